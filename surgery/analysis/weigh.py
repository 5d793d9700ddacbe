"""Where the weights of a model are and what one token costs, from names, shapes and dtypes alone.

A checkpoint gives them by its headers, a bare config.json by the `transformers` class built on the meta device: no
formula of a shape is written here. Conventions:

- *Active* parameters are those multiplied for one token: not the input embedding, which is a lookup (a tied table
  counts once, as the head), and top_k of the E routed experts. So count DeepSeek's weight file notes (36.6 B of 671 B)
  and the model card of gpt-oss (5.1 B of 117 B, arXiv 2508.10925); others add the embedding.
- FLOPs are 2 per multiply-accumulate: 2 × active weight matrices. Biases and norms are apart, attention scores are
  counted for a given context only.
- Bytes are those of the weights that a decoding step streams. B tokens that are routed uniformly touch
  E·(1 − (1 − k/E)^B) experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgery.checkpoint import Checkpoint, natural_key
from surgery.checkpoint.tensors import DTYPES
from surgery.errors import SurgeryError
from surgery.families import Family, find
from surgery.families.roles import DOWN, EXPERT, GATED, IDLE_ROLES, LAYER, MLP_ROLES, ROLES, TOKENS, TOWERS, classifier

Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype

# Bytes per parameter under a given dtype; mxfp4 and nvfp4 with their scales (one byte per 32 and per 16 values).
BYTES = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "mxfp4": 4.25 / 8, "nvfp4": 4.5 / 8,
}  # fmt: skip
CACHE_BYTES = 2  # per element of the KV cache
PACKED = (  # parameters per stored element; scales are bytes, not parameters
    (re.compile(r"_blocks$"), 2),
    (re.compile(r"(_scales?|_scale_inv)$"), 0),
)
GATES = {"silu": "SwiGLU", "swish": "SwiGLU", "gelu": "GeGLU", "relu": "ReGLU", "sigmoid": "GLU"}
# Where a config of an unknown family may keep a fact.
LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "activation")
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the tensors of one role; `matrices` are the parameters that are multiplied, biases and norms apart."""

    parameters: int = 0
    matrices: int = 0
    nbytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.parameters + other.parameters, self.matrices + other.matrices, self.nbytes + other.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Attention over the context, per position: multiply-accumulates and cached elements; `window` bounds the positions."""

    multiplications: int
    cached: int
    window: int | None = None

    def positions(self, context: int) -> int:
        return min(context, self.window or context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A decoder layer, or (index None) all that stands outside of them."""

    prefix: str = ""
    index: int | None = None
    tallies: Mapping[str, Tally]
    experts: int = 0
    top_k: int = 0
    widths: Mapping[str, int] = field(default_factory=dict)  # F by role
    scores: Scores | None = None

    def touched(self, role: str, batch: int = 1) -> float:
        """The share of the role's weights that `batch` tokens multiply, in expectation under uniform routing."""
        if role in IDLE_ROLES:
            return 0.0
        return 1 - (1 - self.top_k / self.experts) ** batch if role == "routed_experts" else 1.0

    def active(self, role: str) -> int:
        """Parameters multiplied for one token."""
        return round(self.tallies[role].parameters * self.touched(role)) if role in self.tallies else 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that weigh the same."""
        return (self.prefix, tuple(sorted(self.tallies.items(), key=lambda item: item[0])), self.experts, self.top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers that weigh the same, not necessarily consecutive."""

    label: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a model weighs. Roles are those of `families.roles`; no role given means all of them."""

    model_type: str
    hidden_size: int
    layers: tuple[Layer, ...]
    outside: Layer
    activation: str
    gated: bool
    tied: bool
    dtypes: Mapping[str, int]  # bytes by stored dtype
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Layer, ...]:
        return (self.outside, *self.layers)

    @property
    def roles(self) -> tuple[str, ...]:
        """Those present, in the order of a report."""
        return tuple(r for r in ROLES if any(r in part.tallies for part in self.parts))

    @property
    def gate(self) -> str:
        """The kind of gate: "SwiGLU", ..., "none"."""
        kinds = (name for prefix, name in GATES.items() if self.activation.startswith(prefix))
        return next(kinds, f"{self.activation} gate") if self.gated else "none"

    @property
    def mlp_share(self) -> float:
        return self.parameters(*MLP_ROLES) / self.parameters()

    def parameters(self, *roles: str) -> int:
        return sum(tally.parameters for _, _, tally in self._entries(roles))

    def active(self, *roles: str) -> int:
        """Parameters multiplied for one token."""
        return sum(part.active(role) for part, role, _ in self._entries(roles))

    def flops(self, *roles: str, context: int = 0) -> float:
        """Forward FLOPs per token, with the attention scores over `context` positions."""
        weights = sum(2 * tally.matrices * part.touched(role) for part, role, tally in self._entries(roles))
        scores = (part.scores for part, role, _ in self._entries(roles) if role == "attention" and part.scores)
        return weights + sum(2 * s.multiplications * s.positions(context) for s in scores)

    def nbytes(self, *roles: str, batch: int = 1, dtype: str | None = None, context: int = 0) -> float:
        """Bytes that a decoding step of `batch` sequences reads: weights (stored, or as `dtype`) and the KV cache."""
        total = 0.0
        for part, role, tally in self._entries(roles):
            stored = tally.parameters * BYTES[dtype] if dtype else tally.nbytes
            total += stored * part.touched(role, batch)
            if role == "attention" and part.scores:
                total += batch * part.scores.cached * part.scores.positions(context) * CACHE_BYTES
        return total

    def groups(self) -> list[LayerGroup]:
        """The decoder layers, those that weigh the same together, in the order of their first."""
        kinds: dict[tuple[Any, ...], list[Layer]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        several = len({layer.prefix for layer in self.layers}) > 1
        return [
            LayerGroup(label=(f"{same[0].prefix} " if several else "") + _ranges([layer.index or 0 for layer in same]),
                       layers=tuple(same))  # fmt: skip
            for same in kinds.values()
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts of parameters, FLOPs per token, bytes."""
        roles = {
            role: {
                "parameters": self.parameters(role),
                "share": self.parameters(role) / self.parameters(),
                "active": self.active(role),
                "flops_per_token": self.flops(role),
                "bytes": sum(tally.nbytes for _, _, tally in self._entries((role,))),
            }
            for role in self.roles
        }
        return {
            "model_type": self.model_type, "hidden_size": self.hidden_size, "activation": self.activation,
            "gate": self.gate, "tied": self.tied, "parameters": self.parameters(), "active": self.active(),
            "mlp_parameters": self.parameters(*MLP_ROLES), "mlp_share": self.mlp_share, "bytes_by_dtype": dict(self.dtypes),
            "roles": roles, "layer_groups": [_group_dict(group) for group in self.groups()], "notes": list(self.notes),
        }  # fmt: skip

    def _entries(self, roles: Sequence[str]) -> Iterator[tuple[Layer, str, Tally]]:
        for part in self.parts:
            for role, tally in part.tallies.items():
                if not roles or role in roles:
                    yield part, role, tally


