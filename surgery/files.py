"""The one place that creates files, and that reads small ones.

A folder may come from anywhere, so nobody's links are followed where we write. A file is made under
a temporary name that did not exist, then renamed; a link in its place is replaced, not followed. A
folder below the output's that is a link is an error. What is read must be a regular file of bounded
size, so that no pipe, device or endless file stops a run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from surgery.errors import SurgeryError

SIDE_LIMIT = 256_000_000  # bytes of a file that is copied beside the weights
JSON_LIMIT = 64_000_000  # bytes of a file that is parsed
_LOCAL = ("file", "local")  # schemes of URLs that are paths
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_url(location: str | Path) -> bool:
    """Return whether a location is elsewhere; file:// and local:// mean a path on this disk."""
    scheme, found, _ = str(location).partition("://")
    return bool(found) and scheme.lower() not in _LOCAL


def expanded(location: str | Path) -> Path:
    """Return the path that a location means, without file:// and with `~` as the home folder."""
    scheme, _, rest = str(location).partition("://")
    try:
        return Path(rest if scheme.lower() in _LOCAL and rest else location).expanduser()
    except RuntimeError:
        raise SurgeryError(
            f"{location} begins with a home folder that is not known", "give the whole path"
        ) from None


# --- writing --------------------------------------------------------------------------------------


def partial_name(name: str) -> str:
    """Return the temporary name of a file that is being written."""
    return f".{name}.partial"


def write(folder: Path, name: str, data: bytes, *, sync: bool = True) -> None:
    """Write a file that is either complete or absent.

    Args:
        folder: is made where it does not exist. It may be a link, because the user has named it.
        name: relative to the folder; folders in it are made.
        data: the content.
        sync: whether it is on the disk when this returns.

    Raises SurgeryError where a folder in `name` is a link, and OSError where the system refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _parent(folder, name, make=True) as (fd, last):
        partial = partial_name(last)
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=fd)
        with os.fdopen(os.open(partial, _CREATE, 0o666, dir_fd=fd), "wb") as f:
            f.write(data)
            f.flush()
            if sync:
                os.fsync(f.fileno())
        os.replace(partial, last, src_dir_fd=fd, dst_dir_fd=fd)


def create(path: Path) -> int:
    """Return the descriptor of a new file to write and read.

    Raises FileExistsError where anything has its name already.
    """
    return os.open(path, _CREATE, 0o666)


def mark(path: Path) -> None:
    """Make an empty file, unless there is one; several processes may do so at once."""
    with suppress(FileExistsError):
        os.close(create(path))


def open_lock(path: Path) -> int:
    """Return the descriptor of a lock file, which is made where it does not exist.

    Raises SurgeryError for a link or anything else that somebody has put in its place.
    """
    try:
        # A pipe without a reader does not block, because it is opened for both.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError:
        _refuse_link(path)
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise SurgeryError(f"{path} is no lock file of ours", "look at it, then remove it")
    return fd


@contextmanager
def _parent(folder: Path, name: str, make: bool) -> Iterator[tuple[int, str]]:
    """Open the folder of a file by its components, and give its descriptor and the last part."""
    *parts, last = PurePosixPath(name).parts or ("",)
    if not last or last == "/" or any(part in ("/", "..") for part in (*parts, last)):
        raise SurgeryError(f"{name!r} is outside {folder}", "do not use this checkpoint")
    fd, path = os.open(folder, _FOLDER), folder
    try:
        for part in parts:
            path /= part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
            try:
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            except OSError:
                _refuse_link(path)
                raise
            os.close(fd)
            fd = below
        yield fd, last
    finally:
        os.close(fd)


# --- reading --------------------------------------------------------------------------------------


def read(folder: Path, name: str, limit: int = SIDE_LIMIT) -> bytes:
    """Return the content of a small file below a folder, without following any link.

    Raises SurgeryError for a link, for anything but a regular file, and for one that is too large;
    FileNotFoundError where it is absent.
    """
    return _content(open_below(folder, name), folder / name, limit)


def open_below(folder: Path, name: str) -> int:
    """Return the descriptor of a regular file below a folder, to read, without following a link.

    Raises SurgeryError for a link and anything but a regular file; FileNotFoundError where it is
    absent.
    """
    path = folder / name
    with _parent(folder, name, make=False) as (parent, last):
        _refuse_link(path)
        require_regular(path)
        try:
            return os.open(last, _READ | os.O_NOFOLLOW, dir_fd=parent)
        except OSError:
            _refuse_link(path)
            raise


def content(path: Path, limit: int = SIDE_LIMIT) -> bytes:
    """Return the content of a small file; `path` may be a link to it.

    Raises SurgeryError for anything but a regular file, and for one that is too large.
    """
    return _content(open_regular(path), path, limit)


def open_regular(path: Path) -> int:
    """Return the descriptor of a regular file, to read. Raises SurgeryError for anything else."""
    require_regular(path)
    fd = os.open(path, _READ)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SurgeryError(f"{path} is no regular file", "put a copy of the file in its place")
    return fd


def require_regular(path: Path) -> None:
    """Raise SurgeryError unless a path is a regular file, or leads to one."""
    try:
        mode = path.stat().st_mode
    except OSError as e:
        if not path.is_symlink():
            raise
        raise SurgeryError(
            f"{path} is a link to {path.readlink()}, which cannot be read: {e.strerror}",
            "put a copy of the file in its place",
        ) from None
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "no file")
        leads = f" leads to {_target(path)}, which" if path.is_symlink() else ""
        raise SurgeryError(
            f"{path}{leads} is {kind}, not a regular file", "put a copy of the file in its place"
        )


def require_within(path: Path, folders: Sequence[Path]) -> Path:
    """Return the real path of a regular file.

    Args:
        path: the file, or a link to it.
        folders: the real paths of the folders that it must lie in one of.

    Raises SurgeryError where it lies elsewhere, and for anything but a regular file.
    """
    require_regular(path)
    real = path.resolve()
    if not any(real.is_relative_to(folder) for folder in folders):
        raise SurgeryError(
            f"{path} leads out of the checkpoint, to {real}",
            "if that file belongs to the checkpoint, put a copy of it in place of the link",
        )
    return real


def require_size(name: str, size: int, limit: int) -> None:
    """Raise SurgeryError where a file that is read as a whole is larger than `limit`."""
    if size > limit:
        raise SurgeryError(
            f"{name} has {size / 1e6:,.0f} MB, and such a file has {limit // 10**6} MB at most",
            "remove it from the folder if it is no part of the checkpoint",
        )


def _content(fd: int, path: Path, limit: int) -> bytes:
    with os.fdopen(fd, "rb") as f:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SurgeryError(f"{path} is no regular file", "put a copy of the file in its place")
        require_size(str(path), status.st_size, limit)
        data = f.read(limit + 1)
    require_size(str(path), len(data), limit)
    return data


def _refuse_link(path: Path) -> None:
    """Raise SurgeryError where a path is itself a link."""
    if path.is_symlink():
        raise SurgeryError(
            f"{path} is a link to {path.readlink()}, and links in it are not followed",
            "remove the link, or put what it leads to in its place",
        )


def _target(path: Path) -> str:
    """Return where a link leads."""
    try:
        return str(path.resolve())
    except (OSError, RuntimeError):
        return str(path.readlink())
