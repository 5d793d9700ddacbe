"""Write a plan: one tensor at a time, straight to its place in its shard.

Extents are copied by the kernel (`copy_file_range`, which shares the blocks on file systems that can), so memory stays
flat whatever the size. A shard has a temporary name until it is whole and synced; config.json comes last, so a folder
that has one is whole. `surgery.partial.json` marks a folder as ours and unfinished, and holds the plan's fingerprint:
the same command goes on from the finished shards, another one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from surgery.checkpoint.checkpoint import Checkpoint
from surgery.checkpoint.compat import dump
from surgery.checkpoint.files import bytes_to_fetch
from surgery.checkpoint.plan import INDEX, Plan, Shard
from surgery.checkpoint.tensors import LazyTensor, SourceFile
from surgery.errors import SurgeryError

MARKER = "surgery.partial.json"
RECORD = "surgery.json"
CHUNK = 64 << 20  # a step of the progress bar, and of the kernel's copy
WINDOW = 256 << 20  # what is written between two flushes
SLACK = 16 << 20  # left free on the disk

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What was written where: the sha256 of each shard (where asked for), how many shards an earlier run had finished."""

    folder: Path
    sha256: dict[str, str | None]
    resumed: int


def write(plan: Plan, out: Path, *, source: Checkpoint, hardlink: bool = False, hashed: bool = True,
          progress: Progress = lambda n: None) -> Written:  # fmt: skip
    """Write the plan to the folder `out`, or go on with it. `progress` is told the bytes as they are written.

    Args:
        hardlink: where a shard is a source file unchanged, link to it instead of copying (same file system only).
        hashed: take each shard's sha256 while it is written; linked and already finished shards are not read for it.

    Raises SurgeryError, before the first byte, for a folder that is not ours to write or a disk that is too small.
    """
    check_target(plan, out, source)
    check_space(plan, out, hardlink)
    out.mkdir(parents=True, exist_ok=True)
    with _claimed(plan, out):
        done = {s.name for s in plan.shards if _has(out / s.name, s.nbytes)}
        for name in plan.small:
            if name not in (INDEX, "config.json"):
                _write_small(out / name, plan.small[name])
        progress(sum(s.nbytes for s in plan.shards if s.name in done))
        todo = [s for s in plan.shards if s.name not in done]
        sha256 = {s.name: _write_shard(s, out, hardlink, hashed, progress) for s in todo}
        for name in (INDEX, "config.json"):
            if name in plan.small:
                _write_small(out / name, plan.small[name])
        _sync_folder(out)
    return Written(folder=out, sha256=sha256, resumed=len(done))


def finish(out: Path, record: dict[str, object]) -> None:
    """Write surgery.json, and take the mark of an unfinished output away."""
    _write_small(out / RECORD, dump(record))
    (out / MARKER).unlink(missing_ok=True)
    _sync_folder(out)


# --- the folder ----------------------------------------------------------------------------------------------------


def check_target(plan: Plan, out: Path, source: Checkpoint) -> None:
    """Refuse a folder inside the source or the hub cache, and one that is not an unfinished output of this plan."""
    resolved = out.resolve()
    for folder, what in ((source.source.folder, "the source"), (_hub_cache(), "the hub cache")):
        if folder and resolved.is_relative_to(Path(folder).resolve()):
            raise SurgeryError(f"the output {out} would stand inside {what} {folder}", "give another folder with --out")
    if out.exists() and not out.is_dir():
        raise SurgeryError(f"the output {out} is a file", "give a folder with --out")
    if not out.exists() or all(p.name == _partial(out / MARKER).name for p in out.iterdir()):
        return  # nothing, or killed before the mark was whole
    begun = _fingerprint_of(out / MARKER)
    if begun is None and (finished := _fingerprint_of(out / RECORD)) is None:
        raise SurgeryError(f"the folder {out} is not empty and not an output of surgery",
                           "give a new folder with --out, or empty this one")  # fmt: skip
    if (begun or finished) != plan.fingerprint:
        state = "unfinished" if begun else "finished"
        raise SurgeryError(f"{out} holds the {state} output of another command, source or version",
                           f"remove it (rm -r {out}) or give another folder with --out")  # fmt: skip


