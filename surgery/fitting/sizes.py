"""What a fit takes in memory: known without torch, for a plan."""

from __future__ import annotations

SAMPLED = 2**23  # products that the neurons of a carved MLP are grouped by
BLOCK = 11_008  # neurons that are fitted together: a Gram matrix of 485 MB in fp32


def fit_nbytes(hidden: int, width: int, rank: int = 0) -> int:
    """What the closed-form fit of a `down` [H, F] and a bypass of this rank adds up, in fp32: one
    Gram matrix, and twice what stands against it (repair.py)."""
    columns = min(width, BLOCK) + rank
    return 4 * columns * (columns + 2 * hidden)
