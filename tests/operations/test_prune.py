"""A pruned model is the same architecture, narrower, and what is left is refitted.

What could break it: a bias that keeps its old length, a fused matrix cut across its halves, a
transposed one cut along the wrong side, a config field of another name, neurons of the wrong layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compared import verify
from models import LAYERS, MODELS, greedy, load, logits_of, read_config, save_model
from safetensors.torch import load_file, save_file

from surgery.checkpoint import Checkpoint, make_plan
from surgery.errors import SurgeryError
from surgery.families import find, known, locate
from surgery.fitting import measures, selection
from surgery.fitting.neurons import Neurons
from surgery.fitting.ridge import ridge
from surgery.fitting.rows import Rows
from surgery.operations.prune import prune
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint, write

CALIBRATION = {"tokens": 256, "sequence_length": 32}
DENSE = [
    name
    for name in ("llama tied", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "falcon", "olmo2")
    if name in MODELS
]


def written(result: Checkpoint, source: Checkpoint, out: Path) -> Path:
    write(make_plan(result), out, source=source)
    return out


def changed(source: Path, change: Any) -> None:
    """Rewrite the weights of a folder by `change(name, tensor)`."""
    file = source / "model.safetensors"
    save_file({n: change(n, t.clone()) for n, t in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("name", DENSE)
def test_the_stock_class_loads_the_narrower_model(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    width = locate(source).mlp(0).width
    result = prune(source, keep=0.5, multiple_of=8, criterion="magnitude", repair="none")
    out = written(result, source, tmp_path / "out")
    model, info = load(out)
    assert {k: v for k, v in info.items() if v} == {}
    assert read_config(out)[find(read_config(out)).width_key] == width // 2
    assert logits_of(model).isfinite().all() and len(greedy(model)) > 0
    before = [locate(source).mlp(i) for i in range(LAYERS)]
    after = [locate(open_checkpoint(out)).mlp(i) for i in range(LAYERS)]
    for old, new in zip(before, after, strict=True):
        kept = [(old.up.read() == row).all(1).nonzero()[0].item() for row in new.up.read()]
        assert kept == sorted(set(kept)) and len(kept) == width // 2
        assert torch.equal(new.down.read(), old.down.read()[:, kept])
        for part in ("gate", "gate_bias", "up_bias"):
            if getattr(old, part) is not None:
                assert torch.equal(getattr(new, part).read(), getattr(old, part).read()[kept])


def test_magnitude_keeps_the_largest(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    large = torch.ones(48)
    large[[1, 5, 40]] = 9.0

    def change(name: str, t: torch.Tensor) -> torch.Tensor:
        return t * large if name.endswith("down_proj.weight") else t

    changed(tmp_path / "source", change)
    source = open_checkpoint(tmp_path / "source")
    result = prune(source, keep=0.05, multiple_of=3, criterion="magnitude", repair="none")
    out = open_checkpoint(written(result, source, tmp_path / "out"))
    for i in range(LAYERS):
        old, new = locate(source).mlp(i).up.read(), locate(out).mlp(i).up.read()
        assert torch.equal(new, old[[1, 5, 40]])


def doubled(width: int = 24, hidden: int = 16) -> Neurons:
    """An MLP of `width` neurons, each of which stands there twice, side by side."""
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(width, hidden, generator=g) for _ in range(2))
    down = torch.randn(hidden, width, generator=g)
    twice = [t.repeat_interleave(2, dim=0) for t in (gate, up)]
    columns = down.repeat_interleave(2, dim=1) / 2
    return Neurons(gate=twice[0], up=twice[1], down=columns, rule="plain", act="silu")


def test_of_twins_one_is_left_out_and_the_other_makes_up_for_it() -> None:
    neurons = doubled()
    z = torch.randn(800, 16, generator=torch.Generator().manual_seed(1))
    rows = Rows(z=z, y=neurons(z))
    kept = selection.least_missed(neurons, rows, 24)
    assert sorted({int(i) // 2 for i in kept}) == list(range(24))
    refitted = ridge(neurons.pick(kept), rows)
    assert measures.error(refitted, rows) < 1e-4
    by_chance = ridge(neurons.pick(selection.largest(selection.chance(neurons, seed=0), 24)), rows)
    assert measures.error(by_chance, rows) > 0.05


def test_mass_keeps_what_writes_most() -> None:
    neurons = doubled()
    neurons.down[:, 10:] *= 1e-3
    z = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))
    kept = selection.largest(selection.mass(neurons, Rows(z=z, y=neurons(z))), 10)
    assert kept.tolist() == list(range(10))


def test_always_open_neurons_stay() -> None:
    """They are the last, and may be the weakest."""
    neurons = doubled()
    neurons.down[:, -4:] = 0
    z = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))
    rows = Rows(z=z, y=neurons(z))
    last = [44, 45, 46, 47]
    assert selection.least_missed(neurons, rows, 24, 4).tolist()[-4:] == last
    assert selection.largest(selection.mass(neurons, rows), 24, 4).tolist()[-4:] == last
    assert selection.largest(selection.mass(neurons, rows), 24).tolist()[-1] < 44


def test_the_least_missed_are_found_as_by_trying_each() -> None:
    """Leave one neuron out: the second-order choice is the one whose refit has the least error."""
    g = torch.Generator().manual_seed(3)
    parts = (torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g))
    down = torch.randn(6, 8, generator=g) * torch.linspace(0.5, 1.5, 8)
    neurons = Neurons(gate=parts[0], up=parts[1], down=down, rule="plain", act="silu")
    z = torch.randn(2000, 6, generator=g)
    rows = Rows(z=z, y=neurons(z))

    def missed(out: int) -> float:
        others = torch.tensor([i for i in range(8) if i != out])
        return measures.error(ridge(neurons.pick(others), rows, damping=1e-6), rows, 0, rows.fitted)

    cheapest = min(range(8), key=missed)
    kept = selection.least_missed(neurons, rows, 7)
    assert set(range(8)) - set(kept.tolist()) == {cheapest}


def test_the_repair_brings_the_model_nearer(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    options: dict[str, Any] = {"keep": 0.75, "multiple_of": 4, "calibration": CALIBRATION}
    reference = logits_of(load(tmp_path / "source")[0])
    far = {}
    for repair in ("none", "ridge"):
        result = prune(source, criterion="mass", repair=repair, **options)
        out = written(result, source, tmp_path / repair)
        far[repair] = (logits_of(load(out)[0]) - reference).square().mean().item()
        assert read_config(out)["intermediate_size"] == 36
    assert far["ridge"] < far["none"]


# --- what adds nothing ----------------------------------------------------------------------------


def test_neurons_that_add_nothing_go_and_the_function_stays(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")

    def change(name: str, t: torch.Tensor) -> torch.Tensor:
        if name.endswith("down_proj.weight"):
            t[:, [0, 7]] = 0
        if name.endswith("up_proj.weight"):
            t[[3, 20]] = 0
        if name.endswith("gate_proj.weight"):
            t[[4, 47, 7]] = 0
        if name == "model.layers.1.mlp.gate_proj.weight":
            t[[5, 6]] = 0
        return t

    changed(tmp_path / "source", change)
    source = open_checkpoint(tmp_path / "source")
    result = prune(source, keep=1, multiple_of=2)
    assert result.exact and result.steps[-1].parameters == {"keep": 1, "multiple_of": 2}
    out = written(result, source, tmp_path / "out")
    assert read_config(out)["intermediate_size"] == 42  # six of 48 in two layers, eight in one
    before, after = logits_of(load(tmp_path / "source")[0]), logits_of(load(out)[0])
    assert (before - after).abs().max() < 1e-5
    assert verify(source, open_checkpoint(out), exact=True).passed


def test_a_gate_that_a_bias_keeps_shut_adds_nothing() -> None:
    neurons = doubled()
    assert neurons.gate is not None
    neurons.gate[:4] = 0
    neurons.gate_bias = torch.ones(48)
    neurons.gate_bias[0], neurons.gate_bias[1] = -1.0, 0.0
    neurons.act = "relu"
    assert selection.idle(neurons).nonzero().flatten().tolist() == [0, 1]
    neurons.act = "silu"  # of -1 is not 0
    assert selection.idle(neurons).nonzero().flatten().tolist() == [1]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 0.0}, "a share of 0 to keep"),
        ({"keep": 1.5}, "a share of 1.5 to keep"),
        ({"multiple_of": 0}, "a multiple of 0"),
        ({"keep": 0.9}, "44 of 48 neurons stay, in multiples of 64"),
        ({"keep": 1, "multiple_of": 4}, "48 of 48 neurons stay"),
    ],
)
def test_what_is_no_pruning_is_refused(options: Any, said: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    with pytest.raises(SurgeryError, match=said) as caught:
        prune(open_checkpoint(tmp_path / "source"), **options)
    assert caught.value.hint


def test_mixtures_and_blocks_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    with pytest.raises(SurgeryError, match="a mixture already"):
        prune(upcycle(source, experts=2))
    with pytest.raises(SurgeryError, match="layer 0 has a sparse block"):
        prune(relufy(source, activation="fatrelu", threshold=0.1, repair="none"))


def test_a_pruned_model_is_upcycled(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    narrow = prune(source, keep=0.5, multiple_of=8, criterion="magnitude", repair="none")
    both = upcycle(narrow, experts=2)
    assert [s.operation for s in both.steps] == ["prune", "upcycle"]
    out = written(both, source, tmp_path / "out")
    dense = written(narrow, source, tmp_path / "narrow")
    assert (logits_of(load(out)[0]) - logits_of(load(dense)[0])).abs().max() < 1e-5


def test_every_dense_family_names_its_width() -> None:
    assert all(f.width_key for f in known().values() if not f.is_moe)
