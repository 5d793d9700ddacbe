"""Measure an MLP on rows: what it misses of their targets, and how many products are zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surgery.fitting.neurons import N, Neurons
from surgery.fitting.rows import CHUNK, Rows

COUNTED = 8192  # rows that zeros are counted on


def error(neurons: Neurons, rows: Rows, start: int = 0, stop: int | None = None) -> float:
    """Return ‖Y − Ŷ‖² / ‖Y‖² over rows [start, stop), weighted."""
    missed = total = 0.0
    with rows.own_precision():
        for z, y, weight in rows.parts(start, stop):
            w = 1.0 if weight is None else weight[:, None]
            missed += (w * (y - neurons(z)).square()).sum(dtype=torch.float64).item()
            total += (w * y.square()).sum(dtype=torch.float64).item()
    return missed / max(total, 1e-300)


def missed_by_domain(several: Sequence[Neurons], rows: Rows) -> Tensor:
    """Return what each of several MLPs misses of the held-out rows of each domain.

    It is [domains, 1 + MLPs], weighted and squared, with the size of the targets first.
    """
    domain = torch.zeros(len(rows.z), dtype=torch.long) if rows.domain is None else rows.domain
    found = torch.zeros(int(domain.max()) + 1, 1 + len(several), dtype=torch.float64)
    start = rows.fitted
    with rows.own_precision():
        for z, y, weight in rows.parts(start):
            missed = torch.stack([y, *(y - neurons(z) for neurons in several)]).square().sum(2).T
            missed = missed if weight is None else missed * weight[:, None]
            found.index_add_(0, domain[start : start + len(z)].cpu(), missed.double().cpu())
            start += len(z)
    return found


def better(before: N, after: N, rows: Rows) -> tuple[N, dict[str, float]]:
    """Return whichever misses less of the rows that were not fitted on, and both errors.

    So a fit that is worse on new rows of any domain is dropped. "error" is the error of `before`,
    "repaired" that of what is returned.
    """
    found = missed_by_domain([before, after], rows)
    helps = bool((found[:, 2] <= found[:, 1]).all())
    total, *missed = found.sum(0).tolist()
    errors = [part / max(total, 1e-300) for part in missed]
    return after if helps else before, {"error": errors[0], "repaired": errors[int(helps)]}


def sparsity(
    neurons: Neurons, rows: Rows, stop: int | None = None, width: int | None = None
) -> float:
    """Return the fraction of exact zeros among the products of rows [0, stop).

    It is counted on about COUNTED of them. Only the first `width` neurons are counted, where it is
    given.
    """
    zeros = total = 0
    counted = rows.z[:stop]
    with rows.own_precision():
        for z in counted[:: max(1, len(counted) // COUNTED)].split(CHUNK):
            h = neurons.product(z.float())[:, :width]
            zeros += h.numel() - int(h.count_nonzero())
            total += h.numel()
    return zeros / total


def figures(**values: float) -> dict[str, Any]:
    """Round the figures of a layer to four digits, for the report."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}
