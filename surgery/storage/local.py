"""Sources on this disk: a folder, or the folder of a single weight file."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from surgery.files import open_regular, require_regular, require_within
from surgery.storage.store import File, Store

# A folder with such a suffix is no folder of a checkpoint: something else should be there.
_SUFFIXES = (".json", ".model", ".txt", ".py", ".tiktoken", ".jinja", ".md", ".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this disk.

    Args:
        name: its name relative to the checkpoint.
        size: bytes.
        identity: the commit for a file of a pinned Hub repository, else size and change time.
        location: where it is.
        within: the real paths of folders that the file must lie in one of, even where it is a
            link. Empty for weights, which people keep where there is room.
    """

    name: str
    size: int
    identity: str
    location: Path
    within: tuple[Path, ...] = ()

    def path(self) -> Path:
        """Return where the file is.

        Raises SurgeryError for anything but a regular file, and where it must not be.
        """
        if self.within:
            return require_within(self.location, self.within)
        require_regular(self.location)
        return self.location

    def read(self, start: int, stop: int) -> bytes:
        with os.fdopen(open_regular(self.path()), "rb") as f:
            f.seek(start)
            return f.read(stop - start)

    def enclosed(self, folder: Path) -> LocalFile:
        """Return the file as one that must lie in the checkpoint's folder, or in its Hub cache.

        Raises SurgeryError where it does not.
        """
        inside = dataclasses.replace(self, within=places(folder))
        inside.path()
        return inside


def places(folder: Path) -> tuple[Path, ...]:
    """Return where the files of a folder may really lie.

    A snapshot of the Hub cache, models--OWNER--NAME/snapshots/COMMIT, consists of links into the
    folder `blobs` of its repository.
    """
    real = folder.resolve()
    repository = real.parent.parent
    cached = real.parent.name == "snapshots" and repository.name.startswith("models--")
    return (real, repository / "blobs") if cached else (real,)


def open_folder(
    path: Path, *, location: str = "", revision: str | None = None, only: str | None = None
) -> Store:
    """Return the files below a folder, two levels deep and without hidden ones.

    Whatever else has the name of a file is among them too, so that reading it is an error.

    Args:
        path: the folder.
        location: what the user called it; by default `path`.
        revision: the commit, where the folder is a snapshot in the Hub cache.
        only: the one weight file to keep, where the user named a file.
    """
    files: dict[str, File] = {}
    # No deeper than two levels, because the path may be a home folder by mistake.
    for p in sorted((*path.glob("*"), *path.glob("*/*"))):
        name = p.relative_to(path).as_posix()
        if name.startswith(".") or "/." in name or _is_plain_folder(p):
            continue
        if only and _is_weights(name) and name != only:
            continue
        size, changed = _size_and_time(p)
        identity = f"{location}@{revision}" if revision else f"{size}-{changed}"
        files[name] = LocalFile(name, size, identity, p)
    return Store(location or str(path), revision, path, files, path)


def _is_plain_folder(path: Path) -> bool:
    """Return whether a path is a folder whose name is not that of a file, like LICENSES."""
    return path.is_dir() and not (path.suffix and path.suffix.lower() in _SUFFIXES)


def _size_and_time(path: Path) -> tuple[int, int]:
    """Return the bytes of a file and when it changed; zeros for a link that leads nowhere."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".index.json"))
