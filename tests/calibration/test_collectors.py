"""Every count agrees with a direct computation, and merged parts with a single pass.

What could break it: bins at the edges and signs of zeros, tokens that do not count beside ones that
do, windows across them, the order in which parts are merged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from surgery.calibration.collectors import (
    BINS,
    WINDOWS,
    Activity,
    CoActivation,
    Collapse,
    Collector,
    ExpertReservoir,
    Histogram,
    Inputs,
    Reservoir,
    Reuse,
    Seen,
    edges,
)

B, T, H, F = 6, 40, 8, 12
COLLECTORS: dict[str, Callable[[], Collector]] = {
    "product": lambda: Histogram("product"),
    "gate": lambda: Histogram("gate"),
    "activity": Activity,
    "reuse": Reuse,
    "co-activation": CoActivation,
    "inputs": Inputs,
    "collapse": Collapse,
    "reservoir": Reservoir,
}


def batch(*, masked: bool = True) -> Seen:
    """Return a batch of ReLU products: BOS masked in every row, one row padded at its end."""
    draw = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(B, T, F, generator=draw) for _ in range(2))
    mask = torch.ones(B, T, dtype=torch.bool)
    if masked:
        mask[:, 0], mask[2, 30:], mask[4, 17] = False, False, False
    taps = {"gate": gate, "up": up, "product": gate.relu() * up}
    taps |= {n: torch.randn(B, T, H, generator=draw) for n in ("input", "output", "hidden")}
    sampled = mask & (torch.rand(B, T, generator=draw) < 0.2)
    return Seen(mask=mask, sampled=sampled, index=torch.arange(B * T).view(B, T), taps=taps)


def part(seen: Seen, rows: slice) -> Seen:
    """Return some sequences of a batch."""
    return Seen(
        mask=seen.mask[rows],
        sampled=seen.sampled[rows],
        index=seen.index[rows],
        taps={n: t[rows] for n, t in seen.taps.items()},
    )


def counted(make: Callable[[], Collector], *parts: Seen) -> Collector:
    """Return a collector that has counted these batches."""
    collector = make()
    for p in parts:
        collector.update(p)
    return collector


@pytest.mark.parametrize("name", COLLECTORS)
def test_merged_halves_are_one_pass(name: str) -> None:
    """Two processes that each counted a batch have exactly the state of one that counted both."""
    seen, make = batch(), COLLECTORS[name]
    first, second = part(seen, slice(0, 3)), part(seen, slice(3, 6))
    once, merged = counted(make, first, second), counted(make, first)
    merged.merge(counted(make, second))
    assert once.state.keys() == merged.state.keys()
    for key, value in once.state.items():
        assert torch.equal(value, merged.state[key]), key
        assert value.dtype in (torch.int64, torch.float64) or name in ("co-activation", "reservoir")


@pytest.mark.parametrize("name", COLLECTORS)
def test_batches_of_any_size_in_any_order(name: str) -> None:
    """Counts agree exactly, and sums up to the rounding of an fp32 sum over a batch."""
    seen, make = batch(), COLLECTORS[name]
    once, merged = counted(make, seen), counted(make, part(seen, slice(4, 6)))
    merged.merge(counted(make, part(seen, slice(0, 1)), part(seen, slice(1, 4))))
    results = [c.result() if isinstance(c, Reservoir) else c.state for c in (once, merged)]
    for key, value in results[0].items():
        rtol = 1e-6 if value.is_floating_point() else 0
        torch.testing.assert_close(value, results[1][key], rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_histogram_is_exact_at_its_edges(dtype: torch.dtype) -> None:
    """For any dtype, from 2^-66 to infinity, and for both zeros."""
    normal = torch.randn(5000, 7, generator=torch.Generator().manual_seed(0))
    values = (normal * torch.logspace(-20, 9, 7)).to(dtype)
    values[:40], values[0, :2] = 0, torch.tensor([-0.0, math.inf], dtype=dtype)
    seen = batch()
    seen.taps = {"product": values}
    d = counted(COLLECTORS["product"], seen).result()  # type: ignore[attr-defined]
    x = values.double()
    assert d.total == x.numel() and d.zeros == int((x == 0).sum())
    assert d.positive == pytest.approx((x > 0).double().mean().item())
    for i in (0, 1, 700, 2000, 2560, 2999, BINS - 1):
        edge = edges()[i].item()
        below = (x.abs() < edge).double().mean().item() if i else d.zero
        assert d.below(edge) == pytest.approx(below, abs=1e-12), i


def test_histogram_of_every_fourth_token() -> None:
    """Counting by four starts anew behind a token that does not count."""
    seen = batch()
    x = torch.cat([seen.taps["gate"][i, start:stop:4] for i, start, stop in seen.runs])
    assert [len(range(start, stop, 4)) for _, start, stop in seen.runs] == [10, 10, 8, 10, 4, 6, 10]
    d = counted(lambda: Histogram("gate", 4), seen).result()  # type: ignore[attr-defined]
    assert d.total == x.numel() and d.positive == (x > 0).double().mean()
    assert d.below(0.5) == (x.abs() < 0.5).double().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_the_products_are_counted_in_every_token(dtype: torch.dtype) -> None:
    """The other products are counted in every fourth token.

    Fractions are then those of its nonzero products, and the share of the zeros is exact.
    """
    seen = batch()
    seen.taps = {"product": seen.taps["product"].to(dtype)}
    d = counted(lambda: Histogram("product", 4), seen).result()  # type: ignore[attr-defined]
    x = seen.taps["product"][seen.mask]
    some = torch.cat([seen.taps["product"][i, a:b:4] for i, a, b in seen.runs])
    assert (d.zeros, d.total) == (int((x == 0).sum()), x.numel()) and 0.45 < d.zero < 0.55
    assert d.counts.sum() == (some != 0).sum() < (x != 0).sum()
    share = lambda event: event.sum().item() / (some != 0).sum().item() * (1 - d.zero)  # noqa: E731
    assert d.positive == pytest.approx(share(some > 0))
    assert d.below(0.25) == pytest.approx(d.zero + share((some != 0) & (some.abs() < 0.25)))
    assert d.shares.sum().item() == pytest.approx(1 - d.zero)
    t = d.threshold(0.8)
    assert share((some != 0) & (some.abs() < t)) + d.zero >= 0.8 - 1e-9
    assert share((some != 0) & (some.abs() < t / (1 + 1 / 64))) + d.zero < 0.8
    assert d.quantile(0.5) == 0 and d.quantile(0.01) < 0 < d.quantile(0.99)


def test_what_is_below_the_upper_half_of_a_float_is_no_zero() -> None:
    """A denormal number shares its upper bits with zero."""
    seen = batch()
    seen.taps = {"gate": torch.tensor([[0.0, -0.0, 1e-42, -1e-42, 1.0]])}
    d = counted(lambda: Histogram("gate"), seen).result()  # type: ignore[attr-defined]
    assert (d.zeros, d.total, int(d.counts.sum())) == (2, 5, 3)


def test_edges_are_log_spaced() -> None:
    """64 bins an octave, from 2^-40 to 2^24."""
    e = edges()
    assert len(e) == BINS + 1 and e[0] == 2.0**-40 and e[-1] == 2.0**24 and e[64] == 2.0**-39
    assert (e[1:] / e[:-1]).max() <= 1 + 1 / 64


def test_thresholds_give_the_sparsity_that_was_asked_for() -> None:
    """Never less, and at most one bin more."""
    seen = batch(masked=False)
    product, gate = (counted(COLLECTORS[n], seen).result() for n in ("product", "gate"))  # type: ignore[attr-defined]
    x, g = seen.taps["product"].abs(), seen.taps["gate"]
    assert product.threshold(0.3) == 0  # half are zeros
    for s in (0.55, 0.65, 0.8, 0.95):
        t = product.threshold(s)
        assert (x < t).double().mean() >= s > (x < t / (1 + 1 / 64)).double().mean()
    for q in (0.05, 0.3, 0.6, 0.95):
        t = gate.quantile(q)
        assert (g <= t).double().mean() >= q - 1e-9 and (g <= t - abs(t) / 63).double().mean() < q


def test_activity() -> None:
    """Tokens that do not count are in no sum."""
    seen = batch()
    state = counted(Activity, seen).state
    gate, product = seen.taps["gate"][seen.mask], seen.taps["product"][seen.mask]
    assert state["tokens"] == len(gate) == B * (T - 1) - 11
    assert torch.equal(state["active"], (gate > 0).sum(0))
    assert torch.equal(state["nonzero"], (product != 0).sum(0))
    torch.testing.assert_close(state["magnitude"], product.double().abs().sum(0), rtol=1e-6, atol=0)


def test_reuse_token_by_token() -> None:
    """Counted once more with sets in Python.

    Windows start anew behind a token that does not count, and none reaches across one.
    """
    seen = batch()
    state = counted(Reuse, seen).state
    runs: list[list[set[int]]] = []
    for rows, mask in zip(seen.taps["gate"], seen.mask.tolist(), strict=True):
        sets = [set((row > 0).nonzero().flatten().tolist()) for row in rows]
        grouped = itertools.groupby(zip(sets, mask, strict=True), lambda pair: pair[1])
        runs += [[active for active, _ in run] for counts, run in grouped if counts]
    assert len(runs) == B + 1
    pairs = [pair for run in runs for pair in itertools.pairwise(run)]
    assert state["shared"] == sum(len(a & b) for a, b in pairs)
    assert state["after"] == sum(len(b) for _, b in pairs)
    for w, union, windows in zip(WINDOWS, state["union"], state["windows"], strict=True):
        found = [run[i : i + w] for run in runs for i in range(0, len(run) - w + 1, w)]
        assert windows == len(found), w
        assert union == sum(len(set().union(*window)) for window in found), w


def test_coactivation() -> None:
    """It is AᵀA of the 0/1 rows, in integers."""
    seen = batch()
    a = (seen.taps["gate"][seen.mask] > 0).int()
    pairs = counted(CoActivation, seen).state["pairs"]
    assert pairs.dtype == torch.int32 and torch.equal(pairs, a.T @ a)


def test_inputs() -> None:
    """By channel and by token, and the largest magnitude to the bit."""
    seen = batch()
    x, state = seen.taps["input"][seen.mask].double(), counted(Inputs, seen).state
    torch.testing.assert_close(state["squares"], x.square().sum(0), rtol=1e-6, atol=0)
    assert torch.equal(state["peak"], x.abs().amax(0))
    assert state["norms"].item() == pytest.approx(x.norm(dim=1).sum().item())
    assert state["largest"].item() == pytest.approx(x.norm(dim=1).max().item())


def test_collapse() -> None:
    """The mean over the tokens is the best approximation of the form 1·x̄ᵀ.

    Equal tokens leave nothing of the stream.
    """
    seen = batch()
    ratios = []
    for x, mask in zip(seen.taps["hidden"], seen.mask, strict=True):
        kept = x[mask].double()
        ones = torch.ones(len(kept), 1, dtype=torch.float64)
        best = ones @ torch.linalg.lstsq(ones, kept).solution
        ratios.append(((kept - best).norm() / kept.norm()).item())
    assert counted(Collapse, seen).state["ratios"].item() == pytest.approx(sum(ratios))
    seen.taps["hidden"][:] = seen.taps["hidden"][:, :1]  # type: ignore[index]
    assert counted(Collapse, seen).state["ratios"].item() < 1e-5


def test_reservoir_keeps_the_sampled_tokens() -> None:
    """And none that does not count."""
    seen = batch()
    rows = counted(Reservoir, seen).result()  # type: ignore[attr-defined]
    assert seen.sampled.any() and not (seen.sampled & ~seen.mask).any()
    assert all(torch.equal(rows[tap], seen.taps[tap][seen.sampled]) for tap in rows)


def test_expert_reservoir_keeps_the_rows_of_the_sampled_tokens() -> None:
    """Rows come by expert, and in each by token.

    The second half of a batch is counted first, because merging must not change the order.
    """
    draw, k, experts = torch.Generator().manual_seed(0), 2, 4

    def routed(seen: Seen) -> Seen:
        x = seen.taps["input"][seen.mask]
        seen.selected = torch.stack([torch.randperm(experts, generator=draw)[:k] for _ in x])
        rows = [(e, t) for e in range(experts) for t in range(len(x)) if e in seen.selected[t]]
        seen.expert = torch.tensor([e for e, _ in rows])
        seen.taps = {"product": torch.stack([x[t] * (e + 1) for e, t in rows])}
        return seen

    seen = batch()
    index, x = seen.index[seen.sampled], seen.taps["input"][seen.sampled]
    parts = [routed(part(seen, rows)) for rows in (slice(3, 6), slice(0, 3))]
    rows = counted(ExpertReservoir, *parts).result()  # type: ignore[attr-defined]
    sent = {int(i): s for p in parts for i, s in zip(p.index[p.mask], p.selected, strict=True)}  # type: ignore[arg-type]
    numbered = list(enumerate(index.tolist()))
    expected = [(e, x[j] * (e + 1)) for e in range(experts) for j, i in numbered if e in sent[i]]
    assert rows["expert"].tolist() == [e for e, _ in expected]
    assert torch.equal(rows["product"], torch.stack([row for _, row in expected]))
