"""Observers of a conversion's progress."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from surgery.checkpoint import Progress


class Observer(Protocol):
    """Is told of each stage: the command line shows a bar, the library nothing."""

    def stage(self, title: str, total: int, unit: str) -> AbstractContextManager[Progress]:
        """Begin a stage of `total` units (0: unknown); the callable is told each advance."""
        ...


class Silent:
    """An observer that shows nothing."""

    def stage(self, title: str, total: int, unit: str) -> AbstractContextManager[Progress]:
        return nullcontext(lambda n: None)
