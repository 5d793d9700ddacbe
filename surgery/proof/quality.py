"""What a conversion costs in quality, measured on held-out text of many domains.

    perplexity   exp(- mean log p(token t+1 | tokens 1..t)); the first token is never predicted
    agreement    how often the most likely next token is the source's
    zeros        the fraction of exact zeros among the MLP's products, by layer; neurons that a
                 conversion made always open are counted in `zeros_of_all` alone

The models are walked one after the other. Of the source only its most likely tokens are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from surgery.calibration.data import Sample, Windows, draw
from surgery.calibration.observe import tapped
from surgery.calibration.texts import Text, to_measure
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, constant
from surgery.checkpoint.tensors import derive
from surgery.families import find, locate


@dataclass(kw_only=True)
class Quality:
    """What was measured of one model.

    Args:
        perplexity: by domain.
        agreement: with the first model that was measured, by domain.
        not_finite: how many logits are NaN or Inf.
        zeros: by layer, without always-open neurons; NaN where a layer has no MLP of its own.
        zeros_of_all: by layer, with them.
    """

    perplexity: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    not_finite: int = 0
    zeros: list[float] = field(default_factory=list)
    zeros_of_all: list[float] = field(default_factory=list)

    @property
    def sparsity(self) -> float:
        """Return the mean fraction of zeros over the layers that have an MLP."""
        return _mean(self.zeros)

    @property
    def sparsity_of_all(self) -> float:
        """Return the same with neurons that are always open."""
        return _mean(self.zeros_of_all)

    @property
    def mean(self) -> float:
        """Return the geometric mean of the perplexity over all domains."""
        return geometric_mean(self.perplexity.values())

    def over(self, source: Quality) -> dict[str, float]:
        """Return how many times the source's perplexity this is, by domain."""
        return {domain: p / source.perplexity[domain] for domain, p in self.perplexity.items()}


def _mean(zeros: Sequence[float]) -> float:
    known = [z for z in zeros if not math.isnan(z)]
    return sum(known) / len(known) if known else math.nan


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
    windows = Windows(rows=each * len(chosen), length=sequence_length, each=each)
    return draw(checkpoint, chosen, windows, part="held_out")


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
        others, every = zip(*_zeros(walk, sample, progress), strict=True)
        quality = Quality(zeros=list(others), zeros_of_all=list(every))
        nll, chosen, quality.not_finite = _scores(walk, sample.input_ids)
        reference = chosen if reference is None else reference
        for number, domain in enumerate(sample.domains):
            rows = sample.domain_of_row == number
            quality.perplexity[domain] = math.exp(min(nll[rows].double().mean().item(), 700.0))
            quality.agreement[domain] = (chosen[rows] == reference[rows]).double().mean().item()
        found[name] = quality
    return found


def _zeros(walk: Walk, sample: Sample, progress: Progress) -> list[tuple[float, float]]:
    """Run the walk to its end and return the fraction of zeros in each layer's products.

    It comes without the neurons that are always open, and with them.
    """
    found = []
    for layer in walk:
        counts, start = torch.zeros(2, 2, dtype=torch.long), 0
        with tapped(layer.module, walk.blocks.family, walk.checkpoint.text_config) as taps:

            def count(b: int, out: Tensor, counts: Tensor = counts) -> None:
                nonlocal start
                mask = sample.mask[start : start + len(out)].to(out.device)
                start += len(out)
                if (h := taps.caught.get("product")) is not None:
                    h = h.reshape(*mask.shape, -1)[mask]
                    for i, part in enumerate((h[:, : h.shape[1] - walk.blocks.always_open], h)):
                        zeros = part.numel() - int(part.count_nonzero())
                        counts[i] += torch.tensor([zeros, part.numel()])

            layer.run(count)
        others, every = (int(z) / int(n) if n else math.nan for z, n in counts)
        found.append((others, every))
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
    shape. Among the other tensors thresholds stay, and what the repair added is zero. Where neurons
    were added, `down` is the source's, with zeros for them.
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
    return output.replace(tensors=tensors | _unfitted_down(source, output))


def _unfitted_down(source: Checkpoint, output: Checkpoint) -> dict[str, LazyTensor]:
    """Return every `down` of the source with zeros for the neurons that the output has more."""
    before, after = locate(source), locate(output)
    if not after.always_open:
        return {}
    found: dict[str, LazyTensor] = {}
    for index in after.dense:
        own, mlp = before.mlp(index).down, after.mlp(index)
        more = mlp.down.shape[1] - own.shape[1]
        down = derive(
            f"{more} more columns of zeros",
            lambda t, more=more: torch.nn.functional.pad(t, (0, more)),
            own,
            dtype=mlp.down.dtype,
            shape=mlp.down.shape,
        )
        layer = after.restored(index, replace(mlp, down=down))
        found |= {n: t for n, t in layer.items() if n.endswith(f"{after.family.down}.weight")}
    return found
