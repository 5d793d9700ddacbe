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
    out = tmp_path / "out"
    assert run(["analyze", str(model), *SHORT, "--json", "--coactivation", "--out", str(out)]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed == json.loads((out / "analysis.json").read_text())
    assert (
        printed["sample"]["sequences"] == 2
        and len(printed["layers"]) == 2
        and printed["device"]["name"] == "h100"
    )
    assert (load_file(out / "analysis.safetensors")["layers.1.mlp.nonzero"] == 78).all()
    pairs = load_file(out / "coactivation" / "layer-1.safetensors")["pairs"]
    assert (
        pairs.shape == (64, 64)
        and (pairs.diag() == load_file(out / "analysis.safetensors")["layers.1.mlp.active"]).all()
    )
    assert stat.S_IMODE((out / "analysis.safetensors").stat().st_mode) == stat.S_IMODE(
        (out / "analysis.json").stat().st_mode
    )


def test_tables_fit_and_quiet_says_nothing(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", str(model), *SHORT, "--on", "cpu", "--memory-budget", "1KB"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("No product is an exact zero; ") and "ms on cpu" in text
    assert "note: the tokens are random" in text
    assert (
        max(len(line) for line in text.splitlines() if not line.startswith(("note", str(model))))
        <= 120
    )
    assert run(["analyze", str(model), *SHORT, "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--coactivation"], "--coactivation needs --out", 2),
        (["--text", "a", "--dataset", "b"], "exclude each other", 2),
        (["--device", "abacus"], "no device 'abacus' here", 2),
        (["--on", "abacus"], "no device 'abacus' is known", 2),
        (["--text", "my.txt"], "my.txt cannot be tokenized: the checkpoint has no tokenizer", 1),
    ],
)
def test_refusals(
    arguments: list[str], message: str, code: int, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["analyze", str(model), *SHORT, *arguments]) == code
    err = capfd.readouterr().err
    assert message in err and len(err.splitlines()) == 2


def test_a_wide_coactivation_is_refused_with_its_size(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surgery.analysis.analyze.LARGEST_COACTIVATION", 63)
    assert (
        run(["analyze", str(model), *SHORT, "--coactivation", "--out", str(tmp_path / "out")]) == 2
    )
    assert "co-activation of 64 neurons takes 0.0 GB a layer" in capfd.readouterr().err
