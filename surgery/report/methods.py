"""What a card and the command line say of a conversion's steps, from the operations' records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surgery import operations
from surgery.blocks.paper import Paper
from surgery.operations.operation import Operation, Parameters

_TRAINED = "Training recovers what the conversion cost, or makes use of what it added."


def done(operation: str, parameters: Parameters) -> str:
    """Return one phrase, as in "every MLP became 8 experts, 2 of them active for a token"."""
    record = operations.known(operation)
    return record.described(parameters) if record else "it was trained"


def why(operation: str) -> str:
    """Return the reason for an operation, in one or two sentences."""
    record = operations.known(operation)
    return record.why if record else _TRAINED


def limits(names: Sequence[str]) -> list[str]:
    """Return what a reader must know of a model that was not trained since; nothing once it was."""
    if operations.TRAINED in names:
        return []
    return [r.limits for r in _records(names) if r.limits]


def tags(names: Sequence[str]) -> list[str]:
    """Return the operations' tags for the Hub."""
    return list(dict.fromkeys(tag for r in _records(names) for tag in r.tags))


def papers(operation: str, parameters: Parameters) -> Sequence[Paper]:
    """Return the papers of the methods that a step used."""
    record = operations.known(operation)
    return record.papers(parameters) if record else ()


def remedies(record: Mapping[str, Any]) -> list[str]:
    """Return what to try with a model that lost too much, from the steps in its surgery.json."""
    steps = [(operations.known(step["operation"]), step) for step in record["recipe"]]
    each = (remedy for known, step in steps if known for remedy in known.remedies(step))
    return list(dict.fromkeys(each))


def _records(names: Iterable[str]) -> list[Operation]:
    found = (operations.known(name) for name in dict.fromkeys(names))
    return [record for record in found if record]
