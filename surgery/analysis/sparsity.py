"""Metrics of activation sparsity, from what the collectors counted.

Shapes: R tokens of the reservoir, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

THRESHOLDS = 64
PILOT = 8  # the thresholds are bisected on every so manieth token
TOLERANCE = 0.01  # of the target, on all of them
RIDGE = (
    1e-6,
    0.3,
)  # times the mean of the Gram matrix's diagonal: for fewer channels than tokens, and for more


# --- CETT -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Neurons with |h_i|·‖W_down[:, i]‖ under `threshold` left out: the error `cett`, and the
    fraction of products that it is (`sparsity`)."""

    cett: float
    threshold: float
    sparsity: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens in one MLP or expert: product [R, F], output [R, H], down [F, H]."""

    product: Tensor
    output: Tensor
    down: Tensor

    @cached_property
    def sizes(self) -> Tensor:
        """[F] ‖W_down[:, i]‖"""
        return self.down.float().square().sum(1).sqrt()

    @cached_property
    def score(self) -> Tensor:
        """[R, F] ‖n_i‖, the size of what each neuron puts out: |h_i|·‖W_down[:, i]‖."""
        return self.product.abs().float() * self.sizes

    @cached_property
    def norms(self) -> Tensor:
        return self.output.float().norm(dim=1)

    def errors(self, threshold: float, every: int = 1) -> Tensor:
        """‖Σ_{i inactive} n_i‖ / ‖y‖ of each token (or of every so manieth)."""
        product = self.product[::every]
        inactive = torch.lt(
            self.score[::every], threshold, out=torch.empty_like(product)
        )  # no bool: five times faster
        tail = inactive.mul_(product) @ self.down
        return tail.float().norm(dim=1) / self.norms[::every]


def truncations(parts: Sequence[Part], targets: Sequence[float]) -> list[Truncation]:
    """For each target CETT, one threshold for all parts whose error is within TOLERANCE of it.

    CETT (cumulative error of tail truncation, ReLU² Wins, Zhang et al. 2024, arXiv 2402.03804) of a
    token is ‖Σ_{i inactive} h_i·W_down[:, i]‖ / ‖FFN(x)‖; the target is the mean over the tokens.
    It is bisected on THRESHOLDS log-spaced thresholds and a part of the tokens, then corrected on
    all of them: locally it is a power of the threshold.
    """

    @cache
    def error(threshold: float, every: int = 1) -> float:
        return torch.cat([p.errors(threshold, every) for p in parts]).mean().item()

    grid, found = _grid(max(p.score.max().item() for p in parts)), []
    for target in targets:
        threshold = _solve(error, grid, target)
        left_out = sum(torch.count_nonzero(p.score < threshold).item() for p in parts)
        found.append(
            Truncation(
                cett=error(threshold),
                threshold=threshold,
                sparsity=left_out / sum(p.score.numel() for p in parts),
            )
        )
    return found


def _grid(largest: float) -> list[float]:
    """THRESHOLDS of them, from 2^-24 of the largest score to just above it."""
    top = math.log10(largest or 1.0)
    return torch.logspace(
        top - 24 * math.log10(2), top + 1e-6, THRESHOLDS, dtype=torch.float64
    ).tolist()


def _solve(error: Callable[..., float], grid: Sequence[float], target: float) -> float:
    """The threshold of that error. Without any (an MLP of zeros divides by 0) the smallest."""
    low, high = 0, len(grid) - 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if error(grid[middle], PILOT) <= target else (low, middle)
    below, above = error(grid[low], PILOT), error(grid[high], PILOT)
    power = math.log(above / below) / math.log(grid[high] / grid[low]) if 0 < below < above else 1.0
    threshold = grid[low] * (target / below) ** (1 / power) if below > 0 else grid[low]
    tried = [threshold]
    for _ in range(3):
        reached = error(tried[-1])
        if not abs(reached - target) > TOLERANCE * target:
            break
        step = (target / reached) ** (1 / power) if reached > 0 else math.inf
        tried.append(min(tried[-1] * min(max(step, 0.25), 4.0), grid[-1]))
    return min(tried, key=lambda t: abs(error(t) - target))


# --- neurons --------------------------------------------------------------------------------------


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


# --- is the MLP a linear map? ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Linearity:
    """`r2` of the best affine map of the input, on tokens it was not fitted to: a lower bound of
    the linear part of the output's variance, and a loose one where `fitted` tokens are fewer than
    H. `switching`: the fraction of neurons that are active for some tokens and not for others.
    `exact` says what is certain on these tokens, "" if nothing."""

    r2: float
    fitted: int
    switching: float
    exact: str = ""


def linearity(
    x: Tensor, y: Tensor, active: Tensor, tokens: int, *, activation: str, gated: bool
) -> Linearity:
    """Of an MLP with input x [R, H] and output y [R, H]; `active` [F] of `tokens`. Every fourth is
    held out of the fit.
    """
    x, y = (t.cpu() if t.device.type == "mps" else t for t in (x, y))  # which has no fp64
    held_out = torch.arange(len(x)) % 4 == 3
    switching = ((active > 0) & (active < tokens)).double().mean().item()
    return Linearity(
        r2=_ridge(x.double(), y.double(), held_out),
        fitted=int((~held_out).sum()),
        switching=switching,
        exact=_exact(activation, gated, switching),
    )


def _exact(activation: str, gated: bool, switching: float) -> str:
    fixed = activation == "linear" or (activation == "relu" and switching == 0)
    if not fixed:
        return ""
    return (
        "quadratic: the gate never switches"
        if gated
        else "affine: two matrices that compose into one"
    )


def _ridge(x: Tensor, y: Tensor, held_out: Tensor) -> float:
    """R² on the held-out rows, of the best of the penalties RIDGE and of the mean alone; solved in
    the space of the channels or of the tokens, of which there are fewer."""
    x, y = x - x[~held_out].mean(0), y - y[~held_out].mean(0)
    x_fit, y_fit, x_test, y_test = x[~held_out], y[~held_out], x[held_out], y[held_out]
    by_channel = x.shape[1] < len(x_fit)
    gram, right = (
        (x_fit.T @ x_fit, x_fit.T @ y_fit) if by_channel else (x_fit @ x_fit.T, x_fit @ x_test.T)
    )
    unit = (gram.trace() / len(x_fit)).clamp_min(torch.finfo(gram.dtype).tiny * 2**60) * torch.eye(
        len(gram)
    ).to(gram)
    errors = [y_test]
    for c in RIDGE:
        solved = torch.cholesky_solve(right, torch.linalg.cholesky_ex(gram + c * unit).L)
        errors.append(y_test - (x_test @ solved if by_channel else solved.T @ y_fit))
    return (
        1 - torch.stack([e.square().sum() for e in errors]).min() / y_test.square().sum()
    ).item()


# --- what it would save ---------------------------------------------------------------------------

# What is left of an MLP's weights at sparsity s of its products: gate, up and down are a third
# each, without a gate up and down are a half. "gate first" computes the gate for every neuron, and
# up and down where it is active; "down only" knows the product before it saves; "foreseen" is the
# ceiling, a predictor that is free and never wrong.
REMAINING: Mapping[str, Callable[[float, bool], float]] = {
    "gate first": lambda s, gated: (1 + 2 * (1 - s)) / 3 if gated else (1 + (1 - s)) / 2,
    "down only": lambda s, gated: (2 + (1 - s)) / 3 if gated else (1 + (1 - s)) / 2,
    "foreseen": lambda s, gated: 1 - s,
}
