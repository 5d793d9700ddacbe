"""Two processes that share the sequences count what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import environment, write_llama

LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")


def test_two_processes_count_what_one_does(tmp_path: Path) -> None:
    """Counts exactly, though the batches are others; sums and what is solved for to rounding."""
    model = write_llama(tmp_path / "model", layers=2)
    shared = (
        "-m",
        "surgery",
        "analyze",
        str(model),
        "--tokens",
        "200",
        "--sequence-length",
        "40",
        "--dtype",
        "fp32",
        "--quiet",
        "--coactivation",
        "--out",
    )
    port = str(20000 + os.getpid() % 20000)
    for name, launch in (("one", ()), ("two", (*LAUNCH, port))):
        done = subprocess.run(
            [sys.executable, *launch, *shared, str(tmp_path / name)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(tmp_path / name / "analysis.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, two[name], rtol=1e-5 if value.is_floating_point() else 0, atol=0
        )
    a, b = (
        json.loads((tmp_path / name / "analysis.json").read_text())["layers"][1]["mlp"]
        for name in ("one", "two")
    )
    assert a["tokens"] == 5 * 39 and a["overlap"] == b["overlap"]
    assert [t["sparsity"] for t in a["cett"]] == pytest.approx(
        [t["sparsity"] for t in b["cett"]], rel=1e-3
    )
    pairs = [
        load_file(tmp_path / name / "coactivation" / "layer-0.safetensors")["pairs"]
        for name in ("one", "two")
    ]
    assert torch.equal(*pairs)
