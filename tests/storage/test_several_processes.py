"""Several processes write one output: it has the bytes of one process, and nobody waits in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import environment, files_of, port, surgery, together, write_llama

from surgery.checkpoint import make_plan
from surgery.errors import SurgeryError
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint, processes, write, writer
from surgery.storage.processes import Elsewhere, Group, Together, divide

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
_OUT = ("--out", "out", "--max-shard-size", "20KB")
UPCYCLE = ("upcycle", "../m", "--experts", "2", *_OUT, "--no-verify")
REPAIRED = ("relufy", "../m", *_OUT, "--tokens", "300", "--sequence-length", "50")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source `m`, in whose subfolders the commands run."""
    room = tmp_path_factory.mktemp("several")
    write_llama(room / "m", shards=3, layers=4)
    return room


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "size"), [(UPCYCLE, 4), (REPAIRED, 2)], ids=["4 upcycle", "2 relufy"]
)
def test_several_processes_write_what_one_does(
    command: tuple[str, ...], size: int, room: Path
) -> None:
    """Several processes write the same files as one, surgery.json and the card included.

    One conversion is plain, the other is calibrated and verified. Rank 0 calibrates alone, because
    sums in another order would round differently.
    """
    one, several = room / f"{command[0]} 1", room / f"{command[0]} {size}"
    one.mkdir()
    assert surgery(*command, cwd=one).code == 0
    ran = together(command, [several] * size)
    assert [r.code for r in ran] == [0] * size, ran
    assert ("Another function: perplexity" in ran[0].out) == (command is REPAIRED)
    assert all(not r.out and not r.err for r in ran[1:])  # Only rank 0 prints.
    assert files_of(several / "out") == files_of(one / "out")
    assert not (several / "out.calibration").exists()


