"""An MLP as tensors in fp32: its weights, what an operation added to it, and what it computes.

Shapes: n rows, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from surgery.blocks import block_config, rules
from surgery.blocks.sparse_mlp import RULES
from surgery.families import Blocks, Mlp
from surgery.families.mlp import BY_NEURON
from surgery.fitting.rows import Rows

if TYPE_CHECKING:
    from typing_extensions import Self

# The tensors that a sparse block has beside the weights.
ADDED = ("threshold", "threshold_up", "correction", "bypass_in", "bypass_out")

N = TypeVar("N", bound="Neurons")


@dataclass(kw_only=True)
class Neurons:
    """Hold a converted MLP in fp32, in Linear's layout.

    `rule`, `act` and the thresholds ([1] or [F]) are those of surgery/blocks/sparse_mlp.py;
    `correction` [H] is added to the output.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    rule: str
    act: str
    threshold: Tensor | None = None
    threshold_up: Tensor | None = None
    correction: Tensor | None = None
    bypass_in: Tensor | None = None
    bypass_out: Tensor | None = None

    @classmethod
    def of(cls, mlp: Mlp, rule: str, act: str, device: str = "cpu") -> Neurons:
        """Read an MLP, with thresholds of 0."""
        parts = {
            n: getattr(mlp, n) for n in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        }
        values = {n: t and t.read().to(device, torch.float32) for n, t in parts.items()}
        zero = torch.zeros(1, device=device)
        return cls(
            rule=rule,
            act=act,
            **values,
            **dict.fromkeys(rules.RULES[rule].thresholds, zero),
        )

    @classmethod
    def at(cls, blocks: Blocks, index: int, device: str = "cpu") -> Neurons:
        """Read the MLP of decoder layer `index` as it stands, with all that a sparse block adds."""
        sparse = block_config.sparse_entry_of(blocks.checkpoint.config, index)
        neurons = cls.of(
            blocks.mlp(index),
            sparse.get("rule", "plain"),
            sparse.get("activation", blocks.activation),
            device,
        )
        start, tensors = f"{blocks.layer(index)}{blocks.family.mlp}.", blocks.checkpoint.tensors
        found = {
            n: tensors[start + n].read().to(device, torch.float32)
            for n in ADDED
            if sparse and start + n in tensors
        }
        return dataclasses.replace(neurons, **found)

    def pick(self, chosen: Tensor | slice) -> Self:
        """Return the `chosen` neurons alone, in that order. A threshold for all of them stays."""
        rows = {n: t[chosen] for n, t in self._by_neuron().items()}
        return dataclasses.replace(self, **rows, down=self.down[:, chosen])

    def reorder(self, order: Tensor) -> None:
        """Put the neurons into another order, one matrix after another: the same function."""
        for name, value in self._by_neuron().items():
            setattr(self, name, value[order])
        self.down = self.down[:, order]

    def _by_neuron(self) -> dict[str, Tensor]:
        """Return what has a row for each neuron, by name."""
        values = {name: getattr(self, name) for name in (*BY_NEURON, "threshold", "threshold_up")}
        return {n: t for n, t in values.items() if t is not None and len(t) == len(self.up)}

    def open(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up [n, F] of inputs [n, H], before the activation.

        Without a gate both are up.
        """
        up = F.linear(z, self.up, self.up_bias)
        return (up if self.gate is None else F.linear(z, self.gate, self.gate_bias)), up

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the products h [n, F] of gate and up [n, F]."""
        up_or_none = None if self.gate is None else up
        return RULES[self.rule].multiply(
            ACT2FN[self.act], gate, up_or_none, self.threshold, self.threshold_up
        )

    def product(self, z: Tensor) -> Tensor:
        """Return the products h [n, F] of inputs [n, H]."""
        return self.multiply(*self.open(z))

    def shares(self, z: Tensor) -> Tensor:
        """Return the mass of each neuron [n, F] on inputs [n, H].

        That is the energy of what it adds to the stream, as a share of its token's.
        """
        energy = (Neurons.product(self, z) * self.down.norm(dim=0)).square()
        return energy / energy.sum(1, keepdim=True).clamp_min(1e-30)

    def output(self, h: Tensor, z: Tensor) -> Tensor:
        """Return y [n, H] of products [n, F] and inputs [n, H]."""
        y = F.linear(h, self.down, self.down_bias)
        if self.bypass_out is not None:
            y = y + F.linear(self.bypassed(z), self.bypass_out)
        return y if self.correction is None else y + self.correction

    def bypassed(self, z: Tensor) -> Tensor:
        """Return the bypass activations [n, rank] of inputs [n, H]."""
        return z if self.bypass_in is None else F.linear(z, self.bypass_in)

    def bypass(self, rank: int) -> dict[str, Tensor]:
        """Return bypass_in [rank, H] and bypass_out [H, rank], zeros where none was fitted."""
        hidden = len(self.down)
        shapes = {"bypass_in": (rank, hidden), "bypass_out": (hidden, rank)}
        fitted = {name: getattr(self, name) for name in shapes}
        return {n: self.down.new_zeros(shapes[n]) if t is None else t for n, t in fitted.items()}

    def __call__(self, z: Tensor) -> Tensor:
        """Return y [n, H] of inputs [n, H]."""
        return self.output(self.product(z), z)


def turned(neurons: Neurons, rows: Rows) -> Neurons:
    """Return `neurons` with the signs of their rows of `up` that suit a ReLU of `up` best.

    Each row gets the sign with which most of the energy of its product lies above zero, where the
    ReLU keeps it. `down` changes sign with it, so that the function without that ReLU stays.
    """
    balance = torch.zeros(len(neurons.up), device=neurons.up.device)
    for z, _, weight in rows.fitting():
        gate, up = neurons.open(z)
        energy = (gate.relu() * up).square() * up.sign()
        balance += (energy if weight is None else energy * weight[:, None]).sum(0)
    sign = torch.where(balance < 0, -1.0, 1.0)
    bias = None if neurons.up_bias is None else neurons.up_bias * sign
    return dataclasses.replace(
        neurons, up=neurons.up * sign[:, None], up_bias=bias, down=neurons.down * sign
    )
