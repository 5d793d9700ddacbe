"""Metrics against their definitions, written out in fp64, and at values that are known."""

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
    """n_i = h_i·W_down[:, i]; those with ‖n_i‖ below the threshold are left out, one neuron at a
    time here.
    """
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
    """Tokens of two experts with weights of their own: the mean error over all of them, whatever
    their number.
    """
    parts = []
    for seed, tokens in ((0, 300), (7, 40)):
        product, down = draw(tokens, F, seed=seed) ** 3, draw(F, H, seed=seed + 1) * (1 + seed)
        parts.append(Part(product=product, output=product @ down, down=down))
    for target, found in zip((0.1, 0.2), truncations(parts, (0.1, 0.2)), strict=True):
        scores = [p.product.abs() * p.down.norm(dim=1) for p in parts]
        tails = [
            (p.product * (s < found.threshold)) @ p.down for p, s in zip(parts, scores, strict=True)
        ]
        errors = torch.cat(
            [t.norm(dim=1) / p.output.norm(dim=1) for t, p in zip(tails, parts, strict=True)]
        )
        assert found.cett == pytest.approx(
            errors.mean().item(), rel=1e-4
        ) and found.cett == pytest.approx(target, rel=0.02)
        inactive = sum(int((s < found.threshold).sum()) for s in scores)
        assert found.sparsity == pytest.approx(inactive / (340 * F), abs=1e-6)


def test_an_mlp_of_zeros_has_no_error() -> None:
    nothing = truncations(
        [Part(product=torch.zeros(R, F), output=torch.zeros(R, H), down=draw(F, H))], (0.1,)
    )[0]
    assert math.isnan(nothing.cett) and nothing.sparsity == 1


def test_hot_share_and_gini() -> None:
    even, one = torch.ones(10), torch.eye(10)[3]
    assert sparsity.hot_share(even) == 0.8 and sparsity.gini(even) == pytest.approx(0)
    assert sparsity.hot_share(one) == 0.1 and sparsity.gini(one) == pytest.approx(0.9)
    assert sparsity.hot_share(torch.zeros(10)) == sparsity.gini(torch.zeros(10)) == 0
    x = torch.rand(50, generator=torch.Generator().manual_seed(0)).double()
    by_pairs = (x[:, None] - x).abs().sum() / (
        2 * len(x) * x.sum()
    )  # half the relative mean absolute difference
    assert sparsity.gini(x) == pytest.approx(by_pairs.item())


def test_outlier_channels_largest_first() -> None:
    rms = torch.ones(32)
    rms[[5, 9, 20]] = torch.tensor([11.0, 9.0, 300.0])
    assert sparsity.outlier_channels(rms) == [20, 5]


def test_a_linear_map_is_found_and_a_curved_one_is_not() -> None:
    x, active = draw(R, H), torch.full((F,), R // 2)
    options = {"activation": "silu", "gated": True}
    line = linearity(x, x @ draw(H, H, seed=1) + draw(H, seed=2), active, R, **options)
    assert line.r2 > 1 - 1e-9 and line.fitted == 300 and line.switching == 1 and line.exact == ""
    assert (
        0 <= linearity(x, x.abs(), active, R, **options).r2 < 0.1
    )  # an even function has no linear part
    gelu = linearity(x, torch.nn.functional.gelu(x), active, R, **options).r2
    assert 0.7 < gelu < 0.95  # 1/4 of E[gelu²] = 0.85 of the variance, for a normal input


@pytest.mark.parametrize("channels", [H, R])
def test_ridge_on_both_sides_of_the_matrix(channels: int) -> None:
    """Fewer channels than tokens, and more: the same closed form, by the other Gram matrix."""
    x, y, held_out = (
        draw(R, channels),
        draw(R, H, seed=1) + 2 * draw(R, channels)[:, :H],
        torch.arange(R) % 4 == 3,
    )
    x, y = (t.double() - t.double()[~held_out].mean(0) for t in (x, y))
    eye, fit, test = torch.eye(channels).double(), ~held_out, held_out
    mean = x[fit].square().sum() / len(x[fit])
    best = max(
        1
        - (
            (
                y[test]
                - x[test]
                @ torch.linalg.solve(x[fit].T @ x[fit] + c * mean * eye, x[fit].T @ y[fit])
            )
            .square()
            .sum()
            / y[test].square().sum()
        ).item()
        for c in sparsity.RIDGE
    )
    found = linearity(x, y, torch.ones(F), R, activation="silu", gated=True).r2
    assert 0.1 < found < 0.9 and found == pytest.approx(best, rel=1e-6)


def test_what_is_certain_where_nothing_switches() -> None:
    x, never = draw(R, H), torch.tensor([0, R, R, 0])

    def exact(active: torch.Tensor, activation: str, gated: bool) -> str:
        return linearity(x, x, active, R, activation=activation, gated=gated).exact

    assert exact(never, "relu", False).startswith("affine") and exact(
        never, "relu", True
    ).startswith("quadratic")
    assert exact(torch.tensor([1, R, R, 0]), "relu", False) == exact(never, "gelu", False) == ""
    assert exact(torch.tensor([1, 5]), "linear", False).startswith("affine")


def test_what_a_kernel_leaves() -> None:
    """At 90% the exact gate leaves 0.4 of a gated MLP, a ceiling of 2.5 times."""
    assert REMAINING["gate first"](0.9, True) == pytest.approx(0.4)
    assert (
        REMAINING["gate first"](0.9, False)
        == REMAINING["down only"](0.9, False)
        == pytest.approx(0.55)
    )
    assert REMAINING["down only"](0.9, True) == pytest.approx(2.1 / 3)
    assert REMAINING["foreseen"](0.9, True) == pytest.approx(0.1)
    assert all(
        f(0.0, gated) == pytest.approx(1) for f in REMAINING.values() for gated in (True, False)
    )
