"""Fit layers on a walk over calibration text, each on what the converted ones before it give.

An operation plans tensors that a `Work` promises, and says how one layer's are fitted. The rest is
here, once: the walk, what an interrupted run left, the rows that a layer is fitted to, and the
converted layer in the place of the source's. Two streams go through the layers, the source's own
and the converted one.

Shapes: b sequences of a batch, T positions, N tokens that count, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from surgery.calibration.data import Sample
from surgery.calibration.observe import tapped
from surgery.calibration.settings import Calibration
from surgery.calibration.walk import Layer
from surgery.checkpoint import LazyTensor, Progress, Work
from surgery.errors import SurgeryError
from surgery.families import Blocks
from surgery.fitting.rows import FEEDBACK, Rows

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """A layer of the walk that is to be fitted.

    `source` is the source's own stream after the layer, [b, T, H] of each batch.
    """

    layer: Layer
    blocks: Blocks
    sample: Sample
    source: Sequence[Tensor]

    @property
    def index(self) -> int:
        return self.layer.index

    @property
    def rows(self) -> Rows:
        """Return what the layer's MLP reads, and what it is to write."""
        return observe(self.layer, self.blocks, self.sample, self.source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A model and the calibration text that it is walked over."""

    blocks: Blocks
    calibration: Calibration
    sample: Sample


def read_text(blocks: Blocks, calibration: Calibration, work: Work) -> Reading:
    """Read the calibration text, and note in the report of `work` which one it is."""
    sample = calibration.sample(blocks.checkpoint)
    work.note("sample", sample.as_dict())
    return Reading(blocks=blocks, calibration=calibration, sample=sample)


def fit_layers(
    reading: Reading,
    layers: Sequence[int],
    work: Work,
    progress: Progress,
    fit: Callable[[Fitting], None],
) -> None:
    """Walk to the last of `layers` over calibration text, and fit each of them.

    1. The source's stream is moved through the layer.
    2. `fit` puts what the work promised under "INDEX."; it is left out where an interrupted run
       has put all of it.
    3. The layer of `work.output` takes the place of the source's, and the walk goes on.
    """
    blocks, sample = reading.blocks, reading.sample
    walk = reading.calibration.walk(blocks.checkpoint, sample.input_ids)
    source = walk.twin()
    for layer in walk:
        for b, out in enumerate(layer.outputs(source)):
            require_finite(out, layer, blocks)
            source[b] = out
        if layer.index in layers:
            if not work.has_all(f"{layer.index}."):
                fit(Fitting(layer=layer, blocks=blocks, sample=sample, source=source))
            walk.install(layer, work.output)
        layer.run()
        progress(1)
        if layer.index == max(layers):
            break


def costs_of_layers(
    blocks: Blocks,
    calibration: Calibration,
    sample: Sample,
    layers: Sequence[int],
    cost: Callable[[Layer, Rows], T],
) -> dict[int, T]:
    """Walk the source over the sample and return the cost of each of `layers`.

    `cost` is told what a layer's MLP reads and writes, with nothing to make up for.
    """
    found: dict[int, T] = {}
    for layer in calibration.walk(blocks.checkpoint, sample.input_ids):
        if layer.index in layers:
            outputs = list(layer.outputs())
            for out in outputs:
                require_finite(out, layer, blocks)
            found[layer.index] = cost(layer, observe(layer, blocks, sample, outputs, feedback=0.0))
        layer.run()
    return found


def require_finite(out: Tensor, layer: Layer, blocks: Blocks) -> None:
    """Raise SurgeryError where the source's layer writes NaN or Inf: nothing fits that."""
    if out.isfinite().all():
        return
    checkpoint, own = blocks.checkpoint, set(blocks.names(layer.index))
    elsewhere = {n for i in range(blocks.count) for n in blocks.names(i)} - own
    read = (n for n in checkpoint.tensors if n not in elsewhere)
    bad = next((n for n in read if not _is_finite(checkpoint.tensors[n])), None)
    raise SurgeryError(
        f"decoder layer {layer.index} of the source writes NaN or Inf on the calibration text",
        f"{bad} holds such values: repair the source, or fetch it again"
        if bad
        else f"its weights are finite, so {str(out.dtype).removeprefix('torch.')} overflows: "
        "calibrate with --calibration-dtype fp32",
    )


def _is_finite(tensor: LazyTensor) -> bool:
    found = tensor.read()
    return not found.is_floating_point() or bool(found.isfinite().all())


def observe(
    layer: Layer,
    blocks: Blocks,
    sample: Sample,
    source: Sequence[Tensor],
    feedback: float = FEEDBACK,
) -> Rows:
    """Return the rows of a layer as it stands; the walk does not move.

    `source` is the source's own stream after the layer, [b, T, H] of each batch; `feedback` the
    part of what lacks to it that the layer is asked to make up for.
    """
    rows, first = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
    config = blocks.checkpoint.text_config
    start = 0
    with tapped(layer.module, blocks.family, config) as taps, _normed(layer, blocks) as normed:
        for out, wanted in zip(layer.outputs(), source, strict=True):
            counted = sample.mask[start : start + len(out)].flatten().to(out.device)
            start += len(out)
            caught = (taps.caught["input"], taps.caught["output"], wanted)
            z, y, wanted = (t.to(out.device).flatten(0, -2) for t in caught)
            lacks = feedback * (wanted - out.flatten(0, -2)).float()
            if normed:
                after = normed[-1].flatten(0, -2).float()
                target, weight = _before_norm(y.float(), after, lacks), y
            else:
                target, weight = y.float() + lacks / blocks.residual_multiplier, wanted
            inverse = 1 / weight.float().square().mean(1).clamp_min(1e-12)
            row = (z, target.to(z.dtype), inverse)
            rows.append(tuple(t[counted] for t in row))
            first.append(tuple(t[~counted] for t in row))
    found = _joined(rows, first=_joined(first))
    found.domain = sample.domain_of_token
    return found


def _joined(parts: Sequence[tuple[Tensor, ...]], first: Rows | None = None) -> Rows:
    z, y, weight = (torch.cat(p) for p in zip(*parts, strict=True))
    return Rows(z=z, y=y, weight=weight, first=first)


@contextmanager
def _normed(layer: Layer, blocks: Blocks) -> Iterator[list[Tensor]]:
    """Yield a list whose last item is what the norm behind the MLP gave, where there is one."""
    caught: list[Tensor] = []
    if not blocks.family.post_norm:
        yield caught
        return
    norm = layer.module.get_submodule(blocks.family.post_norm)
    hook = norm.register_forward_hook(
        lambda module, inputs, output: caught.__setitem__(slice(None), [output])
    )
    try:
        yield caught
    finally:
        hook.remove()


def _before_norm(y: Tensor, normed: Tensor, lacks: Tensor) -> Tensor:
    """Return what must go into the norm for it to give `normed` + `lacks`.

    That is up to a token's scale, which the norm takes away. The norm's weights are, by channel,
    normed / y · rms(y).
    """
    rms = y.square().mean(1, keepdim=True).sqrt()
    weights = (normed * (y / rms)).sum(0) / (y / rms).square().sum(0).clamp_min(1e-12)
    usable = weights.abs() > 1e-3 * weights.abs().max()
    return y + torch.where(usable, lacks * rms / torch.where(usable, weights, 1), 0)
