"""config.json and tokenizer_config.json that transformers 4.57 and 5 both read.

The two versions name the same settings differently, and each silently ignores the other's names. A
config that only transformers 5 understands is loaded by transformers 4 with rope_theta 10000, in
fp32 and without its tokenizer. So both names are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from surgery.checkpoint.parsing import Unreadable, read_json


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with both versions' names for the dtype and the rotary embeddings.

    Every other field is kept as it is.
    """
    out = _complete_rope(_complete_dtype(dict(config)))
    if isinstance(text := out.get("text_config"), Mapping):
        out["text_config"] = _complete_rope(_complete_dtype(dict(text)))
    return out


def _complete_dtype(config: dict[str, Any]) -> dict[str, Any]:
    dtype = config.get("dtype") or config.get("torch_dtype")
    return config | {"dtype": dtype, "torch_dtype": dtype} if dtype else config


def _complete_rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or _rope_of_4(config)
    return _rope_for_4(config, rope) | {"rope_parameters": rope} if rope else config


def _rope_of_4(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `rope_parameters` of transformers 5, made from the fields of transformers 4.

    Returns None where the config has no such fields, or where sliding layers have rotary embeddings
    of their own.
    """
    if "rope_theta" not in config or "rope_local_base_freq" in config:
        return None
    scaling = config.get("rope_scaling") or {}
    rope = {"rope_theta": config["rope_theta"]}
    rope |= {k: v for k, v in scaling.items() if k != "type"}
    return rope | {"rope_type": _rope_type(scaling)}


def _rope_type(rope: Mapping[str, Any]) -> str:
    """Return the type of rotary embeddings; the first Phi-3 files call longrope "su" or "yarn"."""
    if "long_factor" in rope:
        return "longrope"
    return str(rope.get("rope_type") or rope.get("type") or "default")


# Fields that transformers 4 reads from the config itself, not from rope_scaling.
_OUTSIDE = ("rope_theta", "partial_rotary_factor")
_NAMES_OF_4 = tuple((key, key) for key in _OUTSIDE)
_NAMES_OF_4_IN = {
    "gpt_neox": (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor"))
}


# Of the types whose layers differ in their rotary embeddings, those that transformers 4 knows. For
# others its names would only mislead transformers 5.
_BY_KIND_IN_4 = ("gemma3", "gemma3_text", "gemma3n_text")


def _rope_for_4(config: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the fields that transformers 4 reads in place of `rope_parameters`.

    They are rope_theta, rope_scaling and, where sliding layers differ, rope_local_base_freq.
    """
    rope, out = new, dict(config)
    model_type = str(config.get("model_type")).removeprefix("surgery_")
    by_kind = any(isinstance(value, Mapping) for value in new.values())
    if by_kind and model_type not in _BY_KIND_IN_4:
        return out
    if isinstance(full := new.get("full_attention"), Mapping):
        rope = full
        if "rope_theta" in (local := new.get("sliding_attention") or {}):
            out.setdefault("rope_local_base_freq", local["rope_theta"])
    for name, key in (*_NAMES_OF_4, *_NAMES_OF_4_IN.get(model_type, ())):
        if key in rope and out.get(name) is None:
            out[name] = rope[key]
    if _rope_type(rope) == "longrope":
        return out | _longrope_for_4(out, rope)
    if _rope_type(rope) != "default" and not out.get("rope_scaling"):
        out["rope_scaling"] = {k: v for k, v in rope.items() if k not in _OUTSIDE}
    return out


def _longrope_for_4(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the longrope fields of transformers 4.

    Its Phi-3 takes type, short_factor and long_factor alone, and refuses whatever else transformers
    5 writes there.
    """
    length = "original_max_position_embeddings"
    outside = (*_OUTSIDE, length, "rope_type", "type")
    scaling = {"type": "longrope"} | {k: v for k, v in rope.items() if k not in outside}
    original = config.get(length) or rope.get(length)
    return {"rope_scaling": scaling} | ({length: original} if original else {})


def side_file(name: str, data: bytes) -> bytes:
    """Return the bytes to write for a side file.

    They are `data` itself, except in a tokenizer_config.json whose tokenizer class does not exist
    in transformers 4.
    """
    if name != "tokenizer_config.json" or b"TokenizersBackend" not in data:
        return data
    try:
        config = read_json(data, name, "")
    except Unreadable:
        return data  # A broken file is copied as it is.
    if not isinstance(config, dict) or config.get("tokenizer_class") != "TokenizersBackend":
        return data
    return dump(config | {"tokenizer_class": "PreTrainedTokenizerFast"})


def dump(value: Any) -> bytes:
    """Return a value as JSON, formatted as Hugging Face writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
