"""The options of `surgery relufy` reach the operation; thresholds of a stored analysis give the
zeros that it promised.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import Call, assert_two_lines, write_llama

TOKENS = ("--tokens", "480", "--sequence-length", "60", "--dtype", "fp32")


@pytest.mark.parametrize("activation", ["shifted", "fatrelu", "cats", "teal"])
def test_thresholds_of_an_analysis(
    activation: str, call: Call, model: Path, tmp_path: Path
) -> None:
    """In layer 0, whose inputs the conversion does not change, on the text that was analysed."""
    report, out = tmp_path / "report", tmp_path / "out"
    assert call("analyze", model, *TOKENS, "--out", report, "--quiet").code == 0
    ran = call(
        "relufy",
        model,
        "--activation",
        activation,
        "--sparsity",
        "0.65",
        "--analysis",
        report,
        "--repair",
        "none",
        "--no-verify",
        "--out",
        out,
        "--json",
    )
    assert ran.code == 0, ran.err
    assert len(ran.json["recipe"][0]["threshold"]) == 3 and ran.json["calibration"] == []
    zeros = call("analyze", out, *TOKENS, "--json").json["layers"][0]["mlp"]["product"]["zero"]
    assert zeros == pytest.approx(0.65, abs=0.02)


def test_an_analysis_of_another_model_is_refused(call: Call, model: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", layers=2)
    assert call("analyze", other, *TOKENS, "--out", tmp_path / "report", "--quiet").code == 0
    wanted = ("relufy", model, "--activation", "teal", "--repair", "none", "--analysis")
    assert_two_lines(call(*wanted, tmp_path / "report"), "is the analysis of another model")
    assert_two_lines(call(*wanted, tmp_path / "nothing"), "no analysis in")
    assert_two_lines(call(*wanted, tmp_path / "report", "--activation", "drelu"), "drelu", code=2)


def test_the_allocation_is_recorded(call: Call, model: Path) -> None:
    ran = call(
        "relufy",
        model,
        "--activation",
        "shifted",
        "--allocation",
        "greedy",
        "--tokens",
        "240",
        "--sequence-length",
        "60",
        "--no-verify",
        "--json",
    )
    assert ran.code == 0, ran.err
    assert ran.json["recipe"][0]["allocation"] == "greedy" and ran.json["calibration"][0][
        "allocation"
    ].keys() == {
        "0",
        "1",
        "2",
    }
