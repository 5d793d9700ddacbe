"""What is printed where: results on stdout, progress on a terminal's stderr alone, JSON and nothing
else when asked.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from support import COMMAND, STAGE, Call, Ran, environment, files_of, surgery, write_llama

from surgery.demo import MODEL


def test_json_is_all_there_is(call: Call, model: Path) -> None:
    """The record of surgery.json and where it is; a pipe into jq must not meet a warning or a
    table.
    """
    ran = call("upcycle", model, "--experts", "2", "--json")
    assert ran.code == 0 and ran.err == ""
    out = Path(ran.json["out"])
    assert out == model.with_name("model-mixtral-2x-top2")
    record = json.loads((out / "surgery.json").read_text())
    assert ran.json == {"out": str(out), **record}
    assert record["verification"]["passed"] is True and record["exact"] is True
    verified = call("verify", model, out, "--json")
    assert verified.code == 0 and verified.err == "" and verified.json["passed"] is True
    plan = call("upcycle", model, "--experts", "2", "--dry-run", "--json")
    assert plan.err == "" and plan.json["fingerprint"] == record["fingerprint"]
    assert plan.json["shards"] == [
        {
            "name": "model.safetensors",
            "bytes": (out / "model.safetensors").stat().st_size,
            "tensors": plan.json["shards"][0]["tensors"],
        }
    ]


def test_the_dry_run_tells_the_truth(call: Call, model: Path) -> None:
    """It writes nothing; the conversion then writes just the files and the bytes that it had
    named.
    """
    plan = call("upcycle", model, "--max-shard-size", "20KB", "--dry-run", "--json").json
    out = Path(plan["out"])
    assert not out.exists()
    assert call("upcycle", model, "--max-shard-size", "20KB", "--no-verify").code == 0
    every = {n: len(d) for n, d in files_of(out).items()}
    sizes = {n: size for n, size in every.items() if n not in plan["record"]}
    assert (
        set(every) - set(sizes)
        == set(plan["record"])
        >= {"README.md", "recipe.yaml", "surgery.json"}
    )
    assert sizes == {
        **{s["name"]: s["bytes"] for s in plan["shards"]},
        **{n: sizes[n] for n in plan["files"]},
    }
    assert sum(sizes.values()) == plan["bytes"]


def test_a_pipe_gets_text(call: Call, tmp_path: Path) -> None:
    """No escape codes, no bars, a path in one piece though it is longer than any terminal is
    wide.
    """
    model = write_llama(tmp_path / ("a-long-name-" * 12))
    ran = call("upcycle", model, "--experts", "2")
    assert ran.code == 0 and all(STAGE.fullmatch(line) for line in ran.err.splitlines())
    assert "writing: done in" in ran.err
    assert "\x1b" not in ran.out and "\r" not in ran.out
    assert ran.out.splitlines()[0].endswith("-mixtral-2x-top2")
    assert "Same function: fp32 logits differ by at most" in ran.out and "Files valid" in ran.out
    planned = call("upcycle", model, "--experts", "4", "--dry-run")
    assert (
        planned.out.splitlines()[0] == f"Would write 0.1 MB to {model}-mixtral-4x-top2"
        and planned.err == ""
    )


def test_quiet_is_silent(tmp_path: Path) -> None:
    """Not a byte from the writer, the verification or the libraries under it, which warn when first
    imported.
    """
    ran = surgery("upcycle", write_llama(tmp_path / "model"), "--experts", "2", "--quiet")
    assert ran == Ran(0, "", "")


def on_a_terminal(*arguments: object) -> str:
    """What a person sees who runs this."""
    ours, theirs = pty.openpty()
    # tqdm shows nothing in 0 columns.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm", COLUMNS="120"),
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert process.wait(60) == 0, seen
    return seen.decode()


def test_a_terminal_gets_bars(model: Path, tmp_path: Path) -> None:
    """And with --quiet or --json it gets none: the other half of what a pipe must not get."""
    assert "writing" in on_a_terminal(
        "relufy", "--repair", "none", model, "--no-verify", "--out", tmp_path / "a"
    )
    assert (
        on_a_terminal(
            "relufy", "--repair", "none", model, "--no-verify", "--quiet", "--out", tmp_path / "b"
        )
        == ""
    )
    json.loads(
        on_a_terminal(
            "relufy", "--repair", "none", model, "--no-verify", "--json", "--out", tmp_path / "c"
        )
    )


def test_names_are_shown_as_they_are(call: Call, model: Path, tmp_path: Path) -> None:
    """rich takes [brackets] for markup and :colons: for emoji; a folder's name is neither."""
    out = tmp_path / "[bold]x[/bold] :rocket:"
    assert str(out) in call("relufy", "--repair", "none", model, "--dry-run", "--out", out).out
    assert str(out) in call("relufy", "--repair", "none", model, "--no-verify", "--out", out).out


