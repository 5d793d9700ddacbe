"""Operations: functions from checkpoint to checkpoint.

They know nothing of files, shards, processes or the screen, and never import each other. Each is a
file here with its function and its record, `OPERATION`; the file's name is the operation's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError
from surgery.operations.operation import Operation

__all__ = ["TRAINED", "Operation", "check_step", "find", "known", "names"]

TRAINED = "finetune"  # the step that a fine-tune script adds to a record; no operation


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
    """Return the record of the operation of a step; None for training, which is none.

    Names come from records, which come from anywhere. Raises SurgeryError for any other name.
    """
    if name == TRAINED:
        return None
    if name not in names():
        raise SurgeryError(
            f"unknown operation {name[:100]!r}",
            f"known: {', '.join(names())}; a newer version of surgery may know it",
        )
    return find(name)


def check_step(step: Mapping[str, Any]) -> None:
    """Raise SurgeryError for a step of a record that no operation can have left."""
    operation = known(step["operation"])
    if operation is None:
        return
    tells = (operation.described, operation.suffix, operation.papers, operation.remedies)
    try:
        for tell in (*tells, operation.checks):
            tell(step)
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise SurgeryError(
            f"a step of {operation.name} has other parameters than the operation records "
            f"({type(e).__name__}: {str(e)[:100]})",
            "convert the model again",
        ) from None
