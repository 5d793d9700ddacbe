"""Sources on this disk: a folder, or the folder of a single weight file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surgery.storage.store import File, Store


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this disk.

    Args:
        name: its name relative to the checkpoint.
        size: bytes.
        identity: the commit for a file of a pinned Hub repository, else size and change time.
        location: where it is.
    """

    name: str
    size: int
    identity: str
    location: Path

    def path(self) -> Path:
        return self.location

    def read(self, start: int, stop: int) -> bytes:
        with self.location.open("rb") as f:
            f.seek(start)
            return f.read(stop - start)


def open_folder(
    path: Path, *, location: str = "", revision: str | None = None, only: str | None = None
) -> Store:
    """Return the files below a folder, two levels deep and without hidden ones.

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
        if name.startswith(".") or "/." in name or not p.is_file():
            continue
        if only and _is_weights(name) and name != only:
            continue
        stat = p.stat()
        identity = f"{location}@{revision}" if revision else f"{stat.st_size}-{stat.st_mtime_ns}"
        files[name] = LocalFile(name, stat.st_size, identity, p)
    return Store(location or str(path), revision, path, files)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".index.json"))
