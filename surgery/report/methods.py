"""What a card and the command line say of the steps of a conversion, from the operations' records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surgery import operations
from surgery.blocks.paper import Paper
from surgery.calibration.settings import Calibration
from surgery.operations.operation import Operation, Parameters

FINETUNE = "finetune"  # the step that a fine-tune script adds
MORE_TEXT = 131_072  # tokens of calibration text beyond which more are not advised
_TRAINED = "Training recovers what the conversion cost, or makes use of what it added."


def done(operation: str, parameters: Parameters) -> str:
    """Return one phrase, as in "every MLP became 8 experts, 2 of them active for a token"."""
    if operation == FINETUNE:
        return "it was trained"
    record = operations.known(operation)
    return record.described(parameters) if record else f"it was changed by {operation}"


def why(operation: str) -> str:
    """Return the reason for an operation, in one or two sentences; empty where none is known."""
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
    """Return the operations' tags for the Hub."""
    return list(dict.fromkeys(tag for r in _records(names) for tag in r.tags))


def papers(operation: str, parameters: Parameters) -> Sequence[Paper]:
    """Return the papers of the methods that a step used."""
    record = operations.known(operation)
    return record.papers(parameters) if record else ()


def _records(names: Iterable[str]) -> list[Operation]:
    found = (operations.known(name) for name in dict.fromkeys(names))
    return [record for record in found if record]


# --- notes and advice -----------------------------------------------------------------------------


def is_advice(note: str) -> bool:
    """Whether a note is for whoever converts, and not for readers of the card.

    Such notes begin with the option that they advise: "--bypass full repairs much more".
    """
    return note.startswith("--")


def notes(record: Mapping[str, Any]) -> list[str]:
    """Return the notes in a record that are true of the model for every reader."""
    return [note for note in record.get("notes") or () if not is_advice(note)]


def advice(record: Mapping[str, Any]) -> list[str]:
    """Return the notes in a record that say how to convert better."""
    return [note for note in record.get("notes") or () if is_advice(note)]


def remedies(record: Mapping[str, Any]) -> list[str]:
    """Return what to try with a damaged model, most useful first."""
    found, steps = advice(record), record["recipe"]
    if any(step.get("repair") == "none" for step in steps):
        found.append("--repair ridge: refit the weights on calibration text")
    elif record.get("calibration"):
        tokens = max(Calibration.of(step.get("calibration")).tokens for step in steps)
        if tokens < MORE_TEXT:
            found.append(f"--tokens {MORE_TEXT}: it was calibrated on {tokens:,}")
        found.append("--text or --dataset: calibrate on the kind of text that the model is for")
    return [*found, "train it with the script in finetune/"]
