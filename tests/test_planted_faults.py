"""Faults that somebody could plant, or a refactoring could make, and that no other test would see.

Each test says which fault it is for, and takes its expectation from elsewhere than the code.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting.test_folding import planted
from operated import EVERY_OPERATION
from support import write_llama

import surgery
from surgery.calibration import routers
from surgery.calibration.data import Sample
from surgery.checkpoint import Checkpoint, make_plan
from surgery.checkpoint.compat import complete
from surgery.demo import MODEL
from surgery.errors import SurgeryError
from surgery.families import locate
from surgery.fitting.experts import noisy
from surgery.proof import quality
from surgery.proof.integrity import nonfinite
from surgery.storage import open_checkpoint, write, writer


@pytest.fixture
def source() -> Checkpoint:
    return open_checkpoint(MODEL)


def test_rope_names_are_completed_inside_text_config() -> None:
    """The fault: only the outer config is completed, and a tower loads with another rope_theta."""
    rope = {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}
    four = complete({"text_config": {"rope_parameters": rope, "dtype": "bfloat16"}})["text_config"]
    assert four["rope_theta"] == 5e5 and four["rope_scaling"]["factor"] == 4.0
    assert four["torch_dtype"] == "bfloat16"
    five = complete({"text_config": {"rope_theta": 5e5, "rope_scaling": None}})["text_config"]
    assert five["rope_parameters"]["rope_theta"] == 5e5


def test_gate_and_up_have_noise_of_their_own(source: Checkpoint) -> None:
    """The fault: one stream of noise for both, which moves a neuron along one line."""
    mlp = locate(source).mlp(0)
    changed = noisy(mlp, 1.0, "layer 0 expert 0", 0)
    assert mlp.gate is not None and changed.gate is not None
    noise = [
        (a.read().float() - b.read().float()).flatten()
        for a, b in ((changed.gate, mlp.gate), (changed.up, mlp.up))
    ]
    correlation = torch.corrcoef(torch.stack(noise))[0, 1].abs().item()
    assert correlation < 5 / math.sqrt(noise[0].numel())
    assert all(n.std().item() == pytest.approx(1.0, rel=0.02) for n in noise)


def test_the_seed_decides_the_centroids() -> None:
    """The fault: the seed is not handed on, so that every seed gives the same routers."""
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    first, again, other = (routers.centroids(x, 4, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.allclose(first, other)


class Everything(Sample):
    """A sample whose first tokens count."""

    __slots__ = ()

    @property
    def mask(self) -> torch.Tensor:
        return torch.ones_like(self.input_ids, dtype=torch.bool)


def test_first_tokens_are_not_counted_among_zeros(source: Checkpoint) -> None:
    """The fault: the mask is dropped. A first token's products are cut here, and no others."""
    texts = quality.texts(source, 64, 64)
    firsts = len(texts.input_ids)
    assert not texts.mask[:, 0].any() and texts.mask[:, 1:].all()
    relufied = surgery.relufy(source, repair="none")
    found = quality.measure({"output": relufied}, texts)["output"].zeros[0]
    everything = Everything(
        input_ids=texts.input_ids, source="", text=True, row_domains=texts.row_domains
    )
    counted = quality.measure({"output": relufied}, everything)["output"].zeros[0]
    assert found != counted and firsts > 0


def test_dead_neurons_are_in_the_json(source: Checkpoint) -> None:
    """The fault: `dead` counts neurons that fire, or none. Three gates are closed here."""
    name = "model.layers.2.mlp.gate_proj.weight"

    def close(t: torch.Tensor) -> torch.Tensor:
        out = t.clone()
        out[:3] = 0
        return out

    tensors = {**source.tensors, name: source.tensors[name].map("closed", close)}
    found = surgery.analyze(source.replace(tensors=tensors), tokens=2048, device="cpu")
    before = surgery.analyze(source, tokens=2048, device="cpu")
    dead = [a.layers[2].mlp.as_dict()["dead"] for a in (found, before)]  # type: ignore[union-attr]
    assert dead[0] - dead[1] == 3


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinity_in_fp16_is_found(value: float, tmp_path: Path) -> None:
    """The fault: the exponent of another dtype, so that Inf passes for a number."""
    folder = write_llama(tmp_path / "m", layers=2)
    checkpoint = open_checkpoint(folder)
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(t: torch.Tensor) -> torch.Tensor:
        out = t.clone()
        out[-1, -1] = value
        return out

    half = surgery.cast(checkpoint, "fp16")
    spoiled = half.tensors[name].map("spoiled", spoil)
    output = half.replace(tensors={**half.tensors, name: spoiled})
    write(make_plan(output), tmp_path / "out", source=checkpoint)
    assert nonfinite(open_checkpoint(tmp_path / "out").tensors) == [name]


