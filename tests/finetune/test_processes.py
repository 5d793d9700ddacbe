"""The script as users start it: alone, killed and resumed, in two processes with FSDP2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hub import FakeHub
from hub_writes import TOKEN
from scripts import TINY, Converted, history
from support import environment, files_of

pytest.importorskip("trl", reason="the extra `finetune` is not installed")

Convert = Callable[[str], Converted]
GLOO = Path(__file__).with_name("fsdp_on_gloo.py")


def start(*command: object, cwd: Path, cache: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command offline, in a process group of its own."""
    variables = environment(**{"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), **variables})
    return subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process, check that it succeeded, and return its output."""
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-4000:]
    return output


def test_the_smoke_test_of_the_docstring_and_a_push(conversions: Convert, tmp_path: Path) -> None:
    """The command of the docstring works as it is, and the result is pushed.

    It is written beside the checkpoint. The Hub is asked for nothing but the push.
    """
    converted = conversions("relufy")
    with FakeHub() as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        where = {"cwd": converted.script.parent, "cache": tmp_path}
        command = (sys.executable, "finetune.py", "--smoke", "--push=owner/trained")
        finish(start(*command, **where, **variables, HF_HUB_OFFLINE="0"))
        # trl also sends telemetry, which may fail.
        needed = [r for r in hub.requests if "telemetry" not in r and "agent" not in r]
        assert not [r for r in needed if r.startswith(("GET", "HEAD"))], needed
        pushed = hub.find("owner/trained", "main")[1]
    out = converted.folder.with_name(f"{converted.folder.name}-finetuned")
    assert len(history(out)) == 8 and converted.changed(out)
    written = {n: data for n, data in files_of(out).items() if not n.startswith("checkpoint-")}
    assert {n: d for n, d in pushed.items() if n != ".gitattributes"} == written
    expected = {"model.safetensors", "config.json", "surgery.json", "finetune/finetune.py"}
    assert expected <= written.keys()


def test_killed_and_resumed(
    conversions: Convert, train: Callable[..., Path], tmp_path: Path
) -> None:
    """A run that was killed and resumed ends with the weights of a run that nothing stopped.

    They agree bit for bit: order of the data, optimizer and stages are all restored.
    """
    converted = conversions("mixtral")
    data = f"--data={converted.script.with_name('smoke.txt')}"
    arguments = (*TINY, data, "--max_steps=60", "--save_steps=10")
    out = tmp_path / "killed"
    command = (sys.executable, converted.script, *arguments, f"--output_dir={out}")
    process = start(*command, cwd=tmp_path, cache=tmp_path)
    while process.poll() is None and not (out / "checkpoint-20" / "trainer_state.json").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "surgery.json").exists(), "it was over before it was killed"
    (out / "checkpoint-70").mkdir()  # a checkpoint that was begun and is not whole
    whole = train(converted, *arguments)
    train(converted, *arguments, "--resume", f"--output_dir={out}")
    assert len(history(out)) == 60
    expected, resumed = converted.weights(whole), converted.weights(out)
    assert expected.keys() == resumed.keys()
    assert [n for n, t in expected.items() if not torch.equal(t, resumed[n])] == []


@pytest.mark.parametrize("name", [pytest.param("relufy", marks=pytest.mark.slow), "mixtral"])
def test_two_processes_with_fsdp2(
    name: str, conversions: Convert, train: Callable[..., Path], tmp_path: Path
) -> None:
    """Losses and gradients are those of one process with twice the batch.

    The losses that hooks add and the stages could go wrong with sharded weights.
    """
    converted = conversions(name)
    l1 = ["--l1=1"] if name == "relufy" else []
    options = ("--max_steps=3", "--gradient_checkpointing=True", *l1)
    text = converted.script.with_name("fsdp2.yaml").read_text()
    text = text.replace("mixed_precision: bf16", 'mixed_precision: "no"')
    config, out = tmp_path / "fsdp2.yaml", tmp_path / "sharded"
    config.write_text(text.replace("num_processes: 8", "num_processes: 2"))
    arguments = [a for a in (*TINY, *options) if not a.startswith(("--use_cpu", "--per_device"))]
    arguments += ["--per_device_train_batch_size=1", "--data=smoke.txt", f"--output_dir={out}"]
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, GLOO)
    where = {"cwd": converted.script.parent, "cache": tmp_path}
    shown = finish(start(*launch, "finetune.py", *arguments, **where))
    assert "DDP" not in shown
    one, two = history(train(converted, *options)), history(out)
    tolerance = 2e-3  # nonlinear terms are averaged over the processes
    losses, norms = ([row[key] for row in one] for key in ("loss", "grad_norm"))
    assert [row["loss"] for row in two] == pytest.approx(losses, rel=tolerance)
    assert [row["grad_norm"] for row in two] == pytest.approx(norms, rel=10 * tolerance)
    assert converted.weights(out).keys() == converted.weights().keys() and converted.changed(out)
