"""What is counted while a layer runs: state that merges over batches, processes and runs.

Counts are int64, sums fp64 (of fp32 sums over a batch), histograms have fixed bins, and the reservoir is a set of tokens
chosen beforehand, so that merged state is that of one pass. All of it lies on the CPU and has the size of a layer's
width, whatever the number of tokens. Two events are counted:

    h != 0      a product (what down_proj reads) is not an exact zero
    gate > 0    a neuron is active: its pre-activation is positive (of gate_proj; of up_proj in an MLP without a gate)

The second exists in any model and is the first one where the activation is ReLU.

Shapes: b sequences of a batch, T positions, n tokens that count, H hidden_size, F intermediate_size, E experts, k top_k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

BINS, LOWEST, OCTAVES = 4096, -40, 64  # 64 bins an octave, from 2^-40 to 2^24; what is beyond falls into the end bins
BLOCK = 2**18  # elements looked at together on a CPU
WINDOWS = (2, 4, 8, 16, 32, 64)  # tokens


@dataclass(kw_only=True)
class Seen:
    """One batch in one MLP, as it computed it. `mask` [b, T] is False at tokens that do not count.

    `taps` are [b, T, ·]: input [H], gate (pre-activation) [F], up [F] where there is a gate, product [F], output [H];
    hidden [H] is the residual stream after the layer. In a mixture the taps gate and product are [n·k, F], the rows of
    the tokens that count, for `expert` [n·k].
    """

    mask: Tensor
    sampled: Tensor  # [b, T]: the tokens of the reservoir
    index: Tensor  # [b, T]: the number of the token in the sample
    taps: Mapping[str, Tensor]
    router_logits: Tensor | None = None  # [n, E]
    selected: Tensor | None = None  # [n, k]
    expert: Tensor | None = None

    def rows(self, tap: str, every: int = 1) -> Iterator[Tensor]:
        """The tokens that count (or every so manieth of them), [n, ·] at a time: on a CPU few enough for what is computed
        of them to stay in its cache."""
        x = self.taps[tap]
        parts = (x[::every],) if x.ndim == 2 else (x[i, start:stop:every] for i, start, stop in self.runs)
        if x.device.type == "cpu":
            return (block for part in parts for block in part.split(max(1, BLOCK // x.shape[-1])))
        return iter((torch.cat(list(parts)),))

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Where tokens that count stand next to each other: sequence, first position, the one after the last."""
        edge = torch.zeros(len(self.mask), 1, dtype=torch.int8)
        change = torch.cat([edge, self.mask.cpu().to(torch.int8), edge], dim=1).diff(dim=1)
        starts, stops = ((change == sign).nonzero().tolist() for sign in (1, -1))
        return [(i, start, stop) for (i, start), (_, stop) in zip(starts, stops, strict=True)]

    @cached_property
    def tokens(self) -> int:
        """How many count."""
        return sum(stop - start for _, start, stop in self.runs)

    @cached_property
    def zeros(self) -> int:
        """Exact zeros among the products."""
        return _zeros(self.rows("product"))

    @cached_property
    def active(self) -> list[Tensor]:
        """gate > 0, [n, F] for each run."""
        return [_positive(self.taps["gate"][i, start:stop]) for i, start, stop in self.runs]


class Collector:
    """Named state tensors, each merged by addition but where `merged_by` says "max" or "rows" (one after another)."""

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

    def gather(self) -> None:
        """Take in what the same collector of every other process has counted; all of them have the same afterwards."""
        states: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(states, self.state)
        self.state = {}
        for state in states:  # in the order of the processes, so that sums are rounded alike on each
            for name, value in state.items():
                self.add(name, value)

    def add(self, name: str, value: Tensor) -> None:
        how, value = self.merged_by.get(name, "sum"), value.cpu()  # before fp64, which not every device has
        if how != "rows":
            value = value.to(torch.float64 if value.is_floating_point() else self.integer)
        if name in self.state:
            value = _MERGE[how](self.state[name], value)
        self.state[name] = value


_MERGE = {"sum": torch.add, "max": torch.maximum, "rows": lambda a, b: torch.cat([a, b])}


# --- histograms -------------------------------------------------------------------------------------------------------


class Histogram(Collector):
    """`counts` [2, BINS] of x > 0 and x < 0 by log2 |x|, and `zeros`, the exact ones; of `every` so manieth token."""

    def __init__(self, tap: str, every: int = 1) -> None:
        super().__init__()
        self.tap, self.every = tap, every

    def update(self, seen: Seen) -> None:
        shared = self.tap == "product" and self.every == 1
        zeros = seen.zeros if shared else _zeros(seen.rows(self.tap, self.every))
        self.add("counts", _binned(seen.rows(self.tap, self.every), zeros))
        self.add("zeros", torch.tensor(zeros))

    def result(self) -> Distribution:
        return Distribution(counts=self.state["counts"], zeros=int(self.state["zeros"]))


