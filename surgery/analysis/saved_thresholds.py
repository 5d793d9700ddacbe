"""Read thresholds from the folder that `surgery analyze --out DIR` wrote.

Operations that need a threshold per layer can take them from there instead of walking the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.activations import ACT2FN

from surgery.analysis.fingerprint import fingerprint
from surgery.blocks.rules import RULES
from surgery.calibration.collectors import BINS, Distribution, edges
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.parsing import read_json
from surgery.errors import SurgeryError, UsageError
from surgery.files import JSON_LIMIT, content, expanded
from surgery.quoting import shell

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
    report, tensors = _read(expanded(folder))
    if report.get("fingerprint") != fingerprint(checkpoint):
        raise SurgeryError(
            f"{folder} is the analysis of another model than {checkpoint.source.location}",
            f"analyze this very model: {_again(folder)}",
        )
    act, how = str(report["activation"]), RULES[rule]
    chosen = []
    for index in layers:
        try:
            seen = _distributions(_mlp_of(report, index), index, tensors)
            chosen.append(_finite(_QUANTILES[how.cuts](seen, sparsity, act)))
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as e:
            raise SurgeryError(
                f"{folder} has no whole figures of the MLP of layer {index} ({type(e).__name__})",
                f"leave the layer out, or analyze again: {_again(folder)}",
            ) from None
    return chosen if how.least is None else [max(how.least, t) for t in chosen]


def _finite(threshold: float) -> float:
    """Return a threshold. Raises ValueError where it is NaN or infinite."""
    if not math.isfinite(threshold):
        raise ValueError(threshold)
    return threshold


def _again(folder: Path) -> str:
    """Return the command that analyzes a model into `folder`."""
    return f"surgery analyze MODEL --out {shell(str(folder))}"


def _mlp_of(report: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return the figures of the MLP of decoder layer `index`. Raises KeyError without them."""
    found = [layer["mlp"] for layer in report["layers"] if layer["layer"] == index]
    if len(found) != 1 or not found[0]:
        raise KeyError(index)
    mlp: Mapping[str, Any] = found[0]
    return mlp


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    hint = f"run {_again(folder)}"
    try:
        path = folder / "analysis.json"
        report = read_json(content(path, JSON_LIMIT), str(path), hint)
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
    """Return what was counted of a layer. Raises ValueError for what nothing can be counted as."""
    total, found = int(mlp["tokens"]) * int(mlp["width"]), {}
    for name in ("gate", "product"):
        counts = tensors[f"layers.{index}.mlp.{name}.histogram"]
        zeros = round(mlp[name]["zero"] * total)
        if total < 1 or not 0 <= zeros <= total or counts.shape != (2, BINS):
            raise ValueError(total, zeros, counts.shape)
        found[name] = Distribution(counts=counts, total=total, zeros=zeros)
    return found


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
