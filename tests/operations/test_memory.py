"""A memory beside an MLP changes no bit in either version of transformers, and then learns; in its
place it is what was fitted.

What could break it: a table that each layer has for itself, or that is saved twice or not at all; a
layer that reads it where it is not; values that are loaded as garbage; a lookup that finds other
slots than the best.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compared import verify
from models import greedy, logits_of, sample_ids
from operated import Shop, assert_same_by_4, expected, found_by_4, loaded
from safetensors.torch import load_file

from surgery.checkpoint import make_plan
from surgery.errors import SurgeryError, UsageError
from surgery.operations.memory import memory
from surgery.operations.relufy import relufy
from surgery.operations.splinify import splinify
from surgery.storage import open_checkpoint, write

SMALL: dict[str, Any] = {"layers": [0, 2], "slots": 64, "heads": 2, "knn": 4, "key_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, SMALL)
    for name in (
        "llama tied",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "phi3",
        "falcon",
        "opt",
        "olmo2",
        "granite",
    )
} | {
    "gpt2, peer": ("gpt2", SMALL | {"kind": "peer"}),
    "gpt_neox, own tables": ("gpt_neox", SMALL | {"own_tables": True}),
    "llama, everywhere by default": (
        "llama",
        SMALL | {"layers": None, "value_dim": 12, "sparse_gradients": True},
    ),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("memories"), CASES, memory)


@pytest.mark.parametrize("name", CASES)
def test_beside_the_mlp_not_a_bit_of_the_logits_changes(name: str, shop: Shop) -> None:
    source, output, result = shop.case(name)
    model, want = loaded(output), expected(output)
    assert (
        result.exact
        and torch.equal(logits_of(model), want["logits"])
        and greedy(model) == want["tokens"]
    )
    before, after = (load_file(f / "model.safetensors") for f in (source, output))
    at = {n: n if n in after else n.replace(".fc", ".fc1.fc") for n in before}  # OPT's
    assert all(torch.equal(after[at[n]], t) for n, t in before.items())


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("llama tied", {"model.memory_values_0.weight": (64, 32)}),
        (
            "gpt2, peer",
            {
                "transformer.memory_values_0.down": (64, 32),
                "transformer.memory_values_0.up": (64, 32),
            },
        ),
        ("gpt_neox, own tables", {f"gpt_neox.memory_values_{i}.weight": (64, 32) for i in (0, 2)}),
        ("llama, everywhere by default", {"model.memory_values_0.weight": (64, 12)}),
    ],
)
def test_a_table_is_saved_once(
    name: str, tables: dict[str, tuple[int, int]], shop: Shop, tmp_path: Path
) -> None:
    """On disk and in memory; also where transformers saves it again, with the code."""
    _, output, _ = shop.case(name)
    model = loaded(output)
    model.save_pretrained(tmp_path)
    for folder in (output, tmp_path):
        found = {
            n: tuple(t.shape)
            for n, t in load_file(folder / "model.safetensors").items()
            if "memory_values" in n
        }
        assert found == tables
        assert {p.name for p in folder.glob("*.py")} == {"modeling_surgery.py", "memory_mlp.py"}
    assert torch.equal(logits_of(loaded(tmp_path)), logits_of(model))
    readers = [m for m in model.modules() if type(m).__name__ == "Memory"]
    assert len({id(m.values) for m in readers}) == len({n.rpartition(".")[0] for n in tables})


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2, peer"])
def test_it_is_verified_with_a_control(name: str, shop: Shop) -> None:
    """The walk holds one layer at a time, and the table with it."""
    source, output, result = shop.case(name)
    found = verify(
        open_checkpoint(source),
        open_checkpoint(output),
        exact=True,
        layers=result.steps[-1].layers,
        tokens=128,
    )
    rows = {r.check: r.value for r in found.rows}
    assert found.passed and rows["logits max|Δ| in fp32"] == 0
    assert rows["control: max|Δ| in fp32 with the MLP of layer 2 zeroed"] > 0.01  # type: ignore[operator]


def test_a_class_may_name_a_base_that_it_has_not(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3's text model does so in transformers 4; layers and tables are found all the same."""
    monkeypatch.setattr(transformers.Gemma3ForCausalLM, "base_model_prefix", "language_model")
    source, output, result = shop.case("gemma3_text")
    found = verify(
        open_checkpoint(source),
        open_checkpoint(output),
        exact=True,
        layers=result.steps[-1].layers,
        tokens=128,
    )
    assert found.passed


