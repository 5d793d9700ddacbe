"""Choose which neurons of an MLP stay when it gets narrower.

Shapes: F intermediate_size, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from surgery.fitting.neurons import Neurons
from surgery.fitting.ridge import DAMPING, add
from surgery.fitting.rows import Rows

STEPS = 128  # removals of the second-order choice; after each, the neurons are weighed again


def idle(neurons: Neurons) -> Tensor:
    """Return which neurons add exactly nothing to any output, [F] of bool.

    Such a neuron has a column of zeros in `down`, a row and bias of zeros in `up`, or a gate that
    no input opens: a row of zeros whose bias the activation takes to zero. Rules with thresholds
    are looked at through `down` alone.
    """
    silent = (neurons.down == 0).all(dim=0)
    if neurons.rule != "plain":
        return silent
    act = ACT2FN[neurons.act]
    if neurons.gate is None:
        return silent | _always_zero(neurons.up, neurons.up_bias, act)
    shut = _always_zero(neurons.gate, neurons.gate_bias, act)
    return silent | shut | _always_zero(neurons.up, neurons.up_bias, lambda bias: bias)


def _always_zero(
    weight: Tensor, bias: Tensor | None, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return which rows give `function(row · z + bias)` = 0 for every z."""
    constant = weight.new_zeros(len(weight)) if bias is None else bias
    return (weight == 0).all(dim=1) & (function(constant) == 0)


def magnitude(neurons: Neurons) -> Tensor:
    """Return the product of the norms of each neuron's weights, [F]: it needs no text."""
    size = neurons.up.norm(dim=1) * neurons.down.norm(dim=0)
    return size if neurons.gate is None else size * neurons.gate.norm(dim=1)


def mass(neurons: Neurons, rows: Rows) -> Tensor:
    """Return the mass of each neuron on the rows, [F].

    It is the energy of what the neuron adds to the stream, as a share of its token's.
    """
    found = neurons.up.new_zeros(len(neurons.up))
    for z, _, _ in rows.fitting():
        found += neurons.shares(z).sum(0)
    return found


def chance(neurons: Neurons, seed: int) -> Tensor:
    """Return random numbers, [F], to have something to compare the others with."""
    return torch.rand(len(neurons.up), generator=torch.Generator().manual_seed(seed))


def largest(score: Tensor, count: int, fixed: int = 0) -> Tensor:
    """Return the places of the `count` largest scores, sorted; the last `fixed` are among them."""
    score = score.clone()
    score[len(score) - fixed :] = torch.inf
    return score.argsort(descending=True, stable=True)[:count].sort().values


def least_missed(neurons: Neurons, rows: Rows, count: int, fixed: int = 0) -> Tensor:
    """Return the `count` neurons to keep for the refitted MLP to miss least, sorted.

    This is Optimal Brain Surgeon (Hassibi & Stork 1993) for whole columns of `down`. With C the
    Gram matrix of the products and D [H, F] the `down` that fits the targets best, leaving neuron j
    out and refitting the others costs |D_j|² / (C⁻¹)_jj. The cheapest are left out, D and C⁻¹ are
    those of the neurons that are left, and so on, in STEPS steps. The last `fixed` neurons stay.
    """
    inverse, down = _inverse_gram(neurons, rows)
    left = torch.arange(len(down.T), device=down.device)
    while len(left) > count:
        cost = down.square().sum(0) / inverse.diagonal()
        cost[len(cost) - fixed :] = torch.inf
        number = min(len(left) - count, max(1, len(neurons.up) // STEPS))
        order = cost.argsort(stable=True)
        out, stay = order[:number], order[number:].sort().values
        from_out = torch.linalg.solve(inverse[out][:, out], inverse[out])  # [number, left]
        down = (down - down[:, out] @ from_out)[:, stay]
        inverse = (inverse - inverse[:, out] @ from_out)[stay][:, stay]
        left = left[stay]
    return left


def _inverse_gram(neurons: Neurons, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the inverse of the damped Gram matrix [F, F], and the `down` [H, F] that fits best."""
    width, hidden = len(neurons.up), len(neurons.down)
    gram = neurons.up.new_zeros(width, width, dtype=torch.float64)
    cross = neurons.up.new_zeros(hidden, width, dtype=torch.float64)
    for z, y, weight in rows.fitting():
        h = neurons.product(z)
        add(gram, cross, h.double(), (y - neurons.output(h, z)).double(), weight)
    gram.diagonal().add_(DAMPING * gram.diagonal().mean().clamp_min(1e-30))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return inverse, neurons.down.double() + cross @ inverse
