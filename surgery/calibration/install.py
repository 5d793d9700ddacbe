"""Convert layers on a walk: each is fitted on what the converted ones before it give, and installed
as it will be on disk.

Two streams go through the layers, the source's own and the converted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from surgery.calibration.data import Sample
from surgery.calibration.observe import tapped
from surgery.calibration.settings import Calibration
from surgery.calibration.walk import Layer, Walk
from surgery.checkpoint import Checkpoint, Progress, Work
from surgery.families import Blocks
from surgery.fitting.repair import FEEDBACK, Rows


def convert_layers(
    checkpoint: Checkpoint,
    calibration: Calibration,
    layers: Sequence[int],
    work: Work,
    progress: Progress,
    *,
    fit: Callable[[Layer, Sample, Sequence[Tensor]], None],
    install: Callable[[Layer, Walk], None],
    first: Callable[[Sample], None] = lambda sample: None,
) -> None:
    """Walk to the last of `layers` over calibration text; each is fitted on what the converted ones
    before it give.

    `fit` puts what the work promised under "INDEX." and is told the source's own stream after the
    layer, [b, T, H] for each batch; where an interrupted run has done so it is left out. `install`
    puts that into the layer. `first` sees the sample.
    """
    sample = calibration.sample(checkpoint)
    work.note("sample", sample.as_dict())
    first(sample)
    walk = calibration.walk(checkpoint, sample.input_ids)
    source = walk.twin()
    for layer in walk:
        for b, out in enumerate(layer.outputs(source)):
            source[b] = out
        if layer.index in layers:
            if not work.has_all(f"{layer.index}."):
                fit(layer, sample, source)
            install(layer, walk)
        layer.run()
        progress(1)
        if layer.index == max(layers):
            break


def observe(
    layer: Layer,
    blocks: Blocks,
    sample: Sample,
    source: Sequence[Tensor],
    feedback: float = FEEDBACK,
) -> Rows:
    """The rows of a layer of the walk, as it stands; the walk does not move. `source`: the source's
    own stream after the layer [b, T, H]."""
    rows, first = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
    start = 0
    with (
        tapped(layer.module, blocks.family, blocks.checkpoint.text_config) as taps,
        _normed(layer, blocks) as normed,
    ):
        for out, wanted in zip(layer.outputs(), source, strict=True):
            counted = sample.mask[start : start + len(out)].flatten().to(out.device)
            start += len(out)
            z, y, wanted = (
                t.to(out.device).flatten(0, -2)
                for t in (taps.caught["input"], taps.caught["output"], wanted)
            )
            lacks = feedback * (wanted - out.flatten(0, -2)).float()
            if normed:
                target, weight = (
                    _before_norm(y.float(), normed[-1].flatten(0, -2).float(), lacks),
                    y,
                )
            else:
                target, weight = y.float() + lacks / blocks.residual_multiplier, wanted
            row = (z, target.to(z.dtype), 1 / weight.float().square().mean(1).clamp_min(1e-12))
            rows.append(tuple(t[counted] for t in row))
            first.append(tuple(t[~counted] for t in row))
    return _joined(rows, first=_joined(first))


def _joined(parts: Sequence[tuple[Tensor, ...]], first: Rows | None = None) -> Rows:
    z, y, weight = (torch.cat(p) for p in zip(*parts, strict=True))
    return Rows(z=z, y=y, weight=weight, first=first)


@contextmanager
def _normed(layer: Layer, blocks: Blocks) -> Iterator[list[Tensor]]:
    """What the norm behind the MLP gives, where there is one: the last item."""
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
    """What must go into the norm for it to give `normed` + `lacks`, up to the scale of a token,
    which the norm takes away: its weights are normed / y · rms(y), by channel."""
    rms = y.square().mean(1, keepdim=True).sqrt()
    weights = (normed * (y / rms)).sum(0) / (y / rms).square().sum(0).clamp_min(1e-12)
    usable = weights.abs() > 1e-3 * weights.abs().max()
    return y + torch.where(usable, lacks * rms / torch.where(usable, weights, 1), 0)
