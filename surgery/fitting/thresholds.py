"""Thresholds that make a given fraction of an MLP's products zero, chosen from quantiles.

Shapes: n rows, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from surgery.blocks import rules
from surgery.checkpoint.tensors import DTYPES
from surgery.fitting.neurons import Neurons
from surgery.fitting.rows import Rows

SAMPLED = 4_000_000  # values that thresholds are chosen on
QUANTILE = 1_000_000  # the most of them that are sorted together


def thresholded(neurons: Neurons, rows: Rows, sparsity: float, per_neuron: bool = False) -> Neurons:
    """Return `neurons` with thresholds that make this fraction of the products zero.

    It is the fraction of the whole layer, or of each neuron with `per_neuron`.
    """
    step = max(1, rows.fitted // max(1, SAMPLED // len(neurons.up)))
    gate, up = neurons.open(rows.z[: rows.fitted : step].float())
    return dataclasses.replace(neurons, **quantiles(neurons, gate, up, sparsity, per_neuron))


def quantiles(
    neurons: Neurons, gate: Tensor, up: Tensor, sparsity: float, per_neuron: bool
) -> dict[str, Tensor]:
    """Return the thresholds that make this fraction of the products of gate and up [n, F] zero."""
    rule, act = rules.RULES[neurons.rule], ACT2FN[neurons.act]
    if rule.cuts == "both":
        return _both(neurons, gate, up, sparsity, per_neuron)
    threshold = quantile(_CUT[rule.cuts](act, gate, up), sparsity, per_neuron)
    return {"threshold": threshold if rule.least is None else threshold.clamp_min(rule.least)}


# What a threshold is compared with, computed from gate and up. Without a gate both are up.
_CUT: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "gate": lambda act, gate, up: gate,
    "activated": lambda act, gate, up: act(gate).abs(),
    "product": lambda act, gate, up: (act(gate) * (1 if up is gate else up)).abs(),
}


def _both(
    neurons: Neurons, gate: Tensor, up: Tensor, sparsity: float, per_neuron: bool
) -> dict[str, Tensor]:
    """Return the thresholds of dReLU, which cuts gate and up at the same quantile.

    The quantile is found by bisection. No threshold is below 0, where ReLU itself cuts.
    """
    low, high = 0.0, 1.0
    found: dict[str, Tensor] = {}
    ordered = {
        name: _sample(t, per_neuron).sort(0).values
        for name, t in (("threshold", gate), ("threshold_up", up))
    }
    for _ in range(12):
        middle = (low + high) / 2
        found = {
            name: t[max(0, round(middle * len(t)) - 1)].clamp_min(0) for name, t in ordered.items()
        }
        live = ((gate > found["threshold"]) & (up > found["threshold_up"])).sum().item()
        low, high = (middle, high) if 1 - live / gate.numel() < sparsity else (low, middle)
    return found


def quantile(values: Tensor, fraction: float, per_neuron: bool) -> Tensor:
    """Return the value with this fraction of `values` [n, F] below it: [1], or [F] by column."""
    values = _sample(values, per_neuron)
    return values.kthvalue(max(1, round(fraction * len(values))), dim=0).values


def _sample(values: Tensor, per_neuron: bool) -> Tensor:
    """Return `values` [n, F] as they are, or about QUANTILE of them as one column [n, 1]."""
    if per_neuron:
        return values
    step = max(1, values.numel() // QUANTILE) | 1  # odd, or it might meet the same neurons again
    return values.flatten()[::step, None]


def rounded(neurons: Neurons, dtype: str) -> Neurons:
    """Return `neurons` with gate and up, and their biases, rounded as this dtype will hold them."""
    kind = getattr(torch, DTYPES[dtype][1])
    names = ("gate", "up", "gate_bias", "up_bias")
    values = {n: t.to(kind).float() for n in names if (t := getattr(neurons, n)) is not None}
    return dataclasses.replace(neurons, **values)
