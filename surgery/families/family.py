"""`Family` describes one `model_type`; `locate` finds its MLP blocks in a checkpoint and shows them in one layout.

Shapes: H hidden_size, F intermediate_size, E experts. An MLP is always seen as `torch.nn.Linear` keeps it: gate and up
[F, H], down [H, F], whatever is on disk (fused gate_up, transposed Conv1D).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surgery.checkpoint import Checkpoint, LazyTensor, concatenate
from surgery.checkpoint.config import Config
from surgery.errors import SurgeryError

OPERATED = (
    "surgery_"  # before the model_type of a checkpoint whose blocks are code of ours: a "surgery_llama" is a llama
)


def same_as(key: str) -> Callable[[Mapping[str, Any]], Any]:
    """A default that is another field's value."""
    return lambda config: config[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One `model_type`. Paths are relative to a decoder layer; `.weight` and `.bias` are appended to them."""

    model_type: str
    post_norm: str | None = None  # the norm between the MLP's output and the residual stream
    pre_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # what attention and the MLP read
    bias_key: str | None = None  # the config key that gives gate, up and down biases
    layers: str = "layers"  # the ModuleList of decoder layers, in the body of the model
    mlp: str = "mlp"  # the module; "" where its parts stand in the layer itself
    loose: tuple[str, ...] = ()  # these parts, in the order in which the layer applies them
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    fused_gate_up: bool = False  # `up` holds gate's rows, then up's
    transposed: bool = False  # Conv1D: [in, out]
    # Config keys, and the values that the model class assumes where config.json has none.
    hidden_key: str = "hidden_size"
    width_key: str = "intermediate_size"
    layers_key: str = "num_hidden_layers"
    activation_key: str = "hidden_act"  # "": the activation is fixed in the model class
    activation: str = "silu"  # the default of the model class
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # what else it assumes; a value may be a function of the config
    # Mixture of experts
    experts: str | None = None  # the module with the routed experts; None: a dense family
    router: str | None = None
    shared: str | None = None  # the shared expert(s), which every token passes
    experts_key: str = "num_experts"
    top_k_key: str = "num_experts_per_tok"

    def effective(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with the model class's defaults written out where it is silent."""
        out = Config(config)
        for key, default in self.defaults.items():
            if not callable(default):
                out.setdefault(key, default)
            elif out.get(key) is None:
                out[key] = default(Config(config))
        return out

    @property
    def gathered(self) -> Family:
        """The family where our code has put loose parts in a module, in the place of the first (modeling/gathered_mlp.py)."""
        place = self.loose[0]
        return replace(self, mlp=place, up=f"{place}.{self.up}", down=f"{place}.{self.down}", loose=())

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def is_moe(self) -> bool:
        return self.experts is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """One dense MLP in Linear's layout: gate, up [F, H]; down [H, F]; biases [F], [F], [H] or None."""

    gate: LazyTensor | None
    up: LazyTensor
    down: LazyTensor
    gate_bias: LazyTensor | None = None
    up_bias: LazyTensor | None = None
    down_bias: LazyTensor | None = None
    names: tuple[str, ...]  # the tensors on disk that it consists of

    @property
    def width(self) -> int:
        return self.up.shape[0]

    @property
    def biased(self) -> bool:
        return self.up_bias is not None or self.down_bias is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The decoder layers of a checkpoint: `prefix` is what stands before the layer number ("model.layers.")."""

    family: Family
    checkpoint: Checkpoint
    prefix: str
    count: int

    def layer(self, index: int) -> str:
        return f"{self.prefix}{index}."

    @property
    def activation(self) -> str:
        """The name of the MLPs' activation."""
        return str(self.checkpoint.text_config.get(self.family.activation_key) or self.family.activation)

    @property
    def residual_multiplier(self) -> float:
        """What an MLP's output is multiplied with before it is added to the residual stream (Granite)."""
        return float(self.checkpoint.text_config.get("residual_multiplier") or 1.0)

    def names(self, index: int) -> list[str]:
        """Every tensor of decoder layer `index`."""
        start = self.layer(index)
        return [n for n in self.checkpoint.tensors if n.startswith(start)]

    def mlp_names(self, index: int) -> list[str]:
        """Every tensor of the MLP block (router and experts included) of decoder layer `index`."""
        start, f = self.layer(index), self.family
        parts = (f.mlp + ".",) if f.mlp else (f.up + ".", f.down + ".")
        return [n for n in self.names(index) if n[len(start) :].startswith(parts)]

    def mlp(self, index: int) -> Mlp:
        """The dense MLP of decoder layer `index`."""
        f, start, tensors = self.family, self.layer(index), self.checkpoint.tensors
        used: list[str] = []

        def take(path: str, kind: str) -> LazyTensor | None:
            name = f"{start}{path}.{kind}"
            if name not in tensors:
                return None
            used.append(name)
            return tensors[name].transpose() if f.transposed and kind == "weight" else tensors[name]

        def need(path: str) -> LazyTensor:
            if (t := take(path, "weight")) is None:
                raise SurgeryError(f"layer {index} has no tensor {start}{path}.weight, which a {f.model_type} needs",
                                   "the checkpoint is incomplete: download it again")  # fmt: skip
            return t

        up, down = need(f.up), need(f.down)
        up_bias, down_bias = take(f.up, "bias"), take(f.down, "bias")
        gate, gate_bias = None, None
        if f.fused_gate_up:
            gate, up = _halves(up)
            gate_bias, up_bias = _halves(up_bias) if up_bias else (None, None)
        elif f.gate:
            gate, gate_bias = need(f.gate), take(f.gate, "bias")
        return Mlp(gate=gate, up=up, down=down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias,
                   names=tuple(used))  # fmt: skip

    def restored(self, index: int, mlp: Mlp) -> dict[str, LazyTensor]:
        """The tensors on disk that hold this MLP in layer `index`: the inverse of `mlp`."""
        f, out = self.family, dict[str, LazyTensor]()
        gate = [(mlp.gate, mlp.gate_bias, f.gate)] if f.gate and not f.fused_gate_up else []
        for weight, bias, path in (*gate, (mlp.up, mlp.up_bias, f.up), (mlp.down, mlp.down_bias, f.down)):
            if path == f.up and f.fused_gate_up:
                assert weight is not None and mlp.gate is not None
                weight = concatenate([mlp.gate, weight])
                bias = concatenate([mlp.gate_bias, bias]) if mlp.gate_bias and bias else None
            if weight is not None:
                out[f"{self.layer(index)}{path}.weight"] = weight.transpose() if f.transposed else weight
            if bias is not None:
                out[f"{self.layer(index)}{path}.bias"] = bias
        return out


def _halves(t: LazyTensor) -> tuple[LazyTensor, LazyTensor]:
    half = t.shape[0] // 2
    return t.rows(0, half), t.rows(half, t.shape[0])


def known() -> Mapping[str, Family]:
    """Every family, by `model_type`."""
    from surgery.families.dense import DENSE
    from surgery.families.moe import MOE

    return DENSE | MOE


def find(config: Mapping[str, Any]) -> Family:
    """The family of a config.json: `text_config.model_type` first, in multimodal models.

    Raises SurgeryError for a family that is not in the table.
    """
    stated = ((config.get("text_config") or {}).get("model_type"), config.get("model_type"))
    types = [str(t).removeprefix(OPERATED) for t in stated if t]
    table = known()
    for t in types:
        if t in table:
            operated = OPERATED + t in stated
            return table[t].gathered if operated and table[t].loose else table[t]
    if not types:
        raise SurgeryError("config.json has no model_type", "is this a Hugging Face checkpoint?")
    near = difflib.get_close_matches(types[0], table, 3)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise SurgeryError(f"model_type {types[0]!r} is not supported", f"{hint}`surgery families` lists what is")


def locate(checkpoint: Checkpoint) -> Blocks:
    """The decoder layers of a checkpoint. Raises SurgeryError where the tensors do not agree with the config."""
    family = find(checkpoint.config)
    count = int(checkpoint.text_config.get(family.layers_key) or 0)
    prefixes = {m["prefix"] for m in _layer_names(family, checkpoint.tensors)}
    if not prefixes or not count:
        raise SurgeryError(f"no tensor of a {family.model_type} layer among {len(checkpoint.tensors)} tensors",
                           "the tensors do not belong to this config.json")  # fmt: skip
    return Blocks(family=family, checkpoint=checkpoint, prefix=min(prefixes, key=len), count=count)


def _layer_names(family: Family, names: Mapping[str, Any]) -> Iterator[re.Match[str]]:
    """Names of tensors in the MLP of a decoder layer; towers of other modalities name theirs otherwise."""
    part = re.escape(family.mlp + "." if family.mlp else family.down + ".")
    pattern = re.compile(rf"(?P<prefix>(?:[\w.]+\.)?{family.layers}\.)(?P<layer>\d+)\.{part}")
    for name in names:
        if "vision" not in name and (match := pattern.match(name)):
            yield match
