"""A verification whose comparison is given by its fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.checkpoint.row import Row
from surgery.proof.comparison import Check, Comparison
from surgery.proof.verification import Verification
from surgery.proof.verification import verify as compare


def verify(
    source: Checkpoint,
    output: Checkpoint,
    *,
    layers: Sequence[int] | None = None,
    beside: Mapping[str, Checkpoint] | None = None,
    checks: Iterable[Check] = (),
    first: Iterable[Row] = (),
    **fields: Any,
) -> Verification:
    """Verify `output` against `source`; `fields` are the other fields of a Comparison."""
    pair = Comparison(source=source, output=output, **fields)
    return compare(pair, layers=layers, beside=beside, checks=checks, first=first)
