"""What `surgery analyze --out DIR` left in DIR, for operations that need thresholds and no walk of
their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.activations import ACT2FN

from surgery.calibration.collectors import Distribution, edges
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError, UsageError
from surgery.families import locate

Rule = Callable[
    [Mapping[str, Distribution], float, str], float
]  # the distributions of a layer, sparsity, activation


def thresholds(
    folder: Path, checkpoint: Checkpoint, rule: str, sparsity: float, layers: Sequence[int]
) -> list[float]:
    """The threshold of each of `layers` that makes this fraction of the products zero, on the
    stream of the source as it was analysed. `rule` is one of RULES (surgery/blocks/sparse_mlp.py
    defines them).

    Raises SurgeryError for a folder without an analysis, or with that of another model.
    """
    if rule not in RULES:
        raise UsageError(
            f"{rule} has no one threshold that an analysis holds",
            f"--analysis serves {', '.join(RULES)}",
        )
    report, tensors = _read(folder)
    found = {layer["layer"]: layer for layer in report["layers"]}
    blocks = locate(checkpoint)
    for index in layers:
        width, seen = blocks.mlp(index).width, (found.get(index) or {}).get("mlp") or {}
        if seen.get("width") != width or len(found) != blocks.count:
            raise SurgeryError(
                f"{folder} analyses {len(found)} layers, layer {index} {seen.get('width')} neurons wide; the model has "
                f"{blocks.count}, {width} wide",
                "give the analysis of this very model",
            )
    act = str(report["activation"])
    return [RULES[rule](_distributions(found[i]["mlp"], i, tensors), sparsity, act) for i in layers]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        report = json.loads((folder / "analysis.json").read_bytes())
        tensors = load_file(folder / "analysis.safetensors")
    except (OSError, ValueError, SafetensorError) as e:
        raise SurgeryError(
            f"no analysis in {folder}: {e}", f"surgery analyze MODEL --out {folder}"
        ) from None
    if (
        not isinstance(report, dict)
        or not isinstance(report.get("layers"), list)
        or "activation" not in report
    ):
        raise SurgeryError(
            f"{folder / 'analysis.json'} is no analysis", f"surgery analyze MODEL --out {folder}"
        )
    return report, tensors


def _distributions(
    mlp: Mapping[str, Any], index: int, tensors: Mapping[str, Tensor]
) -> dict[str, Distribution]:
    total = int(mlp["tokens"]) * int(mlp["width"])
    return {
        name: Distribution(
            counts=tensors[f"layers.{index}.mlp.{name}.histogram"],
            total=total,
            zeros=round(mlp[name]["zero"] * total),
        )
        for name in ("gate", "product")
    }


def _gate(of: Mapping[str, Distribution], sparsity: float, act: str) -> float:
    return of["gate"].quantile(sparsity)


def _activated(of: Mapping[str, Distribution], sparsity: float, act: str) -> float:
    """The quantile of |act(gate)|, at the middles of the bins: act need not be monotone."""
    middles = (edges()[1:] + edges()[:-1]) / 2
    values = ACT2FN[act](torch.cat([middles, -middles, torch.zeros(1)]).double()).abs()
    shares = torch.cat(
        [of["gate"].shares.double().flatten(), torch.tensor([of["gate"].zero]).double()]
    )
    order = values.argsort()
    reached = shares[order].cumsum(0)
    return float(values[order][min(len(order) - 1, int((reached < sparsity).sum()))])


RULES: Mapping[str, Rule] = {
    "shifted": _gate,
    "fatrelu": lambda of, sparsity, act: max(0.0, _gate(of, sparsity, act)),
    "cats": _activated,
    "teal": lambda of, sparsity, act: of["product"].threshold(sparsity),
}
