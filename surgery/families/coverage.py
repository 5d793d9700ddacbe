"""What was measured of every model type of transformers: which operations work on it, or why not.

`measured.json` is written by `benchmarks/coverage.py`, from a tiny model of each type.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

KINDS = {"causal": "text", "image": "image and text"}
OPERATIONS = ("inspect", "analyze", "relufy", "upcycle", "carve", "memory", "splinify", "prune")
_NOT_BUILT = "no tiny model of it runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The results for all types.

    Args:
        transformers: the version that was measured with.
        rows: by kind ("causal", "image") and type: by operation, one word or the reason.
    """

    transformers: str
    rows: Mapping[str, Mapping[str, Mapping[str, str]]]

    def cell(self, kind: str, model_type: str, operation: str) -> str:
        """Return what came of an operation: one word if it works, else the reason."""
        row = self.rows[kind][model_type]
        reason = f"{_NOT_BUILT}: {row['model']}" if "model" in row else "not measured yet"
        return row.get(operation, reason)

    def count(self, kind: str, operation: str) -> int:
        """Return how many types of a kind an operation works on."""
        return sum(works(self.cell(kind, t, operation)) for t in self.rows[kind])

    def commonest(self, operation: str) -> tuple[str, int] | None:
        """Return the commonest reason why an operation does not work, and how often it is that."""
        reasons = Counter(
            self.cell(kind, t, operation).replace(t, "it").partition(":")[0]
            for kind, rows in self.rows.items()
            for t in rows
            if not works(self.cell(kind, t, operation))
        )
        return next(iter(reasons.most_common(1)), None)


def works(cell: str) -> bool:
    """Return whether a cell says that the operation works: a reason has several words."""
    return " " not in cell


@cache
def measured() -> Measured:
    """Return what was measured last."""
    text = (resources.files("surgery.families") / "measured.json").read_text(encoding="utf-8")
    found = json.loads(text)
    return Measured(transformers=found["transformers"], rows={k: found[k] for k in KINDS})