def is_finished(plan: Plan, out: Path) -> bool:
    """Whether `out` holds the finished output of this very plan."""
    whole = all(_has(out / s.name, s.nbytes) for s in plan.shards) and all(
        (out / name).is_file() for name in plan.small
    )
    return whole and not (out / MARKER).exists() and _fingerprint_of(out / RECORD) == plan.fingerprint


def _fingerprint_of(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_bytes())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hub_cache() -> Path:
    """Without importing huggingface_hub, which reads the same variables."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")  # noqa: PTH118
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


@contextlib.contextmanager
def _claimed(plan: Plan, out: Path) -> Iterator[None]:
    """Mark the folder as ours and hold a lock on the mark: a second run into the same folder is refused."""
    marker = out / MARKER
    if not marker.exists():
        _write_small(marker, dump({"fingerprint": plan.fingerprint}))
    with marker.open("rb") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise SurgeryError(f"another process is writing {out}", "wait for it, or give another --out") from None
        yield


def check_space(plan: Plan, out: Path, hardlink: bool) -> None:
    """Refuse what does not fit: the shards still to be written, and beside them what is fetched for them."""
    todo = [s for s in plan.shards if not _has(out / s.name, s.nbytes)]
    needed = sum(s.nbytes for s in todo if not (hardlink and s.verbatim))
    fetched = bytes_to_fetch(file for s in todo for file in _sources(s))
    if not fetched or _disk(out) == _disk(_hub_cache()):
        downloads = f" with {fetched / 1e9:.2f} GB of downloads" if fetched else ""
        _require_space(out, needed + fetched, downloads, "--out")
    else:
        _require_space(out, needed, "", "--out")
        _require_space(_hub_cache(), fetched, " of downloads", "HF_HUB_CACHE")


def _require_space(folder: Path, needed: int, what: str, option: str) -> None:
    free = shutil.disk_usage(_existing(folder)).free
    if needed + SLACK > free:
        raise SurgeryError(f"{folder} needs {needed / 1e9:.2f} GB{what} and the disk has {free / 1e9:.2f} GB free",
                           f"free some space, or give a folder on another disk with {option}")  # fmt: skip


def _sources(shard: Shard) -> Iterator[SourceFile]:
    """The source files that the shard is made of."""
    if shard.verbatim:
        yield shard.verbatim
    for _, tensor in shard.tensors:
        yield from (extent.file for extent in tensor.sources())


def _existing(folder: Path) -> Path:
    return next(p for p in (folder, *folder.resolve().parents) if p.exists())


def _disk(folder: Path) -> int:
    return _existing(folder).stat().st_dev


# --- a file --------------------------------------------------------------------------------------------------------


def _write_small(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    with partial.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    partial.replace(path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_shard(shard: Shard, out: Path, hardlink: bool, hashed: bool, progress: Progress) -> str | None:
    """Write one shard under a temporary name, sync it, rename it; its sha256 where that was asked for."""
    partial = _partial(out / shard.name)
    partial.unlink(missing_ok=True)
    digest = None
    if hardlink and shard.verbatim and _link(shard.verbatim, partial):
        progress(shard.nbytes)
    else:
        digest = _stream(shard, partial, hashed, progress)
    partial.replace(out / shard.name)
    return digest


def _link(source: SourceFile, partial: Path) -> bool:
    """A hard link to the source's file (not to a symlink of the hub cache); False on another file system."""
    try:
        os.link(source.path().resolve(), partial)
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        return False
    return True


