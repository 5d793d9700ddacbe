"""Where the weights of a model are and what one token costs, from names, shapes and dtypes alone.

A checkpoint gives them by its headers, a bare config.json by the `transformers` class built on the
meta device: no formula of a shape is written here. Conventions:

- *Active* parameters are those multiplied for one token: not the input embedding, which is a lookup
  (a tied table counts once, as the head), with top_k of the E routed experts. So count the notes on
  DeepSeek-V3's weight files (36.6 B of 671 B) and the model card of gpt-oss (5.1 B of 117 B, arXiv
  2508.10925). Others add the input embedding: 37 B, 12.9 B of Mixtral, 22 B of Qwen3, 17 B of
  Maverick; `active_with_embedding` is theirs.
- FLOPs are 2 per multiply-accumulate: 2 × active weight matrices. Biases and norms are apart,
  attention scores are counted for a given context only.
- Bytes are those of the weights that a decoding step streams. B tokens that are routed uniformly
  touch E·(1 − (1 − k/E)^B) experts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgery.checkpoint import Checkpoint, natural_key
from surgery.checkpoint.tensors import DTYPES, FLOATS
from surgery.errors import SurgeryError
from surgery.families import Family, find
from surgery.families.roles import (
    DOWN,
    EXPERT,
    GATED,
    IDLE_ROLES,
    LAYER,
    MLP_ROLES,
    ROLES,
    TOKENS,
    TOWERS,
    classifier,
)

Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype

# Bytes per parameter under a given dtype; mxfp4 and nvfp4 with their scales (one byte per 32 and
# per 16 values).
BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 4.25 / 8,
    "nvfp4": 4.5 / 8,
}
CACHE_BYTES = 2  # per element of the KV cache
PACKED = (  # parameters per stored element; scales are bytes, not parameters
    (re.compile(r"_blocks$"), 2),
    (re.compile(r"(weight_scale|weight_scale_inv|input_scale|_proj_scales)$"), 0),
)
GATES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(silu|swish)$", "SwiGLU"),
        (r"gelu", "GeGLU"),
        (r"relu$", "ReGLU"),
        (r"sigmoid$", "GLU"),
    )
)
# Where a config of an unknown family may keep a fact.
LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
ACTIVATION_KEYS = (
    "hidden_act",
    "hidden_activation",
    "mlp_hidden_act",
    "activation_function",
    "activation",
)
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the tensors of one role; `matrices` are the parameters that are multiplied, biases
    and norms apart.
    """

    parameters: int = 0
    matrices: int = 0
    nbytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.parameters + other.parameters,
            self.matrices + other.matrices,
            self.nbytes + other.nbytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Attention per position of the context: multiply-accumulates, cached elements; `window` bounds
    the positions.
    """

    multiplications: int
    cached: int
    window: int | None = None

    def positions(self, context: int) -> int:
        return min(context, self.window or context)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """A decoder layer, or (index None) all that stands outside of them."""

    prefix: str = ""
    index: int | None = None
    tallies: Mapping[str, Tally]
    experts: int = 0
    top_k: int = 0
    widths: Mapping[str, int] = field(default_factory=dict)  # F by role
    scores: Scores | None = None

    def touched(self, role: str, batch: int = 1) -> float:
        """The share of the role's weights that `batch` tokens multiply, in expectation under
        uniform routing.
        """
        if role in IDLE_ROLES:
            return 0.0
        return 1 - (1 - self.top_k / self.experts) ** batch if role == "routed_experts" else 1.0

    def active(self, role: str) -> int:
        """Parameters multiplied for one token."""
        return (
            round(self.tallies[role].parameters * self.touched(role)) if role in self.tallies else 0
        )

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that weigh the same."""
        return (self.prefix, tuple(self.tallies.items()), self.experts, self.top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers that weigh the same, not necessarily consecutive."""

    label: str
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a model weighs. Roles are those of `families.roles`; no role given means all of them."""

    model_type: str
    hidden_size: int
    layers: tuple[LayerWeights, ...]
    outside: LayerWeights
    activation: str
    gated: bool
    tied: bool
    dtypes: Mapping[str, int]  # bytes by stored dtype
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[LayerWeights, ...]:
        return (self.outside, *self.layers)

    @property
    def roles(self) -> tuple[str, ...]:
        """Those present, in the order of a report."""
        return tuple(r for r in ROLES if any(r in part.tallies for part in self.parts))

    @property
    def gate(self) -> str:
        """The kind of gate: "SwiGLU", ..., "gated" by another function, or "none"."""
        kinds = (name for pattern, name in GATES if pattern.match(self.activation))
        return next(kinds, "gated") if self.gated else "none"

    @property
    def mlp_share(self) -> float:
        return self.parameters(*MLP_ROLES) / self.parameters()

    def parameters(self, *roles: str) -> int:
        return sum(tally.parameters for _, _, tally in self._entries(roles))

    def active(self, *roles: str) -> int:
        """Parameters multiplied for one token."""
        return sum(part.active(role) for part, role, _ in self._entries(roles))

    @property
    def active_with_embedding(self) -> int:
        """The other convention: with the whole input embedding."""
        return self.active() + self.parameters("embedding")

    def flops(self, *roles: str, context: int = 0) -> float:
        """Forward FLOPs per token, with the attention scores over `context` positions."""
        weights = sum(
            2 * tally.matrices * part.touched(role) for part, role, tally in self._entries(roles)
        )
        scores = (
            part.scores
            for part, role, _ in self._entries(roles)
            if role == "attention" and part.scores
        )
        return weights + sum(2 * s.multiplications * s.positions(context) for s in scores)

    def nbytes(
        self, *roles: str, batch: int = 1, dtype: str | None = None, context: int = 0
    ) -> float:
        """Bytes that a decoding step of `batch` sequences reads: weights (stored, or as `dtype`)
        and the KV cache.
        """
        total = 0.0
        for part, role, tally in self._entries(roles):
            stored = tally.parameters * BYTES[dtype] if dtype else tally.nbytes
            total += stored * part.touched(role, batch)
            if role == "attention" and part.scores:
                total += batch * part.scores.cached * part.scores.positions(context) * CACHE_BYTES
        return total

    def groups(self) -> list[LayerGroup]:
        """The decoder layers, those that weigh the same together, in the order of their first."""
        kinds: dict[tuple[Any, ...], list[LayerWeights]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        several = len({layer.prefix for layer in self.layers}) > 1
        return [
            LayerGroup(
                label=f"{same[0].prefix} {_label(same)}" if several else _label(same),
                layers=tuple(same),
            )
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
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "activation": self.activation,
            "gate": self.gate,
            "tied": self.tied,
            "parameters": self.parameters(),
            "active": self.active(),
            "active_with_embedding": self.active_with_embedding,
            "mlp_parameters": self.parameters(*MLP_ROLES),
            "mlp_share": self.mlp_share,
            "bytes_by_dtype": dict(self.dtypes),
            "roles": roles,
            "layer_groups": [_group_dict(group) for group in self.groups()],
            "notes": list(self.notes),
        }

    def _entries(self, roles: Sequence[str]) -> Iterator[tuple[LayerWeights, str, Tally]]:
        for part in self.parts:
            for role, tally in part.tallies.items():
                if not roles or role in roles:
                    yield part, role, tally


def weigh(model: Checkpoint | Shapes, config: Mapping[str, Any]) -> Weights:
    """The weights of a checkpoint, or of names mapped to (shape, dtype), under its config.json.

    A family in no table is weighed by the generic rules of `families.roles`; tensors that they do
    not know have the role `other`, are taken as active, and are named in the notes.
    """
    shapes = (
        {n: (t.shape, t.dtype) for n, t in model.tensors.items()}
        if isinstance(model, Checkpoint)
        else model
    )
    text, family = config.get("text_config") or config, _family(config)
    facts = _Facts.of(text, family)
    entries, tied, unknown = _sort(shapes, family, facts.layers)
    operated = config.get("surgery_blocks") or ()
    blocks = {
        i: b for b in operated if b["kind"] == "experts" or _finds_neurons(b) for i in b["layers"]
    }
    named = (b.get("activation") for b in operated if b["kind"] in ("sparse", "experts"))
    activations = dict.fromkeys(filter(None, named))
    _move_neurons(entries, blocks)
    parts = [
        _measure(found, prefix, index, facts, blocks.get(index))
        for (prefix, index), found in entries.items()
    ]
    layers = [part for part in parts if part.index is not None]
    return Weights(
        model_type=str(text.get("model_type") or config.get("model_type")),
        hidden_size=facts.hidden_size,
        layers=tuple(
            sorted(layers, key=lambda layer: (natural_key(layer.prefix), layer.index or 0))
        ),
        outside=next(part for part in parts if part.index is None),
        activation=", ".join(activations) or facts.activation,
        gated=family.gated
        if family
        else any(GATED.search(name) for name in shapes if not TOWERS.search(name)),
        tied=tied,
        dtypes=_by_dtype(shapes),
        notes=tuple(_notes(config, shapes, facts, parts, unknown)),
    )


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Names, shapes and dtypes of the model that config.json describes, by its `transformers` class
    on the meta device.

    Raises SurgeryError where the installed transformers has no such class, or refuses the config.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    model_type, named = config.get("model_type"), (config.get("architectures") or [None])[0]
    version, hint = (
        f"transformers {transformers.__version__}",
        "weigh the checkpoint itself: its headers are enough",
    )
    if model_type not in transformers.CONFIG_MAPPING:
        raise SurgeryError(f"{version} has no model_type {model_type!r}", hint)
    try:
        model_config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(config))
    except StrictDataclassError as error:
        raise SurgeryError(f"{version} refuses this config.json: {error}", hint) from error
    cls = getattr(transformers, str(named), None)
    with torch.device("meta"):
        model = (
            cls(model_config)
            if cls
            else transformers.AutoModelForCausalLM.from_config(model_config)
        )
    dtype = _config_dtype(config)
    return {name: (tuple(p.shape), dtype) for name, p in model.named_parameters()}


# --- tensors to layers ----------------------------------------------------------------------------


_Place = tuple[str, int | None]  # prefix and index of a layer
_OUTSIDE: _Place = ("", None)


@dataclass(frozen=True, slots=True)
class _Entry:
    role: str
    path: str
    shape: tuple[int, ...]
    tally: Tally


def _sort(
    shapes: Shapes, family: Family | None, count: int
) -> tuple[dict[_Place, list[_Entry]], bool, list[str]]:
    """The tensors by layer, whether the head is the embedding, and the names that no rule knows."""
    parts: dict[_Place, list[_Entry]] = {_OUTSIDE: []}
    classify, unknown = classifier(family), []
    for name, (shape, dtype) in shapes.items():
        match = LAYER.match(name)
        # Past the last decoder layer stands multi-token prediction.
        idle = TOWERS.search(name) or (match and count and int(match["index"]) >= count)
        inside = bool(match) and not idle
        key = (match["prefix"], int(match["index"])) if match and inside else _OUTSIDE
        path = match["path"] if match and inside else name
        role = "towers" if idle else classify(EXPERT.sub("experts.0.", path), inside)
        if role == "other":
            unknown.append(name)
        parts.setdefault(key, []).append(
            _Entry(role, path, shape, _tally(path, role, shape, dtype))
        )
    tied = not any(e.role == "head" for e in parts[_OUTSIDE])
    if tied:
        parts[_OUTSIDE] = [
            dataclasses.replace(e, role="head") if _is_table(e) else e for e in parts[_OUTSIDE]
        ]
    return parts, tied, unknown


def _is_table(entry: _Entry) -> bool:
    return entry.role == "embedding" and bool(TOKENS.search(entry.path))


def _tally(path: str, role: str, shape: tuple[int, ...], dtype: str) -> Tally:
    numel = math.prod(shape)
    parameters = numel * next((n for pattern, n in PACKED if pattern.search(path)), 1)
    multiplied = len(shape) > 1 and role != "norms" and not path.endswith("bias")
    return Tally(parameters, parameters if multiplied else 0, numel * DTYPES[dtype][0])


def _finds_neurons(block: Mapping[str, Any]) -> bool:
    """Whether it is a memory of an MLP's own neurons (surgery/blocks/memory_mlp.py): experts of one
    neuron, of which a token reads knn.
    """
    return block["kind"] == "memory" and block["slots"] == "neurons"


def _move_neurons(
    entries: dict[_Place, list[_Entry]], blocks: Mapping[int, Mapping[str, Any]]
) -> None:
    """Tables of neurons stand outside the layers: into the layer that reads them."""
    for place in list(entries):
        block = None if place[1] is None else blocks.get(place[1])
        if block and _finds_neurons(block):
            moved = [e for e in entries[_OUTSIDE] if f".{block['shared']}." in f".{e.path}"]
            entries[_OUTSIDE] = [e for e in entries[_OUTSIDE] if e not in moved]
            entries[place] += [dataclasses.replace(e, role="routed_experts") for e in moved]


def _as_experts(entry: _Entry, block: Mapping[str, Any]) -> Iterator[_Entry]:
    """A tensor of an MLP that is a mixture (surgery/blocks/experts_mlp.py): what its shared neurons
    have of it, and its experts.
    """
    part = entry.path.removeprefix(f"{block['mlp']}.").rpartition(".")
    if part[0] not in (block["gate"], block["up"], block["down"]) or (
        part[0] == block["down"] and part[2] == "bias"
    ):
        yield entry
        return
    experts, t = block["experts"], entry.tally
    shared, routed = block["shared_neurons"], experts * block["width"]
    sizes = {"shared_experts": shared, "routed_experts": routed}
    for role, size in sizes.items():
        counts = (n * size // (shared + routed) for n in (t.parameters, t.matrices, t.nbytes))
        if size:
            yield _Entry(role, entry.path, (experts, *entry.shape), Tally(*counts))


def _measure(
    entries: Sequence[_Entry],
    prefix: str,
    index: int | None,
    facts: _Facts,
    block: Mapping[str, Any] | None = None,
) -> LayerWeights:
    """The sums by role of a layer, its experts, and the width F of each kind of MLP it has.
    `block`: that of a mixture or of neurons in a memory, whose code travels."""
    mixture = (0, facts.top_k)
    if block and _finds_neurons(block):
        mixture = (block["keys"] ** 2, block["knn"])
    elif block:
        mixture = (block["experts"], block["top_k"])
        entries = [part for e in entries for part in _as_experts(e, block)]
    tallies: dict[str, Tally] = {}
    for e in entries:
        tallies[e.role] = tallies.get(e.role, Tally()) + e.tally
    experts = mixture[0] or _expert_count([e for e in entries if e.role == "routed_experts"])
    top_k = mixture[1] or experts
    widths: dict[str, int] = {}
    for e in entries:
        if facts.hidden_size and e.role in MLP_ROLES and DOWN.search(e.path) and e.tally.matrices:
            routed = e.role == "routed_experts"
            rows = e.shape[0] if routed and not EXPERT.search(e.path) else 1
            widths[e.role] = e.tally.matrices // (
                rows * (facts.latent_size if routed else facts.hidden_size)
            )
    tallies = {role: tallies[role] for role in ROLES if role in tallies}
    return LayerWeights(
        prefix=prefix,
        index=index,
        tallies=tallies,
        experts=experts,
        top_k=top_k,
        widths=widths,
        scores=_scores(facts.text, index) if "attention" in tallies else None,
    )


def _expert_count(routed: Sequence[_Entry]) -> int:
    numbers = [int(match[1]) for e in routed if (match := EXPERT.search(e.path))]
    if numbers:
        return max(numbers) + 1
    return routed[0].shape[0] if routed else 0


def _label(layers: Sequence[LayerWeights]) -> str:
    """ "0–2, 4, 7–9"; "1–47 step 2" where that is all."""
    indices = [layer.index or 0 for layer in layers]
    steps = {b - a for a, b in itertools.pairwise(indices)}
    if len(indices) > 2 and len(steps) == 1 and steps != {1}:
        return f"{indices[0]}–{indices[-1]} step {steps.pop()}"
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])}, … {shown[-1]}"


