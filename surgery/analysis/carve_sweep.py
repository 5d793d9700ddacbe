"""What a carved model is worth against the part of its neurons that is active, beside a random
split and beside the oracle.

One walk of the source carries a stream for each variant, calibration and held-out text side by
side: a layer is carved on the stream that the variant's layers before it gave, put in, and run.
Nothing is written.

    perplexity  of held-out text; `agreement`: how often its most likely next token is the source's
    error       of an MLP on held-out text: ‖y − ŷ‖² / ‖y‖², y what the source's MLP gives for the same input
    oracle      the routed experts with most mass on a token, which no router can know without computing them all

Not all layers need as many parts. `allocate` finds how many each is to have active, so that most is
kept at the same mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surgery.blocks.custom_code import with_gathered_mlps
from surgery.calibration.data import Sample, sample_ids
from surgery.calibration.install import observe
from surgery.calibration.settings import Calibration
from surgery.calibration.walk import BATCH_TOKENS, Layer, Walk, choose_device, choose_dtype
from surgery.checkpoint import Checkpoint, Progress
from surgery.errors import UsageError
from surgery.fitting import carved_mlp, repair
from surgery.fitting.expert_split import ExpertSplit, average
from surgery.operations import carve
from surgery.operations.relufy import ALLOCATIONS

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
ALLOCATION_TOKENS = 4096
EVALUATED = 4096  # tokens


@dataclass(kw_only=True)
class Point:
    """One variant: its split, its router ("oracle" among them), its active parts, of all layers or
    by layer; `errors`, `recall` and `mass_recall` by layer that was carved."""

    method: str
    router: str
    active: int | list[int]
    experts: int
    perplexity: float = math.nan
    agreement: float = math.nan
    errors: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    mass_recall: list[float] = field(default_factory=list)

    @property
    def fraction(self) -> float:
        return average(self.active) / self.experts

    @property
    def error(self) -> float:
        """Mean over layers."""
        return sum(self.errors) / len(self.errors) if self.errors else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """`perplexity` is the source's; `tokens` were evaluated."""

    source: str
    model_type: str
    repair: str
    shared: int
    layers: tuple[int, ...]
    perplexity: float
    tokens: int
    sample: Sample
    points: tuple[Point, ...]

    def as_dict(self) -> dict[str, Any]:
        points = [
            dataclasses.asdict(p) | {"fraction": p.fraction, "error": p.error} for p in self.points
        ]
        return {
            "source": self.source,
            "model_type": self.model_type,
            "repair": self.repair,
            "shared": self.shared,
            "layers": list(self.layers),
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "sample": self.sample.as_dict(),
            "points": points,
        }


@dataclass(kw_only=True)
class _Stream:
    """A variant on its way: its hidden states, batch by batch."""

    point: Point
    job: carve.Job
    hidden: list[Tensor]


def sweep(
    checkpoint: Checkpoint,
    *,
    experts: int = 16,
    fractions: Sequence[float] = FRACTIONS,
    shared: int = 0,
    method: str = "mass",
    router: str = "trained",
    repair: str = "ridge",
    bypass: int | str = 0,
    seed: int = 0,
    random: bool = True,
    allocation: str = "uniform",
    layers: Collection[int] | None = None,
    calibration: Calibration | None = None,
    evaluated: int = EVALUATED,
    progress: Progress = lambda n: None,
) -> Sweep:
    """The quality of `checkpoint` carved in each of these fractions: by `method` and at random,
    with `router` and with the oracle. `random`: without it, by `method` alone. Parts are as in
    `carve`; of `shared`, one fewer than active at most. `allocation` "greedy": by `method` with as
    many active by layer as `allocate` finds; at random with as many in each.
    """
    if allocation not in ALLOCATIONS:
        raise UsageError(f"unknown allocation {allocation!r}", f"one of: {', '.join(ALLOCATIONS)}")
    settings, checkpoint = calibration or Calibration(), with_gathered_mlps(checkpoint)
    counts = {_parts(wanted, experts) for wanted in fractions}
    each: dict[int, int | list[int]] = {count: count for count in counts}
    if allocation == "greedy":
        each |= allocate(
            checkpoint,
            experts=experts,
            active=counts - {experts},
            shared=shared,
            method=method,
            seed=seed,
            layers=layers,
            calibration=settings,
        )
    sample, held_out, batch = _texts(checkpoint, settings, evaluated)
    device = choose_device(settings.device)
    ids = torch.cat([sample.input_ids, held_out.input_ids])
    walk = Walk(
        checkpoint, ids, dtype=choose_dtype(settings.dtype, device), device=device, batch_size=batch
    )
    fitted = len(sample.input_ids) // batch  # batches
    streams = []
    for count in sorted(counts - {experts}):
        splits = {method: each[count]} | (
            {"random": count} if random and method != "random" else {}
        )
        for split, active in splits.items():
            for gate in (router, "oracle"):
                job = carve.check(
                    checkpoint,
                    experts=experts,
                    active=active,
                    shared=_shared(shared, active),
                    method=split,
                    router=gate,
                    repair=repair,
                    bypass=bypass,
                    seed=seed,
                    layers=layers,
                    calibration=settings,
                )
                point = Point(method=split, router=gate, active=job.active, experts=experts)
                streams.append(_Stream(point=point, job=job, hidden=list(walk.hidden)))
    for layer in walk:
        after = list(layer.outputs())
        for stream in streams:
            _advance(stream, layer, sample, after[:fitted], held_out)
        layer.run()
        progress(1)
    return _scored(
        checkpoint,
        walk,
        streams,
        fitted,
        held_out,
        sample,
        experts in counts,
        repair=repair,
        shared=shared,
        experts=experts,
    )


