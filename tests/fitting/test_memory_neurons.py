"""Neurons that product keys find are those of the MLP, and all of them together are the MLP.

What could break it: neurons that stand in other slots than the keys were fitted to, a bias that is
lost or read elsewhere, empty slots that add something, a refit of neurons that are not read, more
read than was asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import load, logits_of, sample_ids, save_model
from operated import Shop, assert_same_by_4, expected, found_by_4, loaded
from safetensors.torch import load_file

from surgery.calibration.walk import Walk
from surgery.checkpoint import make_plan
from surgery.demo import MODEL
from surgery.errors import UsageError
from surgery.families import locate
from surgery.fitting import memory_init, memory_neurons
from surgery.fitting.neurons import Neurons
from surgery.fitting.rows import Rows
from surgery.operations.memory import memory
from surgery.storage import open_checkpoint, write

SMALL: dict[str, Any] = {"tokens": 512, "sequence_length": 64, "dtype": "fp32"}
FOUND: dict[str, Any] = {
    "place": "replace",
    "find": "product-keys",
    "layers": [0, 2],
    "key_dim": 8,
    "calibration": SMALL,
}
ALL = FOUND | {"knn": 49}  # of 48 neurons in 7 × 7 slots
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, ALL) for name in ("llama tied", "phi3", "gemma3_text", "granite", "olmo2")
} | {
    "qwen3, empty slots": ("qwen3", FOUND | {"slots": 81, "knn": 81}),
    "gpt2": ("gpt2", FOUND | {"knn": 144}),
}


@pytest.fixture(scope="module", autouse=True)
def short() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_neurons, "STEPS", 20)
        patch.setattr(memory_neurons, "ROUNDS", 2)
        yield


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("neurons"), CASES, memory)


@pytest.fixture(scope="module")
def by_4(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by_4(shop, tmp_path_factory.mktemp("modules"))


def neurons() -> Neurons:
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(s, generator=draw) for s in ((24, 12), (24, 12), (12, 24)))
    return Neurons(gate=gate, up=up, down=down, rule="plain", act="silu")


def entry(**changes: Any) -> dict[str, Any]:
    """Of 24 neurons in 25 slots."""
    found = {
        "slots": "neurons",
        "heads": 1,
        "keys": 5,
        "knn": 8,
        "key_dim": 6,
        "value_dim": 12,
        "query_norm": False,
        "gated": False,
        "bypass": "bias",
        "activation": "silu",
        "parts": ["gate", "up", "down"],
        "sparse_gradients": False,
    }
    return found | changes


# --- the fit --------------------------------------------------------------------------------------


def test_neurons_are_put_where_their_mass_is_read() -> None:
    """Against a grid in the order of their numbers: never less, on any column or row. None is
    lost.
    """
    draw = torch.Generator().manual_seed(0)
    grid, mass = (
        torch.randperm(36, generator=draw).view(6, 6),
        torch.rand(200, 36, generator=draw) ** 4,
    )
    rows, columns = (torch.rand(200, 6, generator=draw) for _ in range(2))
    read = ((rows[:, :, None] + columns[:, None, :]) > 1.2).float()
    placed = memory_neurons.place(grid, mass, read)
    held = [(mass[:, g.flatten()] * read.flatten(1)).sum().item() for g in (grid, placed)]
    assert held[1] > 1.05 * held[0] and torch.equal(
        placed.flatten().sort().values, torch.arange(36)
    )
    once = memory_neurons.place(placed, mass, read)
    assert (mass[:, once.flatten()] * read.flatten(1)).sum() >= held[1]


@torch.no_grad()
def test_what_is_found_has_more_of_the_mass_than_a_fixed_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs of four kinds, of which each has neurons of its own."""
    monkeypatch.setattr(memory_neurons, "STEPS", 100)
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 12, generator=draw) * 2
    z = centres[torch.randint(4, (3000,), generator=draw)] + 0.3 * torch.randn(
        3000, 12, generator=draw
    )
    whole = neurons()
    data = Rows(z=z, y=whole(z))
    found, slot = memory_neurons.search(whole, data, entry(), seed=0)
    share = whole.shares(z)
    read = memory_neurons._read(found, z)
    assert len(set(slot.tolist())) == 24 and torch.equal(read.sum(1), torch.full((3000,), 8.0))
    fixed = share.mean(0).topk(8).values.sum()
    best = share.topk(8).values.sum(1).mean()
    held = (read[:, slot] * share).sum(1).mean()
    assert fixed + 0.3 * (best - fixed) < held <= best


