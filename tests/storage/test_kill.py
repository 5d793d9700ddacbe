"""A conversion that is killed at any moment never looks complete, and the same command finishes it.

The moment of a kill is when a certain file appears in the output, plus a random delay with a fixed
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

# This one computes routers with torch.
UPCYCLE = ("upcycle", "../m", "--out", "out", "--max-shard-size", "5MB", "--no-verify")
# This one copies extents alone, without torch.
_REPAIR = ("--repair", "none")
RELUFY = ("relufy", "../m", *_REPAIR, "--out", "out", "--max-shard-size", "2MB", "--no-verify")
# The file that appears before a kill, and the most seconds between the two.
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
    """A source of 20 MB and two uninterrupted conversions of it, of 107 MB and of 20 MB.

    They have 22 and 12 shards.
    """
    room = tmp_path_factory.mktemp("kill")
    write_llama(room / "m", shards=3, layers=8, hidden=256, ff=1024, vocab=2000)
    for name, command in (("upcycle", UPCYCLE), ("relufy", RELUFY)):
        (room / f"whole {name}").mkdir()
        assert surgery(*command, cwd=room / f"whole {name}").code == 0
    return room


def start(command: tuple[str, ...], cwd: Path) -> subprocess.Popen[str]:
    def hear() -> None:
        """Accept interruptions, which background jobs of a shell and their children ignore."""
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
    """Send `kind` when a file like `pattern` is in `out` and `delay` seconds have passed."""
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
    """Assert that an output either does not open, or opens as the whole model.

    Files under their final names have their final bytes, and config.json comes last.
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
    # These, and what is under finetune/, are written after config.json.
    record = {"surgery.json", "recipe.yaml", "README.md"}
    assert {n for n in set(expected) - set(found) if not n.startswith("finetune/")} <= record


def test_killed_and_taken_up(room: Path) -> None:
    """Each of seven killed runs is finished by another one to the files of an uninterrupted run."""
    draw, whole, states, resumed = random.Random(0), room / "whole relufy" / "out", [], []
    for i, (pattern, delay) in enumerate(MOMENTS):
        cwd = room / f"relufy {i}"
        out, wait = cwd / "out", delay * draw.random()
        killed = stop(start(RELUFY, cwd), out, pattern, wait, signal.SIGKILL)
        if killed.code == -signal.SIGKILL:
            states.append((shards_of(out), (out / "config.json").exists()))
        assert_not_half(out, whole)
        again = surgery(*RELUFY, cwd=cwd)
        assert again.code == 0, again
        resumed.append("resumed" in again.out)
        assert files_of(out) == files_of(whole), pattern
    # Otherwise too few different stages were hit.
    assert len(set(states)) >= 4 and any(resumed), states


def test_killed_again_and_again(room: Path) -> None:
    """An output with computed values is killed three times; each run goes on from killed ones."""
    draw, whole, out = random.Random(1), room / "whole upcycle" / "out", room / "upcycle" / "out"
    shards = [0]
    moments = (
        (".model-00003-*.partial", 0.02),
        ("model-00009-*", 0.03),
        (".model-00016-*.partial", 0.02),
    )
    for pattern, delay in moments:
        stop(start(UPCYCLE, out.parent), out, pattern, delay * draw.random(), signal.SIGKILL)
        shards.append(shards_of(out))
        assert_not_half(out, whole)
    again = surgery(*UPCYCLE, cwd=out.parent)
    assert again.code == 0, again
    assert files_of(out) == files_of(whole)
    # A later kill found more shards, and none was lost.
    assert shards == sorted(shards) and len(set(shards)) >= 3, shards


def test_interrupted_from_the_keyboard(room: Path) -> None:
    """Ctrl-C exits with 130 and says how to continue, and the output can be continued."""
    cwd = room / "interrupted"
    ran = stop(start(RELUFY, cwd), cwd / "out", "model-00002-*", 0.0, signal.SIGINT)
    assert ran.code == 130
    lines = ["interrupted", "hint: run the same command again to go on"]
    assert ran.err.strip().splitlines() == lines and not ran.out
    assert_not_half(cwd / "out", room / "whole relufy" / "out")
    assert surgery(*RELUFY, cwd=cwd).code == 0
    assert files_of(cwd / "out") == files_of(room / "whole relufy" / "out")


def test_two_runs_at_once(room: Path) -> None:
    """A second run is refused while the first one is stopped, and does not disturb it."""
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
