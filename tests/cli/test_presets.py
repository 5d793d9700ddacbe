"""`--quality` stands for other options: given ones win, and the record has what it stood for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support import Call


def recipe(call: Call, *arguments: object) -> dict[str, Any]:
    """The first operation of the recipe that a command amounts to."""
    ran = call(*arguments, "--print-recipe")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = yaml.safe_load(ran.out)["operations"][0]
    return found


@pytest.mark.parametrize("command", ["relufy", "carve"])
def test_a_preset_is_recorded_as_what_it_stands_for(command: str, call: Call, model: Path) -> None:
    """A recipe must not change its meaning when a preset does."""
    fast = recipe(call, command, model, "--quality", "fast")
    best = recipe(call, command, model, "--quality", "best")
    assert fast == recipe(call, command, model, "--tokens", "8192")
    assert best == recipe(call, command, model, "--tokens", "131072", "--bypass", "full")
    assert fast["calibration"] == {"tokens": 8192} and best["bypass"] == 32
    assert "quality" not in best


def test_best_optimises_thresholds_where_there_are_any(call: Call, model: Path) -> None:
    shifted = recipe(call, "relufy", model, "--quality", "best", "--activation", "fatrelu")
    assert shifted["repair"] == "reconstruct"
    assert recipe(call, "relufy", model, "--quality", "best")["repair"] == "ridge"


def test_given_options_win(call: Call, model: Path) -> None:
    given = ("--tokens", "512", "--bypass", "4")
    found = recipe(call, "relufy", model, "--quality", "best", *given)
    assert found["calibration"] == {"tokens": 512} and found["bypass"] == 4
    default = recipe(call, "relufy", model, "--quality", "best", "--bypass", "0")
    assert default["bypass"] == 0


@pytest.mark.parametrize("command", ["relufy", "carve"])
def test_without_a_repair_there_is_no_bypass(command: str, call: Call, model: Path) -> None:
    found = recipe(call, command, model, "--quality", "best", "--repair", "none")
    assert "bypass" not in found and found["repair"] == "none"
