"""Collectors: what is counted while a layer runs, as state that merges over batches and processes.

Counts are int64, sums are fp64 (of fp32 sums over a batch), histograms have fixed bins, and the
reservoir is a set of tokens chosen beforehand. Merged state is therefore that of a single pass. Its
size depends on the width of a layer and not on the number of tokens. It stays on the device until
`settle`, because fetching it after every batch would stall a GPU. Two events are counted:

    h != 0      a product (the input of down_proj) is not an exact zero
    gate > 0    a neuron is active: its pre-activation is positive

The pre-activation is that of gate_proj, or of up_proj in an MLP without a gate. The second event
exists in any model, and equals the first where the activation is ReLU.

A pass over the taps costs about as much as computing them did. What several collectors need is
therefore computed once, in `Seen`. torch compares integers several times faster than floats, so the
sign and the magnitude of floats are often read from their bits.

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

# 64 bins an octave, from 2^-40 to 2^24; values beyond fall into the first or the last bin.
BINS, LOWEST, OCTAVES = 4096, -40, 64
BLOCK = 2**18  # elements processed together on a CPU
TABLED = 2**20  # elements counted into one table of 2^16 bit patterns
WINDOWS = (2, 4, 8, 16, 32, 64)  # tokens
# Integers by size in bytes: a float's bits read so keep its sign and the order of magnitudes.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Run = tuple[int, int, int]  # sequence, first position, one past the last position


def runs_of(mask: Tensor) -> list[Run]:
    """Return the runs of adjacent tokens that count, in a mask [b, T]."""
    edge = torch.zeros(len(mask), 1, dtype=torch.int8)
    change = torch.cat([edge, mask.cpu().to(torch.int8), edge], dim=1).diff(dim=1)
    starts, stops = ((change == sign).nonzero().tolist() for sign in (1, -1))
    return [(i, start, stop) for (i, start), (_, stop) in zip(starts, stops, strict=True)]


@dataclass(kw_only=True)
class Seen:
    """The activations of one batch in one MLP.

    `mask` [b, T] is False at tokens that do not count; `runs` are the runs of the mask. `taps` are
    [b, T, ·]: input [H], gate (the pre-activation) [F], up [F] if there is a gate, product [F],
    output [H]. The tap hidden [H] is the residual stream after the layer. In a mixture the taps
    gate and product are [n·k, F]: one row for each token that counts and each of its experts, named
    in `expert` [n·k].
    """

    mask: Tensor
    sampled: Tensor  # [b, T], True for the tokens of the reservoir
    index: Tensor  # [b, T], the token's number in the sample
    taps: Mapping[str, Tensor]
    runs: list[Run] = field(default_factory=list)
    router_logits: Tensor | None = None  # [n, E]
    selected: Tensor | None = None  # [n, k]
    expert: Tensor | None = None

    def __post_init__(self) -> None:
        self.runs = self.runs or runs_of(self.mask)

    def stacks(self, tap: str) -> Iterator[Tensor]:
        """Yield [r, n, ·]: the same n positions of r adjacent sequences.

        On a CPU a stack is small enough to stay in the cache.
        """
        x, first = self.taps[tap], 0
        most = max(1, TABLED // x[0].numel()) if x.device.type == "cpu" else len(x)
        for k in range(1, len(self.runs) + 1):
            i, *positions = self.runs[first]
            full = k == len(self.runs) or k - first == most
            if full or self.runs[k] != (i + k - first, *positions):
                yield x[i : i + k - first, slice(*positions)]
                first = k

    def rows(self, tap: str) -> Iterator[Tensor]:
        """Return an iterator over the tokens that count, [n, ·] at a time.

        On a CPU n is small enough for what is computed from them to stay in the cache.
        """
        x = self.taps[tap]
        parts = (x,) if x.ndim == 2 else (x[i, start:stop] for i, start, stop in self.runs)
        if x.device.type == "cpu":
            return (block for part in parts for block in part.split(max(1, BLOCK // x.shape[-1])))
        return iter((torch.cat(list(parts)),))

    def every(self, step: int, tap: str) -> Tensor:
        """Return every `step`-th token of each run, beginning with the first, [n, ·]."""
        x = self.taps[tap]
        if x.ndim == 2:
            return x[::step]
        return torch.cat([s[:, ::step].flatten(0, 1) for s in self.stacks(tap)])

    @cached_property
    def tokens(self) -> int:
        """Return the number of tokens that count."""
        return sum(stop - start for _, start, stop in self.runs)

    @property
    def products_seen(self) -> int:
        """Return the number of products of the tokens that count."""
        x = self.taps["product"]
        return x.numel() if x.ndim == 2 else self.tokens * x.shape[-1]

    @cached_property
    def active(self) -> list[Tensor]:
        """Return gate > 0 as 0 and 1, one [r, n, F] uint8 for each stack."""
        return [_positive(x) for x in self.stacks("gate")]

    @cached_property
    def firings(self) -> list[Tensor]:
        """Return for each stack how many tokens a neuron is active for, [F]."""
        return [_count(rows) for rows in self.active]

    @cached_property
    def products(self) -> tuple[Tensor, Tensor]:
        """Return for each neuron, [F]: how many products are nonzero, and the sum of |h|."""
        nonzero, magnitude = zip(*map(_by_neuron, self.rows("product")), strict=True)
        return torch.stack(nonzero).sum(0), torch.stack(magnitude).sum(0)


class Collector:
    """Named state tensors that merge.

    A tensor is merged by addition, unless `merged_by` says "max", or "rows" to append one to the
    other.
    """

    merged_by: ClassVar[Mapping[str, str]] = {}
    integer: ClassVar[torch.dtype] = torch.int64

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def update(self, seen: Seen) -> None:
        """Count one batch."""
        raise NotImplementedError

    def merge(self, other: Collector) -> None:
        """Add what another collector of the same layer has counted."""
        for name, value in other.state.items():
            self.add(name, value)

    def settle(self) -> None:
        """Move the state to the CPU, once all batches are counted."""
        self.state = {name: value.cpu() for name, value in self.state.items()}

    def gather(self) -> None:
        """Add what the same collector counted in every other process.

        Afterwards all processes have the same state.
        """
        self.settle()
        states: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(states, self.state)
        self.state = {}
        # In the order of the ranks, so that sums are rounded alike in every process.
        for state in states:
            for name, value in state.items():
                self.add(name, value)

    def add(self, name: str, value: Tensor) -> None:
        """Merge `value` into the state `name`."""
        how = self.merged_by.get(name, "sum")
        value = value.cpu() if value.device.type == "mps" else value  # mps has no fp64
        if how != "rows":
            value = value.to(torch.float64 if value.is_floating_point() else self.integer)
        if name in self.state:
            value = _MERGE[how](self.state[name], value)
        self.state[name] = value


_MERGE = {"sum": torch.add, "max": torch.maximum, "rows": lambda a, b: torch.cat([a, b])}


# --- histograms -----------------------------------------------------------------------------------


class Histogram(Collector):
    """A histogram of one tap, over every `every`-th token.

    `patterns` [2, 2^15] counts x >= 0 and x < 0 by the upper half of the fp32 bit pattern, which is
    the whole of a bf16 number: 8 bits of exponent, 7 of mantissa. `zeros` of `total` are exact
    zeros, among the same tokens, except that for the product all tokens are counted.
    """

    def __init__(self, tap: str, every: int = 1) -> None:
        super().__init__()
        self.tap, self.every = tap, every

    def update(self, seen: Seen) -> None:
        x = seen.every(self.every, self.tap).flatten()
        patterns = reduce(torch.add, map(_patterns, x.split(TABLED))).view(2, 2**15)
        zeros, total = patterns[:, 0].sum(), x.numel()
        if x.element_size() > 2 and zeros:
            # The upper half is 0 for magnitudes below 2^-133 too; they go to the next pattern.
            zeros = total - torch.count_nonzero(x)
            patterns[0, 1] += patterns[:, 0].sum() - zeros
        if self.tap == "product":
            total = seen.products_seen
            zeros = total - seen.products[0].sum()
        self.add("patterns", patterns)
        self.add("zeros", zeros)
        self.add("total", torch.tensor(total))

    def result(self) -> Distribution:
        """Return the distribution of all that was counted."""
        counts = _binned(self.state["patterns"])
        zeros, total = int(self.state["zeros"]), int(self.state["total"])
        return Distribution(counts=counts, zeros=zeros, total=total)


def _patterns(x: Tensor) -> Tensor:
    """Count the upper halves of the fp32 bit patterns, [2^16]."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    upper = x.view(torch.uint16)[1::2] if x.dtype == torch.float32 else x.view(torch.uint16)
    return torch.bincount(upper.to(torch.int32), minlength=2**16)


