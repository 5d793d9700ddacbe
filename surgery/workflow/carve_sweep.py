"""What a carved model is worth against the part of its neurons that is active.

It stands beside a random split, and beside the oracle. One walk of the source carries a stream for
each variant, calibration and held-out text side by side: a layer is carved on the stream that the
variant's layers before it gave, put in, and run. Nothing is written.

    perplexity  of held-out text
    agreement   how often the most likely next token is the source's
    error       of an MLP on held-out text: ‖y − ŷ‖² / ‖y‖², y what the source's MLP gives
    oracle      the routed experts with most mass on a token, which no router can know

Not all layers need as many parts. `carve.allocate` finds how many each is to have active.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.analysis.sweep import Point, Sweep
from surgery.blocks.custom_code import with_gathered_mlps
from surgery.calibration.data import Sample, sample_ids
from surgery.calibration.install import observe
from surgery.calibration.settings import Calibration
from surgery.calibration.walk import BATCH_TOKENS, Layer, Walk, choose_device, choose_dtype
from surgery.checkpoint import Checkpoint, Progress
from surgery.errors import UsageError
from surgery.fitting import carved_mlp
from surgery.fitting.neurons import Neurons
from surgery.operations import carve

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
EVALUATED = 6144  # tokens: 512 of each built-in domain


@dataclass(kw_only=True)
class _Stream:
    """A variant on its way: its hidden states, batch by batch."""

    point: Point
    job: carve.Job
    hidden: list[Tensor]


def sweep(
    checkpoint: Checkpoint,
    *,
    fractions: Sequence[float] = FRACTIONS,
    random: bool = True,
    evaluated: int = EVALUATED,
    progress: Progress = lambda n: None,
    calibration: Calibration | None = None,
    **options: Any,
) -> Sweep:
    """Return the quality of `checkpoint` carved in each of these fractions.

    It is carved by the method asked for and at random, with the router asked for and with the
    oracle; with allocation "greedy", by the method with as many active parts by layer as `allocate`
    finds, at random with as many in each layer.

    Args:
        fractions: of the parts, those that are active.
        random: whether to show a random split beside the method.
        evaluated: tokens of held-out text.
        options: further ones of `carve` but `active`; of `shared`, one fewer than active at most.
    """
    settings, checkpoint = calibration or Calibration(), with_gathered_mlps(checkpoint)
    asked = carve.Options(**options, calibration=settings)
    counts = sorted({_parts(wanted, asked.experts) for wanted in fractions})
    sample, held_out, batch = _texts(checkpoint, settings, evaluated)
    device = choose_device(settings.device)
    ids = torch.cat([sample.input_ids, held_out.input_ids])
    dtype = choose_dtype(settings.dtype, device)
    walk = Walk(checkpoint, ids, dtype=dtype, device=device, batch_size=batch)
    fitted = len(sample.input_ids) // batch  # batches
    jobs = [
        job
        for count in counts
        if count < asked.experts
        for job in _jobs(checkpoint, asked, count, random)
    ]
    streams = [_Stream(point=_point(job), job=job, hidden=list(walk.hidden)) for job in jobs]
    for layer in walk:
        after = list(layer.outputs())
        for stream in streams:
            _advance(stream, layer, sample, after[:fitted], held_out)
        layer.run()
        progress(1)
    perplexity = _score(checkpoint, walk, streams, fitted, held_out)
    points = [s.point for s in streams]
    if asked.experts in counts:
        points.append(_whole(asked.experts, perplexity))
    return Sweep(
        source=checkpoint.source.location,
        model_type=str(checkpoint.config.get("model_type")),
        repair=asked.repair,
        shared=asked.shared,
        layers=streams[0].job.layers if streams else (),
        perplexity=perplexity,
        tokens=held_out.input_ids.numel() - len(held_out.input_ids),
        sample=sample,
        points=tuple(points),
    )


def _jobs(
    checkpoint: Checkpoint, asked: carve.Options, count: int, random: bool
) -> Iterator[carve.Job]:
    """Yield the variants with `count` active parts, in the mean of the layers."""
    shared = max(0, min(asked.shared, count - 1))
    some = dataclasses.replace(asked, active=count, shared=shared, allocation="uniform")
    active: int | list[int] = count
    if asked.allocation == "greedy":
        active = carve.allocate(carve.plan(checkpoint, some))
    splits = {asked.method: active} | ({"random": count} if random else {})
    for method, number in splits.items():
        least = number if isinstance(number, int) else min(number)
        for router in (asked.router, "oracle"):
            options = dataclasses.replace(
                some,
                active=number,
                shared=max(0, min(asked.shared, least - 1)),
                method=method,
                router=router,
            )
            yield carve.plan(checkpoint, options)


def _point(job: carve.Job) -> Point:
    split = job.split
    return Point(method=split.method, router=split.router, active=job.active, experts=split.experts)


def _whole(experts: int, perplexity: float) -> Point:
    """Return the point of the source: all parts active."""
    return Point(
        method="all",
        router="",
        active=experts,
        experts=experts,
        perplexity=perplexity,
        agreement=1.0,
    )


def _parts(fraction: float, experts: int) -> int:
    """Return the number of parts for a fraction. Raises UsageError outside of (0, 1]."""
    if not 0 < fraction <= 1:
        raise UsageError(
            f"{fraction:.0%} of the experts active", "give percentages up to 100, like 25,50,75"
        )
    return max(1, round(fraction * experts))


def _texts(
    checkpoint: Checkpoint, settings: Calibration, evaluated: int
) -> tuple[Sample, Sample, int]:
    """Return calibration and held-out text in windows of one length, and the rows of a batch.

    The rows of a batch divide those of the calibration text.
    """
    sample = settings.sample(checkpoint)
    held_out = sample_ids(checkpoint, tokens=evaluated, sequence_length=settings.sequence_length)
    rows = max(1, min(len(sample.input_ids), BATCH_TOKENS // sample.input_ids.shape[1]))
    return sample.rows(slice(len(sample.input_ids) // rows * rows)), held_out, rows


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
    neurons = Neurons.at(job.blocks, layer.index, layer.device)
    carved, found = carved_mlp.fit(neurons, rows, job.splits[layer.index], job.entry(layer.index))
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
    """The carved MLP in the place of the layer's own.

    It keeps what it gave last, `given`, and what the source's MLP gives for the same, `wanted`.
    """

    def __init__(self, own: Neurons, carved: carved_mlp.Carved) -> None:
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
    layer: Layer, mlp: str, own: Neurons, carved: carved_mlp.Carved
) -> Iterator[_StandIn]:
    before, stand_in = getattr(layer.module, mlp), _StandIn(own, carved)
    setattr(layer.module, mlp, stand_in)
    try:
        yield stand_in
    finally:
        setattr(layer.module, mlp, before)


def _score(
    checkpoint: Checkpoint, walk: Walk, streams: Sequence[_Stream], fitted: int, held_out: Sample
) -> float:
    """Score every stream on the held-out text, and return the perplexity of the source."""
    ids = held_out.input_ids
    perplexity, reference = _scores(walk.fork(checkpoint, walk.hidden[fitted:]), ids)
    for stream in streams:
        own = walk.fork(checkpoint, stream.hidden[fitted:])
        stream.point.perplexity, chosen = _scores(own, ids)
        stream.point.agreement = (chosen == reference).double().mean().item()
    return perplexity


def _scores(walk: Walk, ids: Tensor) -> tuple[float, Tensor]:
    """Return the perplexity, and the likeliest token after each but the last, [B, T - 1]."""
    total, chosen = 0.0, torch.empty(len(ids), ids.shape[1] - 1, dtype=torch.long)
    for (rows, positions), logits in walk.logits():
        targets = ids[rows, positions.start + 1 : positions.stop + 1].to(logits.device)
        flat = logits[:, : targets.shape[1]].float()
        total += nn.functional.cross_entropy(flat.transpose(1, 2), targets, reduction="sum").item()
        chosen[rows, positions.start : positions.start + targets.shape[1]] = flat.argmax(-1).cpu()
    return math.exp(min(total / chosen.numel(), 700.0)), chosen
