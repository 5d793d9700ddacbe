"""What is counted while a layer runs: state that merges over batches, processes and runs.

Counts are int64, sums fp64 (of fp32 sums over a batch), histograms have fixed bins, and the
reservoir is a set of tokens chosen beforehand, so that merged state is that of one pass. It has the
size of a layer's width, whatever the number of tokens, and stays on the device until `settle`:
fetching it after every batch would stall a GPU. Two events are counted:

    h != 0      a product (what down_proj reads) is not an exact zero
    gate > 0    a neuron is active: its pre-activation is positive (of gate_proj; of up_proj in an MLP without a gate)

The second exists in any model and is the first one where the activation is ReLU.

A pass over the taps costs about as much as computing them did, so that what several collectors want
is in Seen, once; and torch compares integers several times faster than floats, of which it is the
sign or the magnitude that matters here.

Shapes: b sequences of a batch, T positions, n tokens that count, H hidden_size, F
intermediate_size, E experts, k top_k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

BINS, LOWEST, OCTAVES = (
    4096,
    -40,
    64,
)  # 64 bins an octave, from 2^-40 to 2^24; what is beyond falls into the end bins
BLOCK = 2**18  # elements looked at together on a CPU
TABLED = 2**20  # elements counted into one table of 2^16 bit patterns
WINDOWS = (2, 4, 8, 16, 32, 64)  # tokens
INTEGERS = {
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # with the sign and the order of magnitudes of floats
Run = tuple[int, int, int]  # sequence, first position, the one after the last


def runs_of(mask: Tensor) -> list[Run]:
    """Where tokens that count stand next to each other in a mask [b, T]."""
    edge = torch.zeros(len(mask), 1, dtype=torch.int8)
    change = torch.cat([edge, mask.cpu().to(torch.int8), edge], dim=1).diff(dim=1)
    starts, stops = ((change == sign).nonzero().tolist() for sign in (1, -1))
    return [(i, start, stop) for (i, start), (_, stop) in zip(starts, stops, strict=True)]


@dataclass(kw_only=True)
class Seen:
    """One batch in one MLP, as it computed it. `mask` [b, T] is False at tokens that do not count;
    `runs` are its own.

    `taps` are [b, T, ·]: input [H], gate (pre-activation) [F], up [F] where there is a gate,
    product [F], output [H]; hidden [H] is the residual stream after the layer. In a mixture the
    taps gate and product are [n·k, F], the rows of the tokens that count, for `expert` [n·k].
    """

    mask: Tensor
    sampled: Tensor  # [b, T]: the tokens of the reservoir
    index: Tensor  # [b, T]: the number of the token in the sample
    taps: Mapping[str, Tensor]
    runs: list[Run] = field(default_factory=list)
    router_logits: Tensor | None = None  # [n, E]
    selected: Tensor | None = None  # [n, k]
    expert: Tensor | None = None

    def __post_init__(self) -> None:
        self.runs = self.runs or runs_of(self.mask)

    def stacks(self, tap: str) -> Iterator[Tensor]:
        """[r, n, ·]: the same positions of r sequences next to each other, on a CPU few enough to
        stay in its cache.
        """
        x, first = self.taps[tap], 0
        most = max(1, TABLED // x[0].numel()) if x.device.type == "cpu" else len(x)
        for k in range(1, len(self.runs) + 1):
            i, *positions = self.runs[first]
            if (
                k == len(self.runs)
                or k - first == most
                or self.runs[k] != (i + k - first, *positions)
            ):
                yield x[i : i + k - first, slice(*positions)]
                first = k

    def rows(self, tap: str) -> Iterator[Tensor]:
        """The tokens that count, [n, ·] at a time: on a CPU few enough for what is computed of them
        to stay in its cache.
        """
        x = self.taps[tap]
        parts = (x,) if x.ndim == 2 else (x[i, start:stop] for i, start, stop in self.runs)
        if x.device.type == "cpu":
            return (block for part in parts for block in part.split(max(1, BLOCK // x.shape[-1])))
        return iter((torch.cat(list(parts)),))

    def every(self, step: int, tap: str) -> Tensor:
        """Of each run the first of `step` tokens, [n, ·]."""
        x = self.taps[tap]
        return (
            x[::step]
            if x.ndim == 2
            else torch.cat([s[:, ::step].flatten(0, 1) for s in self.stacks(tap)])
        )

    @cached_property
    def tokens(self) -> int:
        """How many count."""
        return sum(stop - start for _, start, stop in self.runs)

    @property
    def products_seen(self) -> int:
        x = self.taps["product"]
        return x.numel() if x.ndim == 2 else self.tokens * x.shape[-1]

    @cached_property
    def active(self) -> list[Tensor]:
        """gate > 0 as 0 and 1, [r, n, F] uint8 of each stack."""
        return [_positive(x) for x in self.stacks("gate")]

    @cached_property
    def firings(self) -> list[Tensor]:
        """How many tokens of each stack a neuron is active for, [F]."""
        return [_count(rows) for rows in self.active]

    @cached_property
    def products(self) -> tuple[Tensor, Tensor]:
        """Of each neuron, [F]: the products that are no exact zeros, and the sum of their
        magnitudes.
        """
        nonzero, magnitude = zip(*map(_by_neuron, self.rows("product")), strict=True)
        return torch.stack(nonzero).sum(0), torch.stack(magnitude).sum(0)


class Collector:
    """Named state tensors, each merged by addition but where `merged_by` says "max" or "rows" (one
    after another).
    """

    merged_by: ClassVar[Mapping[str, str]] = {}
    integer: ClassVar[torch.dtype] = torch.int64

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def update(self, seen: Seen) -> None:
        raise NotImplementedError

    def merge(self, other: Collector) -> None:
        """Take in what another collector of the same layer has counted."""
        for name, value in other.state.items():
            self.add(name, value)

    def settle(self) -> None:
        """At the end: the state to the CPU."""
        self.state = {name: value.cpu() for name, value in self.state.items()}

    def gather(self) -> None:
        """Take in what the same collector of every other process has counted; all of them have the
        same afterwards.
        """
        self.settle()
        states: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(states, self.state)
        self.state = {}
        for (
            state
        ) in states:  # in the order of the processes, so that sums are rounded alike on each
            for name, value in state.items():
                self.add(name, value)

    def add(self, name: str, value: Tensor) -> None:
        how = self.merged_by.get(name, "sum")
        value = value.cpu() if value.device.type == "mps" else value  # which has no fp64
        if how != "rows":
            value = value.to(torch.float64 if value.is_floating_point() else self.integer)
        if name in self.state:
            value = _MERGE[how](self.state[name], value)
        self.state[name] = value


_MERGE = {"sum": torch.add, "max": torch.maximum, "rows": lambda a, b: torch.cat([a, b])}


# --- histograms -----------------------------------------------------------------------------------


class Histogram(Collector):
    """`patterns` [2, 2^15] of x >= 0 and x < 0 by the upper half of the fp32 bit pattern (all of it
    in bf16: 8 bits of exponent, 7 of mantissa), of `every` so manieth token, and the exact `zeros`
    among `total`: of the same tokens, but of all of them where the tap is the product."""

    def __init__(self, tap: str, every: int = 1) -> None:
        super().__init__()
        self.tap, self.every = tap, every

    def update(self, seen: Seen) -> None:
        x = seen.every(self.every, self.tap).flatten()
        patterns = reduce(torch.add, map(_patterns, x.split(TABLED))).view(2, 2**15)
        zeros, total = patterns[:, 0].sum(), x.numel()
        if x.element_size() > 2 and zeros:  # or below 2^-133
            zeros = total - torch.count_nonzero(x)
            patterns[0, 1] += patterns[:, 0].sum() - zeros
        if self.tap == "product":
            total = seen.products_seen
            zeros = total - seen.products[0].sum()
        for name, value in (
            ("patterns", patterns),
            ("zeros", zeros),
            ("total", torch.tensor(total)),
        ):
            self.add(name, value)

    def result(self) -> Distribution:
        counts = _binned(self.state["patterns"])
        return Distribution(
            counts=counts, zeros=int(self.state["zeros"]), total=int(self.state["total"])
        )


def _patterns(x: Tensor) -> Tensor:
    """Counts [2^16]."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    upper = x.view(torch.uint16)[1::2] if x.dtype == torch.float32 else x.view(torch.uint16)
    return torch.bincount(upper.to(torch.int32), minlength=2**16)


