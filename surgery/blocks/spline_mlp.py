"""An MLP whose activation can be trained: a learnable function beside the fixed one or in its
place, for each channel or group of channels.

    spline    φ(x) = act(x) + Σ_i c_i B_i(x)
              B_i are the cubic B-splines on `grid` equal cells over ±range that are zero at both
              ends; outside the range φ stays act (KAN, Liu et al. 2024, arXiv 2404.19756).
    rational  φ(x) = act(x) + P(x/r) / (1 + |Q(x/r)|)
              P has degree 5, Q degree 4 and no constant, and r is the range: the safe Padé unit
              (Molina et al. 2019, arXiv 1907.06732).
    linear    φ(x) = c_i + t·(c_i+1 − c_i)
              Straight lines between `grid` + 1 knots over ±range. Outside, φ goes on with the
              slopes that the activation has far out. No exponential is left to compute.

Coefficients [groups, n] of zero leave the activation as it was, bit for bit; those of "linear" are
the values of φ at the knots. A group is a run of neighbouring channels, from a single channel to
all of them. The submodules keep their names.

Unlike in a KAN the function sits on the channels and not on every edge: the parameters of an MLP
are not multiplied.

Shapes: H hidden_size, F intermediate_size, G cells of the grid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

NUMERATOR, DENOMINATOR = 6, 4  # coefficients of P and Q


def coefficients(kind: str, grid: int) -> int:
    """Return how many coefficients a function has."""
    return {"spline": grid - 3, "linear": grid + 1}.get(kind, NUMERATOR + DENOMINATOR)


class SplineMLP(nn.Module):
    """Take the place of the MLP that it is built from, activation included."""

    def __init__(self, base: nn.Module, entry: dict[str, Any], config: Any = None) -> None:
        super().__init__()
        for name, child in base.named_children():
            self.add_module(name, child)
        self.entry, self.kind = dict(entry), entry["function"]
        name = entry.get("activation")
        # Without a name of its own: one with weights is stored under the one that it had.
        self.__dict__["act"] = ACT2FN[name] if name else _activation(base)
        weight = self._part("down").weight
        width = weight.shape[0 if entry["transposed"] else 1]
        groups = entry["groups"] or width
        self.repeats = width // groups  # channels of a group
        shape = groups, coefficients(self.kind, entry["grid"])
        dtype = torch.float32 if self.kind == "linear" else weight.dtype
        self.coefficients = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def init_block_weights(self) -> None:
        """Begin with the activation as it was, or with zero where the knots are to be loaded.

        The function of torch.nn.init leaves alone what was loaded.
        """
        nn.init.zeros_(self.coefficients)

    def _part(self, part: str) -> Any:
        return getattr(self, self.entry[part])

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        y: Tensor = self._part("down")(self._product(x))
        return self.dropout(y) if hasattr(self, "dropout") else y

    def _product(self, x: Tensor) -> Tensor:
        """Return the products h [..., F]."""
        if not self.entry["gate"]:
            return self.activate(self._part("up")(x))
        if self.entry["fused"]:
            g, u = self._part("up")(x).chunk(2, dim=-1)
        else:
            g, u = self._part("gate")(x), self._part("up")(x)
        return self.activate(g) * u

    def activate(self, g: Tensor) -> Tensor:
        """Return φ of pre-activations [..., F]."""
        if self.kind == "linear":
            return self._linear(g.float()).to(g.dtype)
        learned = self._spline if self.kind == "spline" else self._rational
        activated: Tensor = self.act(g)
        return activated + learned(g.float() / self.entry["range"]).to(activated.dtype)

    def _spline(self, x: Tensor) -> Tensor:
        """Return Σ_i c_i B_i of x [..., F], which is ±1 at the ends of the grid.

        In each cell four splines are not zero.
        """
        grid = self.entry["grid"]
        place = (x.clamp(-1, 1) + 1) * (grid / 2)
        cell = place.detach().nan_to_num().floor().clamp(0, grid - 1)
        # The splines that would reach over the ends have coefficients of zero.
        c = nn.functional.pad(self.coefficients.float(), (3, 3))
        rows = torch.arange(x.shape[-1], device=x.device) // self.repeats * c.shape[1]
        first = cell.long() + rows
        return sum(w * c.take(first + i) for i, w in enumerate(_cubic(place - cell)))

    def _linear(self, x: Tensor) -> Tensor:
        """Return φ of x [..., F], between the knots and beyond them."""
        grid, reach, (low, high) = self.entry["grid"], self.entry["range"], self.entry["slopes"]
        place = (x.clamp(-reach, reach) + reach) * (grid / (2 * reach))
        cell = place.detach().nan_to_num().floor().clamp(0, grid - 1)
        first = cell.long() + torch.arange(x.shape[-1], device=x.device) // self.repeats * (
            grid + 1
        )
        c = self.coefficients.float()
        beyond = low * (x + reach).clamp(max=0) + high * (x - reach).clamp(min=0)
        return torch.lerp(c.take(first), c.take(first + 1), place - cell) + beyond

    def _rational(self, x: Tensor) -> Tensor:
        """Return P / (1 + |Q|) of x [..., F]."""
        c = self.coefficients.float().repeat_interleave(self.repeats, 0)
        numerator = denominator = torch.zeros_like(x)
        for i in reversed(range(NUMERATOR)):
            numerator = numerator * x + c[:, i]
        for i in reversed(range(NUMERATOR, NUMERATOR + DENOMINATOR)):
            denominator = (denominator + c[:, i]) * x
        return numerator / (1 + denominator.abs())


def _cubic(t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four cubic B-splines that are not zero in a cell, at 0 <= t <= 1 of it.

    The leftmost comes first.
    """
    s = 1 - t
    return s**3 / 6, (3 * t**3 - 6 * t**2 + 4) / 6, (3 * s**3 - 6 * s**2 + 4) / 6, t**3 / 6


def _activation(base: nn.Module) -> nn.Module:
    """Return the one child of the MLP that is no matrix and no dropout."""
    other = (nn.Dropout, nn.Linear, Conv1D)
    found = [m for m in base.children() if not isinstance(m, other)]
    if len(found) != 1:
        raise ValueError(
            f"{type(base).__name__} has {len(found)} modules that could be its activation"
        )
    return found[0]