def _zeros(rows: Iterable[Tensor]) -> int:
    """Exact zeros. Most taps have none, and the smallest magnitude says so four times faster than counting."""
    return sum(0 if x.abs().min() > 0 else x.numel() - int(torch.count_nonzero(x)) for x in rows if len(x))


def _binned(rows: Iterable[Tensor], zeros: int) -> Tensor:
    counts = sum((_patterns(x) for x in rows), torch.zeros(2**16, dtype=torch.int64)).view(2, 2**15)
    first, last = (LOWEST + 127) << 7, (LOWEST + OCTAVES + 127) << 7
    bins = counts[:, first:last].reshape(2, BINS, -1).sum(2)
    bins[:, 0] += counts[:, :first].sum(1)
    bins[:, -1] += counts[:, last:].sum(1)
    bins[1, 0] -= counts[1, 0]  # zeros have a sign too: they leave both halves
    bins[0, 0] += counts[1, 0] - zeros
    return bins


def _patterns(x: Tensor) -> Tensor:
    """Counts of the upper half of the fp32 bit pattern (all of it in bf16): sign, 8 bits of exponent, 7 of mantissa."""
    x = x.contiguous() if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    upper = x.view(torch.uint16)[..., 1::2] if x.dtype == torch.float32 else x.view(torch.uint16)
    return torch.bincount(upper.to(torch.int32).flatten(), minlength=2**16).cpu()


