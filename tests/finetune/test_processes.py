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
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-4000:]
    return output


def test_the_smoke_test_of_the_docstring_and_a_push(conversions: Convert, tmp_path: Path) -> None:
    """No other option: what it wrote stands beside the checkpoint. The Hub is asked for nothing but
    the push.
    """
    converted = conversions("relufy")
    with FakeHub() as hub:
        variables = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        finish(
            start(
                sys.executable,
                "finetune.py",
                "--smoke",
                "--push=owner/trained",
                cwd=converted.script.parent,
                cache=tmp_path,
                **variables,
            )
        )
        needed = [
            r for r in hub.requests if "telemetry" not in r and "agent" not in r
        ]  # which trl sends, and may fail
        assert not [r for r in needed if r.startswith(("GET", "HEAD"))], needed
        pushed = hub.find("owner/trained", "main")[1]
    out = converted.folder.with_name(f"{converted.folder.name}-finetuned")
    assert len(history(out)) == 8 and converted.changed(out)
    written = {
        name: data for name, data in files_of(out).items() if not name.startswith("checkpoint-")
    }
    assert {n: d for n, d in pushed.items() if n != ".gitattributes"} == written
    assert {
        "model.safetensors",
        "config.json",
        "surgery.json",
        "finetune/finetune.py",
    } <= written.keys()


def test_killed_and_resumed(
    conversions: Convert, train: Callable[..., Path], tmp_path: Path
) -> None:
    """The weights are those of a run that nothing stopped, bit for bit: order of the data,
    optimiser, stages and all.
    """
    converted = conversions("mixtral")
    arguments = (
        *TINY,
        f"--data={converted.script.with_name('smoke.txt')}",
        "--max_steps=60",
        "--save_steps=10",
    )
    out = tmp_path / "killed"
    process = start(
        sys.executable,
        converted.script,
        *arguments,
        f"--output_dir={out}",
        cwd=tmp_path,
        cache=tmp_path,
    )
    while process.poll() is None and not (out / "checkpoint-20" / "trainer_state.json").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "surgery.json").exists(), "it was over before it was killed"
    (out / "checkpoint-70").mkdir()  # one that was begun and is not whole
    whole = train(converted, *arguments)
    train(converted, *arguments, "--resume", f"--output_dir={out}")
    assert len(history(out)) == 60
    for (name, a), b in zip(
        converted.weights(whole).items(), converted.weights(out).values(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", [pytest.param("relufy", marks=pytest.mark.slow), "mixtral"])
def test_two_processes_with_fsdp2(
    name: str, conversions: Convert, train: Callable[..., Path], tmp_path: Path
) -> None:
    """Losses and gradients are those of one process with twice the batch: the losses of hooks and
    the stages too.
    """
    converted = conversions(name)
    options = (
        "--max_steps=3",
        "--gradient_checkpointing=True",
        *(["--l1=1"] if name == "relufy" else []),
    )
    text = (converted.script.with_name("fsdp2.yaml")).read_text()
    config = tmp_path / "fsdp2.yaml"
    config.write_text(
        text.replace("mixed_precision: bf16", 'mixed_precision: "no"').replace(
            "num_processes: 8", "num_processes: 2"
        )
    )
    arguments = [a for a in (*TINY, *options) if not a.startswith(("--use_cpu", "--per_device"))]
    launch = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        config,
        GLOO,
        "finetune.py",
    )
    out = tmp_path / "sharded"
    shown = finish(
        start(
            *launch,
            *arguments,
            "--per_device_train_batch_size=1",
            "--data=smoke.txt",
            f"--output_dir={out}",
            cwd=converted.script.parent,
            cache=tmp_path,
        )
    )
    assert "DDP" not in shown
    one, two = history(train(converted, *options)), history(out)
    tolerance = 2e-3  # of the mean over two processes of what is not linear
    assert [row["loss"] for row in two] == pytest.approx(
        [row["loss"] for row in one], rel=tolerance
    )
    assert [row["grad_norm"] for row in two] == pytest.approx(
        [row["grad_norm"] for row in one], rel=10 * tolerance
    )
    assert converted.weights(out).keys() == converted.weights().keys() and converted.changed(out)
