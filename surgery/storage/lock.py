"""A lock on an output folder, so that one run at a time writes into it.

A kernel lock (flock, which NFS and Lustre pass on to their servers) is released when the process
that holds it ends, however it ends. Where the file system has no such locks, a file that only one
process can create says who holds the folder. If the holder is a process of this machine that has
ended, the file is taken over. Nothing is known of a process on another machine, so a person has to
remove its file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.checkpoint.parsing import is_number
from surgery.errors import SurgeryError
from surgery.files import create, open_lock, read

LOCK = ".surgery.lock"  # with kernel locks
HELD = ".surgery.held"  # without
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder while the context lasts.

    The folder is created where it does not exist, and removed again if it is still empty at the
    end. Raises SurgeryError where another process holds it.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path, fd = _take(folder)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()} {socket.gethostname()}\n".encode())
        yield
    finally:
        # The file is removed before the lock is released, so that nobody else's file is removed.
        path.unlink(missing_ok=True)
        os.close(fd)
        if made:
            with suppress(OSError):  # The folder is not empty.
                folder.rmdir()


def _take(folder: Path) -> tuple[Path, int]:
    """Return the lock file and its descriptor. Raises SurgeryError where another holds the lock."""
    path = folder / LOCK
    while True:
        # Open for writing, because NFS locks nothing else.
        fd = open_lock(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            if e.errno in _BUSY:
                raise _busy(path, "wait for it, or give another --out") from None
            if e.errno not in _NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
            return folder / HELD, _create(folder / HELD)
        if _is_at(fd, path):
            return path, fd
        # The process that held the lock has removed the file since it was opened here.
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _create(path: Path) -> int:
    """Return the descriptor of a file that did not exist, for file systems without locks."""
    while True:
        try:
            return create(path)
        except FileExistsError:
            if not _is_left_over(path):
                raise _busy(path, f"wait for it; if it has ended, remove {path}") from None
            path.unlink(missing_ok=True)


def _is_left_over(path: Path) -> bool:
    """Return whether the file was made by a process of this machine that has ended."""
    pid, _, host = _holder(path).partition(" ")
    if host != socket.gethostname() or not is_number(pid):
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # It is another user's process.
    return False


def _holder(path: Path) -> str:
    """Return the content of a lock file, "PID HOST", or "" where it cannot be read."""
    try:
        return read(path.parent, path.name, 1000).decode(errors="replace").strip()
    except (OSError, SurgeryError):
        return ""


def _busy(path: Path, hint: str) -> SurgeryError:
    pid, _, host = _holder(path).partition(" ")
    who = f": {pid} on {host}" if host else ""
    return SurgeryError(f"another process is writing {path.parent}{who}", hint)