def edges() -> Tensor:
    """[BINS + 1] fp64: bin i holds edges[i] <= |x| < edges[i + 1]."""
    i = torch.arange(BINS + 1)
    per = BINS // OCTAVES
    return torch.ldexp(1 + (i % per).double() / per, LOWEST + torch.div(i, per, rounding_mode="floor"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A histogram at its end: fractions of all elements, exact at the edges of the bins (1.6% apart at most)."""

    counts: Tensor
    zeros: int

    @property
    def total(self) -> int:
        return int(self.counts.sum()) + self.zeros

    @property
    def zero(self) -> float:
        """The fraction of exact zeros."""
        return self.zeros / self.total

    @property
    def positive(self) -> float:
        return int(self.counts[0].sum()) / self.total

    def below(self, threshold: float) -> float:
        """The fraction with |x| < threshold, taken at the nearest edge under it."""
        full = int((edges()[1:] <= threshold).sum())
        return (self.zeros * (threshold > 0) + int(self.counts[:, :full].sum())) / self.total

    def threshold(self, sparsity: float) -> float:
        """The smallest edge t with at least this fraction of |x| < t; 0 where the exact zeros suffice."""
        if self.zeros >= sparsity * self.total:
            return 0.0
        reached = self.zeros + self.counts.sum(0).cumsum(0)
        return float(edges()[1 + int((reached < sparsity * self.total).sum())])

    def quantile(self, fraction: float) -> float:
        """The smallest edge t, of either sign, with at least this fraction of x <= t (x < t for a positive t)."""
        negative = self.counts[1].flip(0).cumsum(0)
        if negative[-1] >= fraction * self.total:
            return -float(edges()[BINS - 1 - int((negative < fraction * self.total).sum())])
        below = negative[-1] + self.zeros
        if below >= fraction * self.total:
            return 0.0
        return float(edges()[1 + int((below + self.counts[0].cumsum(0) < fraction * self.total).sum())])


# --- neurons ----------------------------------------------------------------------------------------------------------


class Activity(Collector):
    """Per neuron [F]: tokens with gate > 0 (`active`), tokens with h != 0 (`nonzero`), the sum of |h| (`magnitude`)."""

    def update(self, seen: Seen) -> None:
        tokens, width = seen.tokens, seen.taps["product"].shape[-1]
        for active in seen.active:
            self.add("active", _count(active))
        for x in seen.rows("product") if seen.zeros else ():
            self.add("nonzero", _count(x != 0))
        if not seen.zeros:
            self.add("nonzero", torch.full((width,), tokens))
        for x in seen.rows("product"):
            self.add("magnitude", x.abs().sum(0, dtype=torch.float32))
        self.add("tokens", torch.tensor(tokens))


class Reuse(Collector):
    """What a token shares with its neighbours: `shared` active neurons of a token and the one before it, of `after`
    that are active in tokens that have one before them; over windows of WINDOWS tokens that do not overlap, the size of
    the `union` of active neurons [6], and how many `windows` there are [6]."""

    def update(self, seen: Seen) -> None:
        for active in seen.active:
            self.add("shared", _count(active[1:] & active[:-1]).sum())
            self.add("after", _count(active[1:]).sum())
            unions, windows = [], []
            for _ in WINDOWS:
                even = len(active) // 2 * 2
                active = active[0:even:2] | active[1:even:2]
                unions.append(_count(active).sum())
                windows.append(len(active))
            self.add("union", torch.stack(unions))
            self.add("windows", torch.tensor(windows))


class CoActivation(Collector):
    """`pairs` [F, F]: tokens in which both neurons are active, AᵀA of the 0/1 rows A [n, F]."""

    integer = torch.int32  # half of the memory, and more tokens than anyone will give it

    def update(self, seen: Seen) -> None:
        rows = torch.cat(seen.active).float()
        self.add("pairs", (rows.T @ rows).to(torch.int32))


def _positive(x: Tensor) -> Tensor:
    """x > 0, as integers compare twice as fast: the sign bit is the same."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()]) > 0


def _count(rows: Tensor) -> Tensor:
    """True rows of [n, F] by column. Bytes are summed within bytes, of at most 255 rows: ten times faster."""
    rows = rows.view(torch.uint8)
    whole = len(rows) // 128 * 128
    blocks = rows[:whole].unflatten(0, (-1, 128)).sum(1, dtype=torch.uint8).sum(0, dtype=torch.int32)
    return blocks + rows[whole:].sum(0, dtype=torch.int32)


# --- streams ----------------------------------------------------------------------------------------------------------


class Inputs(Collector):
    """What the MLP reads, by channel [H]: the sum of `squares` and the largest magnitude (`peak`); by token: the sum of
    the `norms` and the largest (`largest`)."""

    merged_by: ClassVar = {"peak": "max", "largest": "max"}

    def update(self, seen: Seen) -> None:
        for rows in seen.rows("input"):
            x = rows.float()
            squares = x.square()
            norms = squares.sum(1).sqrt()
            self.add("squares", squares.sum(0))
            self.add("peak", x.abs().amax(0))
            self.add("norms", norms.sum())
            self.add("largest", norms.max())
        self.add("tokens", torch.tensor(seen.tokens))


class Collapse(Collector):
    """How far the residual stream X [T, H] of a sequence is from one and the same row for every token,

        ‖X − 1 x̄ᵀ‖ / ‖X‖        Frobenius norms, x̄ the mean over the tokens that count

    the residual of Dong et al. 2021 (arXiv 2103.03404), which attention alone drives to 0. `ratios` is their sum."""

    def update(self, seen: Seen) -> None:
        x, mask = seen.taps["hidden"].float(), seen.mask[..., None].float()
        mean = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        residual = ((x - mean) * mask).square().sum((1, 2)).sqrt()
        self.add("ratios", (residual / (x * mask).square().sum((1, 2)).sqrt()).sum())
        self.add("sequences", torch.tensor(len(x)))


class Reservoir(Collector):
    """The taps of the sampled tokens, for what no sum can tell; `index` says which tokens they are."""

    TAPS = ("input", "product", "output")
    merged_by: ClassVar = dict.fromkeys(("index", *TAPS), "rows")

    def update(self, seen: Seen) -> None:
        if seen.sampled.any():
            self.add("index", seen.index[seen.sampled])
            for tap in self.TAPS:
                self.add(tap, seen.taps[tap][seen.sampled])

    def result(self) -> dict[str, Tensor]:
        """In the order of the sample, however the parts were merged."""
        order = self.state["index"].argsort()
        return {tap: self.state[tap][order] for tap in self.TAPS}


# --- mixtures ---------------------------------------------------------------------------------------------------------


class Routing(Collector):
    """How a router spreads `tokens`: selections of each expert (`load` [E]), the sum of the `entropy` of the softmax of
    its logits in nats; and per expert and neuron [E, F] the tokens with gate > 0 (`active`) and h != 0 (`nonzero`)."""

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
            self.add("active", self._by_expert(seen.taps["gate"] > 0, seen.expert))
            self.add("nonzero", self._by_expert(seen.taps["product"] != 0, seen.expert))

    def _by_expert(self, rows: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros(self.experts, rows.shape[1], dtype=torch.int32, device=rows.device)
        return out.index_add_(0, expert, rows.to(torch.int32))


def update_all(collectors: Iterable[Collector], seen: Seen) -> None:
    for collector in collectors:
        collector.update(seen)
