"""The learnable activation against the recursion that defines B-splines, and what holds where there
is no coefficient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgery.blocks import block_config
from surgery.blocks.spline_mlp import SplineMLP, coefficients
from surgery.families import known

HIDDEN, WIDTH = 6, 12


class Base(nn.Module):
    """The children of a llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        for name, (i, o) in {
            "gate": (HIDDEN, WIDTH),
            "up": (HIDDEN, WIDTH),
            "down": (WIDTH, HIDDEN),
        }.items():
            self.add_module(f"{name}_proj", nn.Linear(i, o))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def make(
    kind: str = "spline", groups: int = WIDTH, grid: int = 8, reach: float = 2.0
) -> tuple[Any, Any]:
    """The block and the MLP that it is built from."""
    torch.manual_seed(0)
    base = Base()
    entry = block_config.entry(
        known()["llama"], "spline", [0], function=kind, grid=grid, range=reach, groups=groups
    )
    return SplineMLP(base, entry), base


def b_spline(x: Tensor, knots: Tensor, i: int, degree: int = 3) -> Tensor:
    """B_i by Cox and de Boor."""
    if degree == 0:
        return ((knots[i] <= x) & (x < knots[i + 1])).double()
    left = (x - knots[i]) / (knots[i + degree] - knots[i]) * b_spline(x, knots, i, degree - 1)
    right = (
        (knots[i + degree + 1] - x)
        / (knots[i + degree + 1] - knots[i + 1])
        * b_spline(x, knots, i + 1, degree - 1)
    )
    return left + right


@pytest.mark.parametrize("groups", [1, 4, WIDTH])
@torch.no_grad()
def test_the_spline_is_that_of_the_recursion(groups: int) -> None:
    block, _ = make(groups=groups)
    block.coefficients.normal_()
    x = torch.linspace(-2.5, 2.5, 101)[:, None].expand(-1, WIDTH).contiguous()
    knots = torch.linspace(-2, 2, 9).double()
    c = block.coefficients.repeat_interleave(WIDTH // groups, 0)  # neighbouring channels
    basis = torch.stack([b_spline(x[:, 0].double(), knots, i) for i in range(5)], dim=1)
    expected = nn.functional.silu(x) + (basis @ c.double().T).float()
    torch.testing.assert_close(block.activate(x), expected, rtol=0, atol=2e-6)


@torch.no_grad()
def test_the_rational_function_is_the_safe_pade_unit() -> None:
    block, _ = make("rational", groups=2)
    block.coefficients.normal_()
    x = torch.randn(50, WIDTH) * 3
    for channel, c in ((0, block.coefficients[0]), (WIDTH - 1, block.coefficients[1])):
        z = x[:, channel] / 2
        p = sum(c[i] * z**i for i in range(6))
        q = sum(c[6 + i] * z ** (i + 1) for i in range(4))
        expected = nn.functional.silu(x[:, channel]) + p / (1 + q.abs())
        torch.testing.assert_close(block.activate(x)[:, channel], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["spline", "rational"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_zeros_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    block, base = make(kind)
    x = torch.randn(100, HIDDEN).to(dtype) * 20
    assert torch.equal(block.to(dtype)(x), base.to(dtype)(x))


@torch.no_grad()
def test_outside_the_grid_nothing_changes_and_inside_it_is_smooth() -> None:
    """Twice continuously differentiable over the ends: only splines that end at zero there are in
    the sum.
    """
    block, _ = make(groups=1)
    block.coefficients.fill_(1.0)
    far = torch.tensor([[-1e30, -2.0, 2.0, 3.0, 1e30, float("inf")]])
    assert torch.equal(block.activate(far), nn.functional.silu(far))
    near = 2 - torch.tensor([[0.0, 0.01, 0.02]])
    step = (block.activate(near) - nn.functional.silu(near))[0].diff()
    assert step.abs().max() < 1e-3 * block.coefficients.max()
    assert block.activate(torch.full((1, 4), torch.nan)).isnan().all()


@pytest.mark.parametrize("kind", ["spline", "rational"])
def test_it_learns(kind: str) -> None:
    """Gradients reach every coefficient whose part of the range is visited, and a fit of another
    function succeeds.
    """
    block, _ = make(kind, groups=1, grid=16, reach=3.0)
    x = torch.linspace(-2.9, 2.9, 400)[:, None]
    wanted = nn.functional.silu(x) + torch.sin(2 * x) * (9 - x**2) / 9
    optimiser = torch.optim.Adam([block.coefficients], lr=0.05)
    for _ in range(300):
        loss = (block.activate(x) - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert block.coefficients.grad is not None and block.coefficients.grad.shape == (
        1,
        coefficients(kind, 16),
    )
    assert loss < {"spline": 2e-3, "rational": 0.1}[kind]
    assert kind == "rational" or (block.coefficients.grad.abs() > 0).all()


def test_a_block_that_it_cannot_be_built_from() -> None:
    base = Base()
    base.second = nn.ReLU()
    entry = block_config.entry(
        known()["llama"], "spline", [0], function="spline", grid=8, range=2.0, groups=1
    )
    with pytest.raises(ValueError, match="Base has 2 modules that could be its activation"):
        SplineMLP(base, entry)
