"""What a card says of the steps of a conversion, from the operations' records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surgery import operations
from surgery.blocks.paper import Paper
from surgery.operations.operation import Operation, Parameters

FINETUNE = "finetune"  # what a fine-tune script adds to the steps
_TRAINED = "Training gives back what the conversion cost, or makes use of what it added."


def done(operation: str, parameters: Parameters) -> str:
    """Return one phrase, as in "every MLP became 8 experts, 2 of them active for a token"."""
    if operation == FINETUNE:
        return "it was trained"
    record = operations.known(operation)
    return record.described(parameters) if record else f"it was changed by {operation}"


def why(operation: str) -> str:
    if operation == FINETUNE:
        return _TRAINED
    record = operations.known(operation)
    return record.why if record else ""


def limits(names: Sequence[str]) -> list[str]:
    """Return what a reader must know of a model that was not trained since; nothing once it was."""
    if FINETUNE in names:
        return []
    return [r.limits for r in _records(names) if r.limits]


def tags(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(tag for r in _records(names) for tag in r.tags))


def papers(operation: str, parameters: Parameters) -> Sequence[Paper]:
    """Return the papers of the methods that a step used."""
    record = operations.known(operation)
    return record.papers(parameters) if record else ()


def _records(names: Iterable[str]) -> list[Operation]:
    found = (operations.known(name) for name in dict.fromkeys(names))
    return [record for record in found if record]
