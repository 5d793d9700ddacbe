"""Left-out domains choose how far a refit goes.

What could break it: rows of one domain on both sides, first tokens taken away with a group, an
error from sums that is not that of the rows, a fit that pays in one domain with another.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_repair import neurons

from surgery.fitting.cross_validation import DAMPINGS, _sums, stepped, validated
from surgery.fitting.measures import error
from surgery.fitting.neurons import Neurons
from surgery.fitting.ridge import ridge
from surgery.fitting.rows import FOLDS, Rows

DOMAINS = 6


def relu_mlp(n: int) -> tuple[Neurons, torch.Tensor, torch.Tensor]:
    """A ReLU MLP, and n inputs in turn of DOMAINS domains."""
    mlp, _ = neurons()
    z = torch.randn(n, 12, generator=torch.Generator().manual_seed(3))
    return mlp, z, torch.arange(n) % DOMAINS


def by_domain(mlp: Neurons, rows: Rows) -> list[float]:
    """The error on each domain's rows that no fit saw."""
    held = torch.arange(len(rows.z)) >= rows.fitted
    chosen = [(rows.domain == d) & held for d in range(DOMAINS)]
    return [error(mlp, Rows(z=rows.z[c], y=rows.y[c])) for c in chosen]


def test_groups_share_no_domain_and_leave_out_no_row() -> None:
    _, z, domain = relu_mlp(1200)
    rows = Rows(z=z, y=z, domain=domain)
    found = [set(domain[places].tolist()) for places in rows.folds]
    assert len(found) == FOLDS and sum(map(len, found)) == len(set.union(*found)) == DOMAINS
    assert sorted(torch.cat(rows.folds).tolist()) == list(range(rows.fitted))
    alone = dataclasses.replace(rows, domain=torch.zeros_like(domain)).folds
    assert [len(places) for places in alone] == [360] * 3 and alone[0].max() < alone[1].min()


def test_the_error_from_sums_is_that_of_the_rows() -> None:
    mlp, z, domain = relu_mlp(1200)
    rows = Rows(z=z, y=mlp(z) + z, domain=domain)
    block, places = slice(0, 24), rows.folds[0]
    sums = _sums(mlp, rows.at(places), block, False)
    step = 0.1 * torch.randn(12, 24, generator=torch.Generator().manual_seed(4))
    moved = dataclasses.replace(mlp, down=mlp.down + 0.5 * step)
    own = Rows(z=rows.z[places], y=rows.y[places])
    missed = [(own.y - m(own.z)).square().sum() for m in (mlp, moved)]
    assert sums.left(step, [0.5])[0] == pytest.approx((missed[1] / missed[0]).item(), rel=1e-3)


def test_what_all_domains_share_is_fitted_in_full() -> None:
    mlp, z, domain = relu_mlp(3000)
    target = dataclasses.replace(mlp, down=mlp.down * 1.5)
    fitted, choice = validated(mlp, Rows(z=z, y=target(z), domain=domain))
    assert choice is not None and (choice.damping, choice.part) == (DAMPINGS[0], 1.0)
    assert choice.error < 1e-4 and (fitted.down - target.down).abs().max() < 0.01


def test_what_one_domain_has_alone_is_shrunk() -> None:
    """Every domain has a map of its own: a plain refit is good on no domain that it did not see,
    and the choice leaves `down` alone, or nearly.
    """
    mlp, z, domain = relu_mlp(240)
    draw = torch.Generator().manual_seed(5)
    own = torch.randn(DOMAINS, 12, 24, generator=draw)
    missed = torch.einsum("nf,nhf->nh", mlp.product(z), own[domain])
    rows = Rows(z=z, y=mlp(z) + missed, domain=domain)
    fitted, choice = validated(mlp, rows)
    assert choice is not None and choice.part * (1e-2 / choice.damping) <= 0.5
    plain = ridge(mlp, rows)
    assert (fitted.down - mlp.down).norm() < 0.6 * (plain.down - mlp.down).norm()


def test_more_damping_where_rows_are_few_and_noisy() -> None:
    mlp, z, domain = relu_mlp(100)
    noise = 20 * torch.randn(100, 12, generator=torch.Generator().manual_seed(6))
    better = dataclasses.replace(mlp, down=mlp.down * 1.2)
    _, choice = validated(mlp, Rows(z=z, y=better(z) + noise, domain=domain))
    assert choice is not None and (choice.damping == DAMPINGS[-1] or choice.part < 1)


def test_no_domain_pays_for_another() -> None:
    """Five domains ask for one change and the sixth for its opposite: it is left no worse."""
    mlp, z, domain = relu_mlp(3000)
    sign = torch.where(domain == 5, -1.0, 1.0)[:, None]
    change = torch.randn(12, 24, generator=torch.Generator().manual_seed(7))
    rows = Rows(z=z, y=mlp(z) + sign * (mlp.product(z) @ change.T), domain=domain)
    fitted, choice = validated(mlp, rows)
    before, after = by_domain(mlp, rows), by_domain(fitted, rows)
    assert choice is not None and max(a / b for a, b in zip(after, before, strict=True)) < 2.5
    assert by_domain(ridge(mlp, rows), rows)[5] > after[5]


def test_first_tokens_stay_in_every_fit() -> None:
    mlp, z, domain = relu_mlp(600)
    first = Rows(z=100 * z[:6], y=100 * mlp(z[:6]))
    rows = Rows(z=z, y=mlp(z), domain=domain, first=first)
    total = _sums(mlp, rows.firsts(), slice(0, 24), False)
    assert total.gram.diagonal().sum() > 0
    assert stepped(total, 1e-3, (24, 0)) is not None
