"""The lock on an output folder, with kernel locks and on a file system that has none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surgery.errors import SurgeryError
from surgery.storage.lock import HELD, held

# Holds a folder, and prints a line when it does.
HOLD = """
import sys, time
from pathlib import Path
from surgery.storage.lock import held
with held(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["kernel locks", "none"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder on a file system with kernel locks, and on one without."""
    if request.param == "none":

        def refuse(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
    return tmp_path / "out"


def test_one_at_a_time(folder: Path) -> None:
    busy = f"another process is writing .*out: {os.getpid()} on "
    with held(folder):
        for _ in range(2):
            with pytest.raises(SurgeryError, match=busy), held(folder):
                raise AssertionError
    assert not folder.exists()
    with held(folder):
        pass


def test_an_error_inside_gives_it_back(folder: Path) -> None:
    with pytest.raises(ValueError), held(folder):
        raise ValueError
    with held(folder):
        pass


def test_one_that_was_killed_holds_no_more(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    with pytest.raises(SurgeryError, match=f": {process.pid} on "), held(out):
        raise AssertionError
    process.send_signal(signal.SIGKILL)
    process.wait()
    with held(out):
        pass


@pytest.mark.parametrize("folder", ["none"], indirect=True)
def test_without_kernel_locks_a_killed_one_is_told_by_its_pid(folder: Path) -> None:
    """The file of a process that has ended is taken over, if the process was on this machine.

    For a process on another machine the hint says which file to remove.
    """
    folder.mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (folder / HELD).write_text(f"{dead.pid} {os.uname().nodename}\n")
    with held(folder):
        pass
    (folder / HELD).write_text(f"{dead.pid} another-machine\n")
    with pytest.raises(SurgeryError, match=f": {dead.pid} on another-machine") as e, held(folder):
        raise AssertionError
    assert f"remove {folder / HELD}" in e.value.hint
    (folder / HELD).unlink()
    with held(folder):
        pass
