"""Relufication changes one field of config.json, and the stock class then really computes with it.

What could break it: a field that the class does not read (gemma2 reads hidden_activation, and
hidden_act is a plain attribute of it), one in the wrong part of a multimodal config, weights that
are not the source's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import GEMMA, RELUFIED, Workshop, load, logits_of, read_config, save_config

from surgery.checkpoint import make_plan
from surgery.checkpoint.compat import complete
from surgery.families import find, known
from surgery.families.dense import DENSE
from surgery.operations.relufy import relufy
from surgery.storage import open_checkpoint, write


def zeros_in_products(model: Any, path: str) -> list[float]:
    """The fraction of exact zeros in what enters each module at `path` of a decoder layer."""
    fractions: list[float] = []
    for name, module in model.named_modules():
        if name.endswith(f".{path}"):
            module.register_forward_pre_hook(
                lambda _, inputs: fractions.append((inputs[0] == 0).float().mean().item())
            )
    logits_of(model)
    return fractions


def test_every_family_with_a_key_is_tried() -> None:
    tried = {case.model.split()[0] for case in RELUFIED.values()}
    assert tried | {"gemma3"} == {t for t, f in DENSE.items() if f.activation_key}


@pytest.mark.parametrize("name", RELUFIED)
def test_products_become_zeros(name: str, workshop: Workshop) -> None:
    c = workshop.convert(name)
    family = known()[read_config(c.source)["model_type"]]
    (before, _), (after, info) = load(c.source), load(c.output)
    assert {k: v for k, v in info.items() if v} == {}
    sparse = zeros_in_products(after, family.down)
    assert len(sparse) == 3 and min(sparse) > 0.3
    if family.activation not in ("relu", "relu2"):  # GELU of what is very negative rounds to zero
        assert max(zeros_in_products(before, family.down)) < (
            0.01 if "gelu" in family.activation else 1e-9
        )
    assert (c.output / "model.safetensors").read_bytes() == (
        c.source / "model.safetensors"
    ).read_bytes()
    assert read_config(c.output) == complete(read_config(c.source)) | {
        family.activation_key: c.case.activation
    }


def test_relu2_is_the_square_of_relu(workshop: Workshop) -> None:
    """On the same input the product of gate and up is ReLU(gate)² · up."""
    model, _ = load(workshop.convert("llama, relu2").output)
    mlp, x = (
        model.model.layers[0].mlp,
        torch.randn(5, 32, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        expected = mlp.down_proj(mlp.gate_proj(x).relu().square() * mlp.up_proj(x))
        assert torch.equal(mlp(x), expected)


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """The field stands in text_config; the vision tower has an activation of its own, which
    stays.
    """
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {
        **GEMMA,
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=59,
        eoi_token_index=58,
    )
    source, out = tmp_path / "source", tmp_path / "out"
    save_config(config, source)
    checkpoint = open_checkpoint(source)
    write(make_plan(relufy(checkpoint, repair="none")), out, source=checkpoint)
    before, after = complete(read_config(source)), read_config(out)
    assert before["text_config"]["hidden_activation"] == "gelu_pytorch_tanh"
    assert after == before | {"text_config": before["text_config"] | {"hidden_activation": "relu"}}
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    model, info = load(out)
    assert {k: v for k, v in info.items() if v} == {}
    text_products = zeros_in_products(model, find(after).down)
    assert len(text_products) == 3 and min(text_products) > 0.3


def test_the_step_says_what_was_done(workshop: Workshop) -> None:
    step = workshop.convert("gpt2, relu").checkpoint.steps[-1]
    assert (step.operation, step.parameters, step.exact, step.layers) == (
        "relufy",
        {"activation": "relu", "repair": "none"},
        False,
        (0, 1, 2),
    )
    assert step.notes[0].startswith("gelu_new became relu")
