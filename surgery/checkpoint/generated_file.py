"""Small files that are generated for an output, such as the code of custom-code blocks."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from surgery import files


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """A side file whose content is in memory instead of in the source."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def identity(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def path(self) -> Path:
        """Return a copy on this disk, in a temporary folder that lasts as long as the process."""
        folder, name = Path(_folder().name), self.identity[:16]
        if not (folder / name).is_file():
            files.write(folder, name, self.data, sync=False)
        return folder / name


@dataclass(frozen=True)
class BuiltFile:
    """A side file that is made of a file of the source, when it is first read.

    Args:
        name: its name.
        identity: a text that changes whenever the content may.
        build: returns the content.
    """

    name: str
    identity: str
    build: Callable[[], bytes] = field(compare=False)

    @cached_property
    def _made(self) -> GeneratedFile:
        return GeneratedFile(self.name, self.build())

    @property
    def size(self) -> int:
        return self._made.size

    def path(self) -> Path:
        """Return the file on this disk, where it lasts as long as the process."""
        return self._made.path()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="surgery-")
