"""`Family` says where one `model_type` keeps its MLPs, how they lie on disk, and what its config
calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surgery.checkpoint.config import Config

OPERATED = "surgery_"  # stands before the model_type where blocks are our code: a "surgery_llama" is a llama


def same_as(key: str) -> Callable[[Mapping[str, Any]], Any]:
    """A default that is another field's value."""
    return lambda config: config[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One `model_type`. Paths are relative to a decoder layer; `.weight` and `.bias` are appended
    to them.
    """

    model_type: str
    post_norm: str | None = None  # the norm between the MLP's output and the residual stream
    pre_norms: tuple[str, ...] = (
        "input_layernorm",
        "post_attention_layernorm",
    )  # what attention and the MLP read
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
        """The family where our code has put loose parts in a module, in the place of the first
        (blocks/gathered_mlp.py).
        """
        place = self.loose[0]
        return replace(
            self, mlp=place, up=f"{place}.{self.up}", down=f"{place}.{self.down}", loose=()
        )

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def is_moe(self) -> bool:
        return self.experts is not None
