"""Digests of shards: whether a shard is still what was written, and where it is not.

The sha256 of the file answers the first question, a CRC-32 of its header and of each tensor the
second.
"""

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
from surgery.storage.local import LocalFile

# "sha256": of the file. "crc32": of the header and then of each tensor in the order of the file,
# separated by spaces.
Digest = dict[str, str]
HEADER = "the header"  # stands for the name of a tensor where the header differs


class Hasher:
    """The digest of a file whose bytes come in order.

    Args:
        ends: the offsets at which the header and then each tensor end.
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
        crc32 = " ".join(f"{c:08x}" for c in self._crc32)
        return {"sha256": self._sha256.hexdigest(), "crc32": crc32}


def planned(shard: Shard) -> list[int]:
    """Return where the header and each tensor end in a shard that is to be written."""
    if shard.verbatim:
        return _ends(shard.tensors)
    sizes = (t.nbytes for _, t in shard.tensors)
    return list(itertools.accumulate(sizes, initial=len(shard.header)))


def _ends(tensors: Iterable[tuple[str, LazyTensor]]) -> list[int]:
    """Return where the header and each tensor end in the file that holds these tensors."""
    extents = [t.extents[0] for _, t in sorted(tensors, key=_place)]
    return [extents[0].offset, *(e.offset + e.length for e in extents)] if extents else []


def of_file(path: Path, progress: Progress = lambda n: None) -> Digest:
    """Return the digest of a shard on this disk.

    The CRC-32s are empty where its header cannot be read. `progress` is told the bytes read.
    """
    hasher, buffer = Hasher(_ends(_tensors(path))), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(buffer):
            hasher.update(buffer[:n])
            progress(n)
    return hasher.digest()


def differing(path: Path, expected: str, found: str) -> list[str]:
    """Return the names of the tensors that differ, or HEADER alone where the header does.

    Args:
        path: the shard on this disk.
        expected: the CRC-32s that were recorded.
        found: the CRC-32s that the shard has now.
    """
    before, after = expected.split(), found.split()
    if len(before) != len(after) or before[:1] != after[:1]:
        return [HEADER]
    ordered = sorted(_tensors(path), key=_place)
    return [name for (name, _), a, b in zip(ordered, before[1:], after[1:], strict=True) if a != b]


def _place(pair: tuple[str, LazyTensor]) -> tuple[int, int]:
    """Return a sort key by position in the file; an empty tensor comes before the next one."""
    extent = pair[1].extents[0]
    return extent.offset, extent.length


def _tensors(path: Path) -> list[tuple[str, LazyTensor]]:
    """Return the tensors of a shard, or none where its header cannot be read."""
    file = LocalFile(path.name, path.stat().st_size, "", path)
    try:
        return list(read_header(file, file.read).items())
    except SurgeryError:
        return []
