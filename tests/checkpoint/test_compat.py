"""The config of one version of transformers, completed with the names of the other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surgery.checkpoint.compat import complete, side_file

FULL = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
LOCAL = {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, {"dtype": "float16", "torch_dtype": "float16"}),
        ({"torch_dtype": "float16"}, {"dtype": "float16", "torch_dtype": "float16"}),
        ({"dtype": None}, {"dtype": None}),
        # From transformers 4 to 5.
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        ),
        ({"rope_theta": 5e5, "rope_local_base_freq": 1e4}, {}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "su", "long_factor": [1.0]}},
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "longrope",
                    "long_factor": [1.0],
                },
                "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
            },
        ),
        # From transformers 5 to 4.
        (
            {"rope_parameters": FULL | {"partial_rotary_factor": 0.5}},
            {
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ({"rope_parameters": LOCAL}, {"rope_theta": 1e4}),
        (
            {"model_type": "gpt_neox", "rope_parameters": LOCAL | {"partial_rotary_factor": 0.25}},
            {
                "rotary_emb_base": 1e4,
                "rotary_pct": 0.25,
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        ),
        (
            {
                "model_type": "surgery_gemma3_text",
                "rope_parameters": {"full_attention": FULL, "sliding_attention": LOCAL},
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            {"model_type": "gemma3", "rope_parameters": {"full_attention": LOCAL}},
            {"rope_theta": 1e4},
        ),
        (
            {"model_type": "modernbert", "rope_parameters": {"full_attention": LOCAL}},
            {},
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "longrope",
                    "long_factor": [2.0],
                    "original_max_position_embeddings": 4096,
                }
            },
            {
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "long_factor": [2.0]},
            },
        ),
    ],
)
def test_both_names_are_there(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert complete(config) == config | expected


def test_what_is_set_already_stays() -> None:
    """A value under the old name is the source's own, and is never replaced."""
    config = {"rope_theta": 7.0, "rope_scaling": {"rope_type": "x"}, "rope_parameters": FULL}
    assert complete(config) == config


def test_only_a_tokenizer_that_transformers_4_lacks_is_renamed() -> None:
    new, old = ({"tokenizer_class": c, "n": 1} for c in ("TokenizersBackend", "LlamaTokenizer"))
    name = "tokenizer_config.json"
    found = json.loads(side_file(name, json.dumps(new).encode()))
    assert found == {"tokenizer_class": "PreTrainedTokenizerFast", "n": 1}
    for other, data in (
        ("tokenizer.json", json.dumps(new).encode()),
        (name, json.dumps(old).encode()),
        (name, b'{"a": "TokenizersBackend"}'),
        (name, b'["TokenizersBackend"]'),
        (name, b'{"TokenizersBackend": '),
    ):
        assert side_file(other, data) == data
