"""--max-perplexity and `require:` fail what costs too much, and nothing that failed is
published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surgery.demo import MODEL
from surgery.demo.corpus import domains
from surgery.errors import SurgeryError
from surgery.workflow import recipe
from surgery.workflow.verify import recorded_texts

RUINED = ("--activation", "shifted", "--threshold", "3", "--repair", "none")


@pytest.fixture
def ruined(call: Any, tmp_path: Path) -> Path:
    """An output that fails its limit; the command says by how much, and what to try."""
    out = tmp_path / "out"
    ran = call("relufy", MODEL, *RUINED, "--max-perplexity", "1.2", "--out", out)
    assert ran.code == 1 and f"error: {out} does not pass its verification" in ran.err
    assert ": more than the 1.2 times that are allowed. Try next: a repair: --repair" in ran.err
    assert "Next:" not in ran.out and "1.2" in (out / "README.md").read_text()
    return out


def test_a_limit_that_is_missed_fails_and_keeps_failing(
    ruined: Path, call: Any, tmp_path: Path
) -> None:
    """The record holds the limit, so neither a push nor a plain `verify` forgets it."""
    record = json.loads((ruined / "surgery.json").read_text())
    assert record["require"] == {"max_perplexity": 1.2} and not record["verification"]["passed"]
    assert recipe.load(ruined / "recipe.yaml").require.max_perplexity == 1.2
    pushed = call("push", ruined, "me/model", "--dry-run")
    assert pushed.code == 1 and "has not passed its verification" in pushed.err
    again = call("verify", MODEL, ruined, "--tokens", "32")
    assert again.code == 1 and "1.2 times" in again.err
    (tmp_path / "mine.txt").write_text("One two three four five six. " * 100)
    own = ("--text", tmp_path / "mine.txt", "--tokens", "32", "--json")
    lenient = call("verify", MODEL, ruined, "--max-perplexity", "1e9", *own)
    assert lenient.code == 0
    keys = [row["key"] for row in lenient.json["rows"]]
    assert [k for k in keys if k.startswith("domain.")] == [
        f"domain.{name}" for name in (*domains(), "mine.txt")
    ]


def test_a_limit_needs_a_verification_and_a_number(call: Any, tmp_path: Path) -> None:
    ran = call("relufy", MODEL, "--max-perplexity", "1.2", "--no-verify", "--out", tmp_path / "o")
    assert ran.code != 0 and "--max-perplexity with --no-verify" in ran.err
    ran = call("relufy", MODEL, "--max-perplexity", "-1", "--out", tmp_path / "o")
    assert ran.code != 0 and "a perplexity of at most -1.0 times the source's" in ran.err
    assert not (tmp_path / "o").exists()


def test_texts_and_shares_reach_the_recipe(call: Any, tmp_path: Path) -> None:
    """Several texts with weights, the share of the built-in text, and the limit."""
    text = tmp_path / "my.txt"
    text.write_text("One two three four five six. " * 2000)
    given = ("--text", f"{text}=2", "--text", "builtin:german", "--mix", "0.25")
    ran = call("relufy", MODEL, *given, "--max-perplexity", "1.2", "--print-recipe")
    assert ran.code == 0, ran.err
    made = recipe.parse(ran.out, "printed")
    assert made.operations[0]["calibration"] == {
        "text": [f"{text}=2", "builtin:german"],
        "mix": 0.25,
    }
    assert made.require.max_perplexity == 1.2


@pytest.mark.parametrize(
    ("calibration", "names"),
    [
        ({"text": "../near.txt", "mix": 0}, ["near.txt"]),
        ({"text": ["../near.txt=2", "../gone.txt"]}, [*domains(), "near.txt"]),
        ({"text": "../gone.txt", "mix": 0}, [*domains()]),
        ({"text": "/dev/zero", "mix": 0}, [*domains()]),
        ({"text": "../../../etc", "mix": 0}, [*domains()]),
        ({"text": 5}, None),
        ([1], None),
    ],
)
def test_a_record_names_texts_near_its_output(
    calibration: Any, names: list[str] | None, tmp_path: Path
) -> None:
    """It may be a stranger's: nothing else on this disk is read, and nonsense is an error."""
    (tmp_path / "near.txt").write_text("One two three.")
    steps = [{"operation": "relufy", "calibration": calibration}, {"operation": "cast"}]
    record = {"recipe": steps}
    if names is None:
        with pytest.raises(SurgeryError):
            recorded_texts(record, tmp_path / "out")
    else:
        (tmp_path / "out").mkdir()
        assert [t.domain for t in recorded_texts(record, tmp_path / "out")] == names
