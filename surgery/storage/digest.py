"""What tells whether a shard is still what was written: its sha256, and a CRC-32 of its header and
of each tensor, which say where it is not."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterable
from pathlib import Path

from surgery.checkpoint import Progress
from surgery.checkpoint.header import read_header
from surgery.checkpoint.plan import Shard
from surgery.checkpoint.tensors import LazyTensor
from surgery.errors import SurgeryError
from surgery.storage.files import LocalFile

Digest = dict[
    str, str
]  # "sha256"; "crc32" of the header and then of each tensor as they lie in the file, a space between
HEADER = "the header"


class Hasher:
    """Both of a file whose bytes come in order. `ends`: where the header ends, and where each
    tensor does.
    """

    def __init__(self, ends: Iterable[int]) -> None:
        self._sha256, self._ends, self._position, self._part = hashlib.sha256(), list(ends), 0, 0
        self._crc32 = [0] * len(self._ends)

    def update(self, data: memoryview) -> None:
        self._sha256.update(data)
        while data and self._part < len(self._ends):
            piece = data[: self._ends[self._part] - self._position]
            self._crc32[self._part] = zlib.crc32(piece, self._crc32[self._part])
            self._position += len(piece)
            self._part += self._position == self._ends[self._part]
            data = data[len(piece) :]

    def digest(self) -> Digest:
        return {
            "sha256": self._sha256.hexdigest(),
            "crc32": " ".join(f"{c:08x}" for c in self._crc32),
        }


def planned(shard: Shard) -> list[int]:
    """`ends` of a shard that is written."""
    if shard.verbatim:
        return _ends(shard.tensors)
    return list(
        itertools.accumulate((t.nbytes for _, t in shard.tensors), initial=len(shard.header))
    )


def _ends(tensors: Iterable[tuple[str, LazyTensor]]) -> list[int]:
    """Of tensors that lie in one file."""
    extents = sorted((t.extents[0] for _, t in tensors), key=lambda e: (e.offset, e.length))
    return [extents[0].offset, *(e.offset + e.length for e in extents)] if extents else []


def of_file(path: Path, progress: Progress = lambda n: None) -> Digest:
    """Of a shard on the disk; without the parts where its header cannot be read."""
    hasher, buffer = Hasher(_ends(_tensors(path))), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(buffer):
            hasher.update(buffer[:n])
            progress(n)
    return hasher.digest()


def differing(path: Path, expected: str, found: str) -> list[str]:
    """What in the shard differs, by the CRC-32s of both: names of tensors, or the header."""
    before, after = expected.split(), found.split()
    if len(before) != len(after) or before[:1] != after[:1]:
        return [HEADER]
    ordered = sorted(
        _tensors(path), key=lambda pair: (pair[1].extents[0].offset, pair[1].extents[0].length)
    )
    return [name for (name, _), a, b in zip(ordered, before[1:], after[1:], strict=True) if a != b]


def _tensors(path: Path) -> list[tuple[str, LazyTensor]]:
    file = LocalFile(path.name, path.stat().st_size, "", path)
    try:
        return list(read_header(file, file.read).items())
    except SurgeryError:
        return []