def _binned(patterns: Tensor) -> Tensor:
    """Return counts by bin, [2, BINS], without the zeros, which have a pattern of their own."""
    first, last = (LOWEST + 127) << 7, (LOWEST + OCTAVES + 127) << 7
    bins = patterns[:, first:last].reshape(2, BINS, -1).sum(2)
    bins[:, 0] += patterns[:, 1:first].sum(1)
    bins[:, -1] += patterns[:, last:].sum(1)
    return bins


def edges() -> Tensor:
    """Return the edges of the bins, [BINS + 1] fp64: bin i holds edges[i] <= |x| < edges[i + 1]."""
    i = torch.arange(BINS + 1)
    per = BINS // OCTAVES
    exponent = LOWEST + torch.div(i, per, rounding_mode="floor")
    return torch.ldexp(1 + (i % per).double() / per, exponent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A finished histogram, read as fractions of all elements.

    Fractions are exact at the edges of the bins, which are at most 1.6% apart. `zeros` of `total`
    elements are exact zeros; `counts` [2, BINS] are those of the others, or of a sample of the
    others.
    """

    counts: Tensor
    zeros: int
    total: int

    @property
    def zero(self) -> float:
        """Return the fraction of exact zeros."""
        return self.zeros / self.total

    @property
    def positive(self) -> float:
        """Return the fraction of positive elements."""
        return self._share(self.counts[0])

    @property
    def shares(self) -> Tensor:
        """Return the counts as fractions of all elements, [2, BINS]."""
        return self.counts * ((1 - self.zero) / max(1, int(self.counts.sum())))

    def below(self, threshold: float) -> float:
        """Return the fraction with |x| < threshold, at the nearest edge below the threshold."""
        full = int((edges()[1:] <= threshold).sum())
        return self.zero * (threshold > 0) + self._share(self.counts[:, :full])

    def threshold(self, sparsity: float) -> float:
        """Return the smallest edge t such that at least this fraction has |x| < t.

        Zero if the exact zeros suffice.
        """
        wanted = sparsity * self.total - self.zeros
        return 0.0 if wanted <= 0 else float(edges()[1 + self._bin(self.counts.sum(0), wanted)])

    def quantile(self, fraction: float) -> float:
        """Return the smallest edge t, of either sign, with at least this fraction of x <= t.

        For a positive t it is x < t.
        """
        wanted, negative = fraction * self.total, self._share(self.counts[1]) * self.total
        if negative >= wanted:
            return -float(edges()[BINS - 1 - self._bin(self.counts[1].flip(0), wanted)])
        if negative + self.zeros >= wanted:
            return 0.0
        return float(edges()[1 + self._bin(self.counts[0], wanted - negative - self.zeros)])

    def _share(self, counts: Tensor) -> float:
        """Return these counts as a fraction of all elements.

        The arithmetic is in integers up to the division, so that it is exact if all elements are
        counted.
        """
        counted = max(1, int(self.counts.sum()))
        return int(counts.sum()) * (self.total - self.zeros) / (counted * self.total)

    def _bin(self, counts: Tensor, wanted: float) -> int:
        """Return the first of these bins at which `wanted` elements are reached, or the last."""
        scale = (self.total - self.zeros) / max(1, int(self.counts.sum()))
        return min(BINS - 1, int((counts.cumsum(0) * scale < wanted).sum()))


# --- neurons --------------------------------------------------------------------------------------


class Activity(Collector):
    """Counts per neuron, [F].

    `active` counts tokens with gate > 0, `nonzero` tokens with h != 0; `magnitude` is the sum of
    |h|.
    """

    def update(self, seen: Seen) -> None:
        nonzero, magnitude = seen.products
        self.add("active", torch.stack(seen.firings).sum(0))
        self.add("nonzero", nonzero)
        self.add("magnitude", magnitude)
        self.add("tokens", torch.tensor(seen.tokens))


class Reuse(Collector):
    """What a token shares with its neighbours.

    `shared` counts active neurons of a token that were active for the token before it too, out of
    `after` active neurons of tokens that have a token before them. For windows of WINDOWS tokens
    that do not overlap, `union` [6] sums the sizes of the unions of active neurons over the
    `windows` [6].
    """

    def update(self, seen: Seen) -> None:
        parts = [self._of_stack(*stack) for stack in zip(seen.active, seen.firings, strict=True)]
        shared, after, unions = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        self.add("shared", shared)
        self.add("after", after)
        self.add("union", unions)
        windows = [sum(len(a) * (a.shape[1] // w) for a in seen.active) for w in WINDOWS]
        self.add("windows", torch.tensor(windows))

    def _of_stack(self, active: Tensor, firings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared, unions = _count(active[:, 1:] & active[:, :-1]).sum(), []
        after = firings.sum() - active[:, 0].sum()
        for _ in WINDOWS:
            even = active.shape[1] // 2 * 2
            active = active[:, 0:even:2] | active[:, 1:even:2]
            unions.append(_count(active).sum())
        return shared, after, torch.stack(unions)


class CoActivation(Collector):
    """Co-activation of neurons.

    `pairs` [F, F] counts the tokens for which both neurons are active: AᵀA of the 0/1 rows A [n,
    F].
    """

    integer = torch.int32  # half the memory of int64, and nobody gives it 2^31 tokens

    def update(self, seen: Seen) -> None:
        rows = torch.cat([active.flatten(0, 1) for active in seen.active]).float()
        self.add("pairs", (rows.T @ rows).to(torch.int32))


def _positive(x: Tensor) -> Tensor:
    """Return x > 0 as uint8.

    Integers compare four times as fast as floats, and into uint8 twenty times as fast as into bool.
    """
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return torch.gt(x.view(INTEGERS[x.element_size()]), 0, out=out)


def _unsigned(x: Tensor) -> Tensor:
    """Return the bits of |x| as integers: they have the order of |x|, and are 0 for 0."""
    integer = INTEGERS[x.element_size()]
    return x.view(integer) & torch.iinfo(integer).max


def _by_neuron(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each column of x [n, F]: how many are nonzero, and the sum of magnitudes."""
    pattern = _unsigned(x)
    magnitude = pattern.view(x.dtype).sum(0, dtype=torch.float32)
    # Most taps have no zero, and then there is nothing to count. On a GPU asking costs more than
    # counting.
    if x.device.type == "cpu" and pattern.amin() > 0:
        return torch.full(x.shape[1:], len(x), dtype=torch.int32), magnitude
    return _count(pattern.clamp_max(1).to(torch.uint8)), magnitude


def _count(x: Tensor) -> Tensor:
    """Return the sums of 0 and 1 [..., F] by column.

    Blocks of 128 rows are summed in bytes, whose limit is 255: ten times faster than in int32.
    """
    rows = x.flatten(0, -2)
    whole = len(rows) // 128 * 128
    blocks = rows[:whole].unflatten(0, (-1, 128)).sum(1, dtype=torch.uint8)
    return blocks.sum(0, dtype=torch.int32) + rows[whole:].sum(0, dtype=torch.int32)


# --- streams --------------------------------------------------------------------------------------


class Inputs(Collector):
    """The input of the MLP.

    By channel [H]: the sum of `squares` and the largest magnitude, `peak`. By token: the sum of the
    `norms` and the `largest` one.
    """

    merged_by: ClassVar = {"peak": "max", "largest": "max"}

    def update(self, seen: Seen) -> None:
        squared = (rows.float().square() for rows in seen.rows("input"))
        parts = [(x.sum(0), x.amax(0), x.sum(1)) for x in squared]
        squares, peaks, by_token = zip(*parts, strict=True)
        norms = torch.cat(by_token).sqrt()
        self.add("squares", torch.stack(squares).sum(0))
        # The root of the largest square is |x| to the bit between 2^-63 and 2^64.
        self.add("peak", torch.stack(peaks).amax(0).sqrt())
        self.add("norms", norms.sum())
        self.add("largest", norms.max())
        self.add("tokens", torch.tensor(seen.tokens))


class Collapse(Collector):
    """How far the residual stream X [n, H] of a sequence is from one row repeated for every token.

        ‖X − 1 x̄ᵀ‖ / ‖X‖        Frobenius norms, x̄ the mean over the tokens that count

    This is the residual of Dong et al. 2021 (arXiv 2103.03404), which attention alone drives to 0.
    `ratios` is its sum over `sequences`.
    """

    def update(self, seen: Seen) -> None:
        ratios = []
        for _, runs in groupby(seen.runs, lambda run: run[0]):
            x = torch.cat([seen.taps["hidden"][i, start:stop] for i, start, stop in runs]).float()
            mean = x.mean(0)
            residual = (x - mean).square().sum()
            whole = residual + len(x) * mean.square().sum()  # ‖X‖², by Pythagoras
            ratios.append((residual / whole).sqrt())
        self.add("ratios", torch.stack(ratios).sum())
        self.add("sequences", torch.tensor(len(ratios)))


class Reservoir(Collector):
    """The taps of the sampled tokens, for what no sum can tell.

    `index` says which tokens they are.
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
        """Return the taps in the order of the sample, however the parts were merged."""
        order = self.state["index"].argsort()
        return {tap: self.state[tap][order] for tap in self.TAPS}


# --- mixtures -------------------------------------------------------------------------------------


class Routing(Collector):
    """How a router spreads `tokens` over its experts.

    `load` [E] counts the selections of each expert; `entropy` sums the entropy of the softmax of
    the logits, in nats. Per expert and neuron, [E, F], `active` counts tokens with gate > 0 and
    `nonzero` tokens with h != 0.
    """

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
            active = _positive(seen.taps["gate"])
            nonzero = _unsigned(seen.taps["product"]).clamp_max(1)
            self.add("active", self._by_expert(active, seen.expert))
            self.add("nonzero", self._by_expert(nonzero, seen.expert))

    def _by_expert(self, rows: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros(self.experts, rows.shape[1], dtype=torch.int32, device=rows.device)
        return out.index_add_(0, expert, rows.to(torch.int32))


class ExpertReservoir(Collector):
    """The products of the sampled tokens in each routed expert they were sent to.

    `token` and `expert` say whose product each row is.
    """

    merged_by: ClassVar = dict.fromkeys(("token", "expert", "product"), "rows")

    def update(self, seen: Seen) -> None:
        if seen.expert is None or seen.selected is None:
            return
        order = seen.selected.flatten().sort(stable=True).indices
        sent = order // seen.selected.shape[1]  # the token that each row belongs to
        kept = seen.sampled[seen.mask][sent]
        self.add("token", seen.index[seen.mask][sent][kept])
        self.add("expert", seen.expert[kept])
        self.add("product", seen.taps["product"][kept])

    def result(self) -> dict[str, Tensor]:
        """Return the rows by expert, then in sample order, however they were merged."""
        token, expert = self.state["token"], self.state["expert"]
        order = torch.argsort(expert * (1 + token.max()) + token)
        return {"expert": expert[order], "product": self.state["product"][order]}


def update_all(collectors: Iterable[Collector], seen: Seen) -> None:
    """Let every collector count the batch."""
    for collector in collectors:
        collector.update(seen)
