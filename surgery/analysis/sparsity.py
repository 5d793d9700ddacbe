"""Metrics of activation sparsity, from what the collectors counted.

Shapes: R tokens of the reservoir, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

THRESHOLDS = 64
RIDGE = (1e-6, 1e-3, 1e-1)  # times the mean of the Gram matrix's diagonal


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Neurons with |h_i|·‖W_down[:, i]‖ under `threshold` left out: the error `cett`, and the fraction of products that
    it is (`sparsity`)."""

    cett: float
    threshold: float
    sparsity: float


def truncations(product: Tensor, output: Tensor, down: Tensor, targets: Sequence[float]) -> list[Truncation]:
    """For each target CETT, the threshold that comes nearest. product [R, F], output [R, H], down [F, H].

    CETT (cumulative error of tail truncation, ReLU² Wins, Zhang et al. 2024, arXiv 2402.03804) of a token is
    ‖Σ_{i inactive} h_i·W_down[:, i]‖ / ‖FFN(x)‖. The mean over the tokens is bisected on THRESHOLDS log-spaced
    thresholds and interpolated between the two that enclose the target.
    """
    score = product.float().abs() * down.float().norm(dim=1)
    norms = output.float().norm(dim=1)

    @cache
    def error(threshold: float) -> float:
        tail = torch.where(score < threshold, product, 0) @ down
        return (tail.float().norm(dim=1) / norms).mean().item()

    grid, found = _grid(score), []
    for target in targets:
        threshold = _solve(error, grid, target)
        sparsity = torch.count_nonzero(score < threshold).item() / score.numel()
        found.append(Truncation(cett=error(threshold), threshold=threshold, sparsity=sparsity))
    return found


def _grid(score: Tensor) -> list[float]:
    """THRESHOLDS of them, from 2^-24 of the largest score to just above it."""
    largest = score.max().item() or 1.0
    return torch.logspace(math.log10(largest) - 24 * math.log10(2), math.log10(largest) + 1e-6, THRESHOLDS,
                          dtype=torch.float64).tolist()  # fmt: skip


def _solve(error: Callable[[float], float], grid: Sequence[float], target: float) -> float:
    low, high = 0, len(grid) - 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if error(grid[middle]) <= target else (low, middle)
    below, above = error(grid[low]), error(grid[high])
    part = (target - below) / (above - below) if below < target < above else 0.0
    return grid[low] ** (1 - part) * grid[high] ** part


# --- neurons ----------------------------------------------------------------------------------------------------------


def hot_share(weight: Tensor, part: float = 0.8) -> float:
    """The smallest fraction of the neurons [F] that holds `part` of the sum; 0 where the sum is."""
    total = weight.double().sort(descending=True).values.cumsum(0)
    return 0.0 if total[-1] == 0 else (1 + int((total < part * total[-1]).sum())) / len(total)


def gini(weight: Tensor) -> float:
    """0 where all neurons are alike, towards 1 where few hold everything."""
    x, n = weight.double().sort().values, len(weight)
    rank = torch.arange(1, n + 1, dtype=torch.float64)
    return 0.0 if x.sum() == 0 else (((2 * rank - n - 1) * x).sum() / (n * x.sum())).item()


def outlier_channels(rms: Tensor, times: float = 10.0) -> list[int]:
    """Channels whose root mean square is more than `times` the median's, the largest first."""
    order = rms.argsort(descending=True)
    return [int(i) for i in order if rms[i] > times * rms.median()]


# --- is the MLP a linear map? -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Linearity:
    """`r2` of the best affine map of the input, on tokens it was not fitted to: a lower bound of the linear part of the
    output's variance, and a loose one where `fitted` tokens are fewer than H. `switching`: the fraction of neurons that
    are active for some tokens and not for others. `exact` says what is certain on these tokens, "" if nothing."""

    r2: float
    fitted: int
    switching: float
    exact: str = ""


def linearity(x: Tensor, y: Tensor, active: Tensor, tokens: int, *, activation: str,
              gated: bool) -> Linearity:  # fmt: skip
    """Of an MLP with input x [R, H] and output y [R, H]; `active` [F] of `tokens`. Every fourth is held out of the fit."""
    held_out = torch.arange(len(x)) % 4 == 3
    switching = ((active > 0) & (active < tokens)).double().mean().item()
    return Linearity(r2=_ridge(x.double(), y.double(), held_out), fitted=int((~held_out).sum()),
                     switching=switching, exact=_exact(activation, gated, switching))  # fmt: skip


def _exact(activation: str, gated: bool, switching: float) -> str:
    fixed = activation == "linear" or (activation == "relu" and switching == 0)
    if not fixed:
        return ""
    return "quadratic: the gate never switches" if gated else "affine: two matrices that compose into one"


def _ridge(x: Tensor, y: Tensor, held_out: Tensor) -> float:
    """R² on the held-out rows, of the best of the penalties RIDGE and of the mean alone; solved in the space of the tokens."""
    x, y = x - x[~held_out].mean(0), y - y[~held_out].mean(0)
    x_fit, y_fit, x_test, y_test = x[~held_out], y[~held_out], x[held_out], y[held_out]
    values, vectors = torch.linalg.eigh(x_fit @ x_fit.T)
    left, right = x_test @ x_fit.T @ vectors, vectors.T @ y_fit
    errors = [y_test] + [y_test - left @ (right / (values + c * values.mean())[:, None]) for c in RIDGE]
    return (1 - torch.stack([e.square().sum() for e in errors]).min() / y_test.square().sum()).item()


# --- what it would save -----------------------------------------------------------------------------------------------

# What is left of an MLP's weights at sparsity s of its products: gate, up and down are a third each, without a gate up
# and down are a half. "gate first" computes the gate for every neuron, and up and down where it is active; "down only"
# knows the product before it saves; "foreseen" is the ceiling, a predictor that is free and never wrong.
REMAINING: Mapping[str, Callable[[float, bool], float]] = {
    "gate first": lambda s, gated: (1 + 2 * (1 - s)) / 3 if gated else (1 + (1 - s)) / 2,
    "down only": lambda s, gated: (2 + (1 - s)) / 3 if gated else (1 + (1 - s)) / 2,
    "foreseen": lambda s, gated: 1 - s,
}
