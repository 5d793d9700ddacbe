"""What was measured of every model type of transformers: which operations work on it, or why not.

`measured.json` is written by `benchmarks/coverage.py`, from a tiny model of each type.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

KINDS = {"causal": "text", "image": "image and text"}
OPERATIONS = ("inspect", "analyze", "relufy", "upcycle", "carve", "memory", "splinify")
# What the types of transformers are, by what came of the operations on them. The last four
# operations are about dense MLPs, so that they refuse a mixture of experts by design.
SORTS = {
    "dense": "with dense MLPs",
    "mixture": "mixtures of experts",
    "none": "without an MLP",
    "unmeasured": "no tiny model could be made",
}
_MIXTURE = re.compile(r"is a mixture already|no layer of this \w+ has a dense MLP")
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

    def sort(self, kind: str, model_type: str) -> str:
        """Return which of SORTS a type is."""
        row = self.rows[kind][model_type]
        if "model" in row:
            return "unmeasured"
        if any(_MIXTURE.search(cell) for cell in row.values()):
            return "mixture"
        return "none" if row.get("inspect") == "none" else "dense"

    def sorts(self, kind: str) -> Mapping[str, int]:
        """Return how many types of a kind there are of each sort."""
        found = Counter(self.sort(kind, t) for t in self.rows[kind])
        return {sort: found[sort] for sort in SORTS}

    def count(self, kind: str, operation: str, sort: str = "") -> int:
        """Return how many types of a kind, or of a sort of them, an operation works on."""
        types = [t for t in self.rows[kind] if sort in ("", self.sort(kind, t))]
        return sum(works(self.cell(kind, t, operation)) for t in types)

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
