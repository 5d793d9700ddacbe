"""`surgery analyze`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import write_llama

from surgery.cli import run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=2)


SHORT = ("--tokens", "80", "--sequence-length", "40", "--dtype", "fp32")


def test_json_and_files_say_the_same(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Standard output and the files in the folder hold one and the same analysis."""
    out = tmp_path / "out"
    assert run(["analyze", str(model), *SHORT, "--json", "--coactivation", "--out", str(out)]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed == json.loads((out / "analysis.json").read_text())
    assert printed["sample"]["sequences"] == len(printed["layers"]) == 2
    assert printed["device"]["name"] == "h100"
    tensors = load_file(out / "analysis.safetensors")
    assert (tensors["layers.1.mlp.nonzero"] == 78).all()
    pairs = load_file(out / "coactivation" / "layer-1.safetensors")["pairs"]
    assert pairs.shape == (64, 64)
    assert (pairs.diag() == tensors["layers.1.mlp.active"]).all()
    files = [out / "analysis.safetensors", out / "analysis.json"]
    assert len({stat.S_IMODE(file.stat().st_mode) for file in files}) == 1


def test_all_that_is_written_into_an_output_is_in_its_record(model: Path, tmp_path: Path) -> None:
    """A push sends what the record lists, so the co-activation of each layer is listed too."""
    out = tmp_path / "out"
    arguments = ["--repair", "none", "--no-verify", "--quiet"]
    assert run(["relufy", str(model), *arguments, "--out", str(out)]) == 0
    folder = str(out / "report")
    assert run(["analyze", str(out), *SHORT, "--quiet", "--coactivation", "--out", folder]) == 0
    record = json.loads((out / "surgery.json").read_text())
    listed = {*record["files"], *record["shards"], "surgery.json"}
    assert {f"report/coactivation/layer-{i}.safetensors" for i in (0, 1)} <= listed
    there = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert there == listed


def test_tables_fit_and_quiet_says_nothing(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a pipe the tables are at most 120 columns wide."""
    assert run(["analyze", str(model), *SHORT, "--on", "cpu", "--memory-budget", "1KB"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("No product is an exact zero; ") and "ms on cpu" in text
    assert "note: the tokens are random" in text
    assert widest(text, model) <= 120
    assert run(["analyze", str(model), *SHORT, "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")


def widest(text: str, model: Path) -> int:
    """Return the width of the tables, without the lines that are not wrapped."""
    lines = text.splitlines()[1:]
    return max(len(line) for line in lines if not line.startswith(("note", str(model))))


@pytest.mark.parametrize(("columns", "tables"), [(80, 3), (150, 2)])
def test_tables_heed_columns_in_a_pipe(
    columns: int,
    tables: int,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A table of layers that is too wide comes in two parts, and loses no number."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["analyze", str(model), *SHORT]) == 0
    text = capfd.readouterr().out
    assert widest(text, model) <= columns
    assert sum(set(line.strip()) == {"─"} for line in text.splitlines()) == tables
    assert "residual" in text and "…" not in "".join(text.splitlines()[2:])


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--coactivation"], "--coactivation needs --out", 2),
        (["--mix", "0.5"], "no text to mix in", 2),
        (["--text", "a=0"], "a with a weight of 0", 2),
        (["--device", "abacus"], "no device 'abacus' here", 2),
        (["--on", "abacus"], "no device 'abacus' is known", 2),
        (["--text", "my.txt"], "my.txt cannot be tokenized: the checkpoint has no tokenizer", 1),
    ],
)
def test_refusals(
    arguments: list[str], message: str, code: int, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong options and texts end with two lines: what is wrong, and what to do."""
    assert run(["analyze", str(model), *SHORT, *arguments]) == code
    err = capfd.readouterr().err
    assert message in err and len(err.splitlines()) == 2


def test_a_wide_coactivation_is_refused_with_its_size(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is computed, since it would not fit."""
    monkeypatch.setattr("surgery.analysis.analyze.LARGEST_COACTIVATION", 63)
    out = str(tmp_path / "out")
    assert run(["analyze", str(model), *SHORT, "--coactivation", "--out", out]) == 2
    assert "co-activation of 64 neurons takes 0.0 GB a layer" in capfd.readouterr().err
