"""Measure what the MLPs of a model do on text, in one walk through its layers.

An MLP computes y = down_proj h with h = act(gate_proj x) ⊙ up_proj x, or h = act(up_proj x) if it
has no gate. *Gate* means the pre-activation, *product* means h. All figures leave out the first
token of each sequence (see `Sample.mask`). They describe prefill, where one pass computes every
position; decoding sees the same values token by token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery import files
from surgery.analysis import sparsity
from surgery.analysis.devices import Cost, Device
from surgery.analysis.fingerprint import fingerprint
from surgery.analysis.sparsity import Linearity, Part, Truncation
from surgery.analysis.weigh import Weights, weigh
from surgery.calibration import collectors
from surgery.calibration.collectors import (
    Collapse,
    Collector,
    Distribution,
    Histogram,
    edges,
    runs_of,
    update_all,
)
from surgery.calibration.data import Sample
from surgery.calibration.observe import Taps, leaves, tapped
from surgery.calibration.walk import Layer, Walk, processes
from surgery.checkpoint import Checkpoint, Progress
from surgery.errors import UsageError
from surgery.families import Blocks, Family

REPORT, TENSORS = "analysis.json", "analysis.safetensors"
CETT = (0.1, 0.2)
SPARSITIES = (0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95)
NEAR_ZERO = (1e-3, 1e-2, 1e-1)
ALWAYS = 0.99  # a neuron is "always active" if it is active for a larger share of the tokens
EVERY = 4  # histograms take every fourth token; exact zeros of the product are counted in all
SAMPLED = 512  # tokens in the reservoir
LARGEST_COACTIVATION = 16384  # neurons; the matrix is then 1 GiB of int32
Sink = Callable[[int, Tensor], None]  # takes a layer and its co-activation [F, F] int32


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpStatistics:
    """Figures of a dense MLP, or of the shared expert of a mixture.

    Rates and sparsities are fractions. `unions` maps a window of w tokens to 1 − |∪ active| / F,
    the share of neurons that none of them activates. `overlap` is the share of a token's active
    neurons that were also active for the token before it.
    """

    part: str  # "mlp" or "shared expert"
    width: int
    gated: bool
    tokens: int
    product: Distribution
    gate: Distribution
    up: Distribution | None
    input: Distribution
    gate_zero: float  # share of gates whose activation is exactly 0
    active: Tensor  # [F] tokens with gate > 0
    nonzero: Tensor  # [F] tokens with h != 0
    mass: Tensor  # [F] mean of |h_i|·‖W_down[:, i]‖
    overlap: float
    unions: Mapping[int, float]
    truncations: tuple[Truncation, ...]
    linearity: Linearity
    input_rms: Tensor  # [H]
    input_peak: Tensor  # [H]
    input_norm: float
    input_largest: float
    always_open: int = 0  # the last neurons, which relufication added

    @property
    def zero_of_others(self) -> float:
        """Return the fraction of exact zeros among the neurons that are not always open."""
        others = self.nonzero[: self.width - self.always_open]
        return 1 - int(others.sum()) / max(1, self.tokens * len(others))

    @property
    def rate(self) -> Tensor:
        """Return the firing rate of each neuron, [F]: the share of tokens with gate > 0."""
        return self.active.double() / self.tokens

    @property
    def outliers(self) -> list[int]:
        """Return the outlier channels of the MLP's input, the largest first."""
        return sparsity.outlier_channels(self.input_rms)

    def at(self, cett: float) -> Truncation:
        """Return the truncation found for a target `cett`, one of CETT."""
        return self.truncations[CETT.index(cett)]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; the counts per neuron are in `tensors`."""
        return {
            "part": self.part,
            "width": self.width,
            "gated": self.gated,
            "tokens": self.tokens,
            "always_open": self.always_open,
            "product": {**_spread(self.product), "zero_of_others": self.zero_of_others},
            "gate": {
                **_spread(self.gate),
                "positive": self.gate.positive,
                "activated_zero": self.gate_zero,
                "quantiles": {str(s): self.gate.quantile(s) for s in SPARSITIES},
            },
            "up": self.up and _spread(self.up),
            "input": _spread(self.input),
            "firing_rate": firing_rate(self),
            "dead": int((self.active == 0).sum()),
            "always": int((self.rate > ALWAYS).sum()),
            "hot_80": {
                "firing": sparsity.hot_share(self.active),
                "mass": sparsity.hot_share(self.mass),
            },
            "gini": {"firing": sparsity.gini(self.active), "mass": sparsity.gini(self.mass)},
            "overlap": self.overlap,
            "union_sparsity": {str(w): s for w, s in self.unions.items()},
            "cett": [asdict(t) for t in self.truncations],
            "linearity": asdict(self.linearity),
            "input_norm": {"mean": self.input_norm, "max": self.input_largest},
            "outlier_channels": self.outliers,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return what is counted per neuron, input channel or histogram bin."""
        histograms = {
            "product": self.product,
            "gate": self.gate,
            "up": self.up,
            "input": self.input,
        }
        return {
            "active": self.active,
            "nonzero": self.nonzero,
            "mass": self.mass,
            "input_rms": self.input_rms,
            "input_peak": self.input_peak,
            **{f"{n}.histogram": d.counts for n, d in histograms.items() if d},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStatistics:
    """Figures of a router and its routed experts.

    Fields that look inside the experts are None where the model class does not expose them.
    """

    experts: int
    top_k: int
    tokens: int
    load: Tensor  # [E] how often each expert was selected
    entropy: float | None  # mean entropy of a token's softmax over experts, as a fraction of ln E
    active: Tensor | None  # [E, F] tokens with gate > 0
    nonzero: Tensor | None  # [E, F] tokens with h != 0
    product: Distribution | None
    gate: Distribution | None
    # The error is that of an expert's own output; one threshold serves all experts of the layer.
    truncations: tuple[Truncation, ...] = ()

    @property
    def width(self) -> int:
        """Return how many neurons of the routed experts one token passes through."""
        return 0 if self.active is None else self.top_k * self.active.shape[1]

    @property
    def gated(self) -> bool:
        """Return True: every expert that can be looked into is gated."""
        return True

    def at(self, cett: float) -> Truncation:
        """Return the truncation found for a target `cett`, one of CETT."""
        return self.truncations[CETT.index(cett)]

    @property
    def balance(self) -> float:
        """Return the entropy of the load over ln E: 1 if all experts are chosen equally often."""
        p = self.load.double() / self.load.sum()
        return -(p * p.clamp_min(1e-300).log()).sum().item() / math.log(self.experts)

    @property
    def busiest(self) -> float:
        """Return the load of the busiest expert, as a multiple of the mean load."""
        return self.load.max().item() * self.experts / self.load.sum().item()

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        rates = None
        if self.active is not None:
            rates = (self.active.double().mean(1) / self.load.clamp_min(1)).tolist()
        return {
            "experts": self.experts,
            "top_k": self.top_k,
            "tokens": self.tokens,
            "load": (self.load.double() / self.tokens).tolist(),
            "unused": int((self.load == 0).sum()),
            "balance": self.balance,
            "busiest": self.busiest,
            "entropy": self.entropy,
            "firing_rate": rates,
            "product": self.product and _spread(self.product),
            "gate": self.gate and _spread(self.gate),
            "cett": [asdict(t) for t in self.truncations],
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return what is counted per expert or per neuron of an expert."""
        found = {"load": self.load, "active": self.active, "nonzero": self.nonzero}
        return {name: t for name, t in found.items() if t is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAnalysis:
    """Figures of one decoder layer.

    `residual` says how far the residual stream after the layer is from one and the same row for
    every token (see `collectors.Collapse`).
    """

    index: int
    mlp: MlpStatistics | None
    router: RouterStatistics | None
    residual: float

    @property
    def inside(self) -> dict[str, MlpStatistics | RouterStatistics]:
        """Return what could be looked into, by the role of its weights."""
        found: dict[str, MlpStatistics | RouterStatistics] = {}
        if self.mlp is not None:
            found |= {"mlp": self.mlp, "shared_experts": self.mlp}
        if self.router and self.router.product:
            found["routed_experts"] = self.router
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "layer": self.index,
            "mlp": self.mlp and self.mlp.as_dict(),
            "router": self.router and self.router.as_dict(),
            "residual": self.residual,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """What one token reads and multiplies in all MLPs of the model, before and after skipping.

    `after` is what `kernel` leaves at the sparsity that `rule` gives each dense MLP, shared expert
    and set of routed experts. What cannot be looked into counts whole. `sparsity` is the mean over
    the neurons that a token passes through.
    """

    rule: str
    kernel: str
    sparsity: float
    before: Cost
    after: Cost

    def as_dict(self, device: Device) -> dict[str, Any]:
        """Return the saving for JSON, timed on `device`."""
        return {
            "rule": self.rule,
            "kernel": self.kernel,
            "sparsity": self.sparsity,
            "before": self.before.as_dict(device),
            "after": self.after.as_dict(device),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """The figures of every layer, the sample they were measured on, and sums over the layers.

    `fingerprint` is that of the model (fingerprint.py): thresholds are taken for it alone.
    """

    source: str
    model_type: str
    activation: str
    dtype: str
    sample: Sample
    layers: tuple[LayerAnalysis, ...]
    weights: Weights
    fingerprint: str = ""

    @property
    def mlps(self) -> list[MlpStatistics]:
        """Return the dense MLPs and shared experts, in layer order."""
        return [layer.mlp for layer in self.layers if layer.mlp]

    @property
    def routers(self) -> list[RouterStatistics]:
        """Return the routers, in layer order."""
        return [layer.router for layer in self.layers if layer.router]

    @property
    def inside(self) -> list[MlpStatistics | RouterStatistics]:
        """Return the dense MLPs and shared experts, then routed experts that were seen inside."""
        return [*self.mlps, *(router for router in self.routers if router.product)]

    def mean(
        self,
        value: Callable[[Any], float],
        over: Sequence[MlpStatistics | RouterStatistics] | None = None,
    ) -> float:
        """Return the mean of `value` weighted by neurons, over `over` (by default all dense MLPs).

        NaN where there is nothing to average over.
        """
        parts = self.mlps if over is None else over
        width = sum(p.width for p in parts)
        return sum(value(p) * p.width for p in parts) / width if width else math.nan

    @property
    def savings(self) -> list[Saving]:
        """Return the savings of exact zeros and of CETT, under each kernel that can use them."""
        if not self.inside:
            return []
        kernels = ("down only", "foreseen")
        tails = [self.saving(f"CETT {c}", k, at_cett(c)) for c in CETT for k in kernels]
        return [self.saving("exact zeros", "gate first", zeros_of_all), *tails]

    def saving(
        self, rule: str, kernel: str, value: Callable[[MlpStatistics | RouterStatistics], float]
    ) -> Saving:
        """Return what `kernel` saves if `value` gives the sparsity of each part."""
        before, left = Cost(0, 0), Cost(0, 0)
        for layer in self.layers:
            inside = layer.inside
            for role, work in _mlp_work(self.weights, layer.index).items():
                part = inside.get(role)
                share = sparsity.REMAINING[kernel](value(part), part.gated) if part else 1.0
                before = Cost(before.flops + work.flops, before.nbytes + work.nbytes)
                left = Cost(left.flops + share * work.flops, left.nbytes + share * work.nbytes)
        mean = self.mean(value, self.inside)
        return Saving(rule=rule, kernel=kernel, sparsity=mean, before=before, after=left)

    @property
    def totals(self) -> dict[str, Any]:
        """Return means and counts over all dense MLPs and over all routed experts."""
        found: dict[str, Any] = {}
        if self.mlps:
            found = {
                **_means(self, self.mlps),
                "firing_rate": self.mean(firing_rate),
                "dead": sum(int((m.active == 0).sum()) for m in self.mlps),
                "neurons": sum(m.width for m in self.mlps),
            }
        if routed := [router for router in self.routers if router.product]:
            found["routed_experts"] = _means(self, routed)
        return found

    def as_dict(self, device: Device) -> dict[str, Any]:
        """Return the whole analysis for JSON.

        The savings are timed on `device`, decoding one sequence.
        """
        return _finite(
            {
                "source": self.source,
                "model_type": self.model_type,
                "activation": self.activation,
                "fingerprint": self.fingerprint,
                "dtype": self.dtype,
                "sample": self.sample.as_dict(),
                "events": {
                    "active": "gate pre-activation > 0 (up's in an MLP without a gate)",
                    "zero": "h = 0",
                },
                "totals": self.totals,
                "savings": [s.as_dict(device) for s in self.savings],
                "device": device.as_dict(),
                "layers": [layer.as_dict() for layer in self.layers],
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all counts per neuron, expert or bin, by names like "layers.3.mlp.active"."""
        found = {"histogram.edges": edges()}
        for layer in self.layers:
            for part, value in (("mlp", layer.mlp), ("router", layer.router)):
                tensors = value.tensors() if value else {}
                found |= {f"layers.{layer.index}.{part}.{n}": t for n, t in tensors.items()}
        return found

    def save(self, folder: Path, device: Device) -> None:
        """Write analysis.safetensors and analysis.json to `folder`, which is made if needed."""
        save_tensors(self.tensors(), folder, TENSORS)
        text = json.dumps(self.as_dict(device), indent=2, ensure_ascii=False)
        files.write(folder, REPORT, f"{text}\n".encode(), sync=False)


def firing_rate(mlp: MlpStatistics) -> float:
    """Return the mean firing rate of the neurons."""
    return mlp.rate.mean().item()


def exact_zeros(part: MlpStatistics | RouterStatistics) -> float:
    """Return the fraction of products that are exactly 0; NaN if they were not seen.

    Neurons that are always open do not count.
    """
    if isinstance(part, MlpStatistics) and part.always_open:
        return part.zero_of_others
    return zeros_of_all(part)


def zeros_of_all(part: MlpStatistics | RouterStatistics) -> float:
    """Return the same with the neurons that are always open."""
    return part.product.zero if part.product else math.nan


def at_cett(cett: float) -> Callable[[MlpStatistics | RouterStatistics], float]:
    """Return the function that gives the sparsity at this error."""
    return lambda part: part.at(cett).sparsity


def _means(a: Analysis, parts: Sequence[MlpStatistics | RouterStatistics]) -> dict[str, float]:
    sparsities = {f"sparsity_at_cett_{c}": a.mean(at_cett(c), parts) for c in CETT}
    return {
        "exact_zero": a.mean(zeros_of_all, parts),
        "exact_zero_of_others": a.mean(exact_zeros, parts),
        **sparsities,
    }


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, name: str) -> None:
    """Write a safetensors file below `folder`, with the permissions of any other file.

    `safetensors.torch.save_file` would leave 0600.
    """
    from safetensors.torch import save

    data = save({n: t.contiguous() for n, t in tensors.items()})
    files.write(folder, name, data, sync=False)


def _spread(d: Distribution) -> dict[str, Any]:
    return {
        "zero": d.zero,
        "below": {str(t): d.below(t) for t in NEAR_ZERO},
        "thresholds": {str(s): d.threshold(s) for s in SPARSITIES},
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither.

    An MLP of zeros gives NaN: its CETT divides by the norm of its output.
    """
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mlp_work(weights: Weights, index: int) -> dict[str, Cost]:
    """Return the FLOPs and bytes of one token in the MLPs of a layer, by role."""
    found = {}
    for layer in weights.layers:
        if layer.index == index:
            for role in ("mlp", "shared_experts", "routed_experts"):
                if role in layer.tallies:
                    tally, share = layer.tallies[role], layer.touched(role)
                    found[role] = Cost(2 * tally.matrices * share, tally.nbytes * share)
    return found


# --- the walk -------------------------------------------------------------------------------------


_DENSE: dict[str, Callable[[], Collector]] = {
    "activity": collectors.Activity,
    "reuse": collectors.Reuse,
    "inputs": collectors.Inputs,
    "reservoir": collectors.Reservoir,
    "coactivation": collectors.CoActivation,
}


@dataclass(kw_only=True)
class _Observers:
    """The collectors of one layer."""

    dense: dict[str, Collector] = field(default_factory=dict)
    routed: dict[str, Collector] = field(default_factory=dict)
    stream: Collapse = field(default_factory=Collapse)

    @classmethod
    def of(cls, taps: Taps, coactivation: bool) -> _Observers:
        found = cls()
        if taps.parts.down is not None:
            taps_of = ("gate", "input", *(("up",) if taps.family.gated else ()), "product")
            found.dense = {name: Histogram(name, EVERY) for name in taps_of}
            wanted = {n: m for n, m in _DENSE.items() if coactivation or n != "coactivation"}
            found.dense |= {name: make() for name, make in wanted.items()}
        if taps.parts.router is not None:
            found.routed = {
                "routing": collectors.Routing(taps.experts),
                "reservoir": collectors.ExpertReservoir(),
            }
        return found

    @property
    def all(self) -> list[Collector]:
        return [*self.dense.values(), *self.routed.values(), self.stream]

    def update(self, taps: Taps, where: Mapping[str, Any]) -> None:
        # Also of a layer without an MLP, such as one of a hybrid, the stream is looked at.
        update_all([*self.dense.values(), self.stream], taps.dense(**where))
        if self.routed:
            seen = taps.routed(**where)
            if seen.expert is not None:
                self.routed.setdefault("product", Histogram("product", EVERY))
                self.routed.setdefault("gate", Histogram("gate"))
            update_all([*self.routed.values()], seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What an analysis measures besides the usual, and how.

    Args:
        coactivation: called with each layer and its co-activation matrix AᵀA [F, F], since the
            matrices of all layers would not fit in memory together.
        memory_budget: bytes of hidden states in memory; the rest goes to a temporary file.
        seed: chooses the tokens of the reservoir.
    """

    coactivation: Sink | None = None
    memory_budget: int | None = None
    seed: int = 0


def analyze(
    checkpoint: Checkpoint,
    sample: Sample,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    settings: Settings | None = None,
    progress: Progress = lambda n: None,
) -> Analysis:
    """Walk the checkpoint over the sample, one layer in memory at a time, and measure every MLP.

    If torch.distributed is initialized, each process takes its share of the sequences and all of
    them return the same analysis. `progress` is called with 1 after each layer.

    Raises UsageError if the co-activation would be too large, or if there are more processes than
    sequences.

    Example:
        checkpoint = open_checkpoint("Qwen/Qwen3-0.6B")
        sample = sample_ids(checkpoint, tokens=4096, sequence_length=512)
        print(analyze(checkpoint, sample).totals["firing_rate"])
    """
    settings = settings or Settings()
    weights = weigh(checkpoint, checkpoint.config)
    if settings.coactivation is not None:
        _require_small(weights)
    mine = _mine(sample)
    ids, budget = sample.input_ids[mine], settings.memory_budget
    walk = Walk(checkpoint, ids, dtype=dtype, device=device, memory_budget=budget)
    where = _batches(sample, walk, mine, settings.seed)
    layers = []
    for layer in walk:
        layers.append(_observe(layer, walk, where, weights.activation, settings.coactivation))
        progress(1)
    return Analysis(
        source=checkpoint.source.location,
        model_type=weights.model_type,
        activation=weights.activation,
        dtype=str(dtype).removeprefix("torch."),
        sample=sample,
        layers=tuple(layers),
        weights=weights,
        fingerprint=fingerprint(checkpoint),
    )


def _require_small(weights: Weights) -> None:
    """Raise UsageError if a layer has too many neurons for a matrix of their co-activation."""
    widest = max((w for layer in weights.layers for w in layer.widths.values()), default=0)
    if widest > LARGEST_COACTIVATION:
        raise UsageError(
            f"the co-activation of {widest:,} neurons takes {4e-9 * widest**2:.1f} GB a layer",
            f"leave it out: it is counted for {LARGEST_COACTIVATION:,} neurons at most",
        )


def _mine(sample: Sample) -> slice:
    """Return which sequences this process takes."""
    rank, world = processes()
    if world > len(sample.input_ids):
        raise UsageError(
            f"{world} processes cannot share {len(sample.input_ids)} sequences",
            "give more --tokens",
        )
    return slice(rank, None, world)


def _batches(sample: Sample, walk: Walk, mine: slice, seed: int) -> list[dict[str, Any]]:
    """Return for each batch: mask, the runs of the mask, sampled and index.

    The reservoir is drawn once for all layers, from the tokens that count.
    """
    mask = sample.mask
    index = torch.arange(mask.numel()).view_as(mask)
    counted = index[mask]
    order = torch.randperm(len(counted), generator=torch.Generator().manual_seed(seed))
    sampled = torch.isin(index, counted[order[:SAMPLED]])
    sizes = [len(h) for h in walk.hidden]
    split = [t[mine].to(walk.device).split(sizes) for t in (mask, sampled, index)]
    parts = zip(*split, strict=True)
    return [{"mask": m, "runs": runs_of(m), "sampled": s, "index": i} for m, s, i in parts]


def _observe(
    layer: Layer,
    walk: Walk,
    where: list[dict[str, Any]],
    activation: str,
    coactivation: Sink | None,
) -> LayerAnalysis:
    """Run one layer and return its figures."""
    family, config = walk.blocks.family, walk.checkpoint.text_config
    if not layer.arguments:  # text does not pass through it
        return LayerAnalysis(index=layer.index, mlp=None, router=None, residual=0.0)
    with tapped(layer.module, family, config) as taps:
        seen = _Observers.of(taps, coactivation is not None)
        layer.run(lambda b, hidden: seen.update(taps, {**where[b], "hidden": hidden}))
    for collector in seen.all:
        collector.gather() if processes()[1] > 1 else collector.settle()
    if coactivation is not None and "coactivation" in seen.dense and processes()[0] == 0:
        coactivation(layer.index, seen.dense["coactivation"].state["pairs"])
    mlp = _mlp(seen.dense, taps, walk.blocks, activation) if seen.dense else None
    router = _routed(seen.routed, taps, family) if seen.routed else None
    stream = seen.stream.state
    return LayerAnalysis(
        index=layer.index,
        mlp=mlp,
        router=router,
        residual=(stream["ratios"] / stream["sequences"]).item(),
    )


def _mlp(found: Mapping[str, Any], taps: Taps, blocks: Blocks, activation: str) -> MlpStatistics:
    """Return the figures of one dense MLP, whose weights are loaded."""
    family = blocks.family
    activity, reuse, inputs = (found[name].state for name in ("activity", "reuse", "inputs"))
    tokens, width = int(activity["tokens"]), len(activity["active"])
    weight = taps.parts.down.weight  # type: ignore[union-attr]
    down = weight.detach() if family.transposed else weight.detach().T  # [F, H]
    rows = {tap: x.to(weight.device) for tap, x in found["reservoir"].result().items()}
    gate = found["gate"].result()
    part = Part(product=rows["product"], output=rows["output"], down=down)
    return MlpStatistics(
        part="mlp" if taps.parts.router is None else "shared expert",
        width=width,
        gated=family.gated,
        tokens=tokens,
        product=found["product"].result(),
        gate=gate,
        up=found["up"].result() if "up" in found else None,
        input=found["input"].result(),
        gate_zero=_dead_half(gate, activation),
        active=activity["active"],
        nonzero=activity["nonzero"],
        mass=activity["magnitude"] / tokens * part.sizes.cpu().double(),
        overlap=reuse["shared"].item() / max(1, reuse["after"].item()),
        unions=_unions(reuse, width),
        truncations=tuple(sparsity.truncations([part], CETT)),
        linearity=sparsity.linearity(
            rows["input"],
            rows["output"],
            activity["active"],
            tokens,
            activation=activation,
            gated=family.gated,
        ),
        input_rms=(inputs["squares"] / tokens).sqrt(),
        input_peak=inputs["peak"],
        input_norm=(inputs["norms"] / tokens).item(),
        input_largest=inputs["largest"].item(),
        always_open=blocks.always_open,
    )


def _unions(reuse: Mapping[str, Tensor], width: int) -> dict[int, float]:
    """Return the share of idle neurons for each window that fits into the sequences."""
    windows = reuse["windows"]
    idle = 1 - reuse["union"].double() / (windows.clamp_min(1) * width)
    rows = zip(collectors.WINDOWS, idle.tolist(), windows.tolist(), strict=True)
    return {window: share for window, share, count in rows if count}


def _dead_half(gate: Distribution, activation: str) -> float:
    """Return the fraction of gates with act(gate) = 0, judged at the lower edge of each bin."""
    from transformers.activations import ACT2FN

    act: Any = ACT2FN[activation] if activation in ACT2FN else nn.Identity()
    lower = edges()[:-1].float()
    dead = [
        int(counts[act(sign * lower) == 0].sum())
        for sign, counts in zip((1, -1), gate.counts, strict=True)
    ]
    return (sum(dead) + (gate.zeros if act(torch.zeros(())) == 0 else 0)) / gate.total


def _routed(found: Mapping[str, Any], taps: Taps, family: Family) -> RouterStatistics:
    state = found["routing"].state
    tokens, entropy = int(state["tokens"]), state.get("entropy")
    parts = list(_experts(found["reservoir"].result(), taps, family)) if "product" in found else []
    return RouterStatistics(
        experts=taps.experts,
        top_k=int(state["load"].sum()) // tokens,
        tokens=tokens,
        load=state["load"],
        entropy=None if entropy is None else entropy.item() / tokens / math.log(taps.experts),
        active=state.get("active"),
        nonzero=state.get("nonzero"),
        product=found["product"].result() if "product" in found else None,
        gate=found["gate"].result() if "gate" in found else None,
        truncations=tuple(sparsity.truncations(parts, CETT)) if parts else (),
    )


def _experts(rows: Mapping[str, Tensor], taps: Taps, family: Family) -> Iterator[Part]:
    """Yield one Part for each expert that a sampled token was sent to."""
    chosen, counts = rows["expert"].unique_consecutive(return_counts=True)
    for e, product in zip(chosen.tolist(), rows["product"].split(counts.tolist()), strict=True):
        down, bias = _down(taps.parts.experts, family, e)
        product = product.to(down.device)
        output = product @ down if bias is None else product @ down + bias
        yield Part(product=product, output=output, down=down)


def _down(experts: Any, family: Family, e: int) -> tuple[Tensor, Tensor | None]:
    """Return W_down [F, H] of expert `e` and its bias, wherever transformers keeps them.

    See `surgery/calibration/observe.py` for the two layouts.
    """
    if isinstance(experts, nn.ModuleList):
        linear = getattr(experts[e], str(leaves(family)["down"]))
        return linear.weight.detach().T, None if linear.bias is None else linear.bias.detach()
    weight = experts.down_proj[e].detach()
    bias = experts.down_proj_bias[e].detach() if experts.has_bias else None
    return weight if experts.is_transposed else weight.T, bias
