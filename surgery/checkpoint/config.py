"""config.json, checked when it is read.

The fields that surgery uses must have the types that models have. A field that is needed and absent
is an error that names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgery.checkpoint.parsing import read_json
from surgery.checkpoint.schema import Schema, violations
from surgery.errors import SurgeryError

# Whole numbers, or null.
_COUNTS = (
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "moe_latent_size",
    "always_open_neurons",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_nextn_predict_layers",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
    "head_dim",
    "attention_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "n_shared_experts",
    "moe_num_shared_experts",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "moe_layer_freq",
    "decoder_sparse_step",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
    "interleave_moe_layer_step",
    "no_rope_layer_interval",
    "attention_chunk_size",
)
# Those of them that may be a list, of one for each layer or modality.
_WIDTHS = ("intermediate_size", "ffn_dim", "moe_intermediate_size")
_POSITIVE = (
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "vocab_size",
)
# What is counted here is made one by one, so that a huge number would never come to an end. Other
# fields of such names, also in the configs of towers, have the limit of layers.
_LAYERS, _EXPERTS, _LABELS = 10_000, 20_000, 100_000
_MOST = 2**31
_LIMITS = (
    (re.compile(r"num_labels"), _LABELS),
    (
        re.compile(r"(n|num|moe_num)_(\w+_)?experts(_per_tok|_per_token)?|moe_top_?k|moe_k"),
        _EXPERTS,
    ),
    (re.compile(r"(n|num)_(\w+_)?(layers?|blocks|stages|codebooks)"), _LAYERS),
    (re.compile(r"(\w+_)?depths?|(en|de)coder_layers"), _LAYERS),
)
_NUMBERS = (
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "rms_norm_eps",
    "layer_norm_eps",
    "initializer_range",
)
_TEXTS = (
    "model_type",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "torch_dtype",
    "dtype",
)
_OBJECTS = ("rope_scaling", "rope_parameters", "text_config", "quantization_config", "auto_map")
_LISTS = {
    "layer_types": "string",
    "architectures": "string",
    "no_rope_layers": "integer",
    "mlp_only_layers": "integer",
}
# The kinds of custom-code blocks: the file in surgery/blocks, and what makes the block in it.
BLOCKS: dict[str, tuple[str, str]] = {
    "gathered": ("gathered_mlp", "GatheredMLP"),
    "sparse": ("sparse_mlp", "SparseMLP"),
    "experts": ("experts_mlp", "ExpertsMLP"),
    "spline": ("spline_mlp", "SplineMLP"),
    "memory": ("memory_mlp", "with_memory"),
}
_PATHS, _SIZES = ("mlp", "gate", "up", "down"), ("experts", "width", "top_k", "shared_neurons")
_BLOCK: Schema = {
    "type": "object",
    "required": ["kind", "layers", *_PATHS],
    "properties": {
        "kind": {"enum": BLOCKS.keys()},
        "layers": {"type": "array", "items": {"type": "integer"}},
    }
    | {name: {"type": "string"} for name in (*_PATHS, "activation", "rule")}
    | {name: {"type": "integer"} for name in _SIZES},
}


def _schema() -> Schema:
    kinds = {"integer": _COUNTS, "number": _NUMBERS, "string": _TEXTS, "object": _OBJECTS}
    fields: Schema = {
        name: {"type": [kind, "null"]} for kind, names in kinds.items() for name in names
    }
    # transformers makes a path of model_type while it reads the config.
    fields["model_type"] |= {"pattern": r"^[\w.-]*\w$"}
    lists = {name: _list_of({"type": kind}) for name, kind in _LISTS.items()}
    for name in _WIDTHS:
        alone = {"type": ["integer", "null"]}
        lists[name] = {"anyOf": [alone, {"type": "array", "items": {"type": "integer"}}]}
    blocks = {"surgery_blocks": _list_of(_BLOCK)}
    return {"type": "object", "properties": fields | lists | blocks}


def _list_of(items: Schema) -> Schema:
    return {"anyOf": [{"type": "array", "items": items}, {"type": "null"}]}


_SCHEMA = _schema()


_REPAIR = "download it again, or repair it"


class MissingField(SurgeryError, KeyError):  # noqa: N818
    """A field that is needed and that config.json does not have."""


class Config(dict[str, Any]):
    """The fields of a config.json.

    Reading a field that is absent raises MissingField, because it is a fault of the checkpoint and
    not of the program.
    """

    def __missing__(self, name: str) -> Any:
        raise MissingField(
            f"config.json has no {name}",
            "download it again: it is incomplete, or it belongs to other weights",
        )


def check(config: dict[str, Any], where: str) -> Config:
    """Return the config, checked; `where` names it in errors.

    Raises SurgeryError for the first field whose value no model can have.
    """
    for name, part in (("", config), ("text_config.", config.get("text_config"))):
        if part is not None:
            for message in _wrong(part):
                raise SurgeryError(f"{where}: {name}{message[:200]}", _REPAIR)
    text = config.get("text_config")
    return Config(config | ({"text_config": Config(text)} if text is not None else {}))


def parse_config(data: bytes | str, where: str) -> Config:
    """Return the config in the bytes of a config.json, checked; `where` names it in errors."""
    config = read_json(data, where, _REPAIR)
    if not isinstance(config, dict):
        raise SurgeryError(f"{where} is not a JSON object", _REPAIR)
    return check(config, where)


def _wrong(part: Any) -> Iterator[str]:
    """Yield what is wrong with a config or with its `text_config`."""
    for found in violations(part, _SCHEMA, ("config",)):
        yield f"{found.message}: {found.hint}" if found.path[-1] != "model_type" else found.message
    if isinstance(part, Mapping):
        yield from _wrong_blocks(part)
        yield from _wrong_counts(part)
        yield from _too_many(part)


def _wrong_blocks(part: Mapping[str, Any]) -> Iterator[str]:
    for block in part.get("surgery_blocks") or ():
        if isinstance(block, Mapping) and block.get("kind") == "experts":
            for name in _SIZES:
                if not _fits(name, block):
                    yield f"{name} of surgery_blocks is {block.get(name)}"


def _wrong_counts(part: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        least, stated = int(name in _POSITIVE), part.get(name)
        if stated is None and name in part and least:
            yield f"{name} is {stated}"
        for value in stated if isinstance(stated, list) else [stated]:
            if value is not None and not least <= value < _MOST:
                yield f"{name} is {value}"


def _too_many(part: Any) -> Iterator[str]:
    """Yield the numbers of things that nobody could make one by one, at any depth."""
    for name, value in part.items() if isinstance(part, Mapping) else ():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, Mapping):
                yield from _too_many(number)
            elif isinstance(number, int) and number > _most(str(name)):
                yield f"{name} is {number}, more than {_most(str(name)):,}"


def _most(name: str) -> int | float:
    """Return the largest whole number that a field of this name can hold."""
    return next((most for pattern, most in _LIMITS if pattern.fullmatch(name)), math.inf)


def _fits(name: str, block: Mapping[str, Any]) -> bool:
    """Return whether a block of experts states this size, within its limits."""
    value = block.get(name)
    most = _EXPERTS if name == "experts" else _MOST - 1
    return isinstance(value, int) and int(name != "shared_neurons") <= value <= most