def processes_of(launcher: int) -> dict[int, int]:
    """Return the pids of a launcher's workers, by rank."""
    found = {}
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(task.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            entries = task.joinpath("environ").read_text().split("\0")
            variables = dict(entry.partition("=")[::2] for entry in entries)
        except (OSError, ValueError):
            continue
        if parent == launcher and "RANK" in variables:
            found[int(variables["RANK"])] = int(task.name)
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the workers in /proc")
def test_a_killed_process_ends_the_run_which_goes_on(tmp_path: Path) -> None:
    """Under torchrun, a rank that is killed in the middle of its shards ends the run soon.

    The output does not look complete, and the same command finishes it with the bytes of one
    process.
    """
    write_llama(tmp_path / "m", shards=2, layers=8, hidden=256, ff=1024, vocab=2000)
    command = ("upcycle", "../m", "--out", "out", "--max-shard-size", "2MB", "--no-verify")
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    assert surgery(*command, cwd=one).code == 0
    launcher = subprocess.Popen(
        [*TORCHRUN, port(), "-m", "surgery", *command],
        cwd=two,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    count = len(list((one / "out").glob("*.safetensors")))
    while len(list((two / "out").glob("model-*.safetensors"))) < 3:
        assert launcher.poll() is None
        time.sleep(0.001)
    os.kill(processes_of(launcher.pid)[1], signal.SIGKILL)
    assert launcher.wait(60) != 0
    finished = len(list((two / "out").glob("model-*.safetensors")))
    assert 3 <= finished < count and not (two / "out" / "config.json").exists()
    again = surgery(*command, cwd=two)  # One process continues what two began.
    assert again.code == 0 and "resumed" in again.out, again
    assert files_of(two / "out") == files_of(one / "out")
    finished = together(command, [two] * 2)
    assert [r.code for r in finished] == [0, 0] and "was there already" in finished[0].out


def test_one_that_fails_is_heard(room: Path) -> None:
    """When rank 1 does not find the source, rank 0 prints its error, and both exit with 1."""
    folders = [room / "heard 0", room / "elsewhere" / "heard 1"]
    folders[1].parent.mkdir()
    first, second = together(UPCYCLE, folders)
    assert (first.code, second.code) == (1, 1)
    assert "error: process 1 of 2 on " in first.err and "no file or folder ../m" in first.err
    assert not second.err
    assert not (folders[0] / "out").exists()


def test_an_error_of_all_is_printed_once(room: Path) -> None:
    absent, wrong = ("relufy", "../nothing", "--out", "out"), ("relufy", "../m", "--no-such-option")
    for command, code in ((absent, 1), (wrong, 2)):
        ran = together(command, [room / "all"] * 2)
        assert [r.code for r in ran] == [code] * 2
        assert ran[0].err.count("error: ") == 1 and not ran[1].err and not ran[1].out


# --- in threads -----------------------------------------------------------------------------------


def in_threads(size: int, run: Callable[[Group], Any]) -> list[Any]:
    """Return what `run` returns or raises on each rank of a group whose store is in memory."""
    from torch.distributed import HashStore

    store, outcomes = HashStore(), [None] * size

    def one(number: int) -> None:
        group = Together(store, number, size)
        try:
            outcomes[number] = run(group)
        except SurgeryError as e:
            group.fail(e)
            outcomes[number] = e
        finally:
            group.close()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return outcomes


def test_each_writes_a_share(room: Path, tmp_path: Path) -> None:
    """The digests of all ranks reach rank 0, and shards of an earlier run are not written again."""
    source = open_checkpoint(room / "m")
    plan = make_plan(upcycle(source, experts=2), 20_000)
    out = tmp_path / "out"
    found = in_threads(3, lambda group: write(plan, out, source=source, group=group))
    assert set(found[0].digests) == {s.name for s in plan.shards}
    name = plan.shards[4].name
    (out / name).unlink()
    again = in_threads(3, lambda group: write(plan, out, source=source, group=group))
    assert again[0].fresh == (name,) and again[0].resumed == len(plan.shards) - 1
    assert again[0].digests == found[0].digests


def test_a_folder_that_is_not_shared(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines that each have a disk of their own at --out are found before a shard is written.

    Otherwise the shards of the second would only be missed at the end.
    """
    monkeypatch.setattr(writer, "PATIENCE", 0.0)
    source = open_checkpoint(room / "m")
    plan = make_plan(upcycle(source, experts=2), 20_000)

    def write_apart(group: Group) -> writer.Written:
        return write(plan, tmp_path / str(group.rank), source=source, group=group)

    found = in_threads(2, write_apart)
    assert "is not the folder that the first process writes" in str(found[1])
    assert isinstance(found[0], Elsewhere) and "process 1 of 2 on" in str(found[0])
    assert not (tmp_path / "1").exists() and not (tmp_path / "0" / "config.json").exists()


def test_nobody_waits_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has lost its power cannot say so, and no launcher on another machine can."""
    from torch.distributed import HashStore

    monkeypatch.setattr(processes, "SILENCE", 0.5)
    group = Together(HashStore(), 0, 2)
    with pytest.raises(Elsewhere, match="process 1 of 2 has been silent"):
        group.gather(1)
    group.close()


def test_no_heartbeat_outlives_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is inside the store while the interpreter exits aborts the process.

    The run ends at once all the same, however long the pause between two heartbeats is.
    """
    from torch.distributed import HashStore

    monkeypatch.setattr(processes, "BEAT", 60.0)
    store = HashStore()
    monkeypatch.setattr(processes, "_join", lambda: Together(store, 0, 2))
    before, started = set(threading.enumerate()), time.monotonic()
    with pytest.raises(KeyboardInterrupt), processes.together():
        while not store.add("beats/0", 0):
            time.sleep(0.01)
        assert set(threading.enumerate()) - before
        raise KeyboardInterrupt
    assert not set(threading.enumerate()) - before and time.monotonic() - started < 5


def test_a_slow_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank that shows signs of life is waited for, however long it takes."""
    monkeypatch.setattr(processes, "SILENCE", 0.6)
    monkeypatch.setattr(processes, "BEAT", 0.1)

    def run(group: Group) -> list[Any]:
        if group.rank:
            time.sleep(1.5)
        return group.gather(group.rank)

    assert in_threads(2, run) == [[0, 1], []]


@given(sizes=st.lists(st.integers(1, 10**12), min_size=1, max_size=60), size=st.integers(1, 9))
def test_shards_are_divided_by_bytes(sizes: list[int], size: int) -> None:
    """Each shard belongs to one process, and no share exceeds the mean by more than one shard.

    Neighbours stay together, because they come from the same source file.
    """

    def share(number: int) -> list[int]:
        group = Group()
        group.rank, group.size = number, size
        return divide(sizes, group)

    shares = [share(n) for n in range(size)]
    assert [i for own in shares for i in own] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in own) <= sum(sizes) / size + max(sizes) for own in shares)