def _group_dict(group: LayerGroup) -> dict[str, Any]:
    first = group.layers[0]
    return {
        "layers": [layer.index for layer in group.layers],
        "parameters": sum(t.parameters for t in first.tallies.values()),
        "roles": {
            r: {"parameters": t.parameters, "active": first.active(r)}
            for r, t in first.tallies.items()
        },
        "experts": first.experts,
        "top_k": first.top_k,
        "widths": dict(first.widths),
    }


# --- facts of the config --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What names and shapes do not tell."""

    text: Mapping[str, Any]
    layers: int  # 0: not told
    hidden_size: int
    latent_size: int  # what routed experts read and write: H, but in latent MoE
    top_k: int | None
    activation: str

    @classmethod
    def of(cls, text: Mapping[str, Any], family: Family | None) -> _Facts:
        keys = family or Family(model_type="")
        hidden = int(_first(text, keys.hidden_key, *HIDDEN_KEYS) or 0)
        top_k = _first(text, keys.top_k_key, *TOP_K_KEYS)
        activation = _first(text, *ACTIVATION_KEYS)
        if family:
            activation = _first(text, family.activation_key) or family.activation
        return cls(
            text=text,
            layers=int(_first(text, keys.layers_key, *LAYERS_KEYS) or 0),
            hidden_size=hidden,
            latent_size=int(text.get("moe_latent_size") or hidden),
            top_k=int(top_k) if top_k else None,
            activation=str(activation or "unknown"),
        )


