"""Fold what a relufied MLP adds to its matrices into plain neurons of a gated ReLU.

The MLP of most models has no bias, yet its input holds a constant: with C = E[x xᵀ] and μ = E[x],
the direction v = (C + ε·mean(diag C)·I)⁻¹ μ gives v·x ≈ 1 for every token. So each of these becomes
rows of gate and up and a column of down:

    a threshold t          the gate's row w becomes w − t·v
    an output bias b       a neuron with gate v, up v and down b
    a bypass U·V           a neuron for each rank: gate v, up the row of V, down the column of U

A neuron with gate v is always open, and multiplies by about one. Where the MLP has biases of its
own, they are the constant, and exact: −t goes into the gate's bias, b into down's, and an
always-open neuron has a gate of zeros with a bias of one.

The neurons that are added stand last, the always-open ones first among them; zero neurons fill the
width up. `down` is then fitted on what the folded MLP computes, which makes up for what v·x lacks
to a constant.

Shapes: N rows, H hidden_size, F intermediate_size, r rank of the bypass.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from surgery.fitting.neurons import Neurons
from surgery.fitting.rows import FIRST, Rows

DAMPING = 1e-7  # ε: larger ones lose the constant beside massive activations
SCALED_ON = 2048  # rows that the size of products is measured on


def constant_direction(rows: Rows) -> Tensor:
    """Return the direction v [H] for which v·x is closest to 1 on the rows that are fitted on.

    First tokens take part with a weight of 1/FIRST of all others.
    """
    hidden = rows.z.shape[1]
    moment = torch.zeros(hidden, hidden, dtype=torch.float64)
    mean = torch.zeros(hidden, dtype=torch.float64)
    others = rows.z[: rows.fitted]
    parts = [(others, 1.0)]
    if rows.first is not None and len(rows.first.z):
        parts.append((rows.first.z, len(others) / (FIRST * len(rows.first.z))))
    for part, weight in parts:
        for z in part.split(rows_at_once(hidden)):
            x = z.float()
            with rows.own_precision():
                moment += weight * (x.T @ x).double().cpu()
            mean += weight * x.sum(0).double().cpu()
    moment.diagonal().add_(DAMPING * moment.diagonal().mean().clamp_min(1e-300))
    return torch.linalg.solve(moment, mean).float().to(rows.z.device)


def rows_at_once(hidden: int) -> int:
    """Return how many rows [n, H] are converted to fp32 together: 64 MiB of them."""
    return max(1, 2**24 // hidden)


def deviation(direction: Tensor, rows: Rows) -> float:
    """Return the rms of v·x − 1 over the rows that are held out."""
    z = rows.z[rows.fitted :].float()
    return float((z @ direction - 1).square().mean().sqrt())


def folded(neurons: Neurons, direction: Tensor | None, width: int) -> Neurons:
    """Return the same function as `width` plain neurons.

    `direction` is v; None takes biases as the constant instead. Thresholds [1] or [F], the
    correction and the bypass of `neurons` go into the rows.
    """
    plain = _without_threshold(neurons, direction)
    up, down = _always_open(neurons, direction)
    zeros = width - len(neurons.up) - len(up)
    assert plain.gate is not None and zeros >= 0, f"{len(up)} more neurons than {width} can hold"
    gate = up.new_zeros(up.shape) if direction is None else direction.expand(up.shape)
    below = (0, 0, 0, zeros)
    changes = {
        "gate": F.pad(torch.cat([plain.gate, gate]), below),
        "up": F.pad(torch.cat([plain.up, up]), below),
        "down": F.pad(torch.cat([plain.down, down], dim=1), (0, zeros)),
    }
    if plain.gate_bias is not None and plain.up_bias is not None:
        opens = torch.cat([plain.gate_bias, up.new_ones(len(up))])
        changes["gate_bias"] = F.pad(opens, (0, zeros))
        changes["up_bias"] = F.pad(plain.up_bias, (0, len(up) + zeros))
    return dataclasses.replace(plain, **changes)


def _without_threshold(neurons: Neurons, direction: Tensor | None) -> Neurons:
    """Return the neurons with their threshold in the gate, and nothing beside their matrices."""
    assert neurons.gate is not None
    plain = dataclasses.replace(
        neurons, rule="plain", threshold=None, correction=None, bypass_in=None, bypass_out=None
    )
    shift = neurons.gate.new_zeros(len(neurons.gate))
    if neurons.threshold is not None:
        shift = neurons.threshold.expand(len(neurons.gate))
    if direction is not None:
        plain.gate = neurons.gate - shift[:, None] * direction
        return plain
    zeros = neurons.up.new_zeros
    plain.gate_bias = (
        zeros(len(shift)) if neurons.gate_bias is None else neurons.gate_bias
    ) - shift
    plain.up_bias = zeros(len(shift)) if neurons.up_bias is None else neurons.up_bias
    down_bias = zeros(len(neurons.down)) if neurons.down_bias is None else neurons.down_bias
    plain.down_bias = down_bias + (0 if neurons.correction is None else neurons.correction)
    return plain


def _always_open(neurons: Neurons, direction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rows of up [n, H] and the columns of down [H, n] of the always-open neurons.

    First those of the bypass, then that of the correction, which a bias makes superfluous.
    """
    hidden = len(neurons.down)
    up, down = neurons.up.new_zeros(0, hidden), neurons.up.new_zeros(hidden, 0)
    if neurons.bypass_out is not None:
        identity = torch.eye(hidden, device=up.device)
        up = identity if neurons.bypass_in is None else neurons.bypass_in
        down = neurons.bypass_out
    if neurons.correction is not None and direction is not None:
        up = torch.cat([up, direction[None]])
        down = torch.cat([down, neurons.correction[:, None]], dim=1)
    return up, down


def balanced(neurons: Neurons, rows: Rows) -> Neurons:
    """Return `neurons` with each row of its bypass as large as the products of the other neurons.

    The damping of a refit shrinks every column of `down` alike then, and no weight rounds to
    nothing.
    """
    if neurons.bypass_out is None:
        return neurons
    z = rows.z[: rows.fitted : max(1, rows.fitted // SCALED_ON)].float()
    size = neurons.product(z).square().mean().sqrt()
    own = neurons.bypassed(z).square().mean(0).sqrt()
    scale = torch.where((own > 0) & (size > 0), size / own.clamp_min(1e-30), 1.0)
    rows_in = torch.eye(z.shape[1], device=z.device)
    rows_in = rows_in if neurons.bypass_in is None else neurons.bypass_in
    return dataclasses.replace(
        neurons, bypass_in=rows_in * scale[:, None], bypass_out=neurons.bypass_out / scale
    )
