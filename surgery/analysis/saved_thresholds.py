"""Read thresholds from the folder that `surgery analyze --out DIR` wrote.

Operations that need a threshold per layer can take them from there instead of walking the model.
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

from surgery.blocks.rules import RULES
from surgery.calibration.collectors import Distribution, edges
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError, UsageError
from surgery.families import locate

# Takes the distributions of a layer, the sparsity and the activation; returns a threshold.
Quantile = Callable[[Mapping[str, Distribution], float, str], float]


def thresholds(
    folder: Path, checkpoint: Checkpoint, rule: str, sparsity: float, layers: Sequence[int]
) -> list[float]:
    """Return a threshold for each of `layers` that makes this fraction of the products zero.

    The thresholds fit the hidden states of the source as it was analysed. `rule` is one of
    `surgery/blocks/rules.py`.

    Raises UsageError for a rule without a single threshold, and SurgeryError for a folder that
    holds no analysis or the analysis of another model.
    """
    if rule not in RULES or RULES[rule].cuts not in _QUANTILES:
        served = (name for name, how in RULES.items() if how.cuts in _QUANTILES)
        raise UsageError(
            f"the rule {rule} has no threshold that an analysis could give",
            f"use --analysis with one of {', '.join(served)}",
        )
    report, tensors = _read(folder)
    found = {layer["layer"]: layer for layer in report["layers"]}
    blocks = locate(checkpoint)
    for index in layers:
        width, seen = blocks.mlp(index).width, (found.get(index) or {}).get("mlp") or {}
        if seen.get("width") != width or len(found) != blocks.count:
            raise SurgeryError(
                f"{folder} analyses {len(found)} layers, with {seen.get('width')} neurons in layer "
                f"{index}; the model has {blocks.count} layers, with {width} neurons there",
                "give the analysis of this very model",
            )
    act = str(report["activation"])
    quantile, least = _QUANTILES[RULES[rule].cuts], RULES[rule].least
    each = (_distributions(found[i]["mlp"], i, tensors) for i in layers)
    chosen = [quantile(of, sparsity, act) for of in each]
    return chosen if least is None else [max(least, t) for t in chosen]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    hint = f"run surgery analyze MODEL --out {folder}"
    try:
        report = json.loads((folder / "analysis.json").read_bytes())
        tensors = load_file(folder / "analysis.safetensors")
    except (OSError, ValueError, SafetensorError) as e:
        raise SurgeryError(f"no analysis in {folder}: {e}", hint) from None
    shaped = isinstance(report, dict) and isinstance(report.get("layers"), list)
    if not shaped or "activation" not in report:
        raise SurgeryError(f"{folder / 'analysis.json'} is not an analysis", hint)
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


def _activated(of: Mapping[str, Distribution], sparsity: float, act: str) -> float:
    """Return the quantile of |act(gate)|, evaluated at the middle of each bin.

    The bins are sorted by |act| first, since act need not be monotone.
    """
    middles = (edges()[1:] + edges()[:-1]) / 2
    values = ACT2FN[act](torch.cat([middles, -middles, torch.zeros(1)]).double()).abs()
    zero = torch.tensor([of["gate"].zero]).double()
    shares = torch.cat([of["gate"].shares.double().flatten(), zero])
    order = values.argsort()
    reached = shares[order].cumsum(0)
    return float(values[order][min(len(order) - 1, int((reached < sparsity).sum()))])


# By the quantity that a threshold is compared with; the rules on "both" have no single threshold.
_QUANTILES: Mapping[str, Quantile] = {
    "gate": lambda of, sparsity, act: of["gate"].quantile(sparsity),
    "activated": _activated,
    "product": lambda of, sparsity, act: of["product"].threshold(sparsity),
}
