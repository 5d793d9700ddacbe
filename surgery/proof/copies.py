"""Whether copies that were cut into finer experts are chosen whole.

Where each copy of an MLP is cut into several experts, the model computes what the dense one did as
long as a token gets all parts of a copy or none. A router that chooses experts one by one can tear
a copy where the logits of two copies are equal. That depends on the dtype, so torn copies are
counted in the dtype that the model is loaded in.
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
    """How many of `total` choices, one per token and layer, gave a token only part of a copy."""

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
    """Count the torn copies of a mixture on ids [B, T], in one walk.

    Experts c·shards … (c + 1)·shards - 1 make up copy c.
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
    """Keep the experts [N, K] of a batch's tokens; a layer that stayed dense has none."""
    if "selected" in taps.caught:
        chosen.append(taps.caught["selected"])


def is_torn(selected: Tensor, shards: int) -> Tensor:
    """Return [N], whether a token got only part of a copy, from the experts it chose, [N, K]."""
    copy = selected // shards
    together = (copy[:, :, None] == copy[:, None, :]).sum(-1)  # [N, K], experts of the same copy
    return (together != shards).any(-1)


def check(shards: int) -> Callable[[Comparison, Tensor], Iterator[Row]]:
    """Return the check that no token gets a part of a copy, in the dtype that is loaded.

    `shards` consecutive experts make up a copy. Only outputs that claim to be exact are checked:
    no others have copies that must stay whole.
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
