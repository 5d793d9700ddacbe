"""How much memory a fit takes: known without torch, for a plan."""

from __future__ import annotations

SAMPLED = 2**23  # products that the neurons of a carved MLP are grouped by
BLOCK = 11_008  # neurons that are fitted together: a Gram matrix of 485 MB in fp32


def fit_nbytes(hidden: int, width: int, rank: int = 0) -> int:
    """Return the bytes that the closed-form fit of a `down` [H, F] holds in fp32 (ridge.py).

    That is one Gram matrix, and twice a matrix of the outputs against its columns. A bypass of
    `rank` adds as many columns.
    """
    columns = min(width, BLOCK) + rank
    return 4 * columns * (columns + 2 * hidden)
