"""Repair an MLP that was changed, so that it computes again what it did: fitted on calibration
text, a layer at a time.

The walk hands the converted layers' outputs on, so a layer is fitted on what it will read, and
later layers make up for earlier ones. Two streams go through the layers, the source's own and the
converted one. With y the layer's original MLP on the converted stream, and e what then still lacks
to the source's stream after the layer, the target is

    t = y + α·e        α = 0 keeps each layer to itself; with α = 0.5 the errors of the layers before it are half mended

and correcting them in full (α = 1) asks of one MLP what it cannot do.

*ridge* refits `down_proj` in closed form. With H the new products, R = T − H Wᵀ what they miss of
the targets, Ω row weights:

    W' = W + Rᵀ Ω H (Hᵀ Ω H + λ·mean(diag(Hᵀ Ω H))·I)⁻¹

so that λ → ∞ leaves W as it was. With a bypass, the inputs z stand beside H, and a linear map of
them is fitted in the same
solve: much of what an activation with exact zeros takes away is linear in z. Where it is to have a
rank, the directions of z that the full map uses most are kept (the leading right singular vectors
of A E[z zᵀ]^½), and fitted again.

A row weighs 1/mean(x²), x the source's stream after the layer, because a norm reads that
stream next; where a norm follows the MLP itself (Gemma 2 and 3, OLMo 2), 1/mean(y²).

Shapes: N tokens that count, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from surgery.blocks import block_config, rules
from surgery.blocks.sparse_mlp import RULES
from surgery.checkpoint.tensors import DTYPES
from surgery.families import Blocks, Mlp
from surgery.families.mlp import BY_NEURON
from surgery.fitting.sizes import BLOCK

if TYPE_CHECKING:
    from typing_extensions import Self

DAMPING = 1e-3  # λ
FEEDBACK = 0.5  # α
FIRST = 8  # all first tokens together weigh as much as one in so many of the other rows
HELD_OUT = 0.1  # of the rows: measured on, never fitted on
CHUNK = 512  # rows whose products are held at once
WHITE_ROWS, WHITE_DAMPING = 16_384, 1e-2
SWEEPS = 3  # over the blocks, where there are several
SAMPLED = 4_000_000  # values that thresholds are chosen on
NEURONS, COST_ROWS = 768, 4096  # that the cost of a sparsity is estimated on
ADDED = (
    "threshold",
    "threshold_up",
    "correction",
    "bypass_in",
    "bypass_out",
)  # of a sparse block, beside the weights
QUANTILE = 1_000_000  # of them that are sorted together

N = TypeVar("N", bound="Neurons")


@dataclass(kw_only=True)
class Rows:
    """What the MLP reads, z [N, H], and is to write, y [N, H], in the walk's dtype; `weight` [N] of
    each row.

    `first` are those of the first tokens of sequences, which no error counts. But one may hold the
    massive activation that all attention rests on (Sun et al. 2024, arXiv 2402.17762), so that all
    of them together are fitted to as 1/FIRST of the others.
    """

    z: Tensor
    y: Tensor
    weight: Tensor | None = None
    first: Rows | None = None

    @property
    def fitted(self) -> int:
        """Rows that may be fitted on; the others come after them."""
        return len(self.z) - max(1, int(len(self.z) * HELD_OUT))

    def parts(
        self, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """z, y and weight of rows [start, stop) in fp32, a chunk at a time."""
        stop = len(self.z) if stop is None else stop
        for i in range(start, stop, CHUNK):
            j = min(stop, i + CHUNK)
            yield (
                self.z[i:j].float(),
                self.y[i:j].float(),
                None if self.weight is None else self.weight[i:j],
            )

    def fitting(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """What is fitted to: the rows that may be, then the first tokens with their larger
        weight.
        """
        yield from self.parts(0, self.fitted)
        if self.first is not None:
            larger = len(self.z) / (FIRST * len(self.first.z))
            for z, y, weight in self.first.parts():
                yield z, y, larger * (z.new_ones(len(z)) if weight is None else weight)


@dataclass(kw_only=True)
class Neurons:
    """A converted MLP in fp32, in Linear's layout. `rule`, `act` and the thresholds ([1] or [F])
    are those of surgery/blocks/sparse_mlp.py; `correction` [H] is added to the output."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    rule: str
    act: str
    threshold: Tensor | None = None
    threshold_up: Tensor | None = None
    correction: Tensor | None = None
    bypass_in: Tensor | None = None
    bypass_out: Tensor | None = None

    @classmethod
    def of(cls, mlp: Mlp, rule: str, act: str, device: str = "cpu") -> Neurons:
        """With thresholds of 0."""
        parts = {
            n: getattr(mlp, n) for n in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        }
        values = {n: t and t.read().to(device, torch.float32) for n, t in parts.items()}
        zero = torch.zeros(1, device=device)
        return cls(
            rule=rule,
            act=act,
            **values,
            **dict.fromkeys(rules.RULES[rule].thresholds, zero),
        )

    @classmethod
    def at(cls, blocks: Blocks, index: int, device: str = "cpu") -> Neurons:
        """Of decoder layer `index` as it stands, with all that its sparse block has if it is
        one.
        """
        sparse = block_config.sparse_entry_of(blocks.checkpoint.config, index)
        neurons = cls.of(
            blocks.mlp(index),
            sparse.get("rule", "plain"),
            sparse.get("activation", blocks.activation),
            device,
        )
        start, tensors = f"{blocks.layer(index)}{blocks.family.mlp}.", blocks.checkpoint.tensors
        found = {
            n: tensors[start + n].read().to(device, torch.float32)
            for n in ADDED
            if sparse and start + n in tensors
        }
        return dataclasses.replace(neurons, **found)

    def pick(self, chosen: Tensor | slice) -> Self:
        """Return the `chosen` neurons alone, in that order. A threshold for all of them stays."""
        rows = {n: t[chosen] for n, t in self._by_neuron().items()}
        return dataclasses.replace(self, **rows, down=self.down[:, chosen])

    def reorder(self, order: Tensor) -> None:
        """Put the neurons into another order, one matrix after another: the same function."""
        for name, value in self._by_neuron().items():
            setattr(self, name, value[order])
        self.down = self.down[:, order]

    def _by_neuron(self) -> dict[str, Tensor]:
        """Return what has a row for each neuron, by name."""
        values = {name: getattr(self, name) for name in (*BY_NEURON, "threshold", "threshold_up")}
        return {n: t for n, t in values.items() if t is not None and len(t) == len(self.up)}

    def open(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up, pre-activation [n, F], of inputs [n, H]; both the same where there is no
        gate.
        """
        up = F.linear(z, self.up, self.up_bias)
        return (up if self.gate is None else F.linear(z, self.gate, self.gate_bias)), up

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """h [n, F] of gate and up."""
        up_or_none = None if self.gate is None else up
        return RULES[self.rule].multiply(
            ACT2FN[self.act], gate, up_or_none, self.threshold, self.threshold_up
        )

    def product(self, z: Tensor) -> Tensor:
        """h [n, F] of inputs [n, H]."""
        return self.multiply(*self.open(z))

    def shares(self, z: Tensor) -> Tensor:
        """The energy of what each neuron adds to the stream, as a share of its token's: [n, F] of
        inputs [n, H].
        """
        energy = (Neurons.product(self, z) * self.down.norm(dim=0)).square()
        return energy / energy.sum(1, keepdim=True).clamp_min(1e-30)

    def output(self, h: Tensor, z: Tensor) -> Tensor:
        """y [n, H] of products [n, F] and inputs [n, H]."""
        y = F.linear(h, self.down, self.down_bias)
        if self.bypass_out is not None:
            y = y + F.linear(self.bypassed(z), self.bypass_out)
        return y if self.correction is None else y + self.correction

    def bypassed(self, z: Tensor) -> Tensor:
        """What of inputs [n, H] the bypass maps to the output: [n, rank]."""
        return z if self.bypass_in is None else F.linear(z, self.bypass_in)

    def bypass(self, rank: int) -> dict[str, Tensor]:
        """bypass_in [rank, H] and bypass_out [H, rank], of zeros where none was fitted."""
        hidden = len(self.down)
        shapes = {"bypass_in": (rank, hidden), "bypass_out": (hidden, rank)}
        fitted = {name: getattr(self, name) for name in shapes}
        return {n: self.down.new_zeros(shapes[n]) if t is None else t for n, t in fitted.items()}

    def __call__(self, z: Tensor) -> Tensor:
        """y [n, H] of inputs [n, H]."""
        return self.output(self.product(z), z)


def error(neurons: Neurons, rows: Rows, start: int = 0, stop: int | None = None) -> float:
    """‖Y − Ŷ‖² / ‖Y‖² over rows [start, stop), weighted."""
    missed = total = 0.0
    for z, y, weight in rows.parts(start, stop):
        w = 1.0 if weight is None else weight[:, None]
        missed += (w * (y - neurons(z)).square()).sum(dtype=torch.float64).item()
        total += (w * y.square()).sum(dtype=torch.float64).item()
    return missed / max(total, 1e-300)


def better(before: N, after: N, rows: Rows) -> tuple[N, dict[str, float]]:
    """Return whichever misses less of the rows that were not fitted on, and both errors.

    A fit that makes it worse there is none. The errors are "error", of `before`, and "repaired", of
    what is returned.
    """
    errors = [error(n, rows, rows.fitted) for n in (before, after)]
    kept = after if errors[1] <= errors[0] else before
    return kept, {"error": errors[0], "repaired": min(errors)}


def turned(neurons: Neurons, rows: Rows) -> Neurons:
    """`neurons` whose rows of `up` have the sign that leaves most of the product's energy above
    zero, where a ReLU of `up` keeps it. `down` turns with them: the function without that ReLU
    stays."""
    balance = torch.zeros(len(neurons.up), device=neurons.up.device)
    for z, _, weight in rows.fitting():
        gate, up = neurons.open(z)
        energy = (gate.relu() * up).square() * up.sign()
        balance += (energy if weight is None else energy * weight[:, None]).sum(0)
    sign = torch.where(balance < 0, -1.0, 1.0)
    bias = None if neurons.up_bias is None else neurons.up_bias * sign
    return dataclasses.replace(
        neurons, up=neurons.up * sign[:, None], up_bias=bias, down=neurons.down * sign
    )


# --- thresholds -----------------------------------------------------------------------------------


def thresholded(neurons: Neurons, rows: Rows, sparsity: float, per_neuron: bool = False) -> Neurons:
    """`neurons` with thresholds that make this fraction of the products zero, of each layer or of
    each neuron.
    """
    step = max(1, rows.fitted // max(1, SAMPLED // len(neurons.up)))
    gate, up = neurons.open(rows.z[: rows.fitted : step].float())
    return dataclasses.replace(neurons, **quantiles(neurons, gate, up, sparsity, per_neuron))


def quantiles(
    neurons: Neurons, gate: Tensor, up: Tensor, sparsity: float, per_neuron: bool
) -> dict[str, Tensor]:
    """Return the thresholds that make this fraction of the products of gate and up [n, F] zero."""
    rule, act = rules.RULES[neurons.rule], ACT2FN[neurons.act]
    if rule.cuts == "both":
        return _both(neurons, gate, up, sparsity, per_neuron)
    threshold = quantile(_CUT[rule.cuts](act, gate, up), sparsity, per_neuron)
    return {"threshold": threshold if rule.least is None else threshold.clamp_min(rule.least)}


# What a threshold is compared with, of gate and up; both are the same where there is no gate.
_CUT: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "gate": lambda act, gate, up: gate,
    "activated": lambda act, gate, up: act(gate).abs(),
    "product": lambda act, gate, up: (act(gate) * (1 if up is gate else up)).abs(),
}


def _both(
    neurons: Neurons, gate: Tensor, up: Tensor, sparsity: float, per_neuron: bool
) -> dict[str, Tensor]:
    """dReLU cuts gate and up at the same quantile, found by bisection; never below 0, where ReLU
    cuts.
    """
    low, high = 0.0, 1.0
    found: dict[str, Tensor] = {}
    ordered = {
        name: _sample(t, per_neuron).sort(0).values
        for name, t in (("threshold", gate), ("threshold_up", up))
    }
    for _ in range(12):
        middle = (low + high) / 2
        found = {
            name: t[max(0, round(middle * len(t)) - 1)].clamp_min(0) for name, t in ordered.items()
        }
        live = ((gate > found["threshold"]) & (up > found["threshold_up"])).sum().item()
        low, high = (middle, high) if 1 - live / gate.numel() < sparsity else (low, middle)
    return found


def quantile(values: Tensor, fraction: float, per_neuron: bool) -> Tensor:
    """The value with this fraction of `values` [n, F] below it: [1], or [F] by column."""
    values = _sample(values, per_neuron)
    return values.kthvalue(max(1, round(fraction * len(values))), dim=0).values


def _sample(values: Tensor, per_neuron: bool) -> Tensor:
    """`values` [n, F], or QUANTILE of them at most as one column [n, 1]."""
    if per_neuron:
        return values
    return values.flatten()[
        :: max(1, values.numel() // QUANTILE) | 1, None
    ]  # odd, so as not to fall on few neurons


def cost(
    neurons: Neurons, act: str, rows: Rows, levels: Sequence[float], rank: int = 0
) -> list[float]:
    """What each sparsity costs the stream of a layer after a ridge refit, with a bypass of this
    rank: the weighted squared error on rows that were not fitted on, of every so manieth neuron
    (NEURONS of them), taken as if of all. `act`: the source's activation."""
    step = max(1, len(neurons.up) // NEURONS)
    some = dataclasses.replace(neurons.pick(slice(None, None, step)), down_bias=None)
    some.down = some.down.contiguous()
    source = dataclasses.replace(some, rule="plain", act=act)
    z = rows.z[:: max(1, len(rows.z) // COST_ROWS)].float()
    weight = None if rows.weight is None else rows.weight[:: max(1, len(rows.z) // COST_ROWS)]
    own = Rows(z=z, y=source(z), weight=weight)
    size = (own.y.square().mean(1) * (1 if weight is None else weight)).mean().item() * step
    fitted = (ridge(thresholded(some, own, level), own, bias=True, rank=rank) for level in levels)
    return [size * error(n, own, own.fitted) for n in fitted]


def allocate(
    costs: Mapping[int, Sequence[float]], levels: Sequence[float], sparsity: float
) -> dict[int, float]:
    """A sparsity for each layer whose mean is `sparsity`: greedily, the layer whose next level adds
    the least error is raised, as TEAL does with its projections (Liu et al. 2024, arXiv
    2408.14690)."""
    at = dict.fromkeys(costs, 0)
    needed = sparsity * len(costs)
    while (reached := sum(levels[i] for i in at.values())) < needed:
        open_ = {layer: i for layer, i in at.items() if i + 1 < len(levels)}
        if not open_:
            break
        best = min(
            open_,
            key=lambda n: (
                (costs[n][at[n] + 1] - costs[n][at[n]]) / (levels[at[n] + 1] - levels[at[n]])
            ),
        )
        at[best] += 1
        if (
            sum(levels[i] for i in at.values()) >= needed
        ):  # the last step only as far as it is needed
            chosen = {layer: levels[i] for layer, i in at.items()}
            return chosen | {best: levels[at[best] - 1] + needed - reached}
    return {
        layer: min(sparsity, levels[i]) if sparsity < levels[0] else levels[i]
        for layer, i in at.items()
    }


def rounded(neurons: Neurons, dtype: str) -> Neurons:
    """`neurons` with its threshold as a tensor of this dtype will hold it."""
    assert neurons.threshold is not None
    return dataclasses.replace(
        neurons, threshold=neurons.threshold.to(getattr(torch, DTYPES[dtype][1])).float()
    )


# --- repair ---------------------------------------------------------------------------------------


def ridge(
    neurons: N, rows: Rows, *, damping: float = DAMPING, bias: bool = False, rank: int = 0
) -> N:
    """`neurons` with `down` refitted on the rows, its bias where the architecture can hold one, and
    a bypass of this rank.

    Block after block of neurons, each against what the others leave, where one Gram matrix would be
    too large.
    """
    width = neurons.down.shape[1]
    blocks = [slice(i, min(i + BLOCK, width)) for i in range(0, width, BLOCK)]
    hidden = len(neurons.down)
    refitted = dataclasses.replace(neurons, down=neurons.down.clone())
    if rank < hidden and rank and neurons.bypass_in is None:
        full = ridge(neurons, rows, damping=damping, bias=bias, rank=hidden)
        assert full.bypass_out is not None
        refitted.bypass_in = leading(full.bypass_out, rows, rank)
    if rank and refitted.bypass_out is None:
        refitted.bypass_out = refitted.down.new_zeros(hidden, rank)
    if bias and refitted.correction is None:
        refitted.correction = refitted.down.new_zeros(hidden)
    for _ in range(SWEEPS if len(blocks) > 1 else 1):
        for block in blocks:
            _refit(refitted, rows, block, damping, bias)
    return refitted


def _refit(neurons: Neurons, rows: Rows, block: slice, damping: float, bias: bool) -> None:
    """Solve for the columns `block` of `down`, the bias and the bypass, in place."""
    columns, hidden = block.stop - block.start, len(neurons.down)
    rank = 0 if neurons.bypass_out is None else neurons.bypass_out.shape[1]
    sizes = (columns + bias, rank)

    def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gram = neurons.down.new_zeros(sum(sizes), sum(sizes), dtype=dtype)
        cross = neurons.down.new_zeros(hidden, sum(sizes), dtype=dtype)
        for z, y, weight in rows.fitting():
            h = neurons.product(z)
            missed = y - neurons.output(h, z)
            extra = ([h.new_ones(len(h), 1)] if bias else []) + (
                [neurons.bypassed(z)] if rank else []
            )
            x = torch.cat([h[:, block], *extra], dim=1).to(dtype)
            weighted = x if weight is None else x * weight[:, None]
            gram.addmm_(weighted.T, x)
            cross.addmm_(missed.to(dtype).T, weighted)
        return gram, cross

    step = solve(sums, damping, sizes)
    neurons.down[:, block] += step[:, :columns]
    if bias:
        assert neurons.correction is not None
        neurons.correction = neurons.correction + step[:, columns]
    if rank:
        assert neurons.bypass_out is not None
        neurons.bypass_out = neurons.bypass_out + step[:, -rank:]


def leading(bypass: Tensor, rows: Rows, rank: int) -> Tensor:
    """[rank, H] directions of the inputs that a full bypass [H, H] uses most, as far as the rows
    have them.
    """
    white, coloured = whitening(rows)
    directions: Tensor = torch.linalg.svd(bypass @ coloured).Vh[:rank] @ white
    return directions


def whitening(rows: Rows) -> tuple[Tensor, Tensor]:
    """C^(-1/2) and C^(1/2) [H, H] of C = E[z zᵀ], damped."""
    z = rows.z[: rows.fitted : max(1, rows.fitted // WHITE_ROWS)].float()
    c = z.T @ z / len(z)
    c.diagonal().add_(WHITE_DAMPING * c.diagonal().mean())
    values, vectors = torch.linalg.eigh(c)
    return (vectors * values.rsqrt()) @ vectors.T, (vectors * values.sqrt()) @ vectors.T


def solve(
    sums: Callable[[torch.dtype], tuple[Tensor, Tensor]], damping: float, sizes: Sequence[int] = ()
) -> Tensor:
    """cross · (gram + damping·mean(diag(gram))·I)⁻¹ by Cholesky, with the (gram, cross) that `sums`
    adds up in a dtype: fp64 where fp32 is not positive definite. Both are overwritten: at 11,008
    neurons a Gram matrix has 485 MB.

    `sizes` of groups of columns: the mean is over each, whose scales may have nothing to do with
    each other. A neuron that never fired has a zero row: damping keeps its column as it was.
    """
    for dtype in (torch.float32, torch.float64):
        gram, x = sums(dtype)
        groups = gram.diagonal().split(list(sizes) or [len(gram)])
        gram.diagonal().add_(
            torch.cat(
                [damping * g.mean().clamp_min(1e-30).expand(len(g)) for g in groups if len(g)]
            )
        )
        failed = torch.empty((), dtype=torch.int32, device=gram.device)
        factor, _ = torch.linalg.cholesky_ex(
            gram.mT, out=(gram.mT, failed)
        )  # LAPACK's order of columns: in place
        if not failed:
            x = torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False)
            x = torch.linalg.solve_triangular(factor, x, upper=False, left=False)
            return x.float()
    raise AssertionError("a Gram matrix with damping is positive definite")


def sparsity(neurons: Neurons, rows: Rows, stop: int | None = None) -> float:
    """The fraction of exact zeros in the products."""
    zeros = total = 0
    for z, _, _ in rows.parts(0, stop):
        h = neurons.product(z)
        zeros += h.numel() - int(h.count_nonzero())
        total += h.numel()
    return zeros / total


def figures(**values: float) -> dict[str, Any]:
    """Figures of a layer, to four digits."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}
