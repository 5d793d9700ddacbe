"""What a verification is to find for an output to pass, as the command line and recipes say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from surgery.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Require:
    """What is required of an output.

    Args:
        max_perplexity: how many times the source's perplexity that of the output may be, in the
            geometric mean over all domains.
    """

    max_perplexity: float | None = None

    def __post_init__(self) -> None:
        limit = self.max_perplexity
        if limit is not None and not 0 < limit < math.inf:
            raise UsageError(
                f"a perplexity of at most {limit} times the source's", "give a number, like 1.2"
            )

    @classmethod
    def of(cls, value: Require | Mapping[str, Any] | None) -> Require:
        """Return what a recipe or a record requires. Raises UsageError for a number that is none."""
        return value if isinstance(value, Require) else cls(**(value or {}))

    def as_dict(self) -> dict[str, Any]:
        """Return what is required, for surgery.json."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}
