"""A small file of an output that is in no source: code that goes along."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """`data` under a name."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def identity(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def path(self) -> Path:
        """A copy in a temporary folder that lasts as long as the process."""
        path = Path(_folder().name) / self.identity[:16]
        if not path.is_file():
            path.write_bytes(self.data)
        return path


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="surgery-")
