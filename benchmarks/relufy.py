"""Measure relufied models: perplexity on every domain, zeros, CPU minutes and peak memory.

  python benchmarks/relufy.py MODEL relu:ridge shifted-0.65:reconstruct teal-0.7:ridge
  python benchmarks/relufy.py MODEL fatrelu-0.8:ridge --tokens 131072 --json
  python benchmarks/relufy.py MODEL drelu-0.8:reconstruct:full            # with a linear bypass

A row for each ACTIVATION[-SPARSITY]:REPAIR[:BYPASS], and the same swap without repair beside it.
Calibrated on the built-in text of all domains and measured on the held-out part of each, in fp32
and windows of 512 tokens: the geometric mean and the worst ratio to the source's perplexity.
"""

import argparse
import json
import resource
import time
from statistics import mean

from surgery.calibration.data import Sample
from surgery.checkpoint import Checkpoint
from surgery.operations.relufy import relufy
from surgery.proof import quality
from surgery.storage import open_checkpoint
from surgery.workflow.settle import settle


def measure(
    source: Checkpoint,
    what: str,
    calibration: dict[str, object],
    allocation: str,
    sample: Sample,
) -> dict[str, object]:
    """Return the row of one conversion."""
    swap, repair, bypass, *_ = [*what.split(":"), "", ""]
    activation, _, sparsity = swap.partition("-")
    options = {"activation": activation, "repair": repair or "ridge", "calibration": calibration}
    options |= {"bypass": int(bypass) if bypass.isdecimal() else bypass or 0}
    options |= {"sparsity": float(sparsity), "allocation": allocation} if sparsity else {}
    output = settle(relufy(source, **options))
    wall, cpu = time.time(), time.process_time()
    for step in output.steps:
        if step.work:
            step.work.folder()
    wall, cpu = time.time() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    models = {"source": source, "swap": quality.plain_swap(source, output), "output": output}
    found = quality.measure(models, sample)
    ratios: dict[str, float] = {}
    for name in ("swap", "output"):
        by_domain = found[name].over(found["source"])
        ratios[f"{name}, mean"] = round(quality.geometric_mean(by_domain.values()), 3)
        ratios[f"{name}, worst"] = round(max(by_domain.values()), 3)
    return {
        "what": what,
        "bypass": output.steps[-1].parameters.get("bypass", 0),
        "zeros": round(found["output"].sparsity, 4),
        **ratios,
        "agreement": round(mean(found["output"].agreement.values()), 3),
        "source": {t: round(p, 2) for t, p in found["source"].perplexity.items()},
        "cpu_minutes": round(cpu / 60, 1),
        "wall_minutes": round(wall / 60, 1),
        "peak_gb": round(peak, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("what", nargs="+")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--text", help="calibrate on this file or folder instead")
    parser.add_argument(
        "--generated",
        type=float,
        default=0.0,
        help="the part of the tokens that the model writes itself",
    )
    parser.add_argument("--allocation", default="uniform")
    parser.add_argument("--evaluate", type=int, default=4096, help="tokens of each text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = open_checkpoint(options.model)
    sample = quality.texts(source, options.evaluate, 512)
    for what in options.what:
        calibration = {"tokens": options.tokens, "generated": options.generated} | (
            {"text": options.text} if options.text else {}
        )
        row = measure(source, what, calibration, options.allocation, sample)
        print(
            json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
