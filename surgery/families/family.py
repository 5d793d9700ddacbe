"""`Family`: where one `model_type` keeps its MLPs, how they are stored, and their config keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surgery.checkpoint.config import Config
from surgery.errors import SurgeryError

# The prefix of a model_type with custom-code blocks: a "surgery_llama" is a llama otherwise.
OPERATED = "surgery_"
# The config field with the number of last neurons of every MLP that are always open, or zero. Stock
# classes keep it and do not read it.
ALWAYS_OPEN = "always_open_neurons"


def same_as(key: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a default that takes the value of another field."""
    return lambda config: config[key]


def flat(path: str) -> str:
    """Return the name that a part of an MLP has in the module that gathers them."""
    return path.replace(".", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The facts about one `model_type`.

    Paths are relative to a decoder layer, and `.weight` and `.bias` are appended to them.
    """

    model_type: str
    # The norm between the MLP's output and the residual stream.
    post_norm: str | None = None
    # The norms whose outputs attention and the MLP read.
    pre_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    # The config key that gives biases to gate, up and down.
    bias_key: str | None = None
    # The ModuleList of decoder layers in the body of the model.
    layers: str = "layers"
    # The body's name in the model, of families that were discovered.
    body: str = ""
    # That list's name on disk, where the loader renames it, and the names on disk of the MLP's
    # parts.
    layers_on_disk: str = ""
    on_disk: Mapping[str, str] = field(default_factory=dict)
    # The MLP's module; "" where its parts are modules of the layer itself.
    mlp: str = "mlp"
    # Those parts, in the order in which the layer applies them; in any modules of it.
    loose: tuple[str, ...] = ()
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    # Whether `up` holds the rows of gate, then those of up.
    fused_gate_up: bool = False
    # Whether layers have different tensors by design, as those of hybrids do.
    uneven: bool = False
    # Whether the activation is a module of the MLP's; a block must name it otherwise.
    act_module: bool = True
    # The module that computes the activation where it is no function of ACT2FN: a block keeps it.
    own_activation: str = ""
    # The embedding's tensor, where its name is none of the usual ones.
    embedding: str = ""
    # What the MLP's module computes besides the MLP, in words; no block can take its place then.
    extra: str = ""
    # Why its layers cannot be run one after the other, in words; nothing is measured on text then.
    unchained: str = ""
    # Whether the facts were derived from the model class (discovery.py), and stand in no table.
    discovered: bool = False
    # Whether matrices are stored as [in, out], as Conv1D does.
    transposed: bool = False

    # Config keys, and the values that the model class assumes where config.json has none.
    hidden_key: str = "hidden_size"
    width_key: str = "intermediate_size"
    layers_key: str = "num_hidden_layers"
    # "" where the activation is fixed in the model class.
    activation_key: str = "hidden_act"
    activation: str = "silu"
    # Other fields; a value may be a function of the config.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    # The module with the routed experts; None for a dense family.
    experts: str | None = None
    router: str | None = None
    # The shared experts, which every token passes.
    shared: str | None = None
    experts_key: str = "num_experts"
    top_k_key: str = "num_experts_per_tok"

    def effective(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with the defaults of the model class added where it has no value."""
        out = Config(config)
        for key, default in self.defaults.items():
            if not callable(default):
                out.setdefault(key, default)
            elif out.get(key) is None:
                out[key] = default(Config(config))
        return out

    def stored(self, path: str) -> str:
        """Return the path on disk of a part of the MLP."""
        return self.on_disk.get(path, path)

    @property
    def gathered(self) -> Family:
        """Return the family after custom code has gathered the parts of its MLP in one module.

        The module takes the place of the first part (see blocks/gathered_mlp.py).
        """
        place = self.loose[0]
        up, down = f"{place}.{flat(self.up)}", f"{place}.{flat(self.down)}"
        return replace(self, mlp=place, up=up, down=down, loose=())

    @property
    def gated(self) -> bool:
        """Return whether the MLP has a gate."""
        return self.gate is not None

    def require_dense(self) -> None:
        """Raise SurgeryError for a mixture of experts, whose layers have no MLP to operate on."""
        if self.is_moe:
            raise SurgeryError(
                f"this model is a mixture already: {self.model_type} has experts in the place of "
                "its MLPs",
                "give the dense model that it was made from, or another dense model; `surgery "
                "families` lists them",
            )

    @property
    def is_moe(self) -> bool:
        """Return whether the family is a mixture of experts."""
        return self.experts is not None
