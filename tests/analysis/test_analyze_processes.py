"""Two processes that share the sequences count what one process counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import surgery, together, write_llama


def test_two_processes_count_what_one_does(tmp_path: Path) -> None:
    """Counts agree exactly although the batches differ; sums agree up to rounding."""
    model = write_llama(tmp_path / "model", layers=2)
    short = ("--tokens", "200", "--sequence-length", "40", "--dtype", "fp32", "--quiet")
    command = ("analyze", str(model), *short, "--coactivation", "--out")
    ran = [surgery(*command, tmp_path / "one")]
    ran += together((*command, str(tmp_path / "two")), [tmp_path] * 2)
    assert [r.code for r in ran] == [0] * 3, ran
    one, two = (load_file(tmp_path / name / "analysis.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        rtol = 1e-5 if value.is_floating_point() else 0
        torch.testing.assert_close(value, two[name], rtol=rtol, atol=0)
    files = [tmp_path / name / "analysis.json" for name in ("one", "two")]
    a, b = (json.loads(file.read_text())["layers"][1]["mlp"] for file in files)
    assert a["tokens"] == 5 * 39 and a["overlap"] == b["overlap"]
    expected = [t["sparsity"] for t in b["cett"]]
    assert [t["sparsity"] for t in a["cett"]] == pytest.approx(expected, rel=1e-3)
    files = [tmp_path / n / "coactivation" / "layer-0.safetensors" for n in ("one", "two")]
    assert torch.equal(*(load_file(file)["pairs"] for file in files))
