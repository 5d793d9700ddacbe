"""The header of a safetensors file: eight bytes of length, then JSON, then the data.

Read without the library because a header must be had from a range request as well as from a file,
must be written before any value exists, and because a hostile one must be refused before anything
is allocated for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from surgery.checkpoint.tensors import DTYPES, Extent, LazyTensor, SourceFile
from surgery.errors import SurgeryError

MAX_HEADER = 100_000_000  # the library's own limit
FIRST_READ = 256 * 1024  # holds the header of nearly every shard: one request instead of two
MAX_RANK, MAX_NAME = 64, 1000
_AGAIN = "the file is damaged or was not downloaded whole: fetch it again"


def read_header(file: SourceFile, read: Callable[[int, int], bytes]) -> dict[str, LazyTensor]:
    """The tensors of a safetensors file, from its header alone. `read(start, stop)` returns those
    bytes of the file.

    Raises SurgeryError where the header does not describe the file.
    """
    if file.size < 8:
        raise SurgeryError(f"{file.name} is {file.size} bytes long: not a safetensors file", _AGAIN)
    start = read(0, min(file.size, FIRST_READ))
    length = int.from_bytes(start[:8], "little")
    if length > min(file.size - 8, MAX_HEADER):
        raise SurgeryError(
            f"{file.name} says its header is {length:,} bytes, in a file of {file.size:,} bytes",
            _AGAIN,
        )
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += read(len(start), 8 + length)
    return _parse(raw, file, 8 + length)


def _parse(raw: bytes, file: SourceFile, data: int) -> dict[str, LazyTensor]:
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise SurgeryError(f"{file.name} has a header that is not JSON ({e})", _AGAIN) from None
    if not isinstance(entries, dict):
        raise SurgeryError(f"{file.name} has a header that is no JSON object", _AGAIN)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, file, data) for name, entry in entries.items()}
    _check_coverage(tensors, file, data)
    return tensors


def _tensor(name: str, entry: Any, file: SourceFile, data: int) -> LazyTensor:
    if not name.isprintable() or len(name) > MAX_NAME or not _well_formed(entry):
        raise SurgeryError(f"{file.name} has a malformed header entry for {name[:200]!r}", _AGAIN)
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise SurgeryError(
            f"{name} in {file.name} has the dtype {dtype!r}, which is not supported",
            f"supported: {', '.join(DTYPES)}",
        )
    if stop - start != math.prod(shape) * DTYPES[dtype][0] or data + stop > file.size:
        raise SurgeryError(
            f"{name} in {file.name}: {dtype} {list(shape)} does not fit bytes {start}:{stop} "
            f"of a file of {file.size:,} bytes",
            _AGAIN,
        )
    return LazyTensor(dtype, shape, (Extent(file, data + start, stop - start),))


def _well_formed(entry: Any) -> bool:
    """Whether dtype is a short string, shape and both offsets are 64-bit sizes, and the rank is one
    that torch has.
    """
    if not isinstance(entry, dict):
        return False
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (
        isinstance(dtype, str)
        and len(dtype) < 32
        and isinstance(shape, list)
        and isinstance(offsets, list)
    ):
        return False
    numbers = all(type(n) is int and 0 <= n < 2**63 for n in (*shape, *offsets))
    return numbers and len(shape) <= MAX_RANK and len(offsets) == 2 and offsets[0] <= offsets[1]


def _check_coverage(tensors: dict[str, LazyTensor], file: SourceFile, data: int) -> None:
    """The tensors must tile the data: no overlap, no hole."""
    position = data
    for extent in sorted(
        (t.extents[0] for t in tensors.values()), key=lambda e: (e.offset, e.length)
    ):
        if extent.offset != position:
            raise SurgeryError(
                f"{file.name}: tensors overlap or leave a hole at byte {position:,}", _AGAIN
            )
        position += extent.length
    if position != file.size:
        raise SurgeryError(
            f"{file.name} is {file.size:,} bytes long, its header describes {position:,}", _AGAIN
        )


def make_header(tensors: Iterable[tuple[str, LazyTensor]]) -> bytes:
    """The header of a file that holds the tensors in this order, its length included, padded to 8
    bytes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, t in tensors:
        entries[name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [position, position + t.nbytes],
        }
        position += t.nbytes
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw
