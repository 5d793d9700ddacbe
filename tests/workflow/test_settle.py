"""Choices that need a walk are made when an output is written, and not when it is planned.

What could break it: a dry run that walks, a later step that keeps what the provisional choice gave
it, a recipe that does not repeat the choice, a process that chooses for itself, so that the others
hang.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import surgery
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint
from surgery.demo import MODEL
from surgery.errors import UsageError
from surgery.storage import open_checkpoint
from surgery.storage.processes import Group, Together
from surgery.workflow import dry_run, recipe
from surgery.workflow.convert import convert_alone
from surgery.workflow.request import Request
from surgery.workflow.settle import settle

FEW: dict[str, Any] = {"tokens": 512, "sequence_length": 128, "dtype": "fp32", "device": "cpu"}
AUTO: dict[str, Any] = {"place": "replace", "layers": "auto", "slots": 256, "calibration": FEW}
GREEDY: dict[str, Any] = {"experts": 8, "active": 4, "allocation": "greedy", "calibration": FEW}


@pytest.fixture
def source() -> Checkpoint:
    return open_checkpoint(MODEL)


def test_a_dry_run_walks_nothing(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walked(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run walked the model")

    monkeypatch.setattr(Walk, "__init__", walked)
    for output in (surgery.memory(source, **AUTO), surgery.carve(source, **GREEDY)):
        plan = dry_run.describe(source, output, Request(out=tmp_path / "out"))
        assert plan["bytes"] > 0 and not list(tmp_path.iterdir())


def test_what_is_chosen_is_recorded_and_repeated(source: Checkpoint, tmp_path: Path) -> None:
    """The recipe of a planned output asks for the choice; that of a written one holds it."""
    output = surgery.carve(source, **GREEDY)
    (asked,) = recipe.recipe_of(output).operations
    assert (asked["allocation"], asked["active"]) == ("greedy", 4)
    written = convert_alone(source, output, tmp_path / "out", verify=False)
    (step,) = written.record["recipe"]
    assert len(step["active"]) == 7 and sum(step["active"]) == 4 * 7 and "allocation" not in step
    assert len(set(step["active"])) > 1
    again = recipe.load(tmp_path / "out" / "recipe.yaml")
    repeated = recipe.apply(again, recipe.open_source(again))
    assert not any(s.pending for s in repeated.steps)
    convert_alone(source, repeated, tmp_path / "again", verify=False)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert weights[0] == weights[1]


def test_later_steps_are_applied_again(source: Checkpoint) -> None:
    """A cast after the choice covers the layers that were chosen, not those that stood in."""
    planned = surgery.cast(surgery.memory(source, **AUTO, init="zero"), "fp16")
    settled = settle(planned)
    (chosen,) = settled.steps[0].layers
    assert chosen != planned.steps[0].layers[0] and settled.steps[1].operation == "cast"
    tables = [t for name, t in settled.tensors.items() if f"memory_values_{chosen}" in name]
    assert tables and {t.dtype for t in tables} == {"F16"}


def test_one_process_chooses_for_all(source: Checkpoint) -> None:
    from torch.distributed import HashStore

    store, found, walks = HashStore(), dict[int, Checkpoint](), list[int]()

    def run(rank: int) -> None:
        group: Group = Together(store, rank, 2)
        output = surgery.memory(source, **AUTO, init="zero")
        pending = output.steps[0].pending
        assert pending is not None
        choose = pending.choose

        def counted(progress: Any) -> dict[str, Any]:
            walks.append(rank)
            return choose(progress)

        object.__setattr__(pending, "choose", counted)
        found[rank] = settle(output, group=group)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert walks == [0] and found[0].steps[0].layers == found[1].steps[0].layers


def test_more_layers_than_there_are(source: Checkpoint) -> None:
    with pytest.raises(UsageError, match="8 layers of a model with 7"):
        surgery.memory(source, **AUTO, count=8)


def test_a_layer_of_the_output_is_installed_as_it_will_be_on_disk(source: Checkpoint) -> None:
    """With every layer installed, the walk of the source is the walk of the output."""
    ids = torch.arange(2 * 64).reshape(2, 64) % 500
    for output in (
        surgery.relufy(source, activation="shifted", threshold=0.1, repair="none"),
        surgery.relufy(source, activation="cats", threshold=0.1, repair="none", stage=2),
        surgery.splinify(source),
    ):
        changed = Walk(source, ids)
        for layer in changed:
            changed.install(layer, output)
        own = Walk(output, ids)
        for _ in own:
            pass
        assert all((a == b).all() for a, b in zip(changed.hidden, own.hidden, strict=True))
