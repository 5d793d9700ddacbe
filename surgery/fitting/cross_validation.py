"""Refit `down_proj` as ridge.py does, and let domains that were left out choose how far to go.

A fit to one domain that harms another is worse than none. The rows of a layer are split into groups
of domains. For every damping λ the fit to all groups but one is measured on that one, for each of
them in turn, and so is each part s of its step:

    E_k(λ, s) / E_k(0) = (e_k − 2 s ⟨W, B_k⟩ + s² ⟨W G_k, W⟩) / e_k

with G_k = HᵀΩH and B_k = RᵀΩH of group k, e_k its error before, and W the step that was fitted to
the other groups. So nothing but sums is needed, and they add up: the rows are read once. The pair
with the least mean is taken among those that harm no group; where there is none, `down` stays.

Shapes: H hidden_size, F features (products, bias and bypass).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.fitting.neurons import N, Neurons
from surgery.fitting.ridge import add, beginning, features, groups, move, ridge, substituted
from surgery.fitting.rows import Rows
from surgery.fitting.sizes import BLOCK

DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1)  # λ
PARTS = (1.0, 0.75, 0.5, 0.25)  # s


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How far a fit goes: the damping, and the part of the step that is taken.

    `error` is the mean error on left-out groups, relative to that before the fit.
    """

    damping: float
    part: float
    error: float


@dataclass(kw_only=True, slots=True)
class Sums:
    """Hold what a fit needs of some rows: gram [F, F], cross [H, F] and their error before."""

    gram: Tensor
    cross: Tensor
    energy: float = 0.0

    def plus(self, other: Sums, sign: int = 1) -> Sums:
        """Return the sums with those of other rows added, or with sign −1 taken away."""
        return Sums(
            gram=self.gram.add(other.gram, alpha=sign),
            cross=self.cross.add(other.cross, alpha=sign),
            energy=self.energy + sign * other.energy,
        )

    def left(self, step: Tensor, parts: Sequence[float]) -> list[float]:
        """Return the error that each part of a step [H, F] leaves, relative to that before."""
        gained = 2 * float((step * self.cross).sum(dtype=torch.float64))
        added = float(((step @ self.gram) * step).sum(dtype=torch.float64))
        return [1 - (s * gained - s**2 * added) / max(self.energy, 1e-300) for s in parts]


def validated(
    neurons: N,
    rows: Rows,
    *,
    bias: bool = False,
    rank: int = 0,
    dampings: Sequence[float] = DAMPINGS,
) -> tuple[N, Choice | None]:
    """Return `neurons` refitted as far as left-out domains gain by it, and what was chosen.

    An MLP too wide for one Gram matrix is refitted with the usual damping, without a choice.
    """
    block = slice(0, neurons.down.shape[1])
    if block.stop > BLOCK:
        return ridge(neurons, rows, bias=bias, rank=rank), None
    fitted = beginning(neurons, rows, bias=bias, rank=rank)
    sizes = groups(fitted, block, bias)
    with rows.own_precision():
        folds = [_sums(fitted, rows.at(places), block, bias) for places in rows.folds]
        total = _sums(fitted, rows.firsts(), block, bias)
    for fold in folds:
        total = total.plus(fold)
    choice = choose(total, folds, sizes, dampings)
    step = stepped(total, choice.damping, sizes)
    if step is None:  # too nearly singular in fp32
        return ridge(neurons, rows, bias=bias, rank=rank), None
    move(fitted, choice.part * step, block, bias)
    return fitted, choice


def choose(
    total: Sums, folds: Sequence[Sums], sizes: Sequence[int], dampings: Sequence[float]
) -> Choice:
    """Return the damping and the part of the step that serve groups that were left out best."""
    best = Choice(damping=dampings[-1], part=0.0, error=1.0)
    for damping in dampings:
        steps = [stepped(total.plus(fold, -1), damping, sizes) for fold in folds]
        if any(step is None for step in steps):
            continue
        left = [f.left(s, PARTS) for f, s in zip(folds, steps, strict=True) if s is not None]
        for part, errors in zip(PARTS, zip(*left, strict=True), strict=True):
            error = sum(errors) / len(errors)
            if max(errors) <= 1 and error < best.error:
                best = Choice(damping=damping, part=part, error=error)
    return best


def stepped(sums: Sums, damping: float, sizes: Sequence[int]) -> Tensor | None:
    """Return the step [H, F] of a fit, None where fp32 does not do for it."""
    gram = sums.gram.clone()
    means = [
        damping * g.mean().clamp_min(1e-30).expand(len(g))
        for g in gram.diagonal().split(list(sizes))
        if len(g)
    ]
    gram.diagonal().add_(torch.cat(means))
    factor, failed = torch.linalg.cholesky_ex(gram)
    return None if failed else substituted(factor, sums.cross)


def _sums(
    neurons: Neurons,
    parts: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    block: slice,
    bias: bool,
) -> Sums:
    size, hidden = sum(groups(neurons, block, bias)), len(neurons.down)
    zeros = neurons.down.new_zeros
    sums = Sums(gram=zeros(size, size), cross=zeros(hidden, size))
    for z, y, weight in parts:
        x, missed = features(neurons, z, y, block, bias)
        add(sums.gram, sums.cross, x, missed, weight)
        energy = missed.square().sum(1) * (1 if weight is None else weight)
        sums.energy += float(energy.sum(dtype=torch.float64))
    return sums
