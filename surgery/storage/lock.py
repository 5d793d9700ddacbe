"""One run at a time in an output folder.

A kernel lock (flock, which NFS and Lustre pass on to their servers) goes with the process that
holds it, however it ends. Where the file system has none, a file that only one process can create
says who holds the folder: on this machine that process is looked for, of another machine's nothing
is known, and a person has to remove the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.errors import SurgeryError

LOCK, HELD = ".surgery.lock", ".surgery.held"  # with kernel locks, and without
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made where it is not there, and goes again if nothing comes into
    it.

    Raises SurgeryError where another process holds it.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path, fd = _take(folder)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()} {socket.gethostname()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock goes: nobody removes another's file
        os.close(fd)
        if made:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _take(folder: Path) -> tuple[Path, int]:
    path = folder / LOCK
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only what is open for writing
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
        os.close(fd)  # the one who held it has removed it since it was opened


def _is_at(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _create(path: Path) -> int:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if not _is_left_over(path):
                raise _busy(path, f"wait for it; if it is gone, remove {path}") from None
            path.unlink(missing_ok=True)


def _is_left_over(path: Path) -> bool:
    """Whether a process of this machine made it that is no more."""
    pid, _, host = _holder(path).partition(" ")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _busy(path: Path, hint: str) -> SurgeryError:
    pid, _, host = _holder(path).partition(" ")
    who = f": {pid} on {host}" if host else ""
    return SurgeryError(f"another process is writing {path.parent}{who}", hint)
