"""What a memory in the MLP's place costs: perplexity on every domain relative to the source, and the
bytes that a token reads.

  python benchmarks/memory.py MODEL
  python benchmarks/memory.py MODEL --inits slots slots+distill slots:product-keys fit --layers 9
  6,12 --tokens 131072 --json

A row for each init and each set of layers (by default one, two and three, evenly spaced). "reads"
is relative to the MLPs that are replaced. Fitted on the built-in text of all domains, measured on
the held-out part of each, in fp32 and windows of 512 tokens: the geometric mean and the worst.
Nothing is trained.
"""

import argparse
import json
import re
import time

from surgery.checkpoint import Checkpoint
from surgery.families import locate
from surgery.fitting.memory_init import INITS
from surgery.operations.memory import memory
from surgery.proof import quality
from surgery.storage import open_checkpoint


def spaced(count: int) -> list[list[int]]:
    """One, two and three layers of `count`."""
    return [[round(i * count / (n + 1)) for i in range(1, n + 1)] for n in (1, 2, 3)]


def fitted(
    source: Checkpoint, init: str, layers: list[int], tokens: int
) -> tuple[Checkpoint, dict[str, object]]:
    """The output, its work done, and what that took."""
    wall, cpu = time.time(), time.process_time()
    output = memory(
        source,
        place="replace",
        init=re.split(r"[+:]", init)[0],
        find=init.partition(":")[2] or "always",
        distill=80 * ("+" in init),
        layers=layers,
        calibration={"tokens": tokens},
    )
    step = output.steps[-1]
    if step.work:
        step.work.folder()
    reads = re.search(r"([\d.]+) of the MLP's", step.notes[0])
    errors = [step.work.report[str(i)] for i in layers] if step.work else []
    return output, {
        "init": init,
        "layers": layers,
        "reads": reads and float(reads[1]),
        "errors": errors,
        "cpu_s": round(time.process_time() - cpu),
        "wall_s": round(time.time() - wall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--inits",
        nargs="+",
        default=list(INITS),
        choices=[*INITS, "slots+distill", "slots:product-keys"],
    )
    parser.add_argument("--layers", nargs="+", help="sets like 9 6,12")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--evaluate", type=int, default=512, help="tokens of each text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = open_checkpoint(options.model)
    sets = [[int(i) for i in text.split(",")] for text in options.layers or ()] or spaced(
        locate(source).count
    )
    made = [
        fitted(source, init, layers, options.tokens) for layers in sets for init in options.inits
    ]
    models = {"source": source} | {str(i): output for i, (output, _) in enumerate(made)}
    found = quality.measure(models, quality.texts(source, options.evaluate, 512))
    base = found["source"].perplexity
    print(json.dumps({"source": base}) if options.json else f"source {base}", flush=True)
    for i, (_, row) in enumerate(made):
        ratios = found[str(i)].over(found["source"])
        row |= {"mean": round(quality.geometric_mean(ratios.values()), 3)}
        row |= {"worst": round(max(ratios.values()), 3), "of": max(ratios, key=ratios.__getitem__)}
        print(
            json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
