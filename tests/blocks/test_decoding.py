"""A stock model with ReLU skips its zeros once it is told to, and stays the same otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import COMMON, config_of, greedy, logits_of
from safetensors.torch import load_file

import surgery
from surgery.blocks import sparse_kernel, sparse_mlp

ACTIVATION_KEYS = {"llama": "hidden_act", "phi3": "hidden_act", "gpt2": "activation_function"}


def stock(name: str, **fields: Any) -> Any:
    """Return a random model of a family, with ReLU."""
    torch.manual_seed(0)
    fields = {ACTIVATION_KEYS.get(name, "hidden_act"): "relu", **fields}
    return transformers.AutoModelForCausalLM.from_config(config_of(name, **fields)).eval()


@pytest.mark.parametrize("name", [*ACTIVATION_KEYS, "gpt_neox"])
def test_a_stock_model_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = stock(name), []
    names, want, logits = list(model.state_dict()), greedy(model), logits_of(model)
    surgery.sparse_decode(model)
    op = sparse_mlp.live_mlp
    monkeypatch.setattr(sparse_mlp, "live_mlp", lambda *a: calls.append(1) or op(*a))
    assert greedy(model) == want and list(model.state_dict()) == names
    assert bool(calls) == sparse_kernel.available()
    surgery.sparse_decode(model, False)
    calls.clear()
    assert greedy(model) == want and not calls
    torch.testing.assert_close(logits_of(model), logits, rtol=0, atol=1e-5)


def test_it_is_saved_as_the_stock_model_that_it_is(tmp_path: Path) -> None:
    model = stock("llama")
    model.save_pretrained(tmp_path / "before")
    surgery.sparse_decode(model)
    greedy(model)
    model.save_pretrained(tmp_path / "after")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("before", "after"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    names = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("before", "after")]
    assert names[0] == names[1]


def test_an_mlp_with_a_hook_is_left_alone() -> None:
    model, seen = stock("llama"), []
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda module, args, y: seen.append(y))
    surgery.sparse_decode(model)
    greedy(model)
    assert model.model.layers[1].mlp is mlp and seen
    assert type(model.model.layers[0].mlp).__name__ == "SparseMLP"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"hidden_act": "silu"}, "this llama have silu, which gives no zeros"),
        (
            "opt",
            {"activation_function": "relu"},
            "opt keeps its MLP's matrices in the layer itself",
        ),
    ],
)
def test_what_has_nothing_to_skip_is_refused(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.sparse_decode(stock(name, **fields))


def test_a_tower_that_comes_first_is_left_alone() -> None:
    model = stock("llama")
    both = torch.nn.Module()
    both.config = model.config
    both.audio_tower = torch.nn.Module()
    both.audio_tower.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(surgery.SurgeryError, match="Module has no list of layers called layers"):
        surgery.sparse_decode(both)
    both.language_model = model
    surgery.sparse_decode(both)
    assert {type(layer.mlp).__name__ for layer in model.model.layers} == {"SparseMLP"}


def test_a_mixture_is_refused() -> None:
    config = transformers.MixtralConfig(**COMMON, hidden_act="relu", num_local_experts=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(surgery.SurgeryError, match="this model is a mixture already"):
        surgery.sparse_decode(model)
