"""The sizes of a fit and of what it makes: known without torch, for a plan."""

from __future__ import annotations

SAMPLED = 2**23  # products that the neurons of a carved MLP are grouped by
BLOCK = 11_008  # neurons that are fitted together: a Gram matrix of 485 MB in fp32


def fit_nbytes(hidden: int, width: int, rank: int = 0) -> int:
    """Return the bytes that the closed-form fit of a `down` [H, F] holds in fp32 (ridge.py).

    That is one Gram matrix, twice a matrix of the outputs against its columns, and where it is
    cross-validated one Gram matrix more for each group of domains and two to work in. A bypass of
    `rank` adds as many columns.
    """
    columns, several = min(width, BLOCK) + rank, 6 if width <= BLOCK else 1
    return 4 * columns * (several * columns + 2 * hidden)


MULTIPLE = 256  # neurons: engines that quantise in blocks take whole ones
BYPASS_PART = 8  # the bypass has about one part in so many of the MLP's bytes
LIMIT = 0.05  # of the rms deviation of v·x from 1 (fold.py) in every layer of the stock form


def grown(width: int) -> int:
    """Return the next multiple of MULTIPLE neurons."""
    return -(-width // MULTIPLE) * MULTIPLE


def affordable_rank(hidden: int, width: int, part: int) -> int:
    """Return the rank of a bypass of custom code with 1/`part` of the bytes of a gated MLP.

    It reads rank rows and columns of `hidden`, and one square matrix where it is full.
    """
    values = 3 * hidden * width // part
    return hidden if hidden**2 <= values else values // (2 * hidden)
