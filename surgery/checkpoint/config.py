"""config.json as it comes: the fields that surgery reads are what they must be, and one that is
asked for and absent is an error that names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from surgery.checkpoint.schema import Schema, violations
from surgery.errors import SurgeryError

_COUNTS = (  # whole numbers, or null
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
_POSITIVE = (
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "vocab_size",
)
_MOST = 2**31
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
KINDS = (
    "gathered",
    "sparse",
    "experts",
    "spline",
    "memory",
)  # of blocks: the code that travels, surgery/blocks
_PATHS, _SIZES = ("mlp", "gate", "up", "down"), ("experts", "width", "top_k", "shared_neurons")
_BLOCK: Schema = {
    "type": "object",
    "required": ["kind", "layers", *_PATHS],
    "properties": {
        "kind": {"enum": list(KINDS)},
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
    fields["model_type"] |= {"pattern": r"^[\w.-]*\w$"}  # a part of paths
    lists = {
        name: {"anyOf": [{"type": "array", "items": {"type": kind}}, {"type": "null"}]}
        for name, kind in _LISTS.items()
    }
    blocks = {"anyOf": [{"type": "array", "items": _BLOCK}, {"type": "null"}]}
    return {"type": "object", "properties": fields | lists | {"surgery_blocks": blocks}}


_SCHEMA = _schema()


class MissingField(SurgeryError, KeyError):  # noqa: N818
    """A field of config.json that is needed and absent."""


class Config(dict[str, Any]):
    """The fields. `config[name]` of one that is absent is an error of the checkpoint, not of the
    program.
    """

    def __missing__(self, name: str) -> Any:
        raise MissingField(
            f"config.json has no {name}",
            "fetch it again: it is not that of these weights, or not whole",
        )


def check(config: dict[str, Any], where: str) -> Config:
    """The config, checked. Raises SurgeryError for a field that no model could have so."""
    for name, part in (("", config), ("text_config.", config.get("text_config"))):
        if part is not None:
            for message in _wrong(part):
                raise SurgeryError(f"{where}: {name}{message[:200]}", "fetch it again, or mend it")
    text = config.get("text_config")
    return Config(config | ({"text_config": Config(text)} if text is not None else {}))


def _wrong(part: Any) -> Iterator[str]:
    for found in violations(part, _SCHEMA, ("config",)):
        yield f"{found.message}: {found.hint}" if found.path[-1] != "model_type" else found.message
    if isinstance(part, Mapping):
        for block in part.get("surgery_blocks") or ():
            if isinstance(block, Mapping) and block.get("kind") == "experts":
                yield from (
                    f"{name} of surgery_blocks is {block.get(name)}"
                    for name in _SIZES
                    if not _fits(name, block)
                )
        for name in _COUNTS:
            least, value = int(name in _POSITIVE), part.get(name)
            if (value is None and name in part and least) or (
                value is not None and not least <= value < _MOST
            ):
                yield f"{name} is {value}"


def _fits(name: str, block: Mapping[str, Any]) -> bool:
    """Whether an entry of a mixture says how large it is."""
    value = block.get(name)
    return isinstance(value, int) and int(name != "shared_neurons") <= value < _MOST