def trained(output: Path, steps: int = 10, **options: Any) -> Any:
    """A model whose memory alone was trained, with gradient checkpointing."""
    model = loaded(output, **options)
    before = loss_of(model)
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    for n, p in model.named_parameters():
        p.requires_grad_("memory" in n)
    dense = [p for n, p in model.named_parameters() if "mlp.memory" in n]
    tables = [p for n, p in model.named_parameters() if "memory_values" in n]
    # SGD takes the sparse gradients of the tables.
    optimisers = [torch.optim.AdamW(dense, lr=0.03), torch.optim.SGD(tables, lr=0.1)]
    for _ in range(steps):
        loss = model(input_ids=sample_ids(), labels=sample_ids()).loss
        for o in optimisers:
            o.zero_grad()
        loss.backward()
        for o in optimisers:
            o.step()
    assert loss_of(model.eval()) < before - 0.02
    return model


@torch.no_grad()
def loss_of(model: Any) -> float:
    """Without dropout."""
    found: float = model(input_ids=sample_ids(), labels=sample_ids()).loss.item()
    return found


@pytest.mark.parametrize("name", ["llama tied", "gpt2, peer", "llama, everywhere by default"])
def test_it_learns_and_what_it_learned_is_saved(name: str, shop: Shop, tmp_path: Path) -> None:
    model = trained(shop.case(name)[1])
    gradients = [
        p.grad for n, p in model.named_parameters() if "memory_values" in n and p.grad is not None
    ]
    assert gradients and all(
        g.is_sparse == ("default" in name) and g.to_dense().abs().sum() > 0 for g in gradients
    )
    want = logits_of(model)
    assert not torch.equal(want, expected(shop.case(name)[1])["logits"])
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded(tmp_path)), want)


def test_at_first_only_the_output_has_a_gradient(shop: Shop) -> None:
    model = loaded(shop.case("qwen3")[1])
    model(input_ids=sample_ids(), labels=sample_ids()).loss.backward()
    moved = {
        n
        for n, p in model.named_parameters()
        if "memory" in n and p.grad is not None and p.grad.abs().sum() > 0
    }
    assert moved == {f"model.layers.{i}.mlp.memory.output.weight" for i in (0, 2)}


@pytest.mark.parametrize(
    "places",
    [
        {"model.memory_values_0": "disk", "model.layers.2": "cpu"},
        {"model.memory_values_0": "cpu", "model.layers.2": "disk"},
        {"model.memory_values_0": "disk", "model.layers.2": "disk"},
    ],
)
def test_offloaded_it_is_the_same(places: dict[str, str], shop: Shop, tmp_path: Path) -> None:
    model = trained(shop.case("qwen3")[1])
    model.save_pretrained(tmp_path / "trained")
    rest = (
        "model.embed_tokens",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
        "model.layers.0",
        "model.layers.1",
    )
    again = loaded(
        tmp_path / "trained",
        device_map=dict.fromkeys(rest, "cpu") | places,
        offload_folder=tmp_path / "offload",
    )
    assert any(p.is_meta for p in again.parameters())
    assert torch.equal(logits_of(again), logits_of(model)) and greedy(again) == greedy(model)


def test_auto_device_map_places_it(shop: Shop, tmp_path: Path) -> None:
    _, output, _ = shop.case("qwen3")
    model = loaded(output, device_map="auto", max_memory={"cpu": 70_000}, offload_folder=tmp_path)
    assert set(map(str, model.hf_device_map.values())) == {"cpu", "disk"}
    assert torch.equal(logits_of(model), expected(output)["logits"])


