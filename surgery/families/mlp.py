"""The MLP blocks of a checkpoint in one layout.

Shapes: H hidden_size, F intermediate_size. Whatever the layout on disk (fused gate_up, transposed
Conv1D), an MLP is seen as `torch.nn.Linear` keeps it: gate and up [F, H], down [H, F].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from surgery.checkpoint import Checkpoint, LazyTensor, concatenate
from surgery.errors import SurgeryError
from surgery.families.family import ALWAYS_OPEN, Family

BY_NEURON = ("gate", "up", "gate_bias", "up_bias")  # the parts of an MLP with a row for each neuron


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """One dense MLP in the layout of Linear.

    Args:
        gate: [F, H], or None where the MLP has no gate.
        up: [F, H].
        down: [H, F].
        gate_bias: [F] or None.
        up_bias: [F] or None.
        down_bias: [H] or None.
        names: the tensors on disk that it consists of.
    """

    gate: LazyTensor | None
    up: LazyTensor
    down: LazyTensor
    gate_bias: LazyTensor | None = None
    up_bias: LazyTensor | None = None
    down_bias: LazyTensor | None = None
    names: tuple[str, ...]

    @property
    def width(self) -> int:
        """Return the number of neurons, F."""
        return self.up.shape[0]

    def by_neuron(self, function: Callable[[LazyTensor], LazyTensor]) -> Mlp:
        """Return the MLP with `function` applied to what has a row for each neuron: not `down`."""
        parts = {name: getattr(self, name) for name in BY_NEURON}
        changes: dict[str, Any] = {n: function(t) for n, t in parts.items() if t is not None}
        return replace(self, **changes)

    @property
    def biased(self) -> bool:
        return self.up_bias is not None or self.down_bias is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The decoder layers of a checkpoint.

    Args:
        family: the family of the checkpoint.
        checkpoint: the checkpoint.
        prefix: what comes before the layer number in the names of tensors ("model.layers.").
        count: the number of decoder layers.
    """

    family: Family
    checkpoint: Checkpoint
    prefix: str
    count: int

    def layer(self, index: int) -> str:
        """Return the prefix of the names of decoder layer `index` ("model.layers.3.")."""
        return f"{self.prefix}{index}."

    @property
    def activation(self) -> str:
        """Return the name of the MLPs' activation."""
        stated = self.checkpoint.text_config.get(self.family.activation_key)
        return str(stated or self.family.activation)

    @property
    def always_open(self) -> int:
        """Return the number of last neurons of each MLP that are always open, or zero."""
        return int(self.checkpoint.text_config.get(ALWAYS_OPEN) or 0)

    @property
    def residual_multiplier(self) -> float:
        """Return the factor of an MLP's output in the residual stream (Granite)."""
        return float(self.checkpoint.text_config.get("residual_multiplier") or 1.0)

    def has_mlp(self, index: int) -> bool:
        """Return whether decoder layer `index` has a dense MLP; in hybrids some have none."""
        down = self.family.stored(self.family.down)
        return f"{self.layer(index)}{down}.weight" in self.checkpoint.tensors

    @property
    def dense(self) -> tuple[int, ...]:
        """Return the layers that are operated on.

        Where layers differ by design, they are those with a dense MLP. Raises SurgeryError where
        none has one.
        """
        if not self.family.uneven:
            return tuple(range(self.count))
        found = tuple(index for index in range(self.count) if self.has_mlp(index))
        if not found:
            raise SurgeryError(
                f"no layer of this {self.family.model_type} has a dense MLP",
                "give a model whose layers have one",
            )
        return found

    def names(self, index: int) -> list[str]:
        """Return the names of all tensors of decoder layer `index`."""
        start = self.layer(index)
        return [n for n in self.checkpoint.tensors if n.startswith(start)]

    def mlp_names(self, index: int) -> list[str]:
        """Return the names of all tensors of an MLP block, router and experts included."""
        start, f = self.layer(index), self.family
        parts = (f.mlp + ".",) if f.mlp else (f.stored(f.up) + ".", f.stored(f.down) + ".")
        return [n for n in self.names(index) if n[len(start) :].startswith(parts)]

    def mlp(self, index: int) -> Mlp:
        """Return the dense MLP of decoder layer `index`.

        Raises SurgeryError where a tensor is missing.
        """
        f, start, tensors = self.family, self.layer(index), self.checkpoint.tensors
        used: list[str] = []

        def take(path: str, kind: str) -> LazyTensor | None:
            name = f"{start}{f.stored(path)}.{kind}"
            if name not in tensors:
                return None
            used.append(name)
            return tensors[name].transpose() if f.transposed and kind == "weight" else tensors[name]

        def need(path: str) -> LazyTensor:
            if (t := take(path, "weight")) is None:
                raise SurgeryError(
                    f"layer {index} has no tensor {start}{f.stored(path)}.weight, "
                    f"which a {f.model_type} needs",
                    "the checkpoint is incomplete: download it again",
                )
            return t

        up, down = need(f.up), need(f.down)
        up_bias, down_bias = take(f.up, "bias"), take(f.down, "bias")
        gate, gate_bias = None, None
        if f.fused_gate_up:
            gate, up = _halves(up)
            gate_bias, up_bias = _halves(up_bias) if up_bias else (None, None)
        elif f.gate:
            gate, gate_bias = need(f.gate), take(f.gate, "bias")
        return Mlp(
            gate=gate,
            up=up,
            down=down,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
            names=tuple(used),
        )

    def restored(self, index: int, mlp: Mlp) -> dict[str, LazyTensor]:
        """Return the tensors on disk that hold an MLP in layer `index`: the inverse of `mlp`."""
        f, out = self.family, dict[str, LazyTensor]()
        parts = [(mlp.up, mlp.up_bias, f.up), (mlp.down, mlp.down_bias, f.down)]
        if f.gate and not f.fused_gate_up and mlp.gate is not None:
            parts.insert(0, (mlp.gate, mlp.gate_bias, f.gate))
        for weight, bias, path in parts:
            if path == f.up and f.fused_gate_up:
                assert mlp.gate is not None
                weight = concatenate([mlp.gate, weight])
                bias = concatenate([mlp.gate_bias, bias]) if mlp.gate_bias and bias else None
            stored = weight.transpose() if f.transposed else weight
            start = f"{self.layer(index)}{f.stored(path)}"
            out[f"{start}.weight"] = stored
            if bias is not None:
                out[f"{start}.bias"] = bias
        return out


def _halves(t: LazyTensor) -> tuple[LazyTensor, LazyTensor]:
    half = t.shape[0] // 2
    return t.rows(0, half), t.rows(half, t.shape[0])
