"""How constant v·x is in the inputs of every MLP of a model, v the direction of fitting/fold.py.

  python benchmarks/constant.py MODEL --tokens 15360
  python benchmarks/constant.py MODEL --damping 1e-4

A row for each layer: the rms of v·x − 1 on rows of the built-in domains that v was not fitted on,
and its largest on first tokens, which take part in the fit.
"""

from __future__ import annotations

import argparse

from surgery.calibration.install import costs_of_layers
from surgery.calibration.settings import Calibration
from surgery.calibration.walk import Layer
from surgery.families import locate
from surgery.fitting import fold
from surgery.fitting.rows import Rows
from surgery.storage import open_checkpoint


def measured(layer: Layer, rows: Rows) -> tuple[float, float]:
    """Return both figures of a layer."""
    direction = fold.constant_direction(rows)
    assert rows.first is not None
    first = (rows.first.z.float() @ direction - 1).abs().max()
    return fold.deviation(direction, rows), float(first)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=15_360)
    parser.add_argument("--damping", type=float, default=fold.DAMPING)
    options = parser.parse_args()
    fold.DAMPING = options.damping
    source = open_checkpoint(options.model)
    blocks, calibration = locate(source), Calibration(tokens=options.tokens, sequence_length=256)
    sample = calibration.sample(source)
    found = costs_of_layers(blocks, calibration, sample, range(blocks.count), measured)
    for index, (others, first) in found.items():
        print(f"layer {index}: {others:.4f}, first tokens {first:.4f}")


if __name__ == "__main__":
    main()
