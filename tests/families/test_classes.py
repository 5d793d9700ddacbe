"""Classes that are no language models are named before anything is written; bodies work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import fake

import surgery
from surgery.calibration.stock import check_names
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.families import locate
from surgery.workflow.verify import require_verifiable

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 128}
OPT = {
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def saved(folder: Path, name: str, **fields: Any) -> Path:
    """Save a random model of a class of transformers."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**fields)).float().save_pretrained(folder)
    return folder


HEADS = {
    "LlamaForSequenceClassification": "is a classifier or a reward model",
    "LlamaForTokenClassification": "is a classifier of tokens",
    "LlamaForQuestionAnswering": "is a model for question answering",
    "Qwen3ForSequenceClassification": "is a classifier or a reward model",
    "LlamaForRewardModel": "is a reward model",
    "Qwen2RewardModel": "is a reward model",
    "GPT2DoubleHeadsModel": "is a model for multiple choice",
}


@pytest.mark.parametrize("operation", ["upcycle", "relufy", "carve", "memory", "splinify"])
@pytest.mark.parametrize("name", HEADS)
def test_another_head_is_named(name: str, operation: str) -> None:
    """A tied classifier loads as a language model without a complaint, and was measured as one."""
    checkpoint = fake("llama", architectures=[name])
    with pytest.raises(SurgeryError) as caught:
        getattr(surgery, operation)(checkpoint)
    assert caught.value.message.startswith(f"{name} {HEADS[name]}")
    assert "the language model that it was trained from" in caught.value.hint


def test_a_saved_classifier_is_refused_by_analyze(tmp_path: Path) -> None:
    source = surgery.open(saved(tmp_path, "LlamaForSequenceClassification", **SIZES))
    assert surgery.inspect(source).parameters() > 0
    with pytest.raises(SurgeryError, match="LlamaForSequenceClassification is a classifier"):
        surgery.analyze(source, tokens=64, sequence_length=32)


BODIES: dict[str, dict[str, Any]] = {
    "LlamaModel": {**SIZES, "tie_word_embeddings": True},
    "GemmaModel": SIZES,
    "GPT2Model": GPT2,
    "OPTModel": OPT,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_with_tied_embeddings_works(name: str, tmp_path: Path) -> None:
    """Its names lack the prefix of the body and its head is the embedding."""
    source = surgery.open(saved(tmp_path / "source", name, **BODIES[name]))
    assert not [n for n in source.tensors if n.startswith(("model.", "transformer."))]
    folder = surgery.write(surgery.upcycle(source, experts=4), tmp_path / "out")
    rows = {row.key: row for row in surgery.verify(source, folder).rows}
    assert rows["names_missing"].value == 0
    assert rows["logits.difference"].passed and rows["logits.control"].passed


@pytest.mark.parametrize("operation", ["upcycle", "relufy"])
def test_a_body_without_a_head_is_named(operation: str, tmp_path: Path) -> None:
    source = surgery.open(saved(tmp_path / "source", "LlamaModel", **SIZES))
    with pytest.raises(SurgeryError) as caught:
        require_verifiable(source, getattr(surgery, operation)(source))
    assert caught.value.message == (
        "LlamaModel is the body of a language model, without its head (lm_head.weight)"
    )
    assert "LlamaForCausalLM" in caught.value.hint
    with pytest.raises(SurgeryError, match="LlamaModel is the body"):
        surgery.analyze(source, tokens=64, sequence_length=32)


def test_a_wrapper_that_is_known_is_found() -> None:
    text = fake("gemma3_text")
    config = {"model_type": "gemma3", "text_config": text.config}
    assert locate(text.replace(config=config)).count == 3


def with_config(**fields: Any) -> Checkpoint:
    llama = fake("llama")
    return llama.replace(config={**llama.config, **fields})


def test_only_an_unknown_type_asks_for_a_newer_transformers() -> None:
    """A value that no version takes is a fault of the config."""
    with pytest.raises(SurgeryError) as caught:
        check_names(with_config(model_type="llama9"))
    assert caught.value.hint.startswith("upgrade transformers") and "llama9" in caught.value.hint
    with pytest.raises(SurgeryError) as caught:
        check_names(with_config(hidden_size=30, num_attention_heads=7, hidden_act="no_such"))
    assert "upgrade" not in caught.value.hint and "mend config.json" in caught.value.hint
    with pytest.raises(SurgeryError) as caught:
        check_names(with_config(model_type="clip"))
    assert "clip is no language model to transformers" in caught.value.message
    assert "upgrade" not in caught.value.hint