def _parts(fraction: float, experts: int) -> int:
    """How many of the parts a fraction is. Raises UsageError where it is none."""
    if not 0 < fraction <= 1:
        raise UsageError(
            f"{fraction:.0%} of the experts active", "give percentages up to 100, like 25,50,75"
        )
    return max(1, round(fraction * experts))


def _shared(shared: int, active: int | Sequence[int]) -> int:
    """Of the shared parts asked for, as many as leave one that is chosen."""
    return max(0, min(shared, (active if isinstance(active, int) else min(active)) - 1))


def allocate(
    checkpoint: Checkpoint,
    *,
    experts: int,
    active: Collection[int],
    shared: int = 0,
    method: str = "mass",
    seed: int = 0,
    layers: Collection[int] | None = None,
    calibration: Calibration | None = None,
    progress: Progress = lambda n: None,
) -> dict[int, list[int]]:
    """For each of these numbers of active parts, as many by layer with that mean: one part after
    another is left out where that adds least to the error of the stream behind the layer, as the
    oracle chooses, on the first tokens of the sample.

    Shapes and options are those of `carve`, which takes what is found as `active`.
    """
    settings, checkpoint = calibration or Calibration(), with_gathered_mlps(checkpoint)
    sample = settings.sample(checkpoint)
    rows = max(1, ALLOCATION_TOKENS // sample.input_ids.shape[1])
    sample = dataclasses.replace(sample, input_ids=sample.input_ids[:rows])
    jobs = {
        n: carve.check(
            checkpoint,
            experts=experts,
            active=n,
            shared=_shared(shared, n),
            method=method,
            router="oracle",
            repair="none",
            seed=seed,
            layers=layers,
            calibration=settings,
        )
        for n in active
    }
    costs: dict[int, dict[int, list[float]]] = {n: {} for n in active}
    for layer in settings.walk(checkpoint, sample.input_ids):
        source = list(layer.outputs())
        for n, job in jobs.items():
            if layer.index in job.layers:
                seen = observe(layer, job.blocks, sample, source, feedback=0.0)
                neurons = repair.Neurons.at(job.blocks, layer.index, layer.device)
                costs[n][layer.index] = carved_mlp.costs(neurons, seen, job.cut)
        layer.run()
        progress(1)
    return {n: _allocated(costs[n], jobs[n].cut) for n in active}


def _allocated(costs: dict[int, list[float]], cut: ExpertSplit) -> list[int]:
    """Active parts by layer; `costs` are of all of them active, of one fewer, and so on."""
    levels = [left_out / cut.experts for left_out in range(cut.routed)]
    found = repair.allocate(costs, levels, 1 - cut.active / cut.experts)
    return [cut.experts - round(part * cut.experts) for part in found.values()]


def _texts(
    checkpoint: Checkpoint, settings: Calibration, evaluated: int
) -> tuple[Sample, Sample, int]:
    """Calibration and held-out text in windows of one length, and rows of a batch, which divide
    those of the first.
    """
    sample = settings.sample(checkpoint)
    held_out = sample_ids(checkpoint, tokens=evaluated, sequence_length=settings.sequence_length)
    rows = max(1, min(len(sample.input_ids), BATCH_TOKENS // sample.input_ids.shape[1]))
    ids = sample.input_ids[: len(sample.input_ids) // rows * rows]
    return dataclasses.replace(sample, input_ids=ids), held_out, rows


def _advance(
    stream: _Stream, layer: Layer, sample: Sample, source: Sequence[Tensor], held_out: Sample
) -> None:
    """Carve the layer on the stream as it stands, and move the stream through it."""
    job, point, fitted = stream.job, stream.point, len(source)
    if layer.index not in job.layers:
        stream.hidden[:] = list(layer.outputs(stream.hidden))
        return
    here = dataclasses.replace(layer, hidden=stream.hidden[:fitted])
    rows = observe(here, job.blocks, sample, source)
    neurons = repair.Neurons.at(job.blocks, layer.index, layer.device)
    carved, found = carved_mlp.fit(neurons, rows, job.cuts[layer.index], job.entry(layer.index))
    point.recall.append(found.get("recall", 1.0))
    point.mass_recall.append(found.get("mass_recall", 1.0))
    missed = total = 0.0
    masks = held_out.mask.split(len(stream.hidden[0]))
    with _replaced(layer, job.blocks.family.mlp, neurons, carved) as stand_in:
        for b, out in enumerate(layer.outputs(stream.hidden)):
            stream.hidden[b] = out
            if b >= fitted:
                mask = masks[b - fitted].to(out.device)
                y, off = (
                    t.reshape(*mask.shape, -1)[mask] for t in (stand_in.wanted, stand_in.given)
                )
                missed += (y - off).square().sum(dtype=torch.float64).item()
                total += y.square().sum(dtype=torch.float64).item()
    point.errors.append(missed / max(total, 1e-300))


class _StandIn(nn.Module):
    """The carved MLP in the place of the layer's own; what it gave last, and what the source's
    gives for that.
    """

    def __init__(self, own: repair.Neurons, carved: carved_mlp.Carved) -> None:
        super().__init__()
        self.own, self.carved = own, carved
        self.wanted = self.given = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).float()
        self.wanted = self.own(flat)
        self.given = self.carved(flat)
        return self.given.to(x.dtype).view(x.shape)


@contextmanager
def _replaced(
    layer: Layer, mlp: str, own: repair.Neurons, carved: carved_mlp.Carved
) -> Iterator[_StandIn]:
    before, stand_in = getattr(layer.module, mlp), _StandIn(own, carved)
    setattr(layer.module, mlp, stand_in)
    try:
        yield stand_in
    finally:
        setattr(layer.module, mlp, before)


def _scored(
    checkpoint: Checkpoint,
    walk: Walk,
    streams: Sequence[_Stream],
    fitted: int,
    held_out: Sample,
    sample: Sample,
    whole: bool,
    *,
    repair: str,
    shared: int,
    experts: int,
) -> Sweep:
    """The logits of every stream against those of the source."""
    ids = held_out.input_ids
    perplexity, reference = _scores(walk.fork(checkpoint, walk.hidden[fitted:]), ids)
    for stream in streams:
        stream.point.perplexity, chosen = _scores(
            walk.fork(checkpoint, stream.hidden[fitted:]), ids
        )
        stream.point.agreement = (chosen == reference).double().mean().item()
    points = [s.point for s in streams]
    if whole:
        points.append(
            Point(
                method="all",
                router="",
                active=experts,
                experts=experts,
                perplexity=perplexity,
                agreement=1.0,
            )
        )
    return Sweep(
        source=checkpoint.source.location,
        model_type=str(checkpoint.config.get("model_type")),
        repair=repair,
        shared=shared,
        layers=streams[0].job.layers if streams else (),
        perplexity=perplexity,
        tokens=ids.numel() - len(ids),
        sample=sample,
        points=tuple(points),
    )


def _scores(walk: Walk, ids: Tensor) -> tuple[float, Tensor]:
    """Perplexity, and the most likely token that follows each but the last [B, T - 1]."""
    total, chosen = 0.0, torch.empty(len(ids), ids.shape[1] - 1, dtype=torch.long)
    for (rows, positions), logits in walk.logits():
        targets = ids[rows, positions.start + 1 : positions.stop + 1].to(logits.device)
        flat = logits[:, : targets.shape[1]].float()
        total += nn.functional.cross_entropy(flat.transpose(1, 2), targets, reduction="sum").item()
        chosen[rows, positions.start : positions.start + targets.shape[1]] = flat.argmax(-1).cpu()
    return math.exp(min(total / chosen.numel(), 700.0)), chosen
