"""config.json and tokenizer_config.json that transformers 4.57 and 5 both read.

The two name the same things differently, and each ignores the other's name in silence: what 5 writes alone, 4 loads
with rope_theta 10000, in fp32, and without its tokenizer. So both names are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with both versions' names for dtype and rotary embeddings. Every other field is kept as it is."""
    out = _complete_rope(_complete_dtype(dict(config)))
    if isinstance(text := out.get("text_config"), Mapping):
        out["text_config"] = _complete_rope(_complete_dtype(dict(text)))
    return out


def _complete_dtype(config: dict[str, Any]) -> dict[str, Any]:
    dtype = config.get("dtype") or config.get("torch_dtype")
    return config | {"dtype": dtype, "torch_dtype": dtype} if dtype else config


def _complete_rope(config: dict[str, Any]) -> dict[str, Any]:
    new = config.get("rope_parameters")
    if isinstance(new, Mapping) and new:
        return _rope_for_4(config, new)
    if "rope_theta" in config and "rope_local_base_freq" not in config:
        scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if k != "type"}
        kind = (config.get("rope_scaling") or {}).get("type", "default")
        return config | {"rope_parameters": {"rope_type": kind, "rope_theta": config["rope_theta"]} | scaling}
    return config


def _rope_for_4(config: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 4 reads rope_theta, rope_scaling and, where sliding layers differ, rope_local_base_freq."""
    rope, out = new, dict(config)
    if isinstance(full := new.get("full_attention"), Mapping):
        rope = full
        if "rope_theta" in (local := new.get("sliding_attention") or {}):
            out.setdefault("rope_local_base_freq", local["rope_theta"])
    if "rope_theta" in rope:
        out.setdefault("rope_theta", rope["rope_theta"])
    if "partial_rotary_factor" in rope:
        out.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    if rope.get("rope_type", "default") != "default":
        outside = ("rope_theta", "partial_rotary_factor")
        out.setdefault("rope_scaling", {k: v for k, v in rope.items() if k not in outside})
    return out


def side_file(name: str, data: bytes) -> bytes:
    """The bytes of a side file, unchanged but for a tokenizer class that transformers 4 does not have."""
    if name != "tokenizer_config.json" or b"TokenizersBackend" not in data:
        return data
    config = json.loads(data)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return dump(config)


def dump(value: Any) -> bytes:
    """JSON as Hugging Face writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
