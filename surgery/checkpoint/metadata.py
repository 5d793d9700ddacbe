"""The metadata at the top of a source's README.md, its model card: its licence, its base model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.checkpoint.checkpoint import Checkpoint
from surgery.checkpoint.parsing import Unreadable, read_yaml
from surgery.errors import SurgeryError
from surgery.files import content

# The fields of the source's metadata that hold for an output too.
FOLLOWED = ("license", "license_name", "license_link", "language", "pipeline_tag")
MAX_METADATA = 64_000  # bytes of a README.md that are looked at
MAX_WORDS, MAX_WORD = 200, 200  # of a field of the metadata; characters of each


def metadata_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the metadata in a README.md: what of FOLLOWED and `base_model` is words.

    It is empty where there is none, and where it cannot be read; see `unread`.
    """
    found = _front_matter(checkpoint)
    if not isinstance(found, Mapping):
        return {}
    fields = {key: _words(found.get(key)) for key in (*FOLLOWED, "base_model")}
    return {key: words for key, words in fields.items() if words}


def unread(checkpoint: Checkpoint) -> str:
    """Return a note where the metadata in a README.md cannot be read; else an empty text."""
    found = _front_matter(checkpoint)
    if not isinstance(found, SurgeryError):
        return ""
    return f"the metadata of {found.message}; its licence and language are not taken over"


def _front_matter(checkpoint: Checkpoint) -> Any:
    """Return what stands between the dashes of a README.md, or the error of reading it."""
    if checkpoint.card is None:
        return None
    text = content(checkpoint.card.path())[:MAX_METADATA].decode(errors="replace")
    lines = text.removeprefix("\ufeff").lstrip().splitlines()
    if not lines or lines[0].rstrip() != "---":
        return None
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        full = len(text.encode()) >= MAX_METADATA
        return SurgeryError("the source's README.md has no end") if full else None
    try:
        # The empty line keeps the numbers of lines.
        return read_yaml("\n".join(["", *lines[1:end]]), "the source's README.md", "")
    except Unreadable as error:
        return error


def _words(value: Any) -> str | list[str]:
    """Return a word or a list of words as it is; nothing for what the Hub could not read either."""
    if isinstance(value, list):
        return [word for word in value[:MAX_WORDS] if isinstance(word, str) and _words(word)]
    fits = isinstance(value, str) and value.isprintable() and len(value) <= MAX_WORD
    return str(value) if fits else ""
