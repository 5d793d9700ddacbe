"""Measure what carved models are worth by the part of their neurons that is active.

A random split and the oracle stand beside them.

  # 25, 50 and 75% of 16 parts, every method's default:
  python benchmarks/carve.py MODEL
  python benchmarks/carve.py MODEL --active 75 --methods mass cmoe:analytic:3 kmeans random
  python benchmarks/carve.py MODEL --relufy relu:ridge:full --experts 64 --active 30
  # what single neurons of these layers would hold:
  python benchmarks/carve.py MODEL --held 2,15,29 --experts 64

METHOD[:ROUTER[:SHARED]] is carved with its router and with the oracle, on built-in mixed text, and
measured on held-out speeches, fp32. With --relufy ACTIVATION[-SPARSITY]:REPAIR[:BYPASS] the model
is relufied first, in memory, and that is what the others are compared with. CPU minutes are of the
sweep.
"""

import argparse
import json
import resource
import time
from typing import Any

import torch

from surgery.analysis.sweep import Point, Sweep
from surgery.calibration.install import observe
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint
from surgery.fitting import carved_mlp
from surgery.fitting.expert_split import ExpertSplit
from surgery.fitting.neurons import Neurons
from surgery.fitting.rows import Rows
from surgery.operations import carve
from surgery.operations.relufy import relufy
from surgery.storage import open_checkpoint
from surgery.workflow.carve_sweep import sweep


def relufied(source: Checkpoint, what: str, tokens: int) -> Checkpoint:
    """Return the model, relufied in memory."""
    swap, repair, bypass, *_ = [*what.split(":"), "", ""]
    activation, _, sparsity = swap.partition("-")
    options: dict[str, Any] = {"bypass": int(bypass) if bypass.isdecimal() else bypass or 0}
    options |= {"form": "code"} if bypass else {}  # experts keep it; plain neurons would be cut up
    options |= {"sparsity": float(sparsity)} if sparsity else {}
    return relufy(
        source,
        activation=activation,
        repair=repair or "ridge",
        calibration={"tokens": tokens},
        **options,
    )


def rows(found: Sweep) -> list[dict[str, object]]:
    return [_row(p, found.perplexity) for p in found.points if p.router]


def _row(p: Point, dense: float) -> dict[str, object]:
    def mean(values: list[float]) -> float:
        return round(sum(values) / len(values), 3)

    return {
        "method": p.method,
        "router": p.router,
        "active": round(p.fraction, 3),
        **({"by layer": p.active} if isinstance(p.active, list) else {}),
        "perplexity": round(p.perplexity / dense, 3),
        "agreement": round(p.agreement, 3),
        "error": round(p.error, 4),
        "worst layer": round(max(p.errors), 3),
        "recall": mean(p.recall),
        "mass": mean(p.mass_recall),
    }


def held(source: Checkpoint, options: argparse.Namespace) -> None:
    """Print mass and error of the oracle's choice, of groups and of single neurons, on rows that
    were not grouped by.
    """
    settings = Calibration(tokens=options.tokens, dtype="fp32")
    sample, wanted = settings.sample(source), [int(i) for i in options.held.split(",")]
    for layer in settings.walk(source, sample.input_ids):
        if layer.index in wanted:
            rows = observe(layer, carve.locate(source), sample, list(layer.outputs()), feedback=0.0)
            for percent in map(float, options.active.split(",")):
                cut = ExpertSplit(
                    experts=options.experts,
                    active=round(percent / 100 * options.experts),
                    shared=0,
                    method="mass",
                    router="oracle",
                    repair="none",
                    seed=0,
                )
                print(
                    f"layer {layer.index}, {percent:g}% active:",
                    *_held(source, layer.index, rows, cut),
                )
        if layer.index == max(wanted):
            return


def _held(
    source: Checkpoint, index: int, rows: Rows, cut: carved_mlp.ExpertSplit
) -> tuple[str, ...]:
    blocks = carve.locate(source)
    carved, _ = carved_mlp.fit(Neurons.at(blocks, index), rows, cut, {})
    z, y = rows.z[rows.fitted :], rows.y[rows.fitted :]
    h = Neurons.product(carved, z)
    energy = (h * carved.norm).square()
    best = energy.topk(h.shape[1] * cut.active // cut.experts, dim=1)
    alone = torch.zeros_like(h).scatter_(1, best.indices, 1.0)
    mass = carved.mass(h)
    shares = (best.values.sum(1) / energy.sum(1)).mean(), (mass * carved.choose(mass)).sum(1).mean()
    errors = (
        (given - y).square().sum() / y.square().sum()
        for given in (carved.output(h * alone, z), carved(z))
    )
    return (
        "mass of neurons, of groups",
        *(f"{s:.4f}" for s in shares),
        "error of neurons, of groups",
        *(f"{e:.4f}" for e in errors),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--active", default="25,50,75", help="percentages")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument(
        "--methods", nargs="+", default=["mass", "random"], metavar="METHOD[:ROUTER[:SHARED]]"
    )
    parser.add_argument("--repair", default="ridge")
    parser.add_argument("--allocation", default="uniform", choices=("uniform", "greedy"))
    parser.add_argument("--bypass", default="0", help="a rank, or full")
    parser.add_argument("--relufy", metavar="ACTIVATION[-SPARSITY]:REPAIR[:BYPASS]")
    parser.add_argument("--relufy-tokens", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--evaluate", type=int, default=4096)
    parser.add_argument("--held", metavar="LAYERS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = open_checkpoint(options.model)
    if options.relufy:
        source = relufied(source, options.relufy, options.relufy_tokens)
    if options.held:
        return held(source, options)
    for method in options.methods:
        name, router, shared, *_ = [*method.split(":"), "", ""]
        start = time.process_time()
        found = sweep(
            source,
            experts=options.experts,
            fractions=[float(p) / 100 for p in options.active.split(",")],
            method=name,
            router=router or "trained",
            shared=int(shared or 0),
            repair=options.repair,
            allocation=options.allocation,
            bypass=int(options.bypass) if options.bypass.isdecimal() else options.bypass,
            random=False,
            calibration=Calibration(tokens=options.tokens, dtype="fp32"),
            evaluated=options.evaluate,
        )
        minutes, peak = (
            (time.process_time() - start) / 60,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        )
        for row in rows(found):
            row = {
                **row,
                "shared": found.shared,
                "repair": found.repair,
                "dense": round(found.perplexity, 2),
            }
            print(
                json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()),
                flush=True,
            )
        print(f"{method}: {minutes:.1f} CPU minutes, peak {peak:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
