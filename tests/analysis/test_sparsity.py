"""Metrics agree with their definitions, written out in fp64, and with known values."""

from __future__ import annotations

import math

import pytest
import torch

from surgery.analysis import sparsity
from surgery.analysis.sparsity import REMAINING, Part, linearity, truncations

R, H, F = 400, 16, 40


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_cett_is_the_error_of_leaving_out_the_smallest_outputs() -> None:
    """Outputs h_i·W_down[:, i] with a norm below the threshold are left out, one by one here."""
    product, down, bias = draw(R, F) ** 3, draw(F, H, seed=1) * torch.rand(F, 1), draw(H, seed=2)
    output = product @ down + bias
    part = Part(product=product, output=output, down=down)
    for target, found in zip((0.05, 0.1, 0.2), truncations([part], (0.05, 0.1, 0.2)), strict=True):
        outputs = product.double()[:, :, None] * down.double()  # [R, F, H]
        inactive = outputs.norm(dim=2) < found.threshold
        error = (outputs * inactive[..., None]).sum(1).norm(dim=1) / output.double().norm(dim=1)
        assert found.sparsity == pytest.approx(inactive.double().mean().item(), abs=1e-4)
        assert found.cett == pytest.approx(error.mean().item(), rel=1e-3)
        assert found.cett == pytest.approx(target, rel=0.03)


def test_cett_of_products_that_are_zeros_already() -> None:
    """ReLU's zeros cost nothing: the sparsity is never below theirs."""
    product, down = draw(R, F).relu(), draw(F, H, seed=1)
    found = truncations([Part(product=product, output=product @ down, down=down)], (0.01,))[0]
    assert found.sparsity >= (product == 0).double().mean().item()


def test_one_threshold_for_several_experts() -> None:
    """The error is the mean over the tokens of both experts, which get 300 and 40."""
    parts = []
    for seed, tokens in ((0, 300), (7, 40)):
        product, down = draw(tokens, F, seed=seed) ** 3, draw(F, H, seed=seed + 1) * (1 + seed)
        parts.append(Part(product=product, output=product @ down, down=down))
    for target, found in zip((0.1, 0.2), truncations(parts, (0.1, 0.2)), strict=True):
        scores = [p.product.abs() * p.down.norm(dim=1) for p in parts]
        errors = []
        for p, score in zip(parts, scores, strict=True):
            tail = (p.product * (score < found.threshold)) @ p.down
            errors.append(tail.norm(dim=1) / p.output.norm(dim=1))
        assert found.cett == pytest.approx(torch.cat(errors).mean().item(), rel=1e-4)
        assert found.cett == pytest.approx(target, rel=0.02)
        inactive = sum(int((s < found.threshold).sum()) for s in scores)
        assert found.sparsity == pytest.approx(inactive / (340 * F), abs=1e-6)


def test_an_mlp_of_zeros_has_no_error() -> None:
    """There is no output to divide by, and everything can be left out."""
    part = Part(product=torch.zeros(R, F), output=torch.zeros(R, H), down=draw(F, H))
    nothing = truncations([part], (0.1,))[0]
    assert math.isnan(nothing.cett) and nothing.sparsity == 1


def test_hot_share_and_gini() -> None:
    """At values that are known, and as half the relative mean absolute difference."""
    even, one = torch.ones(10), torch.eye(10)[3]
    assert sparsity.hot_share(even) == 0.8 and sparsity.gini(even) == pytest.approx(0)
    assert sparsity.hot_share(one) == 0.1 and sparsity.gini(one) == pytest.approx(0.9)
    assert sparsity.hot_share(torch.zeros(10)) == sparsity.gini(torch.zeros(10)) == 0
    x = torch.rand(50, generator=torch.Generator().manual_seed(0)).double()
    by_pairs = (x[:, None] - x).abs().sum() / (2 * len(x) * x.sum())
    assert sparsity.gini(x) == pytest.approx(by_pairs.item())


def test_outlier_channels_largest_first() -> None:
    """A channel at 9 times the median is none."""
    rms = torch.ones(32)
    rms[[5, 9, 20]] = torch.tensor([11.0, 9.0, 300.0])
    assert sparsity.outlier_channels(rms) == [20, 5]


def test_a_linear_map_is_found_and_a_curved_one_is_not() -> None:
    """With R² between 0 and 1 on tokens that were held out."""
    x, active = draw(R, H), torch.full((F,), R // 2)
    options = {"activation": "silu", "gated": True}
    line = linearity(x, x @ draw(H, H, seed=1) + draw(H, seed=2), active, R, **options)
    assert line.r2 > 1 - 1e-9 and line.fitted == 300 and line.switching == 1 and line.exact == ""
    even = linearity(x, x.abs(), active, R, **options).r2
    assert 0 <= even < 0.1  # an even function has no linear part
    gelu = linearity(x, torch.nn.functional.gelu(x), active, R, **options).r2
    assert 0.7 < gelu < 0.95  # 1/4 of E[gelu²] = 0.85 of the variance, for a normal input


@pytest.mark.parametrize("channels", [H, R])
def test_ridge_on_both_sides_of_the_matrix(channels: int) -> None:
    """With fewer channels than tokens or more, either Gram matrix gives the same closed form."""
    x, held_out = draw(R, channels), torch.arange(R) % 4 == 3
    y = draw(R, H, seed=1) + 2 * draw(R, channels)[:, :H]
    x, y = (t.double() - t.double()[~held_out].mean(0) for t in (x, y))
    fit_x, fit_y, test_x, test_y = x[~held_out], y[~held_out], x[held_out], y[held_out]
    unit = fit_x.square().sum() / len(fit_x) * torch.eye(channels).double()
    scores = []
    for c in sparsity.RIDGE:
        solved = torch.linalg.solve(fit_x.T @ fit_x + c * unit, fit_x.T @ fit_y)
        error = (test_y - test_x @ solved).square().sum() / test_y.square().sum()
        scores.append(1 - error.item())
    found = linearity(x, y, torch.ones(F), R, activation="silu", gated=True).r2
    assert 0.1 < found < 0.9 and found == pytest.approx(max(scores), rel=1e-6)


def test_what_is_certain_where_nothing_switches() -> None:
    """Without a neuron that switches, an MLP of ReLU is affine, or quadratic if it has a gate."""
    x, never = draw(R, H), torch.tensor([0, R, R, 0])

    def exact(active: torch.Tensor, activation: str, gated: bool) -> str:
        return linearity(x, x, active, R, activation=activation, gated=gated).exact

    assert exact(never, "relu", False).startswith("affine")
    assert exact(never, "relu", True).startswith("quadratic")
    assert exact(torch.tensor([1, R, R, 0]), "relu", False) == exact(never, "gelu", False) == ""
    assert exact(torch.tensor([1, 5]), "linear", False).startswith("affine")


def test_what_a_kernel_leaves() -> None:
    """At 90% sparsity the exact gate leaves 0.4 of a gated MLP, a ceiling of 2.5 times."""
    assert REMAINING["gate first"](0.9, True) == pytest.approx(0.4)
    assert REMAINING["gate first"](0.9, False) == pytest.approx(0.55)
    assert REMAINING["down only"](0.9, False) == pytest.approx(0.55)
    assert REMAINING["down only"](0.9, True) == pytest.approx(2.1 / 3)
    assert REMAINING["foreseen"](0.9, True) == pytest.approx(0.1)
    for left in REMAINING.values():
        assert left(0.0, True) == pytest.approx(1) and left(0.0, False) == pytest.approx(1)
