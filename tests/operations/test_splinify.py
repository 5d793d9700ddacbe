"""A splined model computes what its source does, bit for bit, in both versions of transformers, and
can then be trained.

What could break it: an activation that is not the one of the class, a fused or transposed matrix, a
head that loses its tie, coefficients that are loaded as garbage or not saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compared import verify
from models import greedy, logits_of, sample_ids, save_model
from operated import Shop, assert_same_by_4, expected, found_by_4, loaded
from safetensors.torch import load_file
from transformers.activations import ACT2FN

from surgery.checkpoint import make_plan
from surgery.errors import SurgeryError, UsageError
from surgery.operations.relufy import relufy
from surgery.operations.splinify import splinify
from surgery.storage import open_checkpoint, write

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        "llama tied",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "gpt2",
        "gpt_neox",
        "falcon",
        "opt",
        "nemotron",
        "granite",
        "olmo2",
    )
} | {
    "llama, one function a layer": ("llama", {"groups": "layer", "grid": 64, "range": 4.0}),
    "gemma3_text, groups, one layer": ("gemma3_text", {"groups": 6, "layers": [1]}),
    "gpt2, rational": ("gpt2", {"kind": "rational"}),
    "phi3, rational": ("phi3", {"kind": "rational", "groups": "layer"}),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("splined"), CASES, splinify)


@pytest.mark.parametrize("name", CASES)
def test_not_a_bit_of_the_logits_changes(name: str, shop: Shop) -> None:
    _, output, result = shop.case(name)
    model, want = loaded(output), expected(output)
    assert (
        result.exact
        and torch.equal(logits_of(model), want["logits"])
        and greedy(model) == want["tokens"]
    )
    names = [n for n in load_file(output / "model.safetensors") if n.endswith("coefficients")]
    assert len(names) == len(CASES[name][1].get("layers", range(3)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama tied", (48, 29)),
        ("llama, one function a layer", (1, 61)),
        ("gemma3_text, groups, one layer", (6, 29)),
        ("gpt2, rational", (128, 10)),
    ],
)
def test_only_coefficients_are_new(name: str, shape: tuple[int, int], shop: Shop) -> None:
    source, output, _ = shop.case(name)
    before, after = (load_file(f / "model.safetensors") for f in (source, output))
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert {tuple(after[n].shape) for n in after.keys() - before.keys()} == {shape}


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2, rational"])
def test_it_is_verified_with_a_control(name: str, shop: Shop) -> None:
    source, output, _ = shop.case(name)
    found = verify(open_checkpoint(source), open_checkpoint(output), exact=True, tokens=128)
    rows = {r.check: r.value for r in found.rows}
    assert found.passed and rows["logits max|Δ| in fp32"] == 0
    assert rows["control: max|Δ| in fp32 with the MLP of layer 2 zeroed"] > 0.01  # type: ignore[operator]


@pytest.mark.parametrize("name", ["llama tied", "phi3, rational"])
def test_trained_coefficients_are_saved_and_loaded(name: str, shop: Shop, tmp_path: Path) -> None:
    """With gradient checkpointing; the weights stay frozen, the loss falls."""
    model = loaded(shop.case(name)[1]).train()
    model.gradient_checkpointing_enable()
    for n, p in model.named_parameters():
        p.requires_grad_(n.endswith("coefficients"))
    model.enable_input_require_grads()
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(8):
        loss = model(input_ids=sample_ids(), labels=sample_ids()).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded(tmp_path)), logits_of(model))


@pytest.mark.parametrize(
    ("name", "act"),
    [("llama tied", "silu"), ("gemma3_text", "gelu_pytorch_tanh"), ("gpt2", "gelu_new")],
)
def test_straight_lines_are_near_the_activation(name: str, act: str, tmp_path: Path) -> None:
    """To 1e-4 inside the grid; beyond it they go on as the activation does. Random models compute
    nearly what they did.
    """
    save_model(name, tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    output = splinify(source, kind="linear")
    write(make_plan(output), tmp_path / "out", source=source)
    model, before = (
        loaded(tmp_path / "out"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval(),
    )
    block = next(m for m in model.modules() if type(m).__name__ == "SplineMLP")
    assert block.coefficients.shape == (1, 513) and block.coefficients.dtype == torch.float32
    x, width = torch.linspace(-12, 12, 4001), block.repeats
    with torch.no_grad():
        error = (block.activate(x[:, None].expand(-1, width)) - ACT2FN[act](x)[:, None]).abs()
    assert error[x.abs() <= 8].max() < 1e-4 and error.max() < 5e-3
    found = verify(source, open_checkpoint(tmp_path / "out"), exact=False, tokens=128)
    assert found.passed and not output.exact
    assert 0 < (logits_of(model) - logits_of(before)).abs().max() < 1e-3
    model.train()(input_ids=sample_ids(), labels=sample_ids()).loss.backward()
    assert block.coefficients.grad.abs().max() > 0


def test_an_activation_that_bends_for_ever_has_no_straight_lines(tmp_path: Path) -> None:
    save_model("nemotron", tmp_path)
    with pytest.raises(UsageError, match="relu2 does not go on straight"):
        splinify(open_checkpoint(tmp_path), kind="linear")


def test_offloaded_it_is_the_same(shop: Shop, tmp_path: Path) -> None:
    _, output, _ = shop.case("qwen3")
    model = loaded(output, device_map="auto", max_memory={"cpu": 60_000}, offload_folder=tmp_path)
    assert set(map(str, model.hf_device_map.values())) == {"cpu", "disk"}
    assert torch.equal(logits_of(model), expected(output)["logits"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 5}, "5 groups of 48 channels"),
        ({"groups": "all"}, "all groups of 48"),
        ({"kind": "wavelet"}, "kind 'wavelet'"),
        ({"grid": 3}, "a grid of 3 cells"),
        ({"range": 0.0}, "a range of 0.0"),
        ({"layers": [3]}, r"layers \[3\] of a model with 3"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, shop: Shop) -> None:
    with pytest.raises(UsageError, match=message):
        splinify(open_checkpoint(shop.case("llama tied")[0]), **options)


def test_layers_that_have_a_block(shop: Shop) -> None:
    checkpoint = relufy(open_checkpoint(shop.case("llama tied")[0]), repair="none", layers=[1])
    with pytest.raises(
        SurgeryError, match="layer 1 has a sparse block, whose activation is its own"
    ):
        splinify(checkpoint)
    kinds = [e["kind"] for e in splinify(checkpoint, layers=[0]).config["surgery_blocks"]]
    assert kinds == ["sparse", "spline"]


@pytest.fixture(scope="module")
def by_4(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by_4(shop, tmp_path_factory.mktemp("modules"))


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_gives_the_same(name: str, by_4: dict[str, Any]) -> None:
    assert_same_by_4(by_4[name], ["modeling_surgery.py", "spline_mlp.py"])
