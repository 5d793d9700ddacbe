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
    """Verify `output` against `source`; `fields` are the other fields of a Comparison.

    Each row passes just where its value is within its limit, so that readers can see why.
    """
    pair = Comparison(source=source, output=output, **fields)
    found = compare(pair, layers=layers, beside=beside, checks=checks, first=first)
    for row in found.rows:
        assert row.passed == _is_within(row), row
    return found


def _is_within(row: Row) -> bool:
    if row.limit is None:
        return True
    assert not isinstance(row.value, str)
    # What is not a number would fail the comparison, which is what a control is to show.
    return row.value <= row.limit if row.relation == "<=" else not row.value <= row.limit
