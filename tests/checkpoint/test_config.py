"""config.json is checked before anything reads it."""

from __future__ import annotations

import json

import pytest

from surgery.checkpoint.config import parse_config
from surgery.errors import SurgeryError


def parsed(**fields: object) -> object:
    return parse_config(json.dumps({"model_type": "llama", **fields}), "config.json")


@pytest.mark.parametrize("width", [8192, [8192, 16384], None])
def test_a_width_may_be_one_for_each_layer(width: object) -> None:
    """Gemma 3n states one for each layer, ERNIE 4.5 VL one for each modality."""
    assert parsed(intermediate_size=width)["intermediate_size"] == width  # type: ignore[index]


@pytest.mark.parametrize(
    ("width", "seen"),
    [
        ([8192, -1], "intermediate_size is -1"),
        ([8192, "8192"], "item 1 of intermediate_size is '8192'"),
        ("8192", "intermediate_size is '8192'"),
    ],
)
def test_a_width_that_no_model_has_is_refused(width: object, seen: str) -> None:
    with pytest.raises(SurgeryError, match=seen):
        parsed(intermediate_size=width)
