"""A small file that is generated for an output, such as the code of custom-code blocks."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from functools import cache
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


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="surgery-")
