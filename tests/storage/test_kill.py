"""A conversion that is killed at any moment: the folder never looks whole, and the same command
finishes it.

Moments are chosen by watching the output for a file to appear, then a random delay with a fixed
seed. Paths are relative to a folder of each run, so that the commands, which surgery.json records,
are the same.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support import COMMAND, Ran, environment, files_of, surgery, write_llama

from surgery.errors import SurgeryError
from surgery.storage import open_checkpoint

UPCYCLE = (
    "upcycle",
    "../m",
    "--out",
    "out",
    "--max-shard-size",
    "5MB",
    "--no-verify",
)  # computes routers: torch
RELUFY = (
    "relufy",
    "../m",
    "--repair",
    "none",
    "--out",
    "out",
    "--max-shard-size",
    "2MB",
    "--no-verify",
)  # extents alone: no torch
# What appears before the kill, up to how many seconds it comes after.
MOMENTS = (
    ("surgery.partial.json", 0.0),
    (".model-00001-*.partial", 0.003),
    ("model-00003-*", 0.01),
    (".model-00006-*.partial", 0.005),
    ("model-00008-*", 0.01),
    ("model.safetensors.index.json", 0.0),
    ("config.json", 0.0),
)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of 20 MB, and both conversions of it, uninterrupted: 107 MB in 22 shards, 20 MB in
    12.
    """
    room = tmp_path_factory.mktemp("kill")
    write_llama(room / "m", shards=3, layers=8, hidden=256, ff=1024, vocab=2000)
    for name, command in (("upcycle", UPCYCLE), ("relufy", RELUFY)):
        (room / f"whole {name}").mkdir()
        assert surgery(*command, cwd=room / f"whole {name}").code == 0
    return room


def start(command: tuple[str, ...], cwd: Path) -> subprocess.Popen[str]:
    def hear() -> None:
        """Interruptions, which a shell's background jobs and their children ignore."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    cwd.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*COMMAND, *command],
        cwd=cwd,
        env=environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear,
    )


def stop(
    process: subprocess.Popen[str], out: Path, pattern: str, delay: float, kind: signal.Signals
) -> Ran:
    """Send `kind` when a file like `pattern` has appeared in `out` and `delay` seconds are over."""
    while process.poll() is None:
        if out.is_dir() and any(fnmatch(p.name, pattern) for p in out.iterdir()):
            time.sleep(delay)
            process.send_signal(kind)
            break
        time.sleep(0.0005)
    stdout, stderr = process.communicate(timeout=60)
    return Ran(process.returncode, stdout, stderr)


def shards_of(out: Path) -> int:
    return len(list(out.glob("model-*.safetensors")))


def assert_not_half(out: Path, whole: Path) -> None:
    """What opens is the whole model; what is under its final name has its final bytes; a
    config.json comes last.
    """
    expected, found = files_of(whole), files_of(out)
    for name, data in found.items():
        if not name.startswith(".") and name != "surgery.partial.json":
            assert data == expected[name], name
    try:
        open_checkpoint(out)
    except SurgeryError:
        assert "config.json" not in found
        return
    record = {
        "surgery.json",
        "recipe.yaml",
        "README.md",
    }  # which come with what is under finetune/, after config.json
    assert {n for n in set(expected) - set(found) if not n.startswith("finetune/")} <= record


def test_killed_and_taken_up(room: Path) -> None:
    """Seven kills of seven runs, each finished by a second: every file of the output is that of an
    unbroken run.
    """
    draw, whole, states, resumed = random.Random(0), room / "whole relufy" / "out", [], []
    for i, (pattern, delay) in enumerate(MOMENTS):
        cwd = room / f"relufy {i}"
        killed = stop(
            start(RELUFY, cwd), cwd / "out", pattern, delay * draw.random(), signal.SIGKILL
        )
        if killed.code == -signal.SIGKILL:
            states.append((shards_of(cwd / "out"), (cwd / "out" / "config.json").exists()))
        assert_not_half(cwd / "out", whole)
        again = surgery(*RELUFY, cwd=cwd)
        assert again.code == 0, again
        resumed.append("resumed" in again.out)
        assert files_of(cwd / "out") == files_of(whole), pattern
    assert len(set(states)) >= 4 and any(resumed), states  # several stages were really hit


def test_killed_again_and_again(room: Path) -> None:
    """Three kills of one output, where values are computed: what each run takes over was written by
    killed ones.
    """
    draw, whole, out = random.Random(1), room / "whole upcycle" / "out", room / "upcycle" / "out"
    shards = [0]
    for pattern, delay in (
        (".model-00003-*.partial", 0.02),
        ("model-00009-*", 0.03),
        (".model-00016-*.partial", 0.02),
    ):
        stop(start(UPCYCLE, out.parent), out, pattern, delay * draw.random(), signal.SIGKILL)
        shards.append(shards_of(out))
        assert_not_half(out, whole)
    again = surgery(*UPCYCLE, cwd=out.parent)
    assert again.code == 0, again
    assert files_of(out) == files_of(whole)
    assert shards == sorted(shards) and len(set(shards)) >= 3, (
        shards
    )  # a later kill found more, and none was lost


def test_interrupted_from_the_keyboard(room: Path) -> None:
    """Exit code 130, two lines that say how to go on, no traceback, and an output that goes on."""
    cwd = room / "interrupted"
    ran = stop(start(RELUFY, cwd), cwd / "out", "model-00002-*", 0.0, signal.SIGINT)
    assert ran.code == 130
    assert (
        ran.err.strip().splitlines() == ["interrupted", "hint: run the same command again to go on"]
        and not ran.out
    )
    assert_not_half(cwd / "out", room / "whole relufy" / "out")
    assert surgery(*RELUFY, cwd=cwd).code == 0
    assert files_of(cwd / "out") == files_of(room / "whole relufy" / "out")


def test_two_runs_at_once(room: Path) -> None:
    """The second is refused while the first stands still in the middle, and the first does not
    notice.
    """
    cwd = room / "two"
    first = start(RELUFY, cwd)
    try:
        while not list((cwd / "out").glob("model-00002-*")):
            assert first.poll() is None
            time.sleep(0.0005)
        first.send_signal(signal.SIGSTOP)
        second = surgery(*RELUFY, cwd=cwd)
        assert second.code == 1 and "error: another process is writing out" in second.err, second
        assert_not_half(cwd / "out", room / "whole relufy" / "out")
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 0
    assert files_of(cwd / "out") == files_of(room / "whole relufy" / "out")
    again = surgery(*RELUFY, cwd=cwd)
    assert again.code == 0 and "was there already" in again.out
