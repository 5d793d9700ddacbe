"""`surgery run`, `surgery recipes`, and the recipe that every command amounts to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support import Call, assert_two_lines

from surgery.workflow import recipe


def test_recipes_are_listed_shown_and_described(call: Call) -> None:
    listed = call("recipes", "--json").json
    assert listed == recipe.shipped() and "demo-relufy" in call("recipes").out
    assert yaml.safe_load(call("recipes", "show", "demo-upcycle").out)["source"] == "demo"
    assert json.loads(call("recipes", "schema").out)["properties"]["operations"]["type"] == "array"
    assert_two_lines(
        call("recipes", "show", "demo-upcicle"),
        "no recipe demo-upcicle",
        "did you mean demo-upcycle?",
    )


def test_run_with_changes(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = call(
        "run",
        "demo-upcycle",
        "--set",
        "operations.0.experts=2",
        "--set",
        "verify=false",
        "--out",
        out,
        "--json",
    )
    assert (
        ran.code == 0 and ran.json["recipe"][0]["experts"] == 2 and ran.json["verification"] is None
    ), ran
    again = call("run", out / "recipe.yaml", "--no-verify", "--out", tmp_path / "again", "--quiet")
    assert again.code == 0 and again.out == ""
    first, second = (
        (folder / "model.safetensors").read_bytes() for folder in (out, tmp_path / "again")
    )
    assert first == second


def test_a_dry_run_of_a_recipe(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model's outputs go here, not into the package."""
    monkeypatch.chdir(tmp_path)
    plan = call("run", "demo-relufy-upcycle", "--dry-run", "--json").json
    assert (
        plan["out"] == "demo-relu-ridge-mixtral-4x-top2"
        and len(plan["shards"]) > 2
        and plan["download"] == 0
    )
    assert not list(tmp_path.iterdir())


def test_a_typo(call: Call, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "source: demo\noperations:\n  - operation: relufy\n    activaton: relu\n"
    )
    ran = call("run", tmp_path / "r.yaml")
    assert_two_lines(
        ran, "r.yaml, line 4: relufy: unknown key 'activaton'", "did you mean activation?"
    )
    assert_two_lines(
        call("run", "demo-upcycle", "--set", "x"), "--set x has no key and value", code=2
    )
    (tmp_path / "r.yaml").write_text("operations: []\n")
    assert_two_lines(call("run", tmp_path / "r.yaml"), "names no source", "--set source=MODEL")


@pytest.mark.parametrize(
    "command",
    [
        (
            "upcycle",
            "--experts",
            "2",
            "--drop",
            "0.5",
            "--dtype",
            "fp16",
            "--max-shard-size",
            "60KB",
        ),
        ("relufy", "--activation", "relu2", "--repair", "none", "--no-verify"),
        ("splinify", "--grid", "8", "--layers", "0,2"),
    ],
    ids=lambda c: c[0],
)
def test_every_command_prints_its_recipe(
    command: tuple[str, ...], call: Call, model: Path, tmp_path: Path
) -> None:
    """What `surgery run` makes of it is what the command plans."""
    printed = call(*command, model, "--print-recipe")
    assert printed.code == 0 and not list(model.parent.glob("model-*"))
    (tmp_path / "r.yaml").write_text(printed.out)
    data = yaml.safe_load(printed.out)
    assert data["source"] == str(model) and data.get("verify", True) == (
        "--no-verify" not in command
    )
    direct, repeated = (
        call(*command, model, "--dry-run", "--json"),
        call("run", tmp_path / "r.yaml", "--dry-run", "--json"),
    )
    assert (
        direct.json["fingerprint"] == repeated.json["fingerprint"]
        and direct.json["out"] == repeated.json["out"]
    )
