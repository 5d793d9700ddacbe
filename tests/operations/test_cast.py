"""Casting gives torch's own values, and says whether any could have changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import fake, load, logits_of, save_model
from safetensors.torch import load_file

from surgery.checkpoint import constant, make_plan
from surgery.operations.cast import cast
from surgery.storage import open_checkpoint, write

TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@pytest.mark.parametrize(
    ("before", "after", "exact"),
    [
        ("bf16", "fp32", True),
        ("fp16", "fp32", True),
        ("fp32", "fp64", True),
        ("bf16", "bf16", True),
        ("fp32", "bf16", False),
        ("fp32", "fp16", False),
        ("fp16", "bf16", False),  # loses mantissa
        ("bf16", "fp16", False),  # loses exponent: 1e5 becomes infinite
    ],
)
def test_values_are_torchs(before: str, after: str, exact: bool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("llama", source, dtype=TORCH[before])
    checkpoint = open_checkpoint(source)
    result = cast(checkpoint, after)
    write(make_plan(result), out, source=checkpoint)
    old, new = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert new[name].dtype == TORCH[after] and torch.equal(
            new[name], tensor.to(TORCH[after])
        ), name
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(TORCH[after]).removeprefix("torch.")
    assert result.exact == result.steps[-1].exact == exact


def test_bf16_in_fp32_is_the_same_function(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("qwen3", source, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(source)
    write(make_plan(cast(checkpoint, "float32")), out, source=checkpoint)
    assert torch.equal(logits_of(load(source)[0]), logits_of(load(out)[0]))


def test_integers_stay() -> None:
    """A position buffer in floating point would index nothing."""
    checkpoint = fake("llama")
    ids = constant(3, (4,), "I64")
    result = cast(
        checkpoint.replace(tensors={**checkpoint.tensors, "model.position_ids": ids}), "bf16"
    )
    assert result.tensors["model.position_ids"] is ids
    assert {t.dtype for n, t in result.tensors.items() if n != "model.position_ids"} == {"BF16"}


def test_the_language_models_dtype_goes_with_it() -> None:
    """A multimodal config has one dtype for the whole and one for the language model."""
    llama = fake("llama")
    config: dict[str, Any] = {
        "model_type": "llava",
        "dtype": "float32",
        "text_config": {**llama.config, "dtype": "float32"},
    }
    after = json.loads(make_plan(cast(llama.replace(config=config), "bf16")).small["config.json"])
    for part in (after, after["text_config"]):
        assert part["dtype"] == part["torch_dtype"] == "bfloat16"
