"""Compute metrics of activation sparsity from what the collectors counted.

Shapes: R tokens in the reservoir, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

THRESHOLDS = 64
PILOT = 8  # thresholds are bisected on every 8th token
TOLERANCE = 0.01  # relative to the target, on all tokens
# Penalties as multiples of the Gram matrix's mean diagonal. The small one suits fewer channels than
# tokens, the large one more channels than tokens.
RIDGE = (1e-6, 0.3)


# --- CETT -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """The result of leaving out all neurons with |h_i|·‖W_down[:, i]‖ below `threshold`.

    `cett` is the error this makes, `sparsity` the fraction of products left out.
    """

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
        """Return ‖W_down[:, i]‖, [F]."""
        return self.down.float().square().sum(1).sqrt()

    @cached_property
    def score(self) -> Tensor:
        """Return the size of what each neuron adds to the output, |h_i|·‖W_down[:, i]‖, [R, F]."""
        return self.product.abs().float() * self.sizes

    @cached_property
    def norms(self) -> Tensor:
        """Return ‖y‖ of each token, [R]."""
        return self.output.float().norm(dim=1)

    def errors(self, threshold: float, every: int = 1) -> Tensor:
        """Return ‖Σ_{i inactive} h_i·W_down[:, i]‖ / ‖y‖ of every `every`-th token."""
        product = self.product[::every]
        # Comparing into the dtype of the products is five times as fast as into bool.
        out = torch.empty_like(product)
        inactive = torch.lt(self.score[::every], threshold, out=out)
        tail = inactive.mul_(product) @ self.down
        return tail.float().norm(dim=1) / self.norms[::every]


def truncations(parts: Sequence[Part], targets: Sequence[float]) -> list[Truncation]:
    """Return for each target CETT one threshold for all parts that meets it within TOLERANCE.

    CETT is the cumulative error of tail truncation of "ReLU² Wins" (Zhang et al. 2024, arXiv
    2402.03804): ‖Σ_{i inactive} h_i·W_down[:, i]‖ / ‖FFN(x)‖ for one token. The target is the mean
    over the tokens.

    1. The threshold is bisected on a grid of THRESHOLDS log-spaced values, on every PILOT-th token.
    2. It is corrected on all tokens, taking the error for a power of the threshold.
    """

    @cache
    def error(threshold: float, every: int = 1) -> float:
        return torch.cat([p.errors(threshold, every) for p in parts]).mean().item()

    grid = _grid(max(p.score.max().item() for p in parts))
    total = sum(p.score.numel() for p in parts)
    found = []
    for target in targets:
        threshold = _solve(error, grid, target)
        left_out = sum(torch.count_nonzero(p.score < threshold).item() for p in parts)
        sparsity = left_out / total
        found.append(Truncation(cett=error(threshold), threshold=threshold, sparsity=sparsity))
    return found


def _grid(largest: float) -> list[float]:
    """Return THRESHOLDS values from 2^-24 of the largest score to just above it."""
    top = math.log10(largest or 1.0)
    low = top - 24 * math.log10(2)
    return torch.logspace(low, top + 1e-6, THRESHOLDS, dtype=torch.float64).tolist()


def _solve(error: Callable[..., float], grid: Sequence[float], target: float) -> float:
    """Return the threshold whose error is `target`.

    If no threshold has an error (an MLP of zeros divides by 0), return the smallest.
    """
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
    """Return the smallest fraction of the neurons [F] that holds `part` of the sum of `weight`.

    Zero if the sum is zero.
    """
    total = weight.double().sort(descending=True).values.cumsum(0)
    return 0.0 if total[-1] == 0 else (1 + int((total < part * total[-1]).sum())) / len(total)


def gini(weight: Tensor) -> float:
    """Return the Gini coefficient: 0 if all are equal, near 1 if a few hold everything."""
    x, n = weight.double().sort().values, len(weight)
    rank = torch.arange(1, n + 1, dtype=torch.float64)
    return 0.0 if x.sum() == 0 else (((2 * rank - n - 1) * x).sum() / (n * x.sum())).item()


def outlier_channels(rms: Tensor, times: float = 10.0) -> list[int]:
    """Return the channels with an RMS of more than `times` the median's, the largest first."""
    order = rms.argsort(descending=True)
    return [int(i) for i in order if rms[i] > times * rms.median()]


# --- is the MLP a linear map? ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Linearity:
    """How close an MLP comes to an affine map of its input.

    `r2` is that of the best affine map, on tokens it was not fitted to. It is a lower bound of the
    linear share of the output's variance, and a loose one if `fitted` tokens are fewer than H.
    `switching` is the fraction of neurons that are active for some tokens and inactive for others.
    `exact` names what certainly holds on these tokens; it is empty if nothing does.
    """

    r2: float
    fitted: int
    switching: float
    exact: str = ""


def linearity(
    x: Tensor, y: Tensor, active: Tensor, tokens: int, *, activation: str, gated: bool
) -> Linearity:
    """Measure how linear an MLP with input x [R, H] and output y [R, H] is.

    `active` [F] counts for how many of `tokens` each neuron is active. Every fourth token is held
    out of the fit.
    """
    # The fit is in fp64, which mps does not have.
    x, y = (t.cpu() if t.device.type == "mps" else t for t in (x, y))
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
    if gated:
        return "quadratic: the gate never switches"
    return "affine: two matrices that compose into one"


def _ridge(x: Tensor, y: Tensor, held_out: Tensor) -> float:
    """Return R² on the held-out rows, for the best of the penalties RIDGE and of the mean alone.

    The system is solved in the space of the channels or of the tokens, whichever are fewer.
    """
    x, y = x - x[~held_out].mean(0), y - y[~held_out].mean(0)
    x_fit, y_fit, x_test, y_test = x[~held_out], y[~held_out], x[held_out], y[held_out]
    by_channel = x.shape[1] < len(x_fit)
    if by_channel:
        gram, right = x_fit.T @ x_fit, x_fit.T @ y_fit
    else:
        gram, right = x_fit @ x_fit.T, x_fit @ x_test.T
    smallest = torch.finfo(gram.dtype).tiny * 2**60  # so that an input of zeros can be solved for
    unit = (gram.trace() / len(x_fit)).clamp_min(smallest) * torch.eye(len(gram)).to(gram)
    errors = [y_test]
    for c in RIDGE:
        solved = torch.cholesky_solve(right, torch.linalg.cholesky_ex(gram + c * unit).L)
        errors.append(y_test - (x_test @ solved if by_channel else solved.T @ y_fit))
    least = torch.stack([e.square().sum() for e in errors]).min()
    return (1 - least / y_test.square().sum()).item()


# --- what it would save ---------------------------------------------------------------------------

# The share of an MLP's weights that is left to read at sparsity s of its products. gate, up and
# down are a third each; without a gate, up and down are a half each.
# - "gate first" computes the gate of every neuron, and up and down where it is active.
# - "down only" knows the product before it can skip anything, so it saves down_proj alone.
# - "foreseen" is the ceiling: a predictor that is free and never wrong.
REMAINING: Mapping[str, Callable[[float, bool], float]] = {
    "gate first": lambda s, gated: (1 + 2 * (1 - s)) / 3 if gated else (1 + (1 - s)) / 2,
    "down only": lambda s, gated: (2 + (1 - s)) / 3 if gated else (1 + (1 - s)) / 2,
    "foreseen": lambda s, gated: 1 - s,
}