@torch.no_grad()
def test_the_neuron_of_first_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent on all other tokens."""
    monkeypatch.setattr(memory_neurons, "STEPS", 60)
    draw = torch.Generator().manual_seed(0)
    z, first = torch.randn(3000, 12, generator=draw), torch.randn(16, 12, generator=draw)
    z[:, 5], first[:, 5] = 0.3 * z[:, 5], 5.0
    whole = neurons()
    whole.gate[7], whole.up[7] = 0.0, 0.0
    whole.gate[7, 5], whole.up[7, 5], whole.gate_bias = 20.0, 20.0, torch.zeros(24)
    whole.gate_bias[7] = -50.0
    found, slot = memory_neurons.search(
        whole, Rows(z=z, y=whole(z), first=Rows(z=first, y=whole(first))), entry(), seed=0
    )
    assert memory_neurons._read(found, first)[:, slot[7]].min() == 1
    assert whole.shares(first)[:, 7].min() > 0.9
    assert memory_neurons._read(found, z)[:, slot[7]].mean() < 0.5


@torch.no_grad()
def test_a_refit_that_does_not_help_is_dropped() -> None:
    """The targets are noise: neurons stay as they were, at their slots."""
    draw = torch.Generator().manual_seed(0)
    mlp = locate(open_checkpoint(MODEL)).mlp(0)
    hidden, n = mlp.down.shape[0], int((mlp.width - 1) ** 0.5) + 1
    noise = Rows(
        z=torch.randn(300, hidden, generator=draw), y=torch.randn(300, hidden, generator=draw)
    )
    found, figures = memory_neurons.fit(mlp, "silu", noise, entry(keys=n, value_dim=hidden), seed=0)
    assert figures["error"] == figures["without refit"] and not found["bias"].any()
    for part, source in (("gate", mlp.gate), ("up", mlp.up), ("down", mlp.down)):
        rows = found[f"table.{part}"]
        want = source.read().float()  # type: ignore[union-attr]
        kept = rows[found["table.down"].any(1)]
        assert torch.equal(kept.sort(0).values, (want.T if part == "down" else want).sort(0).values)


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_all_slots_are_the_mlp(name: str, shop: Shop) -> None:
    _, output, result = shop.case(name)
    model, want = loaded(output), expected(output)["logits"]
    torch.testing.assert_close(
        logits_of(model), want, rtol=0, atol=1e-4 * max(1.0, want.std().item())
    )
    assert sum("memory_values" in n for n in load_file(output / "model.safetensors")) == 2 * len(
        result.config["surgery_blocks"][0]["parts"]
    )


@torch.no_grad()
def test_empty_slots_change_nothing(shop: Shop) -> None:
    """Until their columns of down are something."""
    _, output, _ = shop.case("qwen3, empty slots")
    model = loaded(output)
    before, table = logits_of(model), model.model.memory_values_2
    empty = ~table.down.any(1)
    assert empty.sum() == 81 - 48 and table.gate[empty].std().item() == pytest.approx(
        32**-0.5, rel=0.1
    )
    table.gate[empty] = 7.0
    assert torch.equal(logits_of(model), before)
    table.down[empty] = 1.0
    assert not torch.allclose(logits_of(model), before)


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_gives_the_same(name: str, by_4: dict[str, Any]) -> None:
    assert_same_by_4(by_4[name], ["memory_mlp.py", "modeling_surgery.py"])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3", "gpt2", "llama with biases"])
@torch.no_grad()
def test_what_is_written_is_what_the_walk_computed(name: str, tmp_path: Path) -> None:
    """Where some are read; and it is nearer to the source than no MLP is."""
    changes = {"mlp_bias": True} if "biases" in name else {}
    save_model(name.removesuffix(" with biases"), tmp_path / "source", **changes)
    checkpoint = open_checkpoint(tmp_path / "source")
    output, nothing = (
        memory(checkpoint, **FOUND),
        memory(checkpoint, **(FOUND | {"find": "always", "init": "zero"})),
    )
    for folder, made in (("output", output), ("nothing", nothing)):
        write(make_plan(made), tmp_path / folder, source=checkpoint)
    want = logits_of(load(tmp_path / "source")[0])
    got, without = (logits_of(loaded(tmp_path / folder)) for folder in ("output", "nothing"))
    assert (got - want).square().mean() < 0.8 * (without - want).square().mean()
    walk = Walk(open_checkpoint(tmp_path / "output"), sample_ids())
    for layer in walk:
        layer.run()
    torch.testing.assert_close(
        torch.cat([part for _, part in walk.logits()], dim=1), got, rtol=0, atol=1e-5
    )
    report = output.steps[-1].work.report  # type: ignore[union-attr]
    assert (
        0 < report["0"]["error"] <= report["0"]["without refit"]
        and 0 < report["2"]["mass_read"] < 1
    )


@pytest.mark.parametrize("reads", [0.3, 0.5, 1.0])
def test_a_token_reads_what_was_asked_for(reads: float) -> None:
    checkpoint = open_checkpoint(MODEL)
    output = memory(checkpoint, place="replace", find="product-keys", layers=[1, 2], reads=reads)
    made, other = output.config["surgery_blocks"]
    mlp = locate(checkpoint).mlp(1)
    hidden, whole = mlp.down.shape[0], memory_init.mlp_numbers(mlp)
    read = memory_init.numbers_read(made, hidden)
    # Query, keys, bias, scale, rows.
    assert read == 32 * (hidden + 1) + 32 * made["keys"] + hidden + 1 + made["knn"] * 3 * hidden
    assert read <= reads * whole < read + 3 * hidden
    assert (made["shared"], other["shared"], made["width"]) == (
        "memory_values_1",
        "memory_values_2",
        0,
    )
    assert f"{output.parameters - checkpoint.parameters:+,} parameters" in output.steps[-1].notes[0]
    assert f"{read / whole:.2f} × what the MLP reads" in output.steps[-1].notes[0]


def test_the_query_learns_through_the_scale(shop: Shop) -> None:
    """Which begins at 0 and has a gradient of its own; so have the neurons."""
    model = loaded(shop.case("llama tied")[1])
    names = {
        "query": "model.layers.0.mlp.memory.query.weight",
        "keys": "model.layers.0.mlp.memory.keys",
        "scale": "model.layers.0.mlp.memory.scale",
        "up": "model.memory_values_0.up",
    }
    found = {}
    for scale in (0.0, 1.0):
        torch.nn.init.constant_(model.model.layers[0].mlp.memory.scale, scale)
        model.zero_grad()
        model(input_ids=sample_ids(), labels=sample_ids()).loss.backward()
        parameters = dict(model.named_parameters())
        found[scale] = {n for n, path in names.items() if parameters[path].grad.abs().sum() > 0}  # type: ignore[union-attr]
    assert found == {0.0: {"scale", "up"}, 1.0: set(names)}


def test_the_cheapest_layers_are_chosen() -> None:
    made = memory(open_checkpoint(MODEL), **(FOUND | {"layers": "auto"}), count=2)
    assert len(made.steps[-1].layers) == 2 and made.steps[-1].parameters["find"] == "product-keys"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "fit"}, "--find product-keys with --init fit"),
        ({"place": "beside"}, "--find product-keys with --init random"),
        ({"heads": 2}, "2 heads with"),
        ({"distill": 8}, "--distill 8 with --find"),
        ({"slots": 36}, "36 slots for 48 neurons"),
        ({"slots": 60}, "60 slots are no square"),
        ({"knn": 50}, "knn 50 of 49 slots"),
        ({"reads": 0.01}, "a token that reads 0.01 of 4,608"),
        ({"find": "fast"}, "unknown find 'fast'"),
        ({"key_dim": 7}, "a key_dim of 7"),
        ({"value_dim": 12}, "a value_dim of 12"),
        ({"kind": "peer"}, "--init slots of peer"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, shop: Shop) -> None:
    with pytest.raises(UsageError, match=message):
        memory(open_checkpoint(shop.case("llama tied")[0]), **(FOUND | options))
