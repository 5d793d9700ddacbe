"""The GGUF file format, version 3, written as a stream.

    "GGUF" · version · counts · metadata · one entry for each tensor · padding · values

Names, shapes, types and offsets stand before the first value, so the whole header is known before
anything is read, and values follow a few rows at a time. All numbers are little-endian, and every
value begins at a multiple of 32 bytes.

Specification: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from surgery.checkpoint import LazyTensor, Progress
from surgery.engines.quantise import TYPES, encode
from surgery.errors import SurgeryError

Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]

ALIGNMENT = 32
CHUNK = 1 << 22  # values in memory at a time, where rows can be read by themselves
_VERSION = 3
# By Python type: the number of the type in GGUF and how it is packed. bool comes before int.
_SCALARS = ((bool, 7, "<?"), (int, 4, "<I"), (float, 6, "<f"))
_STRING, _ARRAY = 8, 9
_ITEMS = {int: (5, "i"), float: (6, "f")}  # of arrays, whose whole numbers are signed


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of the file.

    Args:
        name: in the file.
        value: what it holds; the last dimension is the one that is quantised.
        type: a name in `TYPES`.
        leading: how many dimensions of 1 the file puts before those of `value`.
    """

    name: str
    value: LazyTensor
    type: str
    leading: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the file, the slowest dimension first."""
        return (1,) * self.leading + self.value.shape

    @property
    def nbytes(self) -> int:
        """Return the bytes of the value in the file, without padding."""
        kind = TYPES[self.type]
        return self.value.numel // kind.block * kind.nbytes

    @property
    def peak_memory(self) -> int:
        """Return about how many bytes are held while the value is written."""
        at_once = min(self.value.numel, max(CHUNK, self.value.shape[-1]))
        if not self.value.copied:
            at_once = self.value.numel
        return self.value.peak_memory + 16 * at_once

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the value, a few rows at a time.

        Raises SurgeryError for a value that the type cannot hold.
        """
        for part in _parts(self.value):
            yield encode(part.read().float().numpy(), self.type, self.name)


@dataclass(frozen=True, kw_only=True)
class File:
    """A GGUF file that has not been written.

    Args:
        metadata: values by key.
        tensors: in order.
        notes: what a user of the file should know.
    """

    metadata: Mapping[str, Value]
    tensors: Sequence[Tensor]
    notes: tuple[str, ...] = ()

    @cached_property
    def header(self) -> bytes:
        """Return everything before the first value."""
        head = b"GGUF" + struct.pack("<IQQ", _VERSION, len(self.tensors), len(self.metadata))
        fields = b"".join(_text(key) + _field(value) for key, value in self.metadata.items())
        entries, offset = [], 0
        for tensor in self.tensors:
            shape = tensor.shape[::-1]
            entries.append(
                _text(tensor.name)
                + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
                + struct.pack("<IQ", TYPES[tensor.type].number, offset)
            )
            offset += _padded(tensor.nbytes)
        whole = head + fields + b"".join(entries)
        return whole + bytes(_padded(len(whole)) - len(whole))

    @property
    def nbytes(self) -> int:
        """Return the size of the whole file."""
        return len(self.header) + sum(_padded(t.nbytes) for t in self.tensors)

    @property
    def peak_memory(self) -> int:
        """Return about how many bytes are held while the file is written."""
        return len(self.header) + max(t.peak_memory for t in self.tensors)

    def write(self, fd: int, progress: Progress) -> None:
        """Write the file to the descriptor `fd`, and tell `progress` the bytes.

        Raises SurgeryError for a value that its type cannot hold, and where a source ends early.
        """
        _write(fd, self.header, progress)
        for tensor in self.tensors:
            written = 0
            for chunk in tensor.chunks():
                _write(fd, chunk, progress)
                written += len(chunk)
            if written != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {written} bytes of {tensor.nbytes} planned")
            _write(fd, bytes(_padded(written) - written), progress)


def _parts(value: LazyTensor) -> Iterator[LazyTensor]:
    """Yield the rows of a value in parts of at most `CHUNK` values, where they can be read alone.

    What is computed is computed as a whole: part by part would repeat the work.
    """
    rows = max(1, CHUNK // math.prod(value.shape[1:]))
    if not value.copied or value.shape[0] <= rows:
        yield value
        return
    for start in range(0, value.shape[0], rows):
        yield value.rows(start, min(start + rows, value.shape[0]))


def _write(fd: int, data: bytes, progress: Progress) -> None:
    view = memoryview(data)
    while view:
        n = os.write(fd, view)
        view = view[n:]
        progress(n)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _field(value: Value) -> bytes:
    """Return the type of a field and its value."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, Sequence):
        return struct.pack("<I", _ARRAY) + _array(value)
    number, packed = next((n, p) for kind, n, p in _SCALARS if isinstance(value, kind))
    try:
        return struct.pack("<I", number) + struct.pack(packed, value)
    except (struct.error, OverflowError):
        raise SurgeryError(
            f"the config holds {value}, which no field of a GGUF file can hold",
            "check the config.json of the source",
        ) from None


def _array(values: Sequence[str] | Sequence[int] | Sequence[float]) -> bytes:
    """Return the type of the items, their number and the items. An empty array has texts."""
    if not values or isinstance(values[0], str):
        items = b"".join(_text(str(v)) for v in values)
        return struct.pack("<IQ", _STRING, len(values)) + items
    number, letter = _ITEMS[type(values[0])]
    return struct.pack("<IQ", number, len(values)) + struct.pack(f"<{len(values)}{letter}", *values)
