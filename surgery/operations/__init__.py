"""Operations: functions from checkpoint to checkpoint.

They know nothing of files, shards, processes or the screen, and never import each other. Each is a
file here with its function and its record, `OPERATION`; the file's name is the operation's.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from surgery.operations.operation import Operation

__all__ = ["Operation", "find", "known", "names"]


@cache
def names() -> tuple[str, ...]:
    """Return the names of all operations, sorted. Imports none of them."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    return tuple(sorted(f.stem for f in files if f.stem != "operation"))


@cache
def find(name: str) -> Operation:
    """Return the record of an operation. Raises KeyError for a name that is none."""
    if name not in names():
        raise KeyError(name)
    found: Operation = importlib.import_module(f"surgery.operations.{name}").OPERATION
    return found


def known(name: str) -> Operation | None:
    """Return the record of an operation, None for a name that is none."""
    return find(name) if name in names() else None
