"""The output folder: nothing foreign is overwritten, and repeating a command does no harm."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support import files_of, llama_tensors, write_llama

from surgery.checkpoint import Checkpoint, make_plan
from surgery.errors import SurgeryError
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import Transfer, check_space, open_checkpoint, write
from surgery.storage.lock import held
from surgery.storage.writer import MARKER
from surgery.workflow.convert import Result, convert_alone


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path / "m", shards=3, layers=4))


def convert(source: Checkpoint, out: Path, *, experts: int = 2, **options: bool) -> Result:
    output = upcycle(source, experts=experts)
    return convert_alone(source, output, out, max_shard_size=20_000, verify=False, **options)


def test_a_finished_output_is_left_alone(source: Checkpoint, tmp_path: Path) -> None:
    """No byte is written again, because the model may be in use."""
    out = tmp_path / "out"

    def state() -> dict[Path, tuple[int, int]]:
        return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.iterdir()}

    assert not convert(source, out).already
    before = state()
    assert convert(source, out).already
    assert state() == before


@pytest.mark.parametrize(
    "lost", ["model-00003-of-*.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_a_lost_file_is_written_again(lost: str, source: Checkpoint, tmp_path: Path) -> None:
    """surgery.json alone does not prove that the output is complete."""
    out = tmp_path / "out"
    convert(source, out)
    before = files_of(out)
    next(out.glob(lost)).unlink()
    again = convert(source, out)
    assert not again.already and files_of(out) == before


def test_another_command_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    """Another command may write into neither a finished nor an interrupted output."""
    out = tmp_path / "out"
    convert(source, out)
    finished = files_of(out)
    with pytest.raises(SurgeryError, match="finished output of another command"):
        convert(source, out, experts=4)
    with pytest.raises(SurgeryError, match="finished output of another command"):
        convert_alone(source, relufy(source, repair="none"), out, verify=False)
    assert files_of(out) == finished
    (out / "surgery.json").unlink()
    (out / "config.json").unlink()
    fingerprint = json.loads(finished["surgery.json"])["fingerprint"]
    (out / MARKER).write_text(json.dumps({"fingerprint": fingerprint}))
    interrupted = files_of(out)
    with pytest.raises(SurgeryError, match="unfinished output of another command"):
        convert(source, out, experts=4)
    assert files_of(out) == interrupted
    convert(source, out)
    assert files_of(out) == finished


def test_another_source_is_another_command(source: Checkpoint, tmp_path: Path) -> None:
    """A source with the same names and shapes but other values is another one.

    Otherwise shards of two models could be mixed.
    """
    convert(source, tmp_path / "out")
    other = llama_tensors(layers=4)
    other["model.norm.weight"] = torch.full((32,), 2.0, dtype=torch.bfloat16)
    changed = open_checkpoint(write_llama(tmp_path / "m", shards=3, layers=4, tensors=other))
    with pytest.raises(SurgeryError, match="another command, source or version"):
        convert(changed, tmp_path / "out")


def test_a_foreign_folder_is_refused_untouched(source: Checkpoint, tmp_path: Path) -> None:
    for name in ("notes.txt", "config.json", ".hidden", "sub/file", "surgery.json", MARKER):
        out = tmp_path / name.replace("/", "-")
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("mine")
        with pytest.raises(SurgeryError, match="not an output of surgery"):
            convert(source, out)
        assert files_of(out) == {name: b"mine"}


def test_an_empty_folder_and_one_killed_before_its_mark_are_taken(
    source: Checkpoint, tmp_path: Path
) -> None:
    for left in ([], [f".{MARKER}.partial"]):
        out = tmp_path / f"out{len(left)}"
        out.mkdir()
        for name in left:
            (out / name).write_bytes(b"{")
        convert(source, out)
        assert not list(out.glob(".*"))
        open_checkpoint(out)


def test_never_into_the_source(source: Checkpoint, tmp_path: Path) -> None:
    """The source is recognised by its name, below it, through `..` and through a symlink."""
    before = files_of(tmp_path / "m")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    for out in ("m", "m/out", "x/../m/out", "link/out"):
        with pytest.raises(SurgeryError, match="inside the source"):
            convert(source, tmp_path / out)
    assert files_of(tmp_path / "m") == before and not (tmp_path / "x").exists()


def test_never_into_the_hub_cache(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other tool would take a folder among the snapshots for a download."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SurgeryError, match="inside the Hub cache"):
        convert(source, tmp_path / "cache" / "models--a--b" / "out")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(SurgeryError, match="inside the Hub cache"):
        convert(source, tmp_path / "home" / "hub" / "out")
    assert not (tmp_path / "cache").exists() and not (tmp_path / "home").exists()


def test_an_output_that_is_a_file(source: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SurgeryError, match="is a file"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_small_disk_is_found_before_the_first_byte(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is too small is an error at once, and no folder is left behind."""
    out = tmp_path / "a" / "b" / "out"
    usage = shutil._ntuple_diskusage(10**9, 10**9, 17 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    sizes = {"layers": 1, "vocab": 60_000, "hidden": 64}
    large = open_checkpoint(write_llama(tmp_path / "large", **sizes))
    with pytest.raises(SurgeryError, match=r"needs 0\.02 GB and the disk has 0\.02 GB free"):
        convert_alone(large, upcycle(large), out, verify=False)
    assert not (tmp_path / "a").exists()
    convert(source, out)  # A small model fits.


def test_a_shard_that_is_written_again_needs_its_space_twice(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of a run without hashes are there, but the verified run makes each of them anew."""
    out = tmp_path / "out"
    write(make_plan(source), out, source=source, transfer=Transfer(hashed=False))
    usage = shutil._ntuple_diskusage(10**9, 10**9, (16 << 20) + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_space(make_plan(source), out, Transfer(hashed=False))
    with pytest.raises(SurgeryError, match="GB free"):
        check_space(make_plan(source), out, Transfer())


def test_a_second_process_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    """Two runs into one folder would write the same shard at once, so the second one is refused."""
    out = tmp_path / "out"
    with held(out):
        before = files_of(out)
        busy = f"another process is writing .*out: {os.getpid()} on "
        with pytest.raises(SurgeryError, match=busy):
            convert(source, out)
        assert files_of(out) == before
    convert(source, out)


@pytest.mark.parametrize("kind", ["computed", "extents", "verbatim"])
def test_a_source_truncated_meanwhile_is_one_error(
    kind: str, source: Checkpoint, tmp_path: Path
) -> None:
    """A source that was truncated is an error, and what has been written does not open.

    Zeros or a short shard in its place would look like a model.
    """
    outputs = {
        "computed": source.replace(tensors={n: t.cast("F32") for n, t in source.tensors.items()}),
        "extents": upcycle(source, experts=2),
        "verbatim": relufy(source, repair="none"),
    }
    shard = tmp_path / "m" / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(SurgeryError, match=r"model-00003-of-00003\.safetensors ended early"):
        convert_alone(source, outputs[kind], tmp_path / "out", verify=False)
    with pytest.raises(SurgeryError):
        open_checkpoint(tmp_path / "out")


def test_a_full_disk_midway_leaves_a_resumable_output(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk is full in the middle of a shard, the finished shards stay and are used."""
    convert(source, tmp_path / "whole")
    real, calls = os.fsync, []

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SurgeryError, match="No space left"):
        convert(source, tmp_path / "out")
    with pytest.raises(SurgeryError):
        open_checkpoint(tmp_path / "out")
    monkeypatch.undo()
    assert convert(source, tmp_path / "out").resumed > 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_without_copy_file_range_the_bytes_are_the_same(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems lack the call, and some file systems refuse it, perhaps after a first part."""
    convert(source, tmp_path / "kernel")
    real, calls = os.copy_file_range, []

    def refuse_later(source: int, target: int, length: int, offset: int) -> int:
        calls.append(length)
        if len(calls) > 1:
            raise OSError(errno.EXDEV, "")
        return real(source, target, min(length, 100), offset)

    monkeypatch.setattr(os, "copy_file_range", refuse_later)
    convert(source, tmp_path / "refused")
    monkeypatch.delattr(os, "copy_file_range")
    convert(source, tmp_path / "absent")
    assert len(calls) > 10
    kernel = files_of(tmp_path / "kernel")
    assert files_of(tmp_path / "refused") == kernel and files_of(tmp_path / "absent") == kernel