def test_random_tensors_depend_on_seed_and_name_alone(shop: Shop) -> None:
    checkpoint = open_checkpoint(shop.case("llama tied")[0])
    name = "model.memory_values_0.weight"
    first, again, other = (
        memory(checkpoint, **SMALL, seed=seed).tensors[name].read() for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.std().item() == pytest.approx(32**-0.5, rel=0.05)


def test_what_a_token_reads_is_said(shop: Shop) -> None:
    """Query 32·16 + 16, norm 8, keys 2·2·8·4, gate and output 32·32 each, 2·4 values of 32; the MLP
    has 3·32·48.
    """
    result = shop.case("llama tied")[2]
    read = 4 * (32 * 16 + 16 + 8 + 2 * 2 * 8 * 4 + 2 * 32 * 32 + 2 * 4 * 32)
    added = 2 * (32 * 16 + 16 + 8 + 2 * 2 * 8 * 4 + 2 * 32 * 32) + 64 * 32
    assert f"{added:+,} parameters" in result.steps[-1].notes[0]
    assert (
        f"{read / 1e6:,.2f} MB in each of 2 layers, {read / (4 * 3 * 32 * 48):.2f} × what the MLP"
        in result.steps[-1].notes[0]
    )


def test_a_memory_beside_another_block(shop: Shop, tmp_path: Path) -> None:
    """It adds to whatever is there; what would rebuild the MLP under it is refused."""
    checkpoint = splinify(
        relufy(open_checkpoint(shop.case("llama tied")[0]), repair="none", layers=[0]), layers=[2]
    )
    result = memory(checkpoint, **SMALL)
    assert [e["kind"] for e in result.config["surgery_blocks"]] == ["sparse", "spline", "memory"]
    for name, made in (("before", checkpoint), ("after", result)):
        write(make_plan(made), tmp_path / name, source=checkpoint)
    assert torch.equal(
        logits_of(loaded(tmp_path / "before")), logits_of(loaded(tmp_path / "after"))
    )
    with pytest.raises(SurgeryError, match="layer 0 has a memory block"):
        relufy(
            memory(open_checkpoint(shop.case("llama tied")[0]), **SMALL), repair="none", layers=[0]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 60}, "60 slots are no square"),
        ({"knn": 9}, "knn 9 of 8 keys"),
        ({"key_dim": 7}, "a key_dim of 7"),
        ({"init": "fit"}, "--init fit beside"),
        ({"layers": "auto"}, "--layers auto beside"),
        ({"place": "replace", "layers": None}, "no layers"),
        ({"place": "replace", "kind": "peer"}, "--init slots of peer"),
        ({"heads": 0}, "heads 0"),
        ({"kind": "lram"}, "kind 'lram'"),
        ({"place": "replace", "reads": 0.05}, "a token that reads 0.05 of 4,608 numbers"),
        ({"layers": [7]}, r"layers \[7\] of a model with 3"),
        ({"place": "replace", "value_dim": 12}, "a value_dim of 12"),
        ({"distill": 9}, "--distill 9 with --init random"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, shop: Shop) -> None:
    with pytest.raises(UsageError, match=message):
        memory(open_checkpoint(shop.case("llama tied")[0]), **(SMALL | options))


def test_a_second_memory_has_a_table_of_its_own(shop: Shop, tmp_path: Path) -> None:
    source = open_checkpoint(shop.case("llama tied")[0])
    twice = memory(
        memory(source, **(SMALL | {"layers": [0]})), **(SMALL | {"layers": [2], "slots": 16})
    )
    write(make_plan(twice), tmp_path, source=source)
    model = copy.deepcopy(loaded(tmp_path))
    assert torch.equal(logits_of(model), expected(shop.case("llama tied")[1])["logits"])
    tables = [model.model.memory_values_0, model.model.memory_values_2]
    assert [len(t.weight) for t in tables] == [64, 16]
    assert [
        model.model.layers[i].mlp.memory.values is t for i, t in zip((0, 2), tables, strict=True)
    ] == [True, True]
    with pytest.raises(SurgeryError, match="layer 0 has a memory block already"):
        memory(twice, **SMALL)


@pytest.fixture(scope="module")
def by_4(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by_4(shop, tmp_path_factory.mktemp("modules"))


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_gives_the_same(name: str, by_4: dict[str, Any]) -> None:
    assert_same_by_4(by_4[name], ["memory_mlp.py", "modeling_surgery.py"])