def _stream(shard: Shard, partial: Path, hashed: bool, progress: Progress) -> str | None:
    with partial.open("wb+", buffering=0) as f, _Follower(partial, hashed) as follower, _Descriptors() as sources:
        position = 0

        def advance(n: int) -> None:
            nonlocal position
            position += n
            follower.reach(position)
            progress(n)

        fd = f.fileno()
        if shard.verbatim:
            _copy(sources.open(shard.verbatim.path()), fd, 0, shard.verbatim.size, shard.verbatim.name, advance)
        else:
            _write_all(fd, shard.header, advance)
            for _, tensor in shard.tensors:
                _write_tensor(tensor, fd, sources, advance)
        os.fsync(fd)
    return follower.hexdigest()


def _write_tensor(tensor: LazyTensor, fd: int, sources: _Descriptors, advance: Progress) -> None:
    if tensor.compute is None:
        for e in tensor.extents:
            _copy(sources.open(e.file.path()), fd, e.offset, e.length, e.file.name, advance)
    elif tensor.nbytes:
        import torch

        value = tensor.read()
        _write_all(fd, memoryview(value.reshape(-1).view(torch.uint8).numpy()), advance)


def _write_all(fd: int, data: bytes | memoryview, advance: Progress) -> None:
    view = memoryview(data)
    while view:
        n = os.write(fd, view[:CHUNK])
        view = view[n:]
        advance(n)


_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM)


def _copy(source: int, target: int, offset: int, length: int, name: str, advance: Progress) -> None:
    """Append `length` bytes of `source` from `offset` to `target`, inside the kernel where it can."""
    while length:
        n = _copy_some(source, target, offset, min(length, CHUNK))
        if not n:
            raise SurgeryError(f"{name} ended early: it was truncated while it was read",
                               "restore the source, then run the same command again")  # fmt: skip
        offset, length = offset + n, length - n
        advance(n)


def _copy_some(source: int, target: int, offset: int, length: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, length, offset)
        except OSError as e:
            if e.errno not in _NO_KERNEL_COPY:
                raise
    view = memoryview(os.pread(source, min(length, 4 << 20), offset))
    size = len(view)
    while view:
        view = view[os.write(target, view) :]
    return size


class _Descriptors:
    """Source files, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> _Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def open(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]


class _Follower:
    """A thread behind the writer: hashes what has been written while it is warm in the page cache, then sends it to
    the disk and gives its pages back. So the sync at the end is short, and a conversion of any size neither fills the
    memory with dirty pages nor drives other programs' files out of the cache."""

    def __init__(self, path: Path, hashed: bool) -> None:
        self._path, self._hash = path, hashlib.sha256() if hashed else None
        self._reached = queue.SimpleQueue[int | None]()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._reached.put(None)
        self._thread.join()
        if self._error:
            raise self._error

    def reach(self, position: int) -> None:
        self._reached.put(position)

    def hexdigest(self) -> str | None:
        return self._hash.hexdigest() if self._hash else None

    def _run(self) -> None:
        try:
            flushed = hashed = 0
            with self._path.open("rb+", buffering=0) as f:
                while (end := self._reached.get()) is not None:
                    if self._hash:
                        hashed = _hash_range(f, hashed, end, self._hash)
                    if end - flushed >= WINDOW:
                        _flush(f.fileno(), flushed, end)
                        flushed = end
        except BaseException as e:  # handed to the writer's thread
            self._error = e


def _hash_range(f: io.FileIO, position: int, end: int, h: hashlib._Hash) -> int:
    buffer = memoryview(bytearray(4 << 20))
    f.seek(position)
    while position < end:
        n = f.readinto(buffer[: min(len(buffer), end - position)])
        h.update(buffer[:n])
        position += n
    return position


def _flush(fd: int, start: int, end: int) -> None:
    os.fsync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


def hash_file(path: Path, progress: Progress = lambda n: None) -> str:
    """sha256 of a file, as hexadecimal digits."""
    h, buffer = hashlib.sha256(), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(buffer):
            h.update(buffer[:n])
            progress(n)
    return h.hexdigest()