def _binned(patterns: Tensor) -> Tensor:
    """[2, BINS], less the zeros, which have a pattern of their own."""
    first, last = (LOWEST + 127) << 7, (LOWEST + OCTAVES + 127) << 7
    bins = patterns[:, first:last].reshape(2, BINS, -1).sum(2)
    bins[:, 0] += patterns[:, 1:first].sum(1)
    bins[:, -1] += patterns[:, last:].sum(1)
    return bins


def edges() -> Tensor:
    """[BINS + 1] fp64: bin i holds edges[i] <= |x| < edges[i + 1]."""
    i = torch.arange(BINS + 1)
    per = BINS // OCTAVES
    return torch.ldexp(
        1 + (i % per).double() / per, LOWEST + torch.div(i, per, rounding_mode="floor")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A histogram at its end: fractions of all elements, exact at the edges of the bins (1.6% apart
    at most).

    `zeros` of `total` are exact zeros; `counts` are those of the others, or of a sample of them.
    """

    counts: Tensor
    zeros: int
    total: int

    @property
    def zero(self) -> float:
        """The fraction of exact zeros."""
        return self.zeros / self.total

    @property
    def positive(self) -> float:
        return self._share(self.counts[0])

    @property
    def shares(self) -> Tensor:
        """[2, BINS]: of all elements."""
        return self.counts * ((1 - self.zero) / max(1, int(self.counts.sum())))

    def below(self, threshold: float) -> float:
        """The fraction with |x| < threshold, taken at the nearest edge under it."""
        full = int((edges()[1:] <= threshold).sum())
        return self.zero * (threshold > 0) + self._share(self.counts[:, :full])

    def threshold(self, sparsity: float) -> float:
        """The smallest edge t with at least this fraction of |x| < t; 0 where the exact zeros
        suffice.
        """
        wanted = sparsity * self.total - self.zeros
        return 0.0 if wanted <= 0 else float(edges()[1 + self._bin(self.counts.sum(0), wanted)])

    def quantile(self, fraction: float) -> float:
        """The smallest edge t, of either sign, with at least this fraction of x <= t (x < t for a
        positive t).
        """
        wanted, negative = fraction * self.total, self._share(self.counts[1]) * self.total
        if negative >= wanted:
            return -float(edges()[BINS - 1 - self._bin(self.counts[1].flip(0), wanted)])
        if negative + self.zeros >= wanted:
            return 0.0
        return float(edges()[1 + self._bin(self.counts[0], wanted - negative - self.zeros)])

    def _share(self, counts: Tensor) -> float:
        """What these make of all elements; integers until the division, so that it is exact where
        all are counted.
        """
        return (
            int(counts.sum())
            * (self.total - self.zeros)
            / (max(1, int(self.counts.sum())) * self.total)
        )

    def _bin(self, counts: Tensor, wanted: float) -> int:
        """The first of these bins at which so many elements are reached; the last where they never
        are.
        """
        scale = (self.total - self.zeros) / max(1, int(self.counts.sum()))
        return min(BINS - 1, int((counts.cumsum(0) * scale < wanted).sum()))


# --- neurons --------------------------------------------------------------------------------------


class Activity(Collector):
    """Per neuron [F]: tokens with gate > 0 (`active`), tokens with h != 0 (`nonzero`), the sum of
    |h| (`magnitude`).
    """

    def update(self, seen: Seen) -> None:
        nonzero, magnitude = seen.products
        self.add("active", torch.stack(seen.firings).sum(0))
        self.add("nonzero", nonzero)
        self.add("magnitude", magnitude)
        self.add("tokens", torch.tensor(seen.tokens))


class Reuse(Collector):
    """What a token shares with its neighbours: `shared` active neurons of a token and the one
    before it, of `after` that are active in tokens that have one before them; over windows of
    WINDOWS tokens that do not overlap, the size of the `union` of active neurons [6], and how many
    `windows` there are [6]."""

    def update(self, seen: Seen) -> None:
        parts = [self._of_stack(*stack) for stack in zip(seen.active, seen.firings, strict=True)]
        shared, after, unions = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        self.add("shared", shared)
        self.add("after", after)
        self.add("union", unions)
        self.add(
            "windows",
            torch.tensor([sum(len(a) * (a.shape[1] // w) for a in seen.active) for w in WINDOWS]),
        )

    def _of_stack(self, active: Tensor, firings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared, unions = _count(active[:, 1:] & active[:, :-1]).sum(), []
        after = firings.sum() - active[:, 0].sum()
        for _ in WINDOWS:
            even = active.shape[1] // 2 * 2
            active = active[:, 0:even:2] | active[:, 1:even:2]
            unions.append(_count(active).sum())
        return shared, after, torch.stack(unions)


class CoActivation(Collector):
    """`pairs` [F, F]: tokens in which both neurons are active, AᵀA of the 0/1 rows A [n, F]."""

    integer = torch.int32  # half of the memory, and more tokens than anyone will give it

    def update(self, seen: Seen) -> None:
        rows = torch.cat([active.flatten(0, 1) for active in seen.active]).float()
        self.add("pairs", (rows.T @ rows).to(torch.int32))


def _positive(x: Tensor) -> Tensor:
    """x > 0 as uint8. Integers compare four times as fast, and into uint8 twenty times as fast as
    into bool.
    """
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return torch.gt(x.view(INTEGERS[x.element_size()]), 0, out=out)


def _unsigned(x: Tensor) -> Tensor:
    """The bits of |x|, as integers: in its order, and 0 for 0."""
    integer = INTEGERS[x.element_size()]
    return x.view(integer) & torch.iinfo(integer).max


def _by_neuron(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [n, F], by column: how many are no exact zeros, and the sum of the magnitudes."""
    pattern = _unsigned(x)
    magnitude = pattern.view(x.dtype).sum(0, dtype=torch.float32)
    if (
        x.device.type == "cpu" and pattern.amin() > 0
    ):  # most taps have no zero; on a GPU to ask costs more than to count
        return torch.full(x.shape[1:], len(x), dtype=torch.int32), magnitude
    return _count(pattern.clamp_max(1).to(torch.uint8)), magnitude


def _count(x: Tensor) -> Tensor:
    """The sum of 0 and 1 [..., F] by column. Bytes are summed within bytes, of at most 255 rows:
    ten times faster.
    """
    rows = x.flatten(0, -2)
    whole = len(rows) // 128 * 128
    blocks = (
        rows[:whole].unflatten(0, (-1, 128)).sum(1, dtype=torch.uint8).sum(0, dtype=torch.int32)
    )
    return blocks + rows[whole:].sum(0, dtype=torch.int32)


# --- streams --------------------------------------------------------------------------------------


class Inputs(Collector):
    """What the MLP reads, by channel [H]: the sum of `squares` and the largest magnitude (`peak`);
    by token: the sum of the `norms` and the largest (`largest`)."""

    merged_by: ClassVar = {"peak": "max", "largest": "max"}

    def update(self, seen: Seen) -> None:
        parts = [
            (x.sum(0), x.amax(0), x.sum(1))
            for x in (rows.float().square() for rows in seen.rows("input"))
        ]
        squares, peaks, by_token = zip(*parts, strict=True)
        norms = torch.cat(by_token).sqrt()
        self.add("squares", torch.stack(squares).sum(0))
        self.add(
            "peak", torch.stack(peaks).amax(0).sqrt()
        )  # of the square: |x| to the bit between 2^-63 and 2^64
        self.add("norms", norms.sum())
        self.add("largest", norms.max())
        self.add("tokens", torch.tensor(seen.tokens))


class Collapse(Collector):
    """How far the residual stream X [n, H] of a sequence is from one and the same row for every
    token,

        ‖X − 1 x̄ᵀ‖ / ‖X‖        Frobenius norms, x̄ the mean over the tokens that count

    the residual of Dong et al. 2021 (arXiv 2103.03404), which attention alone drives to 0. `ratios`
    is their sum."""

    def update(self, seen: Seen) -> None:
        ratios = []
        for _, runs in groupby(seen.runs, lambda run: run[0]):
            x = torch.cat([seen.taps["hidden"][i, start:stop] for i, start, stop in runs]).float()
            mean = x.mean(0)
            residual = (x - mean).square().sum()
            ratios.append(
                (residual / (residual + len(x) * mean.square().sum())).sqrt()
            )  # Pythagoras
        self.add("ratios", torch.stack(ratios).sum())
        self.add("sequences", torch.tensor(len(ratios)))


class Reservoir(Collector):
    """The taps of the sampled tokens, for what no sum can tell; `index` says which tokens they
    are.
    """

    TAPS = ("input", "product", "output")
    merged_by: ClassVar = dict.fromkeys(("index", *TAPS), "rows")

    def update(self, seen: Seen) -> None:
        where = seen.sampled.nonzero(as_tuple=True)
        if len(where[0]):
            self.add("index", seen.index[where])
            for tap in self.TAPS:
                self.add(tap, seen.taps[tap][where])

    def result(self) -> dict[str, Tensor]:
        """In the order of the sample, however the parts were merged."""
        order = self.state["index"].argsort()
        return {tap: self.state[tap][order] for tap in self.TAPS}


# --- mixtures -------------------------------------------------------------------------------------


class Routing(Collector):
    """How a router spreads `tokens`: selections of each expert (`load` [E]), the sum of the
    `entropy` of the softmax of its logits in nats; and per expert and neuron [E, F] the tokens with
    gate > 0 (`active`) and h != 0 (`nonzero`)."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def update(self, seen: Seen) -> None:
        assert seen.selected is not None
        self.add("load", torch.bincount(seen.selected.flatten(), minlength=self.experts))
        self.add("tokens", torch.tensor(len(seen.selected)))
        if seen.router_logits is not None:
            log_p = seen.router_logits.float().log_softmax(-1)
            self.add("entropy", -(log_p.exp() * log_p).sum())
        if seen.expert is not None:
            self.add("active", self._by_expert(_positive(seen.taps["gate"]), seen.expert))
            self.add(
                "nonzero",
                self._by_expert(_unsigned(seen.taps["product"]).clamp_max(1), seen.expert),
            )

    def _by_expert(self, rows: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros(self.experts, rows.shape[1], dtype=torch.int32, device=rows.device)
        return out.index_add_(0, expert, rows.to(torch.int32))


class ExpertReservoir(Collector):
    """The products of the sampled tokens in the routed experts that they were sent to; `token` and
    `expert` of each.
    """

    merged_by: ClassVar = dict.fromkeys(("token", "expert", "product"), "rows")

    def update(self, seen: Seen) -> None:
        if seen.expert is None or seen.selected is None:
            return
        sent = (
            seen.selected.flatten().sort(stable=True).indices // seen.selected.shape[1]
        )  # the token of each row
        kept = seen.sampled[seen.mask][sent]
        self.add("token", seen.index[seen.mask][sent][kept])
        self.add("expert", seen.expert[kept])
        self.add("product", seen.taps["product"][kept])

    def result(self) -> dict[str, Tensor]:
        """By expert, then in the order of the sample, however the parts were merged."""
        token, expert = self.state["token"], self.state["expert"]
        order = torch.argsort(expert * (1 + token.max()) + token)
        return {"expert": expert[order], "product": self.state["product"][order]}


def update_all(collectors: Iterable[Collector], seen: Seen) -> None:
    for collector in collectors:
        collector.update(seen)
