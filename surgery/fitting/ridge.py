"""Refit `down_proj` in closed form, so that a changed MLP computes again what the original did.

With H the new products, T the targets (rows.py), R = T − H Wᵀ what the products miss of them, and
Ω the weights of the rows:

    W' = W + Rᵀ Ω H (Hᵀ Ω H + λ·mean(diag(Hᵀ Ω H))·I)⁻¹

so that λ → ∞ leaves W as it was. With a bypass, the inputs z stand beside H, and a linear map of
them is fitted in the same solve: much of what an activation with exact zeros takes away is linear
in z. Where the bypass has a rank r, the map of rank r that leaves the least error beside H is taken
(reduced-rank regression), and it is fitted again with `down`. With A the full map and L Lᵀ the part
of Zᵀ Ω Z that H does not explain, a bypass of rank r gains Σ σᵢ² over the first r singular values
of A L. L is the last block of the Cholesky factor of the Gram matrix of [H, Z].

Shapes: N rows, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surgery.fitting.neurons import N, Neurons
from surgery.fitting.rows import Rows
from surgery.fitting.sizes import BLOCK

DAMPING = 1e-3  # λ
WHITE_ROWS, WHITE_DAMPING = 16_384, 1e-2  # of the second moment of the inputs
SELECTED = 16_384  # rows that the directions of a bypass are chosen on
SWEEPS = 3  # over the blocks of neurons, where there are several


def ridge(
    neurons: N, rows: Rows, *, damping: float = DAMPING, bias: bool = False, rank: int = 0
) -> N:
    """Return `neurons` with `down` refitted on the rows.

    With `bias` a correction of the output is fitted too, and with `rank` a bypass of that rank.
    Where one Gram matrix of all neurons would be too large, one block of neurons after another is
    fitted, each to what the others leave.
    """
    width = neurons.down.shape[1]
    blocks = [slice(i, min(i + BLOCK, width)) for i in range(0, width, BLOCK)]
    refitted = beginning(neurons, rows, damping=damping, bias=bias, rank=rank)
    for _ in range(SWEEPS if len(blocks) > 1 else 1):
        for block in blocks:
            _refit(refitted, rows, block, damping, bias)
    return refitted


def beginning(
    neurons: N, rows: Rows, *, damping: float = DAMPING, bias: bool = False, rank: int = 0
) -> N:
    """Return `neurons` with a correction and a bypass of zeros, whose inputs are chosen."""
    hidden = len(neurons.down)
    refitted = dataclasses.replace(neurons, down=neurons.down.clone())
    if rank < hidden and rank and neurons.bypass_in is None:
        refitted.bypass_in = leading(neurons, rows, rank, damping)
    if rank and refitted.bypass_out is None:
        refitted.bypass_out = refitted.down.new_zeros(hidden, rank)
    if bias and refitted.correction is None:
        refitted.correction = refitted.down.new_zeros(hidden)
    return refitted


def _refit(neurons: Neurons, rows: Rows, block: slice, damping: float, bias: bool) -> None:
    """Solve for the columns `block` of `down`, the bias and the bypass, in place."""
    sizes = groups(neurons, block, bias)

    def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gram = neurons.down.new_zeros(sum(sizes), sum(sizes), dtype=dtype)
        cross = neurons.down.new_zeros(len(neurons.down), sum(sizes), dtype=dtype)
        with rows.own_precision():
            for z, y, weight in rows.fitting():
                x, missed = features(neurons, z, y, block, bias)
                add(gram, cross, x.to(dtype), missed.to(dtype), weight)
        return gram, cross

    move(neurons, solve(sums, damping, sizes), block, bias)


def groups(neurons: Neurons, block: slice, bias: bool) -> tuple[int, int]:
    """Return how many features are products (or the bias), and how many are the bypass's."""
    rank = 0 if neurons.bypass_out is None else neurons.bypass_out.shape[1]
    return block.stop - block.start + bias, rank


def features(
    neurons: Neurons, z: Tensor, y: Tensor, block: slice, bias: bool
) -> tuple[Tensor, Tensor]:
    """Return what is fitted to [n, features], and what the neurons miss of y, [n, H]."""
    h = neurons.product(z)
    columns = [h[:, block]]
    columns += [h.new_ones(len(h), 1)] if bias else []
    columns += [] if neurons.bypass_out is None else [neurons.bypassed(z)]
    x = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
    return x, y - neurons.output(h, z)


