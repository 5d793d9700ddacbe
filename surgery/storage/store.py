"""The files of a source, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from surgery.checkpoint.tensors import SourceFile


class File(SourceFile, Protocol):
    """A file of a source that can also be read in part, without downloading all of it."""

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop)."""
        ...


@dataclass(frozen=True, slots=True)
class Store:
    """The files of one checkpoint.

    Args:
        location: what the user called it: a path, a Hub id or a URL.
        revision: the commit that a Hub id was pinned to.
        folder: the folder that no output may touch: the checkpoint's own, or the Hub cache.
        files: the files by name, relative to the checkpoint.
        root: the folder that the files are in, where they are on this disk.
    """

    location: str
    revision: str | None
    folder: Path | None
    files: dict[str, File]
    root: Path | None = None
