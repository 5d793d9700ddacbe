"""How many bytes reading a source downloads, and how many of them are on this disk at once."""

from __future__ import annotations

from collections.abc import Iterable

from surgery.checkpoint.tensors import SourceFile
from surgery.storage.hub import HubFile
from surgery.storage.remote import RemoteFile
from surgery.storage.staging import KEEP, Staging


def bytes_to_fetch(files: Iterable[SourceFile]) -> int:
    """Return the bytes that are downloaded to read each of these files once."""
    return sum(_missing(f) for f in set(files))


def bytes_on_disk(files: Iterable[SourceFile]) -> int:
    """Return the most bytes that downloading these files takes on the disk of the caches.

    Of streamed shards only the largest few count, because no more are kept at a time.
    """
    missing: dict[Staging | None, list[int]] = {}
    for f in set(files):
        missing.setdefault(getattr(f, "staging", None), []).append(_missing(f))
    total = 0
    for staging, sizes in missing.items():
        total += sum(sorted(sizes, reverse=True)[: staging.keep if staging else None])
    return total


def bytes_streamed(order: Iterable[SourceFile]) -> int:
    """Return the bytes that are downloaded to read streamed shards in this order.

    A shard counts again whenever it had to make room for others since it was last read.
    """
    total, held = 0, dict[SourceFile, None]()
    for file in order:
        if file not in held:
            total += _missing(file)
            if len(held) == KEEP:
                del held[next(iter(held))]
        held.pop(file, None)
        held[file] = None
    return total


def is_streamed(file: SourceFile) -> bool:
    """Return whether a file may be downloaded again each time the source is read."""
    staging = getattr(file, "staging", None)
    return staging is not None and staging.keep is not None


def _missing(file: SourceFile) -> int:
    """Return the bytes of a file that are not on this disk yet."""
    if isinstance(file, HubFile):
        return file.missing
    return file.size if isinstance(file, RemoteFile) else 0
