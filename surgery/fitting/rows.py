"""The rows that a layer's MLP is fitted to: what it reads, and what it is to write.

The walk hands the converted layers' outputs on, so a layer is fitted on what it will read, and
later layers make up for earlier ones. Two streams go through the layers, the source's own and the
converted one. With y the output of the layer's original MLP on the converted stream, and e what the
stream after the layer then still lacks to the source's, the target is

    t = y + α·e

With α = 0 each layer answers for itself alone; with α = 0.5 it takes back half of the errors of the
layers before it. Taking them back in full (α = 1) asks of one MLP what it cannot do.

A row weighs 1/mean(x²), where x is the source's stream after the layer, because a norm reads that
stream next. Where a norm follows the MLP itself (Gemma 2 and 3, OLMo 2), it weighs 1/mean(y²).

Shapes: N tokens that count, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

FEEDBACK = 0.5  # α
FIRST = 8  # all first tokens together weigh 1/FIRST of what the other rows do
HELD_OUT = 0.1  # the part of the rows that is measured on and never fitted on
CHUNK = 512  # rows whose products are held at once
FOLDS = 3  # groups of domains, each of which is left out of a fit in turn


@dataclass(kw_only=True)
class Rows:
    """Hold what an MLP reads, z [N, H], and is to write, y [N, H], in the walk's dtype.

    `weight` [N] is that of each row, and `domain` [N] the number of the domain that its text is of.
    `first` are the rows of the first tokens of sequences, which no error counts. But one of them
    may hold the massive activation that all attention rests on (Sun et al. 2024, arXiv 2402.17762),
    so the fit takes them in with a weight of their own: all of them together weigh 1/FIRST of the
    others.
    """

    z: Tensor
    y: Tensor
    weight: Tensor | None = None
    domain: Tensor | None = None
    first: Rows | None = None

    @property
    def fitted(self) -> int:
        """Return how many rows are fitted on; those that are held out come after them."""
        return len(self.z) - max(1, int(len(self.z) * HELD_OUT))

    @contextmanager
    def own_precision(self) -> Iterator[None]:
        """Multiply fp32 matrices inside as the walk does, where its dtype is bf16.

        Factors are rounded to bf16, and sums stay in fp32. Hardware that multiplies bf16 is several
        times faster so, and loses nothing of inputs and weights that are bf16 already.
        """
        before = torch.get_float32_matmul_precision()
        if self.z.dtype == torch.bfloat16:
            torch.set_float32_matmul_precision("medium")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def some(self, count: int) -> Rows:
        """Return about `count` of the rows, every k-th, with all first tokens."""
        every = max(1, len(self.z) // count)
        weight, domain = (t if t is None else t[::every] for t in (self.weight, self.domain))
        z, y = self.z[::every], self.y[::every]
        return Rows(z=z, y=y, weight=weight, domain=domain, first=self.first)

    @property
    def folds(self) -> list[Tensor]:
        """Return the places of the rows that are fitted on, in FOLDS groups that share no domain.

        Rows of fewer domains are cut into as many stretches of text.
        """
        stop = self.fitted
        group = torch.arange(stop) * FOLDS // max(1, stop)
        if self.domain is not None and len(self.domain[:stop].unique()) >= FOLDS:
            group = self.domain[:stop].cpu() % FOLDS
        return [(group == k).nonzero()[:, 0] for k in range(FOLDS)]

    def at(self, places: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield z, y and weight of the rows at these places in fp32, a chunk at a time."""
        for i in places.to(self.z.device).split(CHUNK):
            weight = None if self.weight is None else self.weight[i]
            yield self.z[i].float(), self.y[i].float(), weight

    def parts(
        self, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield z, y and weight of rows [start, stop) in fp32, a chunk at a time."""
        stop = len(self.z) if stop is None else stop
        for i in range(start, stop, CHUNK):
            j = min(stop, i + CHUNK)
            yield (
                self.z[i:j].float(),
                self.y[i:j].float(),
                None if self.weight is None else self.weight[i:j],
            )

    def fitting(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield what a fit takes in: the rows for it, then the first tokens at their own weight."""
        yield from self.parts(0, self.fitted)
        yield from self.firsts()

    def firsts(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield the first tokens at the weight that they have in a fit."""
        if self.first is not None:
            larger = len(self.z) / (FIRST * len(self.first.z))
            for z, y, weight in self.first.parts():
                yield z, y, larger * (z.new_ones(len(z)) if weight is None else weight)
