"""An operation needs no module in surgery/cli: its command follows from its record."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import pytest
from support import Call, assert_two_lines

from surgery import operations
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, Step
from surgery.operations import Operation

SEEN: list[dict[str, Any]] = []


def scale(
    checkpoint: Checkpoint,
    *,
    factor: float,
    kind: Literal["up", "down"] = "up",
    times: int = 2,
    size: int | str | None = None,
    strict: bool = False,
    whole: bool = True,
    layers: Collection[int] | None = None,
    calibration: Calibration | None = None,
) -> Checkpoint:
    """Return the model, scaled.

    Args:
        factor: by how much.
        kind: in which direction.
        times: how often.
        size: a number, or "full".
        strict: whether to be strict.
        whole: whether all of it.
        layers: default all.
        calibration: the text.

    Raises SurgeryError never.
    """
    values = locals()
    given = {n: v for n, v in values.items() if n != "checkpoint" and v is not None}
    SEEN.append(given)
    recorded = {n: v for n, v in given.items() if n != "calibration"}
    step = Step(operation="scale", parameters=recorded, exact=True, layers=())
    return checkpoint.replace(step=step)


TOY = Operation(
    name="scale",
    function=scale,
    summary="Scale the MLPs, a toy.",
    done=lambda p, where: f"{where} was scaled",
    why="It shows how.",
    suffix=lambda p: "scaled",
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy is one of the operations, as if its file lay beside theirs."""
    names, find = operations.names, operations.find
    monkeypatch.setattr(operations, "names", lambda: tuple(sorted([*names(), "scale"])))
    monkeypatch.setattr(operations, "find", lambda name: TOY if name == "scale" else find(name))
    SEEN.clear()


def test_the_help_has_its_summary_and_its_options(call: Call) -> None:
    assert "Scale the MLPs, a toy." in call("--help").out
    ran = call("scale", "--help")
    assert ran.code == 0 and "Scale the MLPs, a toy." in ran.out and "Args:" not in ran.out
    for part in ("By how much.  [required]", "[up|down]", "--no-whole", "--tokens", "--out FOLDER"):
        assert part in ran.out, part
    assert "How often. [default: 2]" in ran.out and "--calibration " not in ran.out


def test_it_converts_and_verifies(call: Call, model: Path) -> None:
    ran = call("scale", model, "--factor", "1.5", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["recipe"] == [
        {"operation": "scale", "factor": 1.5, "kind": "up", "times": 2}
        | {"strict": False, "whole": True}
    ]
    assert ran.json["out"].endswith("model-scaled") and ran.json["verification"]["passed"]
    assert "every MLP was scaled" in Path(ran.json["out"], "README.md").read_text()


def test_options_reach_the_function_in_their_types(call: Call, model: Path) -> None:
    options = ("--factor", "2", "--kind", "down", "--size", "full", "--strict", "--no-whole")
    more = ("--layers", "0-1", "--tokens", "64", "--dry-run")
    assert call("scale", model, *options, *more).code == 0
    given = SEEN[-1]
    assert given.pop("calibration") == {"tokens": 64}
    assert given == {
        "factor": 2.0,
        "kind": "down",
        "times": 2,
        "size": "full",
        "strict": True,
        "whole": False,
        "layers": [0, 1],
    }
    assert call("scale", model, "--factor", "2", "--size", "16", "--dry-run").code == 0
    assert SEEN[-1]["size"] == 16


def test_wrong_usage_is_two_lines(call: Call, model: Path) -> None:
    assert_two_lines(call("scale", model), "--factor", code=2)
    assert_two_lines(call("scale", model, "--factor", "x"), "--factor", code=2)
    assert_two_lines(call("scale", model, "--factor", "1", "--kind", "left"), "left", code=2)


def test_cast_is_such_an_operation(call: Call, model: Path) -> None:
    """Its own --dtype takes the place of the shared one."""
    ran = call("cast", model, "--dtype", "fp32", "--json")
    assert ran.code == 0, ran.err
    config = json.loads(Path(ran.json["out"], "config.json").read_text())
    assert config["dtype"] == "float32" and ran.json["exact"]
