"""Weigh a model, from names, shapes and dtypes alone: where its weights are, what a token costs.

The shapes come from the headers of a checkpoint, or from the `transformers` class of a bare
config.json built on the meta device, so no formula for a shape is written here. Conventions:

- *Active* parameters are those multiplied for one token, with top_k of the E routed experts. The
  input embedding is a lookup and not among them; a tied table counts once, as the head. The notes
  on DeepSeek-V3's weight files (36.6 B of 671 B) and the model card of gpt-oss (5.1 B of 117 B,
  arXiv 2508.10925) count this way. Others add the input embedding: 37 B, 12.9 B for Mixtral, 22 B
  for Qwen3, 17 B for Maverick; `active_with_embedding` is that number.
- FLOPs are 2 per multiply-accumulate, hence 2 × the active weight matrices. Biases and norms are
  left out, and attention scores are counted for a given context only.
- Bytes are those of the weights that a decoding step streams. B tokens routed uniformly touch E·(1
  − (1 − k/E)^B) experts.
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
from surgery.families import ALWAYS_OPEN, Family, find
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

# Bytes per parameter in a given dtype. mxfp4 and nvfp4 include their scales, one byte per 32 and
# per 16 values.
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
PACKED = (  # parameters per stored element; scales have bytes but no parameters
    (re.compile(r"_blocks$"), 2),
    (re.compile(r"(weight_scale|weight_scale_inv|input_scale|_proj_scales)$"), 0),
)
GATES = (
    (re.compile(r"(silu|swish)$"), "SwiGLU"),
    (re.compile(r"gelu"), "GeGLU"),
    (re.compile(r"relu$"), "ReGLU"),
    (re.compile(r"sigmoid$"), "GLU"),
)
# Keys under which the config of an unknown family may keep a fact.
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
    """Sums over the tensors of one role; `matrices` leaves out biases and norms."""

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
    """The cost of attention per position of the context.

    `multiplications` counts multiply-accumulates, `cached` elements of the KV cache; a sliding
    `window` bounds the positions.
    """

    multiplications: int
    cached: int
    window: int | None = None

    def positions(self, context: int) -> int:
        """Return how many positions of the context are attended to."""
        return min(context, self.window or context)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """The weights of a decoder layer, or, if `index` is None, all weights outside of them."""

    prefix: str = ""
    index: int | None = None
    tallies: Mapping[str, Tally]
    experts: int = 0
    top_k: int = 0
    widths: Mapping[str, int] = field(default_factory=dict)  # F by role
    scores: Scores | None = None

    def touched(self, role: str, batch: int = 1) -> float:
        """Return the share of a role's weights that `batch` tokens multiply.

        For routed experts it is the expectation under uniform routing.
        """
        if role in IDLE_ROLES:
            return 0.0
        return 1 - (1 - self.top_k / self.experts) ** batch if role == "routed_experts" else 1.0

    def active(self, role: str) -> int:
        """Return the parameters multiplied for one token."""
        if role not in self.tallies:
            return 0
        return round(self.tallies[role].parameters * self.touched(role))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return a key that is equal for layers that weigh the same."""
        return (self.prefix, tuple(self.tallies.items()), self.experts, self.top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers that weigh the same, not necessarily consecutive."""

    label: str
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a model weighs. Roles are those of `families.roles`; giving none means all of them."""

    model_type: str
    hidden_size: int
    layers: tuple[LayerWeights, ...]
    outside: LayerWeights
    activation: str
    gated: bool
    tied: bool
    dtypes: Mapping[str, int]  # bytes by stored dtype
    always_open: int = 0  # last neurons of each MLP
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[LayerWeights, ...]:
        """Return what is outside the layers, then the layers."""
        return (self.outside, *self.layers)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that are present, in the order of a report."""
        return tuple(r for r in ROLES if any(r in part.tallies for part in self.parts))

    @property
    def gate(self) -> str:
        """Return the kind of gate: "SwiGLU", ..., "gated" for another function, or "none"."""
        kinds = (name for pattern, name in GATES if pattern.match(self.activation))
        return next(kinds, "gated") if self.gated else "none"

    @property
    def mlp_share(self) -> float:
        """Return the share of the parameters that the MLPs hold."""
        return self.parameters(*MLP_ROLES) / self.parameters()

    def parameters(self, *roles: str) -> int:
        """Return the number of parameters."""
        return sum(tally.parameters for _, _, tally in self._entries(roles))

    def active(self, *roles: str) -> int:
        """Return the number of parameters multiplied for one token."""
        return sum(part.active(role) for part, role, _ in self._entries(roles))

    @property
    def active_with_embedding(self) -> int:
        """Return the active parameters plus the whole input embedding."""
        return self.active() + self.parameters("embedding")

    def flops(self, *roles: str, context: int = 0) -> float:
        """Return the forward FLOPs per token, with attention scores over `context` positions."""
        entries = list(self._entries(roles))
        weights = sum(2 * tally.matrices * part.touched(role) for part, role, tally in entries)
        scores = (p.scores for p, role, _ in entries if role == "attention" and p.scores)
        return weights + sum(2 * s.multiplications * s.positions(context) for s in scores)

    def nbytes(
        self, *roles: str, batch: int = 1, dtype: str | None = None, context: int = 0
    ) -> float:
        """Return the bytes that a decoding step of `batch` sequences reads.

        They are those of the weights, as stored or as if stored in `dtype`, and of the KV cache.
        """
        total = 0.0
        for part, role, tally in self._entries(roles):
            stored = tally.parameters * BYTES[dtype] if dtype else tally.nbytes
            total += stored * part.touched(role, batch)
            if role == "attention" and part.scores:
                total += batch * part.scores.cached * part.scores.positions(context) * CACHE_BYTES
        return total

    def groups(self) -> list[LayerGroup]:
        """Return the decoder layers grouped by weight, in the order of each group's first."""
        kinds: dict[tuple[Any, ...], list[LayerWeights]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        several = len({layer.prefix for layer in self.layers}) > 1
        prefixes = [f"{same[0].prefix} " if several else "" for same in kinds.values()]
        return [
            LayerGroup(label=prefix + _label(same), layers=tuple(same))
            for prefix, same in zip(prefixes, kinds.values(), strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for JSON: parameters, FLOPs per token, bytes."""
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
            "always_open": self.always_open,
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
        """Yield every tally of these roles, with the part it belongs to."""
        for part in self.parts:
            for role, tally in part.tallies.items():
                if not roles or role in roles:
                    yield part, role, tally


def weigh(model: Checkpoint | Shapes, config: Mapping[str, Any]) -> Weights:
    """Weigh a checkpoint, or a mapping of names to (shape, dtype), under its config.json.

    Reads no weight. A family that is in no table is weighed by the generic rules of
    `families.roles`. Tensors that those rules do not know get the role `other`, count as active,
    and are named in the notes.

    Example:
        checkpoint = open_checkpoint("Qwen/Qwen3-0.6B")
        print(f"{weigh(checkpoint, checkpoint.config).mlp_share:.0%} of the weights are in MLPs")
    """
    if isinstance(model, Checkpoint):
        model = {n: (t.shape, t.dtype) for n, t in model.tensors.items()}
    shapes: Shapes = model
    text, family = config.get("text_config") or config, _family(config)
    facts = _Facts.of(text, family)
    entries, tied, unknown = _sort(shapes, family, facts.layers)
    blocks = _weighed_blocks(config)
    _move_neurons(entries, blocks)
    parts = [_measure(e, place, facts, blocks.get(place[1])) for place, e in entries.items()]
    layers = [part for part in parts if part.index is not None]
    gated = any(GATED.search(name) for name in shapes if not TOWERS.search(name))
    return Weights(
        model_type=str(text.get("model_type") or config.get("model_type")),
        hidden_size=facts.hidden_size,
        layers=tuple(sorted(layers, key=lambda part: (natural_key(part.prefix), part.index or 0))),
        outside=next(part for part in parts if part.index is None),
        activation=_block_activations(config) or facts.activation,
        gated=family.gated if family else gated,
        tied=tied,
        dtypes=_by_dtype(shapes),
        always_open=int(text.get(ALWAYS_OPEN) or 0),
        notes=tuple(_notes(config, shapes, facts, parts, unknown)),
    )


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Return names, shapes and dtypes of the model that config.json describes.

    They are those of its `transformers` class, built on the meta device.

    Raises SurgeryError if the installed transformers has no such class, or refuses the config.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    model_type, named = config.get("model_type"), (config.get("architectures") or [None])[0]
    version = f"transformers {transformers.__version__}"
    hint = "weigh the checkpoint itself: its headers are enough"
    if model_type not in transformers.CONFIG_MAPPING:
        raise SurgeryError(f"{version} has no model_type {model_type!r}", hint)
    try:
        model_config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(config))
    except StrictDataclassError as error:
        raise SurgeryError(f"{version} refuses this config.json: {error}", hint) from error
    build = getattr(transformers, str(named), None) or transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(model_config)
    dtype = _config_dtype(config)
    return {name: (tuple(p.shape), dtype) for name, p in model.named_parameters()}


def _weighed_blocks(config: Mapping[str, Any]) -> dict[int | None, Mapping[str, Any]]:
    """Return, by layer, the custom-code blocks whose MLP is weighed as a mixture of experts."""
    blocks = config.get("surgery_blocks") or ()
    mixtures = [b for b in blocks if b["kind"] == "experts" or _finds_neurons(b)]
    return {index: block for block in mixtures for index in block["layers"]}


def _block_activations(config: Mapping[str, Any]) -> str:
    """Return the activations that custom-code blocks name, which override the config's own."""
    blocks = config.get("surgery_blocks") or ()
    named = (b.get("activation") for b in blocks if b["kind"] in ("sparse", "experts"))
    return ", ".join(dict.fromkeys(filter(None, named)))


# --- tensors to layers ----------------------------------------------------------------------------


_Place = tuple[str, int | None]  # prefix and index of a layer; no index outside the layers
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
    """Return the tensors by layer, whether the head is tied, and the names that no rule knows."""
    parts: dict[_Place, list[_Entry]] = {_OUTSIDE: []}
    classify, unknown = classifier(family), []
    for name, (shape, dtype) in shapes.items():
        match = LAYER.match(name)
        # Layers past the last decoder layer are for multi-token prediction.
        idle = TOWERS.search(name) or (match and count and int(match["index"]) >= count)
        inside = bool(match) and not idle
        key = (match["prefix"], int(match["index"])) if match and inside else _OUTSIDE
        path = match["path"] if match and inside else name
        role = "towers" if idle else classify(EXPERT.sub("experts.0.", path), inside)
        if role == "other":
            unknown.append(name)
        entry = _Entry(role, path, shape, _tally(path, role, shape, dtype))
        parts.setdefault(key, []).append(entry)
    outside = parts[_OUTSIDE]
    tied = not any(e.role == "head" for e in outside)
    if tied:
        as_head = [dataclasses.replace(e, role="head") if _is_table(e) else e for e in outside]
        parts[_OUTSIDE] = as_head
    return parts, tied, unknown


def _is_table(entry: _Entry) -> bool:
    return entry.role == "embedding" and bool(TOKENS.search(entry.path))


def _tally(path: str, role: str, shape: tuple[int, ...], dtype: str) -> Tally:
    numel = math.prod(shape)
    parameters = numel * next((n for pattern, n in PACKED if pattern.search(path)), 1)
    multiplied = len(shape) > 1 and role != "norms" and not path.endswith("bias")
    return Tally(parameters, parameters if multiplied else 0, numel * DTYPES[dtype][0])


def _finds_neurons(block: Mapping[str, Any]) -> bool:
    """Return whether a block finds an MLP's own neurons by product keys.

    It is then weighed as experts of one neuron each, of which a token reads `knn`. See
    `surgery/blocks/memory_mlp.py`.
    """
    return block["kind"] == "memory" and block["slots"] == "neurons"


def _move_neurons(
    entries: dict[_Place, list[_Entry]], blocks: Mapping[int | None, Mapping[str, Any]]
) -> None:
    """Move tables of neurons, which are stored outside the layers, to the layer that reads them."""
    for place in list(entries):
        block = blocks.get(place[1])
        if block and _finds_neurons(block):
            moved = [e for e in entries[_OUTSIDE] if f".{block['shared']}." in f".{e.path}"]
            entries[_OUTSIDE] = [e for e in entries[_OUTSIDE] if e not in moved]
            entries[place] += [dataclasses.replace(e, role="routed_experts") for e in moved]


def _as_experts(entry: _Entry, block: Mapping[str, Any]) -> Iterator[_Entry]:
    """Yield what the shared neurons and the experts of a mixture hold of one of its MLP's tensors.

    See `surgery/blocks/experts_mlp.py`.
    """
    module, _, leaf = entry.path.removeprefix(f"{block['mlp']}.").rpartition(".")
    is_matrix = module in (block["gate"], block["up"], block["down"])
    if not is_matrix or (module == block["down"] and leaf == "bias"):
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
    place: _Place,
    facts: _Facts,
    block: Mapping[str, Any] | None = None,
) -> LayerWeights:
    """Return the sums of a layer by role, its experts, and the width F of each kind of MLP in it.

    `block` is the custom-code block of a mixture, or of a memory that finds neurons, if any.
    """
    experts, top_k = 0, facts.top_k
    if block and _finds_neurons(block):
        experts, top_k = block["keys"] ** 2, block["knn"]
    elif block:
        experts, top_k = block["experts"], block["top_k"]
        entries = [part for e in entries for part in _as_experts(e, block)]
    tallies: dict[str, Tally] = {}
    for e in entries:
        tallies[e.role] = tallies.get(e.role, Tally()) + e.tally
    experts = experts or _expert_count([e for e in entries if e.role == "routed_experts"])
    prefix, index = place
    return LayerWeights(
        prefix=prefix,
        index=index,
        tallies={role: tallies[role] for role in ROLES if role in tallies},
        experts=experts,
        top_k=top_k or experts,
        widths=_widths(entries, facts),
        scores=_scores(facts.text, index) if "attention" in tallies else None,
    )


def _widths(entries: Sequence[_Entry], facts: _Facts) -> dict[str, int]:
    """Return F by role, from the number of elements of each down_proj."""
    widths: dict[str, int] = {}
    for e in entries:
        if facts.hidden_size and e.role in MLP_ROLES and DOWN.search(e.path) and e.tally.matrices:
            routed = e.role == "routed_experts"
            experts = e.shape[0] if routed and not EXPERT.search(e.path) else 1
            output = facts.latent_size if routed else facts.hidden_size
            widths[e.role] = e.tally.matrices // (experts * output)
    return widths


def _expert_count(routed: Sequence[_Entry]) -> int:
    numbers = [int(match[1]) for e in routed if (match := EXPERT.search(e.path))]
    if numbers:
        return max(numbers) + 1
    return routed[0].shape[0] if routed else 0


def _label(layers: Sequence[LayerWeights]) -> str:
    """Return "0–2, 4, 7–9", or "1–47 step 2" where the indices are evenly spaced."""
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
    """What config.json says and names and shapes do not show."""

    text: Mapping[str, Any]
    layers: int  # 0 if the config does not say
    hidden_size: int
    latent_size: int  # width that routed experts read and write: H, except in latent MoE
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
    """Return the cost of attention per position, or None where the config does not tell.

    With a latent KV cache (MLA) it is that of the absorbed form, which decoding uses.
    """
    heads = int(_first(text, "num_attention_heads", "n_head") or 0)
    hidden = int(_first(text, *HIDDEN_KEYS) or 0)
    if not heads:
        return None
    types = text.get("layer_types") or []
    kind = types[index] if index is not None and index < len(types) else ""
    window = text.get(WINDOWS[kind]) if kind in WINDOWS else None
    if latent := text.get("kv_lora_rank"):
        rope = int(text["qk_rope_head_dim"])
        products = heads * (2 * latent + rope)
        return Scores(multiplications=products, cached=latent + rope, window=window)
    width = _first(text, "head_dim", "attention_head_dim") or hidden // heads
    if not width:
        return None
    cached = 2 * width * int(_first(text, "num_key_value_heads", "num_kv_heads") or heads)
    return Scores(multiplications=2 * heads * width, cached=cached, window=window)


def _config_dtype(config: Mapping[str, Any]) -> str:
    """Return safetensors' name for the dtype of config.json.

    Without one transformers assumes fp32, but a quantised model is then taken for bf16.
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
    """Yield what a reader must know to trust the figures."""
    parts, dtypes = list(parts), {dtype for _, dtype in shapes.values()}
    if facts.top_k is None and any(part.experts and part.top_k == part.experts for part in parts):
        yield "config.json does not say how many experts a token goes to: all count as active"
    towers = sum(part.tallies["towers"].parameters for part in parts if "towers" in part.tallies)
    if towers:
        yield (
            f"{towers:,} parameters belong to other modalities or to multi-token prediction: "
            "text does not run them"
        )
    if unknown:
        yield (
            f"{len(unknown):,} tensors have names that no rule knows and count as active: "
            f"{unknown[0]}, …"
        )
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method and dtypes <= set(FLOATS):
        yield (
            f"config.json says {method}, but {'/'.join(dtypes)} is weighed: give the checkpoint "
            "itself, or --dtype"
        )
    if "I32" in dtypes or ("U8" in dtypes and method != "mxfp4"):
        yield (
            f"the weights are packed ({method}) and their parameters are counted as stored "
            "elements: the counts are too low"
        )
