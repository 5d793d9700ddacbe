"""config.json and tokenizer_config.json that transformers 4.57 and 5 both read.

The two name the same things differently, and each ignores the other's name in silence: what 5
writes alone, 4 loads with rope_theta 10000, in fp32, and without its tokenizer. So both names are
written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with both versions' names for dtype and rotary embeddings. Every other field is
    kept as it is.
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
    """transformers 5's rope_parameters from 4's names; None where there are none, or where sliding
    layers differ.
    """
    if "rope_theta" not in config or "rope_local_base_freq" in config:
        return None
    scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if k != "type"}
    return (
        {"rope_theta": config["rope_theta"]}
        | scaling
        | {"rope_type": _rope_type(config.get("rope_scaling") or {})}
    )


def _rope_type(rope: Mapping[str, Any]) -> str:
    """The first Phi-3 files call longrope "su" or "yarn"."""
    return (
        "longrope"
        if "long_factor" in rope
        else str(rope.get("rope_type") or rope.get("type") or "default")
    )


def _rope_for_4(config: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 4 reads rope_theta, rope_scaling and, where sliding layers differ,
    rope_local_base_freq.
    """
    rope, out = new, dict(config)
    if isinstance(full := new.get("full_attention"), Mapping):
        rope = full
        if "rope_theta" in (local := new.get("sliding_attention") or {}):
            out.setdefault("rope_local_base_freq", local["rope_theta"])
    for name, key in (
        *_NAMES_OF_4,
        *_NAMES_OF_4_IN.get(str(config.get("model_type")).removeprefix("surgery_"), ()),
    ):
        if key in rope and out.get(name) is None:
            out[name] = rope[key]
    if _rope_type(rope) == "longrope":
        return out | _longrope_for_4(out, rope)
    if _rope_type(rope) != "default" and not out.get("rope_scaling"):
        out["rope_scaling"] = {k: v for k, v in rope.items() if k not in _OUTSIDE}
    return out


_OUTSIDE = ("rope_theta", "partial_rotary_factor")  # of transformers 4's rope_scaling
_NAMES_OF_4 = tuple((key, key) for key in _OUTSIDE)
_NAMES_OF_4_IN = {
    "gpt_neox": (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor"))
}


def _longrope_for_4(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 4's Phi-3 takes type, short_factor and long_factor, and refuses what else 5
    writes.
    """
    outside = (*_OUTSIDE, "original_max_position_embeddings", "rope_type", "type")
    scaling = {"type": "longrope"} | {k: v for k, v in rope.items() if k not in outside}
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    return {"rope_scaling": scaling} | (
        {"original_max_position_embeddings": original} if original else {}
    )


def side_file(name: str, data: bytes) -> bytes:
    """The bytes of a side file, unchanged but for a tokenizer class that transformers 4 does not
    have.
    """
    if name != "tokenizer_config.json" or b"TokenizersBackend" not in data:
        return data
    try:
        config = json.loads(data)
    except ValueError:
        return data  # as broken as it was
    if not isinstance(config, dict) or config.get("tokenizer_class") != "TokenizersBackend":
        return data
    return dump(config | {"tokenizer_class": "PreTrainedTokenizerFast"})


def dump(value: Any) -> bytes:
    """JSON as Hugging Face writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
