"""Papers that methods are from, for model cards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper on arXiv: its number, first author ("Last, First"), title and year."""

    number: str
    author: str
    title: str
    year: int

    @property
    def bibtex(self) -> str:
        """Return the entry for a bibliography."""
        key = f"{self.author.partition(',')[0].lower()}{self.year}"
        return (
            f"@misc{{{key},\n"
            f"  title = {{{self.title}}},\n"
            f"  author = {{{self.author} and others}},\n"
            f"  year = {{{self.year}}},\n"
            f"  eprint = {{{self.number}}},\n"
            "  archivePrefix = {arXiv}\n}"
        )
