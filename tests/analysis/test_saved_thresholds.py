"""Thresholds come from the analysis of the very model that is converted.

What could break it: another model of the same shapes, the model after a fine-tune or a
relufication, and a file that somebody has edited.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import surgery
from surgery.analysis.devices import parse_device
from surgery.analysis.saved_thresholds import thresholds
from surgery.checkpoint import Checkpoint
from surgery.demo import MODEL
from surgery.errors import SurgeryError

NAME = "model.layers.4.mlp.down_proj.weight"


@pytest.fixture
def source() -> Checkpoint:
    return surgery.open(MODEL)


@pytest.fixture
def folder(source: Checkpoint, tmp_path: Path) -> Path:
    found = surgery.analyze(source, tokens=256, sequence_length=64, device="cpu", dtype="fp32")
    found.save(tmp_path / "report", parse_device("h100"))
    return tmp_path / "report"


def of(folder: Path, checkpoint: Checkpoint) -> list[float]:
    return thresholds(folder, checkpoint, "shifted", 0.8, [0, 4])


def test_another_model_of_the_same_shapes_is_refused(source: Checkpoint, folder: Path) -> None:
    assert len(of(folder, source)) == 2
    tuned = source.tensors[NAME].map("tuned", lambda t: t * 1.01)
    relufied = surgery.relufy(source, repair="none")
    for other in (source.replace(tensors={**source.tensors, NAME: tuned}), relufied):
        with pytest.raises(SurgeryError, match="is the analysis of another model"):
            of(folder, other)


def test_the_place_of_a_model_does_not_matter(
    source: Checkpoint, folder: Path, tmp_path: Path
) -> None:
    copy = surgery.open(surgery.write(source, tmp_path / "copy"))
    assert of(folder, copy) == of(folder, source)


def drop_layer(report: dict[str, Any]) -> None:
    del report["layers"][4]


def no_counts(report: dict[str, Any]) -> None:
    report["layers"][4]["mlp"]["gate"] = {}


def twice(report: dict[str, Any]) -> None:
    report["layers"][3]["layer"] = 4


def setter(key: str, value: Any) -> Any:
    """Return a damage that sets a figure of the layer's MLP, or of its gate."""

    def damage(report: dict[str, Any]) -> None:
        mlp = report["layers"][4]["mlp"]
        (mlp["gate"] if key == "zero" else mlp)[key] = value

    return damage


NUMBERS = [("tokens", 0), ("tokens", 1e308), ("zero", "0"), ("zero", 10**40)]


@pytest.mark.parametrize(
    "damage", [drop_layer, no_counts, twice, *(setter(*number) for number in NUMBERS)]
)
def test_a_damaged_analysis_names_its_layer(damage: Any, source: Checkpoint, folder: Path) -> None:
    report = json.loads((folder / "analysis.json").read_text())
    damage(report)
    (folder / "analysis.json").write_text(json.dumps(report))
    with pytest.raises(SurgeryError, match="whole figures of the MLP of layer 4"):
        of(folder, source)
