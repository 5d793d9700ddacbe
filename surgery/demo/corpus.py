"""Read the built-in texts of twelve domains, in two parts that share no document.

`domains/DOMAIN.jsonl.gz` holds a domain, one document a line; `domains/PROVENANCE.md` says where
each comes from, and `benchmarks/build_texts.py` makes them. Nothing is read before it is asked for.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from surgery.errors import SurgeryError

Part = Literal["fit", "held_out"]
FOLDER = Path(__file__).parent / "domains"
PIECE = 6_000  # characters: what `mixed` takes of a document before it goes on
DOMAINS = (
    "speeches",
    "novels",
    "encyclopaedia",
    "manuals",
    "python",
    "c",
    "javascript",
    "dialogue",
    "german",
    "french",
    "spanish",
    "mathematics",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a domain and where it comes from."""

    domain: str
    part: Part
    name: str  # of the work in its package, then # and the number of the document in the work
    title: str
    author: str
    licence: str
    package: str
    version: str
    registry: str  # pypi, debian or npm
    text: str


def domains() -> tuple[str, ...]:
    """Return the names of the domains, in the order in which `mixed` takes them."""
    return DOMAINS


@cache
def _all(domain: str) -> tuple[Document, ...]:
    """Return all documents of a domain."""
    if domain not in DOMAINS:
        raise SurgeryError(f"no built-in text of {domain!r}", f"one of {', '.join(DOMAINS)}")
    with gzip.open(FOLDER / f"{domain}.jsonl.gz", "rt", encoding="utf-8", newline="\n") as f:
        return tuple(Document(**json.loads(line)) for line in f)


def documents(domain: str, part: Part) -> Iterator[Document]:
    """Yield the documents of one part of a domain; neighbours come from different works.

    Raises:
        SurgeryError: There is no such domain.
    """
    return (document for document in _all(domain) if document.part == part)


def cut(text: str, size: int) -> Iterator[str]:
    """Yield a text in pieces of at most `size` characters that end with a line, or with a word."""
    start = 0
    while len(text) - start > size:
        end = start + size
        end = text.rfind("\n", start + size // 2, end) + 1 or text.rfind(" ", start, end) + 1 or end
        yield text[start:end]
        start = end
    yield text[start:]


def pieces(domain: str, part: Part, size: int = PIECE) -> Iterator[str]:
    """Yield a part of a domain in pieces: the first of each document, then the second of each.

    A piece has at most `size` characters, and is followed by an empty line.
    """
    rounds = zip_longest(*(cut(document.text, size) for document in documents(domain, part)))
    return (piece.strip("\n") + "\n\n" for turn in rounds for piece in turn if piece)


def _turns(domain: str, part: Part, size: int) -> Iterator[str]:
    """Yield pieces of a domain up to `size` bytes."""
    for piece in pieces(domain, part):
        yield piece.encode()[:size].decode(errors="ignore")
        size -= len(piece.encode())
        if size <= 0:
            return


def mixed(part: Part, bytes_each: int) -> str:
    """Return up to `bytes_each` bytes of every domain, always next of the one with the least yet.

    They come in pieces of at most PIECE characters, so any beginning of the text holds about as much of
    each domain, until one has no more. A small amount already draws on many works of a domain.
    """
    waiting = {domain: _turns(domain, part, bytes_each) for domain in DOMAINS}
    taken = dict.fromkeys(DOMAINS, 0)
    found = []
    while waiting:
        domain = min(waiting, key=taken.__getitem__)
        if piece := next(waiting[domain], ""):
            taken[domain] += len(piece.encode())
            found.append(piece.strip("\n"))
        else:
            del waiting[domain]
    return "\n\n".join(found)