def weigh(model: Checkpoint | Shapes, config: Mapping[str, Any]) -> Weights:
    """The weights of a checkpoint, or of names mapped to (shape, dtype), under its config.json.

    A family in no table is weighed by the generic rules of `families.roles`; tensors that they do not know have the
    role `other`, are taken as active, and are named in the notes.
    """
    shapes = {n: (t.shape, t.dtype) for n, t in model.tensors.items()} if isinstance(model, Checkpoint) else model
    text, family = config.get("text_config") or config, _family(config)
    top_k = _top_k(text, family)
    hidden = int(_first(text, (family.hidden_key,) if family else HIDDEN_KEYS) or 0)
    parts, tied, unknown = _sort(shapes, family, _layer_count(text, family))
    outside = _measure(parts.pop(("", None), []), "", None, top_k, hidden)
    layers = [_measure(entries, *key, top_k, hidden, text) for key, entries in parts.items()]
    return Weights(
        model_type=str(text.get("model_type") or config.get("model_type")),
        hidden_size=hidden,
        layers=tuple(sorted(layers, key=lambda layer: (natural_key(layer.prefix), layer.index or 0))),
        outside=outside,
        activation=_activation(text, family),
        gated=family.gated if family else any(GATED.search(name) for name in shapes if not TOWERS.search(name)),
        tied=tied,
        dtypes=_by_dtype(shapes),
        notes=tuple(_notes([outside, *layers], config, unknown)),
    )


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Names, shapes and dtypes of the model that a config.json describes, by its `transformers` class on the meta device.

    Raises SurgeryError where the installed transformers has no such class, or refuses the config.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    model_type, named = config.get("model_type"), (config.get("architectures") or [None])[0]
    if model_type not in transformers.CONFIG_MAPPING:
        raise SurgeryError(f"transformers {transformers.__version__} has no model_type {model_type!r}",
                           "weigh the checkpoint itself, its headers are enough; or install a newer transformers")  # fmt: skip
    try:
        model_config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(config))
    except StrictDataclassError as error:
        raise SurgeryError(f"transformers {transformers.__version__} refuses this config.json: {error}",
                           "weigh the checkpoint itself, its headers are enough; or correct the value") from error  # fmt: skip
    auto = transformers.AutoModelForCausalLM
    if named and not named.endswith("ForCausalLM"):
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = getattr(transformers, named)(model_config) if hasattr(transformers, str(named)) else auto.from_config(model_config)  # fmt: skip
    dtype = _config_dtype(config)
    return {name: (tuple(p.shape), dtype) for name, p in model.named_parameters()}