def test_without_a_model_it_is_the_one_in_this_folder(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default output is beside it, never inside: the folder's name, not a dot, is the start of
    its name.
    """
    monkeypatch.chdir(model)
    before = sorted(model.iterdir())
    assert call("upcycle", "--no-verify").code == 0
    assert (model.parent / "model-mixtral-8x-top2" / "config.json").exists()
    assert (
        call(
            "relufy", "--repair", "none", "--no-verify", "--activation", "relu2", "--dtype", "fp32"
        ).code
        == 0
    )
    assert (model.parent / "model-relu2-float32" / "config.json").exists()
    assert call("inspect").code == 0
    assert sorted(model.iterdir()) == before


def test_a_weight_file_as_model(call: Call, model: Path) -> None:
    """The output is beside the folder, not in it."""
    assert call("relufy", "--repair", "none", model / "model.safetensors", "--no-verify").code == 0
    assert (model.parent / "model-relu" / "model.safetensors").exists()


def test_the_second_run_says_so(call: Call, model: Path) -> None:
    assert "was there already" not in call("relufy", "--repair", "none", model, "--no-verify").out
    assert "was there already" in call("relufy", "--repair", "none", model, "--no-verify").out


def test_a_closed_pipe_is_no_traceback(model: Path) -> None:
    """`surgery families | head -1`."""
    process = subprocess.Popen(
        [*COMMAND, "families"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) in (0, 1)


def test_a_pipe_is_as_wide_as_columns_says(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log viewer that exports COLUMNS gets lines that fit; without it nothing is cut at 80."""
    monkeypatch.setenv("COLUMNS", "60")
    table = [line for line in call("families").out.splitlines() if line[:1] in "│┌└┏┡├"]
    assert table and max(map(len, table)) <= 60
    monkeypatch.delenv("COLUMNS")
    assert 80 < max(map(len, call("families").out.splitlines()[1:-2])) <= 120


def test_what_comes_next_is_ready_to_copy(call: Call, tmp_path: Path) -> None:
    """Each command names the real folder, quoted; what the model has no use for is left out."""
    out = tmp_path / "my out"
    ran = call("upcycle", write_llama(tmp_path / "model"), "--experts", "2", "--out", out)
    following = ran.out.partition("\nNext:\n")[2]
    commands = [shlex.split(line.strip().partition(" ")[2]) for line in following.splitlines()]
    load, train, publish = commands
    assert load[:2] == ["python", "-c"] and str(out) in load[2]
    compile(load[2], "load", "exec")
    assert train == ["python", str(out / "finetune" / "finetune.py"), "--smoke"]
    assert publish == ["surgery", "push", str(out), "OWNER/NAME"]
    assert "Next:" not in call("upcycle", tmp_path / "model", "--experts", "4", "--quiet").out


def test_a_model_with_zeros_is_to_be_timed(call: Call, model: Path) -> None:
    ran = call("relufy", model, "--repair", "none")
    assert f"surgery bench {model}-relu\n" in ran.out


def test_damage_is_called_by_its_name(call: Call, tmp_path: Path) -> None:
    """The last line of a verification says what to try, not that it passed."""
    options = ("--activation", "shifted", "--threshold", "3", "--repair", "none")
    ran = call("relufy", MODEL, *options, "--out", tmp_path / "out")
    assert ran.code == 0 and "passed" not in ran.out
    assert ran.out.startswith("wrote ") and "\nAnother function: perplexity × " in ran.out
    last = ran.out.partition("\nNext:\n")[2].splitlines()[-1]
    assert last.startswith("Damaged: perplexity × ") and " domains, × " in last
    assert "Try next: a repair: --repair ridge; or " in last
    assert "perplexity, mean of 12 domains" in ran.out and "perplexity, worst: " in ran.out


def test_the_plan_has_a_rough_time(call: Call, model: Path) -> None:
    """From the bytes, the calibration and the verification, with the rates it was reckoned with."""
    plan = call("relufy", model, "--dry-run", "--json").json["time"]
    assert plan["calibrating"] > 0 and plan["writing"] > 0 and plan["verifying"] > 0
    bare = call("relufy", model, "--repair", "none", "--no-verify", "--dry-run", "--json").json
    assert bare["time"]["calibrating"] == 0 == bare["time"]["verifying"]
    shown = call("relufy", model, "--dry-run").out
    assert "roughly" in shown and "GFLOP/s" in shown
    assert [p.name for p in model.parent.iterdir()] == [model.name]