def move(neurons: Neurons, step: Tensor, block: slice, bias: bool) -> None:
    """Add a step [H, features] to the columns `block` of `down`, the bias and the bypass."""
    columns = block.stop - block.start
    neurons.down[:, block] += step[:, :columns]
    if bias:
        assert neurons.correction is not None
        neurons.correction = neurons.correction + step[:, columns]
    if neurons.bypass_out is not None:
        neurons.bypass_out = neurons.bypass_out + step[:, columns + bias :]


def add(gram: Tensor, cross: Tensor, x: Tensor, missed: Tensor, weight: Tensor | None) -> None:
    """Add rows of features x [n, F] and of what is missed [n, H] to the sums, in place."""
    if weight is not None:  # half of it on each side, so that the sums stay positive definite
        root = weight.sqrt()[:, None]
        x, missed = x * root, missed * root
    gram.addmm_(x.T, x)
    cross.addmm_(missed.T, x)


def leading(neurons: Neurons, rows: Rows, rank: int, damping: float = DAMPING) -> Tensor:
    """Return the directions [rank, H] of the inputs that a bypass of this rank gains most with.

    Each has the same size over the rows, as far as the products of `neurons` do not explain it.
    They are chosen on at most SELECTED rows, and beside at most BLOCK of the neurons.
    """
    some, width, hidden = rows.some(SELECTED), len(neurons.up), len(neurons.down)
    chosen = slice(None, None, -(-width // BLOCK))
    sizes = (len(range(width)[chosen]) + 1, hidden)

    def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gram = neurons.down.new_zeros(sum(sizes), sum(sizes), dtype=dtype)
        cross = neurons.down.new_zeros(hidden, sum(sizes), dtype=dtype)
        with rows.own_precision():
            for z, y, weight in some.fitting():
                h = neurons.product(z)
                x = torch.cat([h[:, chosen], h.new_ones(len(h), 1), z], dim=1)
                add(gram, cross, x.to(dtype), (y - neurons.output(h, z)).to(dtype), weight)
        return gram, cross

    factor, cross = factored(sums, damping, sizes)
    unexplained = factor[-hidden:, -hidden:].float()
    gains = torch.linalg.svd(substituted(factor, cross)[:, -hidden:].float() @ unexplained)
    directions = gains.Vh[:rank].T
    return torch.linalg.solve_triangular(unexplained.mT, directions, upper=True).T.contiguous()


def whitening(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return C^(-1/2) and C^(1/2) [H, H] of C = E[z zᵀ], damped."""
    z = rows.z[: rows.fitted : max(1, rows.fitted // WHITE_ROWS)].float()
    c = z.T @ z / len(z)
    c.diagonal().add_(WHITE_DAMPING * c.diagonal().mean())
    values, vectors = torch.linalg.eigh(c)
    return (vectors * values.rsqrt()) @ vectors.T, (vectors * values.sqrt()) @ vectors.T


def solve(
    sums: Callable[[torch.dtype], tuple[Tensor, Tensor]], damping: float, sizes: Sequence[int] = ()
) -> Tensor:
    """Solve for cross · (gram + damping·mean(diag(gram))·I)⁻¹; see `factored`."""
    return substituted(*factored(sums, damping, sizes)).float()


def substituted(factor: Tensor, x: Tensor) -> Tensor:
    """Return x · (factor · factorᵀ)⁻¹ of a lower Cholesky factor."""
    x = torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, x, upper=False, left=False)


def factored(
    sums: Callable[[torch.dtype], tuple[Tensor, Tensor]], damping: float, sizes: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return the lower Cholesky factor of gram + damping·mean(diag(gram))·I, and cross.

    `sums` adds up (gram, cross) in the dtype that it is given: fp32, and fp64 where that is not
    positive definite. Gram is overwritten, because at 11,008 neurons it has 485 MB.
    `sizes` are those of groups of columns: the mean of the diagonal is taken over each group by
    itself, as their scales may have nothing to do with each other. A neuron that never fired has a
    zero row, and damping keeps its column as it was.
    """
    for dtype in (torch.float32, torch.float64):
        gram, cross = sums(dtype)
        groups = gram.diagonal().split(list(sizes) or [len(gram)])
        gram.diagonal().add_(
            torch.cat(
                [damping * g.mean().clamp_min(1e-30).expand(len(g)) for g in groups if len(g)]
            )
        )
        failed = torch.empty((), dtype=torch.int32, device=gram.device)
        # The transpose has LAPACK's order of columns, so that the factor replaces it in place.
        factor, _ = torch.linalg.cholesky_ex(gram.mT, out=(gram.mT, failed))
        if not failed:
            return factor, cross
    raise AssertionError("a Gram matrix with damping is positive definite")
