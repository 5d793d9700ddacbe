"""Parity: source and output walked over the same ids, and their logits compared.

Shapes: b sequences of a batch, n positions, V vocab_size.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint, constant
from surgery.families import locate
from surgery.proof.comparison import Comparison

PARITY = 1e-5  # of max(1, std of the source logits)


class LogitSums:
    """Sums over the logits of both models on `sequences` rows of ids, for the verification's rows.

    In `not_finite` and `nll` the source comes first, then the output.
    """

    def __init__(self, sequences: int) -> None:
        # The max|Δ| of each sequence, in a tensor because Python's max would lose a NaN.
        self.deltas = torch.zeros(sequences, dtype=torch.float64)
        self.total = self.squares = 0.0  # of the source's logits
        self.count = self.scored = 0
        self.not_finite = [0, 0]
        self.nll = [0.0, 0.0]

    def add(self, rows: slice, logits: tuple[Tensor, Tensor], targets: Tensor) -> None:
        """Add the logits of source and output, [b, n, V], and the tokens that follow, [b, n].

        The last position of a sequence has no token that follows.
        """
        a, b = logits
        self.deltas[rows] = torch.maximum(
            self.deltas[rows], (a - b).abs().amax((1, 2)).double().cpu()
        )
        self.total += a.sum(dtype=torch.float64).item()
        self.squares += a.double().square().sum().item()
        self.count += a.numel()
        self.scored += targets.numel()
        for i, x in enumerate(logits):
            self.not_finite[i] += int((~x.isfinite()).sum())
            flat = x[:, : targets.shape[1]].flatten(0, 1)
            self.nll[i] += torch.nn.functional.cross_entropy(
                flat, targets.flatten(), reduction="sum"
            ).item()

    @property
    def delta(self) -> float:
        """Return the largest max|Δ| of a sequence."""
        return self.deltas.max().item()

    @property
    def limit(self) -> float:
        """Return what the largest difference may be at most."""
        mean = self.total / self.count
        return PARITY * max(1.0, math.sqrt(max(0.0, self.squares / self.count - mean * mean)))

    def perplexity(self, i: int) -> float:
        """Return the perplexity of the source (0) or the output (1)."""
        return math.exp(min(self.nll[i] / self.scored, 700.0))  # e^710 overflows


class Pair:
    """Source and output at the end of their walks over the same ids.

    `last` is the last converted layer, whose MLP the control zeroes.
    """

    def __init__(self, models: Comparison, input_ids: Tensor, last: int) -> None:
        self.models, self.input_ids, self.last = models, input_ids, last
        self.source, self.output = (
            Walk(c, input_ids, dtype=models.dtype, device=models.device)
            for c in (models.source, models.output)
        )
        # The hidden states of the first batch as they enter layer `last` of the output.
        self.before_last: list[Tensor] = []
        for walk in (self.source, self.output):
            for layer in walk:
                if walk is self.output and layer.index == last:
                    self.before_last = layer.hidden[:1]
                layer.run()
                models.progress(1)
        self.compared = self._compare(self.source, self.output)

    @property
    def worst(self) -> int:
        """Return the number of the sequence where they differ most."""
        return int(self.compared.deltas.argmax())

    def rounding(self, narrow: Pair) -> float:
        """Return how far the source's logits in `narrow` are from these, as max|Δ|.

        This pair holds the worst sequence of `narrow` alone, in a wider dtype.
        """
        hidden = [row[None] for batch in narrow.source.hidden for row in batch][narrow.worst]
        again = narrow.source.fork(narrow.source.checkpoint, [hidden])
        both = zip(self.source.logits(), again.logits(), strict=True)
        return max((a.cpu() - b.cpu()).abs().max().item() for (_, a), (_, b) in both)

    def in_fp64(self) -> Pair:
        """Walk both again in fp64, on the sequence where they differ most."""
        device = self.models.device
        place = "cpu" if device.startswith("mps") else device  # MPS has no fp64
        wide = dataclasses.replace(self.models, dtype=torch.float64, device=place)
        return Pair(wide, self.input_ids[self.worst : self.worst + 1], self.last)

    def control(self) -> float:
        """Return max|Δ| on the first batch with the MLP of layer `last` zeroed in the output.

        The comparison must catch it: otherwise it proves nothing.
        """
        zeroed = self.output.fork(without_mlp(self.output.checkpoint, self.last), self.before_last)
        for layer in zeroed.steps(start=self.last):
            layer.run()
            self.models.progress(1)
        source = self.source.fork(self.source.checkpoint, self.source.hidden[:1])
        return self._compare(source, zeroed).delta

    def _compare(self, source: Walk, output: Walk) -> LogitSums:
        compared = LogitSums(len(self.input_ids))
        for ((rows, positions), a), (_, b) in zip(source.logits(), output.logits(), strict=True):
            following = slice(positions.start + 1, positions.stop + 1)
            logits = (a, b) if a.dtype == torch.float64 else (a.float(), b.float())
            compared.add(rows, logits, self.input_ids[rows, following].to(a.device))
        return compared


def without_mlp(checkpoint: Checkpoint, index: int) -> Checkpoint:
    """Return the checkpoint with every tensor of the MLP of layer `index` set to zero."""
    names, tensors = locate(checkpoint).mlp_names(index), dict(checkpoint.tensors)
    return checkpoint.replace(
        tensors=tensors | {n: constant(0.0, tensors[n].shape, tensors[n].dtype) for n in names}
    )
