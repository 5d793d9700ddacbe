"""Write one shard to a file.

Bytes of source files are copied inside the kernel (`copy_file_range`), and computed values are
written one tensor at a time. A thread follows behind, which hashes and flushes what was written.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path

from surgery import files
from surgery.checkpoint import Progress
from surgery.checkpoint.plan import Shard
from surgery.checkpoint.tensors import Extent, LazyTensor
from surgery.errors import SurgeryError
from surgery.storage.digest import Digest, Hasher, planned

CHUNK = 64 << 20  # bytes in a step of the progress bar and of the kernel's copy
WINDOW = 256 << 20  # bytes written between two flushes


def stream(shard: Shard, partial: Path, hashed: bool, progress: Progress) -> Digest | None:
    """Write a shard to the new file `partial` and sync it.

    Args:
        shard: what to write.
        partial: where.
        hashed: whether to compute its digest, which is None otherwise.
        progress: told the bytes as they are written.

    Raises SurgeryError where a source file ends early.
    """
    hasher = Hasher(planned(shard)) if hashed else None
    with (
        os.fdopen(files.create(partial), "wb+", buffering=0) as f,
        _Follower(f.fileno(), hasher) as follower,
        _Descriptors() as sources,
    ):
        position = 0

        def advance(n: int) -> None:
            nonlocal position
            position += n
            follower.reach(position)
            progress(n)

        fd = f.fileno()
        if shard.verbatim:
            _copy(Extent(shard.verbatim, 0, shard.verbatim.size), fd, sources, advance)
        else:
            _write_all(fd, shard.header, advance)
            for _, tensor in shard.tensors:
                _write_tensor(tensor, fd, sources, advance)
        os.fsync(fd)
    return hasher.digest() if hasher else None


def _write_tensor(tensor: LazyTensor, fd: int, sources: _Descriptors, advance: Progress) -> None:
    """Append the value of a tensor to the file `fd`."""
    if tensor.compute is None:
        for part in tensor.inputs:
            _write_tensor(part, fd, sources, advance)
        for extent in tensor.extents:
            _copy(extent, fd, sources, advance)
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


# What `copy_file_range` fails with where a system or a file system cannot do it.
_NO_KERNEL_COPY = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EBADF,
    errno.EPERM,
)


def _copy(extent: Extent, target: int, sources: _Descriptors, advance: Progress) -> None:
    """Append the bytes of an extent to the file `target`."""
    source, offset, length = sources.open(extent.file.path()), extent.offset, extent.length
    while length:
        n = _copy_some(source, target, offset, min(length, CHUNK))
        if not n:
            raise SurgeryError(
                f"{extent.file.name} ended early: it was truncated while it was read",
                "restore the source, then run the same command again",
            )
        offset, length = offset + n, length - n
        advance(n)


def _copy_some(source: int, target: int, offset: int, length: int) -> int:
    """Append up to `length` bytes, inside the kernel where possible, and return how many."""
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
    """The descriptors of source files, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> _Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def open(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = files.open_regular(path)
        return self._open[path]


class _Follower:
    """A thread that follows the writer through a file.

    It hashes what has been written while that is still in the page cache, then sends it to the disk
    and gives its pages back. So the sync at the end is short, and a conversion of any size neither
    fills the memory with dirty pages nor drives other programs' files out of the cache.
    """

    def __init__(self, fd: int, hasher: Hasher | None) -> None:
        self._fd, self._hasher = fd, hasher
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
        """Tell the thread that the file has been written up to `position`."""
        self._reached.put(position)

    def _run(self) -> None:
        try:
            flushed = hashed = 0
            while (end := self._reached.get()) is not None:
                if self._hasher:
                    hashed = _hash_range(self._fd, hashed, end, self._hasher)
                if end - flushed >= WINDOW:
                    _flush(self._fd, flushed, end)
                    flushed = end
        except BaseException as e:  # It is raised again in the writer's thread.
            self._error = e


def _hash_range(fd: int, position: int, end: int, hasher: Hasher) -> int:
    buffer = memoryview(bytearray(4 << 20))
    while position < end:
        n = _read_at(fd, buffer[: min(len(buffer), end - position)], position)
        hasher.update(buffer[:n])
        position += n
    return position


def _read_at(fd: int, buffer: memoryview, position: int) -> int:
    """Fill the buffer from a position of a file that another thread appends to; return how much."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], position)
    data = os.pread(fd, len(buffer), position)
    buffer[: len(data)] = data
    return len(data)


def _flush(fd: int, start: int, end: int) -> None:
    os.fsync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