def test_the_bypass_counts_among_the_bytes_that_carving_reads(source: Checkpoint) -> None:
    """The fault: the note leaves out what every token reads, 192 × 192 values in 7 layers."""
    few = {"tokens": 256, "sequence_length": 64, "device": "cpu"}
    note = surgery.carve(source, active=8, bypass="full", calibration=few).steps[0].notes[1]
    item = source.tensors["model.layers.0.mlp.down_proj.weight"].nbytes / (192 * 512)
    assert re.search(rf"{7 * 192 * 192 * item / 1e6:,.1f} the bypass", note), note
    without = surgery.carve(source, active=8, calibration=few).steps[0].notes[1]
    read = [float(re.search(r"reads ([\d.]+) of", n)[1]) for n in (note, without)]  # type: ignore[index]
    assert read[0] - read[1] == pytest.approx(7 * 192 * 192 * item / 1e6, abs=0.11)


def test_the_api_trusts_no_code_by_itself(tmp_path: Path) -> None:
    """The fault: `write` or `verify` runs the code of a stranger's checkpoint unasked."""
    folder = write_llama(tmp_path / "m", layers=2)
    out = surgery.write(surgery.open(folder), tmp_path / "out")
    for place in (folder, out):
        config = json.loads((place / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
        (place / "config.json").write_text(json.dumps(config))
        (place / "modeling_x.py").write_text("raise SystemExit('ran')")
    with pytest.raises(SurgeryError, match="brings code of its own"):
        surgery.write(surgery.open(folder), tmp_path / "again")
    with pytest.raises(SurgeryError, match="brings code of its own"):
        surgery.verify(surgery.open(folder), out)
    assert not (tmp_path / "again").exists()


def test_the_config_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: config.json before the index, so that a killed run looks like a whole model."""
    source = open_checkpoint(write_llama(tmp_path / "m", layers=4, shards=3))
    order: list[str] = []
    small, shard = writer._write_small, writer._write_shard

    def noted_small(out: Path, name: str, data: bytes) -> None:
        order.append(name)
        small(out, name, data)

    def noted_shard(one: Any, *rest: Any) -> Any:
        order.append(one.name)
        return shard(one, *rest)

    monkeypatch.setattr(writer, "_write_small", noted_small)
    monkeypatch.setattr(writer, "_write_shard", noted_shard)
    write(make_plan(source), tmp_path / "out", source=source)
    assert order[-2:] == ["model.safetensors.index.json", "config.json"]
    assert order[0] == "surgery.partial.json"


FEW = ("--tokens", "128", "--sequence-length", "64", "--device", "cpu")
COMMANDS = {
    "upcycle": ("--experts", "2"),
    "relufy": ("--repair", "none"),
    "carve": ("--experts", "4", "--active", "2", *FEW),
    "memory": ("--slots", "64", "--knn", "4", "--key-dim", "16", *FEW),
    "splinify": ("--grid", "8"),
    "prune": ("--keep", "0.5", "--multiple-of", "8", *FEW),
    "fold": FEW,
    "cast": ("--dtype", "fp32"),
}


def test_every_command_that_writes_is_among_those_that_can_fail() -> None:
    """The fault: a new operation whose exit code nothing looks at."""
    assert COMMANDS.keys() == EVERY_OPERATION.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_failed_verification_is_exit_code_1(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault: a command ends with 0 although the output is not what it claims."""
    from surgery.cli import run
    from surgery.proof import verification

    folder = write_llama(tmp_path / "m", layers=2)
    if name == "fold":
        coded = planted("llama", tmp_path / "constant")
        coded = surgery.relufy(coded, activation="shifted", threshold=0.1, form="code")
        folder = surgery.write(coded, tmp_path / "coded")
    sound = verification.name_rows

    def failing(*reports: Any) -> Any:
        rows = sound(*reports)
        return [*rows, verification.none_of("planted", "planted", ["a fault"])]

    out = tmp_path / "out"
    command = [name, str(folder), *COMMANDS[name], "--out", str(out), "--quiet"]
    with monkeypatch.context() as patched:
        patched.setattr("surgery.workflow.checks.require_verifiable", lambda *_: None)
        patched.setattr(verification, "name_rows", failing)
        assert run(command) == 1
    assert "does not pass" in capsys.readouterr().err
    assert json.loads((out / "surgery.json").read_text())["verification"]["passed"] is False
    assert run(command) == 0
