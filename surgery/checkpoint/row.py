"""One row of a verification: what was checked, what was found, and whether that is good enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One check: `value` stands in `relation` to `limit`. A row without a limit only informs.

    Args:
        key: the stable name by which code finds the row, like "domain.python".
        check: what a person reads. It may change at any time; nothing looks a row up by it.
        value: what was found.
        relation: "<=" or ">", between `value` and `limit`.
        limit: the bound, None where the row only informs.
        passed: whether the bound holds.
        detail: further lines, like the names of what failed.
        layers: the value of each decoder layer that has one.
        models: what was measured of each model, by its name, as {"output": {"perplexity": 9.1}}.
        warns: whether a person should see the row although it has no limit.
    """

    key: str
    check: str
    value: float | int | str
    relation: str = ""
    limit: float | int | None = None
    passed: bool = True
    detail: tuple[str, ...] = ()
    layers: tuple[tuple[int, float], ...] = field(default=())
    models: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    warns: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, which has no NaN: a number that is not finite becomes text."""
        found: dict[str, Any] = {
            "key": self.key,
            "check": self.check,
            "value": self.value if isinstance(self.value, str) else _finite(self.value),
            "passed": self.passed,
            "detail": list(self.detail),
        }
        if self.limit is not None:
            found |= {"relation": self.relation, "limit": self.limit}
        if self.layers:
            found["layers"] = [[index, _finite(value)] for index, value in self.layers]
        if self.models:
            found["models"] = {
                name: {what: _finite(value) for what, value in values.items()}
                for name, values in self.models.items()
            }
        return found | ({"warns": True} if self.warns else {})


def _finite(value: float | int) -> float | int | str:
    return value if math.isfinite(value) else str(value)
