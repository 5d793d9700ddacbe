"""Are copies that were cut in finer experts chosen whole?

A model of copies that are each cut in several experts computes what the dense one did as long as a
token gets all parts of a copy or none. A router that chooses experts one by one can tear a copy
where the logits of two copies are equal, which
is a matter of the dtype: it is counted in the one that the model is loaded in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from surgery.calibration.observe import Taps, tapped
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.row import Row
from surgery.proof.comparison import SHORT, Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Torn:
    """Tokens in layers that route: `torn` of `total` got a part of a copy without the rest of
    it.
    """

    torn: int
    total: int


def torn_copies(
    checkpoint: Checkpoint,
    input_ids: Tensor,
    *,
    shards: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Torn:
    """Of a mixture whose experts c·shards … (c + 1)·shards - 1 make up copy c, on ids [B, T]; one
    walk.
    """
    walk, torn, total = Walk(checkpoint, input_ids, dtype=dtype, device=device), 0, 0
    for layer in walk:
        chosen: list[Tensor] = []
        with tapped(layer.module, walk.blocks.family, checkpoint.text_config) as taps:
            layer.run(partial(_note, taps, chosen))
        torn += sum(int(is_torn(selected, shards).sum()) for selected in chosen)
        total += sum(len(selected) for selected in chosen)
    return Torn(torn=torn, total=total)


def _note(taps: Taps, chosen: list[Tensor], batch: int, output: Tensor) -> None:
    """The experts [N, K] of a batch's tokens; a layer that stayed dense has none."""
    if "selected" in taps.caught:
        chosen.append(taps.caught["selected"])


def is_torn(selected: Tensor, shards: int) -> Tensor:
    """[N] of the experts that each of N tokens chose, [N, K]: whether it got a part of a copy
    alone.
    """
    copy = selected // shards
    together = (copy[:, :, None] == copy[:, None, :]).sum(-1)  # of the same copy
    return (together != shards).any(-1)


def check(shards: int) -> Callable[[Comparison, Tensor], Iterator[Row]]:
    """Return the check that no token gets a part of a copy, in the dtype that is loaded.

    `shards` experts that follow one another make up a copy. It is for outputs that claim to be
    exact: any other has no copies that must stay whole.
    """

    def run(pair: Comparison, input_ids: Tensor) -> Iterator[Row]:
        if not pair.exact:
            return
        found = torn_copies(
            pair.output, input_ids, shards=shards, dtype=pair.stored, device=pair.device
        )
        yield Row(
            key="copies.torn",
            check=f"tokens with parts of copies in {SHORT[pair.stored]}, of {found.total}",
            value=found.torn,
            relation="<=",
            limit=0,
            passed=not found.torn,
        )

    return run
