"""What a conversion costs in quality, measured on held-out text of many domains.

    perplexity   exp(- mean log p(token t+1 | tokens 1..t)); the first token is never predicted
    agreement    how often the most likely next token is the source's
    zeros        the fraction of exact zeros among the MLP's products, by layer

The models are walked one after the other. Of the source only its most likely tokens are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surgery.calibration.data import Sample, draw
from surgery.calibration.observe import tapped
from surgery.calibration.texts import Text, to_measure
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint, Progress, constant
from surgery.families import find


@dataclass(kw_only=True)
class Quality:
    """What was measured of one model.

    Args:
        perplexity: by domain.
        agreement: with the first model that was measured, by domain.
        not_finite: how many logits are NaN or Inf.
        zeros: by layer; NaN where a layer has no MLP of its own.
    """

    perplexity: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    not_finite: int = 0
    zeros: list[float] = field(default_factory=list)

    @property
    def sparsity(self) -> float:
        """The mean fraction of zeros over the layers that have an MLP."""
        known = [z for z in self.zeros if not math.isnan(z)]
        return sum(known) / len(known) if known else math.nan

    @property
    def mean(self) -> float:
        """The geometric mean of the perplexity over all domains."""
        return geometric_mean(self.perplexity.values())

    def over(self, source: Quality) -> dict[str, float]:
        """Return how many times the source's perplexity this is, by domain."""
        return {domain: p / source.perplexity[domain] for domain, p in self.perplexity.items()}


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def texts(
    checkpoint: Checkpoint, tokens: int, sequence_length: int, chosen: Sequence[Text] = ()
) -> Sample:
    """Return up to `tokens` held-out tokens of each text, in windows of `sequence_length`.

    The texts are the built-in domains where no other are `chosen`.
    """
    chosen, each = chosen or to_measure(), max(1, tokens // sequence_length)
    return draw(
        checkpoint,
        chosen,
        rows=each * len(chosen),
        each=each,
        sequence_length=sequence_length,
        part="held_out",
    )


def measure(
    models: Mapping[str, Checkpoint],
    sample: Sample,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    progress: Progress = lambda n: None,
) -> dict[str, Quality]:
    """Measure each model; the first is the one that the others are compared with."""
    found: dict[str, Quality] = {}
    reference: Tensor | None = None
    for name, checkpoint in models.items():
        walk = Walk(checkpoint, sample.input_ids, dtype=dtype, device=device)
        quality = Quality(zeros=_zeros(walk, sample, progress))
        nll, chosen, quality.not_finite = _scores(walk, sample.input_ids)
        reference = chosen if reference is None else reference
        for number, domain in enumerate(sample.domains):
            rows = sample.domain_of_row == number
            quality.perplexity[domain] = math.exp(min(nll[rows].double().mean().item(), 700.0))
            quality.agreement[domain] = (chosen[rows] == reference[rows]).double().mean().item()
        found[name] = quality
    return found


def _zeros(walk: Walk, sample: Sample, progress: Progress) -> list[float]:
    """Run the walk to its end and return the fraction of zeros in each layer's products."""
    found = []
    for layer in walk:
        zeros, total, start = 0, 0, 0
        with tapped(layer.module, walk.blocks.family, walk.checkpoint.text_config) as taps:

            def count(b: int, out: Tensor) -> None:
                nonlocal zeros, total, start
                mask = sample.mask[start : start + len(out)].to(out.device)
                start += len(out)
                if (h := taps.caught.get("product")) is not None:
                    h = h.reshape(*mask.shape, -1)[mask]
                    zeros, total = zeros + h.numel() - int(h.count_nonzero()), total + h.numel()

            layer.run(count)
        found.append(zeros / total if total else math.nan)
        progress(1)
    return found


def _scores(walk: Walk, ids: Tensor) -> tuple[Tensor, Tensor, int]:
    """Score the logits at the end of a walk over ids [B, T].

    Returns −log p of the token that follows each position but the last, [B, T - 1], the most
    likely token there, [B, T - 1], and the number of logits that are not finite.
    """
    not_finite = 0
    nll = torch.empty(len(ids), ids.shape[1] - 1)
    chosen = torch.empty_like(nll, dtype=torch.long)
    for (rows, positions), logits in walk.logits():
        targets = ids[rows, positions.start + 1 : positions.stop + 1].to(logits.device)
        not_finite += int((~logits.isfinite()).sum())
        flat = logits[:, : targets.shape[1]].float()
        losses = torch.nn.functional.cross_entropy(flat.transpose(1, 2), targets, reduction="none")
        where = slice(positions.start, positions.start + targets.shape[1])
        nll[rows, where], chosen[rows, where] = losses.cpu(), flat.argmax(-1).cpu()
    return nll, chosen, not_finite


def plain_swap(source: Checkpoint, output: Checkpoint) -> Checkpoint:
    """Return what the conversion would be without its repair.

    That is the output with the source's weights wherever both have a tensor of that name and
    shape. Among the other tensors thresholds stay, and what the repair added is zero.
    """
    added = tuple(
        f".{name}" for name in ("correction", "bypass_out", f"{find(output.config).down}.bias")
    )
    tensors = {}
    for name, t in output.tensors.items():
        own = source.tensors.get(name)
        if own is not None and own.shape == t.shape:
            tensors[name] = own
        else:
            tensors[name] = constant(0.0, t.shape, t.dtype) if name.endswith(added) else t
    return output.replace(tensors=tensors)
