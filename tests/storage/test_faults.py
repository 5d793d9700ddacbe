"""Faults of disks and sources in the middle of a conversion.

Each is one error that names the file. The output never looks complete, and the same command then
finishes it with the bytes of an uninterrupted run.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support import COMMAND, Ran, assert_two_lines, environment, files_of, surgery, write_llama

from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.proof.integrity import damaged_shards
from surgery.storage import open_checkpoint
from surgery.storage.digest import HEADER
from surgery.storage.record import read_record
from surgery.workflow.convert import Result, convert_alone
from surgery.workflow.observer import Observer, Silent
from surgery.workflow.verify import verify_folder

SIZES = {"layers": 4, "hidden": 64, "ff": 256, "vocab": 500}


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path / "m", shards=3, **SIZES))


class After(Silent):
    """An observer that calls `happens` once, when `written` bytes of shards have been written."""

    def __init__(self, written: int, happens: Callable[[], None]) -> None:
        self.left, self.happens = written, happens

    def stage(self, title: str, total: int, unit: str) -> Any:
        return nullcontext(self.advance if title == "writing" else lambda n: None)

    def advance(self, n: int) -> None:
        before, self.left = self.left, self.left - n
        if before > 0 >= self.left:
            self.happens()


KINDS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "computed": lambda c: c.replace(tensors={n: t.cast("F32") for n, t in c.tensors.items()}),
    "extents": lambda c: upcycle(c, experts=2),
    "verbatim": lambda c: relufy(c, repair="none"),
}


def convert(
    source: Checkpoint, out: Path, kind: str = "extents", observer: Observer | None = None
) -> Result:
    size = None if kind == "verbatim" else 150_000
    return convert_alone(
        source, KINDS[kind](source), out, max_shard_size=size, verify=False, observer=observer
    )


def assert_not_whole(out: Path, whole: Path) -> None:
    """Assert that an output does not open, and that the shards under their final names are done."""
    with pytest.raises(SurgeryError):
        open_checkpoint(out)
    expected = files_of(whole)
    assert all(p.read_bytes() == expected[p.name] for p in out.glob("model*"))


# --- the disk -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    """Fill the disk, as another program may."""
    with (folder / "another's").open("wb") as f:
        try:
            while True:
                os.write(f.fileno(), bytes(1 << 12))
        except OSError as e:
            assert e.errno == errno.ENOSPC


@pytest.mark.parametrize("kind", ["computed", "extents"])
def test_a_disk_that_another_fills(
    kind: str, source: Checkpoint, tmp_path: Path, small_disk: Path
) -> None:
    """Another program fills the disk after the conversion has found enough room."""
    whole = tmp_path / "as" / "whole"  # as deep: the record names the source as seen from there
    convert(source, whole, kind)
    out = small_disk / "out"
    with pytest.raises(
        SurgeryError, match=r"cannot write .*model-\d+-of-\d+\.safetensors: No space left"
    ) as e:
        convert(source, out, kind, After(300_000, lambda: fill(small_disk)))
    assert e.value.hint == "free some space, then run the same command again"
    assert_not_whole(out, whole)
    (small_disk / "another's").unlink()
    assert convert(source, out, kind).resumed >= 1
    assert files_of(out) == files_of(whole)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("write", "computed"),
        ("copy_file_range", "extents"),
        ("copy_file_range", "verbatim"),
        ("fsync", "extents"),
        ("rename", "extents"),
    ],
)
def test_a_call_that_fails(
    call: str,
    kind: str,
    code: int,
    source: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever call the system refuses, the error names the file, and a later run finishes.

    Calls fail one after another, each run getting further: the third one, the sixth one, …
    """
    convert(source, tmp_path / "whole", kind)
    name, out, failures = {"rename": "replace"}.get(call, call), tmp_path / "out", 0
    real, calls = getattr(os, name), 0

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 * (failures + 1) and failures < 4:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, fail)
    while True:
        calls = 0
        try:
            convert(source, out, kind)
            break
        except SurgeryError as e:
            assert os.strerror(code) in e.message and f"cannot write {out}" in e.message
            assert "run the same command again" in e.hint
            failures += 1
        if not (out / "config.json").exists():
            assert_not_whole(out, tmp_path / "whole")
    assert failures >= 1
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The command line prints two lines and exits with 1, and finishes once the limit is lifted."""
    write_llama(tmp_path / "m", shards=3, **SIZES)
    size = ("--max-shard-size", "150KB")
    command = ("relufy", "m", "--repair", "none", "--no-verify", *size, "--out")
    assert surgery(*command, "whole", cwd=tmp_path).code == 0

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    done = subprocess.run(
        [*COMMAND, *command, "out"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    ran = Ran(done.returncode, done.stdout, done.stderr)
    words = ("cannot write out/model-00001-of-", "File too large", "free some space")
    assert_two_lines(ran, *words)
    assert_not_whole(tmp_path / "out", tmp_path / "whole")
    assert surgery(*command, "out", cwd=tmp_path).code == 0
    same = {n: d for n, d in files_of(tmp_path / "out").items() if n.startswith("model")}
    assert same == {n: d for n, d in files_of(tmp_path / "whole").items() if n.startswith("model")}


# --- the source -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["truncated", "removed"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_source_that_changes_meanwhile(
    kind: str, what: str, source: Checkpoint, tmp_path: Path
) -> None:
    """A source that changes is an error: zeros or a short shard would look like a model."""
    convert(source, tmp_path / "whole", kind)
    shard = tmp_path / "m" / "model-00003-of-00003.safetensors"
    kept, out = tmp_path / "kept", tmp_path / "out"
    shutil.copy2(shard, kept)

    def truncate() -> None:
        os.truncate(shard, shard.stat().st_size - 10)

    happens = shard.unlink if what == "removed" else truncate
    with pytest.raises(SurgeryError, match=r"model-00003-of-00003\.safetensors") as e:
        convert(source, out, kind, After(1, happens))
    assert "then run the same command again" in e.value.hint
    assert_not_whole(out, tmp_path / "whole")
    shutil.copy2(kept, shard)
    assert convert(open_checkpoint(tmp_path / "m"), out, kind).resumed >= 1
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_source_of_links_is_read_and_never_written(tmp_path: Path) -> None:
    """A source in the Hub cache consists of links to blobs, which other snapshots share.

    Even where a file of the output is a hard link to a blob, the next conversion into that folder
    replaces the link and leaves the blob alone.
    """
    repository = tmp_path / "models--tiny--llama"
    model, blobs = repository / "snapshots" / "0123", repository / "blobs"
    write_llama(model, shards=3, **SIZES)
    blobs.mkdir()
    for path in model.iterdir():
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)

    def state() -> dict[Path, tuple[int, int]]:
        return {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in blobs.iterdir()}

    before, modes = files_of(blobs), state()
    source = open_checkpoint(model)
    output, linked = relufy(source, repair="none"), tmp_path / "linked"
    for out in (tmp_path / "out", linked):
        convert_alone(source, output, out, verify=False, hardlink=out == linked)
        assert not any(p.is_symlink() for p in out.rglob("*"))
    (linked / "config.json").unlink()
    (linked / "model-00001-of-00003.safetensors").unlink()
    convert_alone(source, output, linked, verify=False)
    assert files_of(blobs) == before and state() == modes
    assert all(p.is_symlink() for p in model.iterdir())


def test_a_shard_is_on_the_disk_before_it_has_its_name(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, a file with its final name must have its bytes.

    So every file is synced under its temporary name and then renamed, and the folder is synced
    last.
    """
    done: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        done.append(("sync", Path(f"/proc/self/fd/{fd}").readlink().name))
        sync(fd)

    def rename(start: Any, end: Any, **options: Any) -> None:
        done.append(("rename", Path(end).name))
        replace(start, end, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    out = tmp_path / "out"
    convert(source, out)
    renamed = [name for what, name in done if what == "rename"]
    assert {p.name for p in out.iterdir() if p.is_file()} <= set(renamed)
    for name in renamed:
        i = done.index(("rename", name))
        assert done[i - 1] == ("sync", f".{name}.partial")
    assert done[-1] == ("sync", "out")


# --- the output -----------------------------------------------------------------------------------


def damage_of(source: Checkpoint, out: Path) -> tuple[str, ...]:
    """Return what the verification says of damaged shards."""
    rows = {r.check: r for r in verify_folder(source, out).rows}
    assert not rows["shards damaged"].passed
    return rows["shards damaged"].detail


@pytest.mark.parametrize("kind", ["extents", "verbatim"])
def test_a_flipped_bit_is_found_in_its_tensor(
    kind: str, source: Checkpoint, tmp_path: Path
) -> None:
    """The verification names the shard and the tensor or header in which a bit was flipped.

    When the bits have been flipped back, it finds nothing.
    """
    out = tmp_path / "out"
    size = None if kind == "verbatim" else 150_000
    convert_alone(source, KINDS[kind](source), out, max_shard_size=size)
    found = open_checkpoint(out)
    for name in ("model.layers.2.self_attn.q_proj.weight", "lm_head.weight", "model.norm.weight"):
        extent = found.tensors[name].extents[0]
        flip(out / extent.file.name, extent.offset + extent.length - 1)
        (detail,) = damage_of(source, out)
        assert detail.startswith(f"{extent.file.name} has sha256 ")
        assert detail.endswith(f": {name} differs")
        flip(out / extent.file.name, extent.offset + extent.length - 1)
    shard = next(out.glob("model-00001*"))
    flip(shard, 20)
    (detail,) = damage_of(source, out)
    assert shard.name in detail and f"{HEADER} differs" in detail
    flip(shard, 20)
    assert damaged_shards(out, read_record(out)["shards"])[0] == []


def flip(path: Path, position: int) -> None:
    """Flip one bit of the byte at a position of a file."""
    with path.open("r+b") as f:
        f.seek(position)
        (byte,) = f.read(1)
        f.seek(position)
        f.write(bytes([byte ^ 1]))


def test_a_shard_that_a_killed_run_left_is_covered_too(source: Checkpoint, tmp_path: Path) -> None:
    """A shard of a killed run was not hashed when it was written, but the record must have its
    hash.
    """
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert_alone(source, upcycle(source, experts=2), whole, max_shard_size=150_000)

    class Killed(Exception):  # noqa: N818
        pass

    def kill() -> None:
        raise Killed

    output, after = upcycle(source, experts=2), After(400_000, kill)
    with pytest.raises(Killed):
        convert_alone(source, output, out, max_shard_size=150_000, observer=after)
    assert convert_alone(source, output, out, max_shard_size=150_000).resumed >= 1
    assert files_of(out)["surgery.json"] == files_of(whole)["surgery.json"]
