"""The header of a safetensors file: eight bytes of length, then JSON, then the data.

The safetensors library is not used here, for three reasons: a header must be readable from a range
request as well as from a file, it must be writable before any value exists, and a hostile header
must be refused before anything is allocated for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from surgery.checkpoint.parsing import read_json
from surgery.checkpoint.tensors import DTYPES, Extent, LazyTensor, SourceFile
from surgery.errors import SurgeryError

MAX_HEADER = 100_000_000  # the library's own limit
FIRST_READ = 256 * 1024  # holds the header of nearly every shard: one request instead of two
MAX_RANK, MAX_NAME = 64, 1000
_AGAIN = "the file is damaged or incomplete: download it again"


def read_header(file: SourceFile, read: Callable[[int, int], bytes]) -> dict[str, LazyTensor]:
    """Return the tensors of a safetensors file by name, from its header alone.

    Args:
        file: the file, to which the extents of the tensors refer.
        read: returns the bytes [start, stop) of the file.

    Raises SurgeryError where the header does not describe the file.
    """
    if file.size < 8:
        raise SurgeryError(
            f"{file.name} has {file.size} bytes, too few for a safetensors file", _AGAIN
        )
    start = read(0, min(file.size, FIRST_READ))
    length = int.from_bytes(start[:8], "little")
    if length > min(file.size - 8, MAX_HEADER):
        raise SurgeryError(
            f"{file.name} declares a header of {length:,} bytes in a file of {file.size:,} bytes",
            _AGAIN,
        )
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += read(len(start), 8 + length)
    return _parse(raw, file, 8 + length)


def _parse(raw: bytes, file: SourceFile, data: int) -> dict[str, LazyTensor]:
    entries = _entries(raw, file)
    _check_metadata(entries.pop("__metadata__", None), file)
    tensors = {name: _tensor(name, entry, file, data) for name, entry in entries.items()}
    _check_coverage(tensors, file, data)
    return tensors


def _entries(raw: bytes, file: SourceFile) -> dict[str, Any]:
    """Return the JSON object in a header, read as strictly as the safetensors library reads it.

    Python's reader alone would also take UTF-16, a byte order mark, and Infinity.
    """
    where = f"the header of {file.name}"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise SurgeryError(f"{where} is not UTF-8: {e.reason}", _AGAIN) from None
    entries = read_json(text, where, _AGAIN, finite=True)
    if not isinstance(entries, dict):
        raise SurgeryError(f"{file.name} has a header that is not a JSON object", _AGAIN)
    return entries


def _check_metadata(metadata: Any, file: SourceFile) -> None:
    """Raise SurgeryError unless `__metadata__` is absent or maps texts to texts."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise SurgeryError(
            f"{file.name} has a __metadata__ that is not an object of texts",
            "save it again with the safetensors library, which would refuse to read it",
        )


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
    """Return whether a header entry has the right types.

    The dtype must be a short string, the shape and both offsets 64-bit sizes, and the rank one that
    torch supports.
    """
    if not isinstance(entry, dict):
        return False
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and len(dtype) < 32):
        return False
    if not (isinstance(shape, list) and isinstance(offsets, list)):
        return False
    numbers = all(type(n) is int and 0 <= n < 2**63 for n in (*shape, *offsets))
    return numbers and len(shape) <= MAX_RANK and len(offsets) == 2 and offsets[0] <= offsets[1]


def _check_coverage(tensors: dict[str, LazyTensor], file: SourceFile, data: int) -> None:
    """Raise SurgeryError unless the tensors cover the data without an overlap or a hole."""
    position = data
    extents = (t.extents[0] for t in tensors.values())
    for extent in sorted(extents, key=lambda e: (e.offset, e.length)):
        if extent.offset != position:
            raise SurgeryError(
                f"{file.name}: tensors overlap or leave a hole at byte {position:,}", _AGAIN
            )
        position += extent.length
    if position != file.size:
        raise SurgeryError(
            f"{file.name} has {file.size:,} bytes, but its header describes {position:,}", _AGAIN
        )


def make_header(tensors: Iterable[tuple[str, LazyTensor]]) -> bytes:
    """Return the header of a file that holds the tensors in this order.

    The header begins with its length and is padded to a multiple of 8 bytes.
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