def _first(text: Mapping[str, Any], *keys: str) -> Any:
    return next((text[key] for key in keys if text.get(key) is not None), None)


def _family(config: Mapping[str, Any]) -> Family | None:
    try:
        return find(config)
    except SurgeryError:
        return None


def _scores(text: Mapping[str, Any], index: int | None) -> Scores | None:
    """Keys and values of attention per position; with a latent cache (MLA), in the absorbed form
    that decoding uses.
    """
    heads, hidden = (
        int(_first(text, *keys) or 0) for keys in (("num_attention_heads", "n_head"), HIDDEN_KEYS)
    )
    if not heads:
        return None
    types = text.get("layer_types") or []
    kind = types[index] if index is not None and index < len(types) else ""
    window = text.get(WINDOWS[kind]) if kind in WINDOWS else None
    if latent := text.get("kv_lora_rank"):
        rope = int(text["qk_rope_head_dim"])
        return Scores(
            multiplications=heads * (2 * latent + rope), cached=latent + rope, window=window
        )
    width = _first(text, "head_dim", "attention_head_dim") or hidden // heads
    if not width:
        return None
    cached = 2 * width * int(_first(text, "num_key_value_heads", "num_kv_heads") or heads)
    return Scores(multiplications=2 * heads * width, cached=cached, window=window)


def _config_dtype(config: Mapping[str, Any]) -> str:
    """safetensors' name of the dtype. Without one, transformers assumes fp32, but no quantised
    model came from that.
    """
    name = _first({**config, **(config.get("text_config") or {})}, "dtype", "torch_dtype")
    name = name or ("bfloat16" if config.get("quantization_config") else "float32")
    return next((short for short, (_, long) in DTYPES.items() if long == name), "F32")


def _by_dtype(shapes: Shapes) -> dict[str, int]:
    nbytes: dict[str, int] = {}
    for shape, dtype in shapes.values():
        nbytes[dtype] = nbytes.get(dtype, 0) + math.prod(shape) * DTYPES[dtype][0]
    return nbytes


def _notes(
    config: Mapping[str, Any],
    shapes: Shapes,
    facts: _Facts,
    parts: Iterable[LayerWeights],
    unknown: Sequence[str],
) -> Iterator[str]:
    """What the reader must know to trust the figures."""
    parts, dtypes = list(parts), {dtype for _, dtype in shapes.values()}
    if facts.top_k is None and any(part.experts and part.top_k == part.experts for part in parts):
        yield "config.json does not say how many experts a token goes to: all are taken as active"
    if towers := sum(
        part.tallies["towers"].parameters for part in parts if "towers" in part.tallies
    ):
        yield f"{towers:,} parameters are of other modalities or multi-token prediction: text does not run them"
    if unknown:
        yield f"{len(unknown):,} tensors have names that no rule knows, taken as active: {unknown[0]}, …"
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method and dtypes <= set(FLOATS):
        yield f"config.json says {method}, but {'/'.join(dtypes)} is weighed: give the checkpoint itself, or --dtype"
    if "I32" in dtypes or ("U8" in dtypes and method != "mxfp4"):
        yield f"weights are packed ({method}): their parameters are counted as stored elements, too few"
