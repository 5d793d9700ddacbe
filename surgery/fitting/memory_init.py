"""Shapes and sizes of a memory layer, and the random tensors of the published inits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from surgery.checkpoint import LazyTensor, concatenate, constant, normal
from surgery.checkpoint.tensors import DTYPES
from surgery.errors import UsageError
from surgery.families import Mlp

Shapes = dict[str, tuple[int, ...]]
MASSES = 2**28  # masses of neurons on tokens that their lookup is trained on
PLACED = 2**25  # the part of those that the neurons are placed by
PIECE = 2**22  # numbers of a table that are drawn at a time


def memory_shapes(entry: Mapping[str, Any], hidden: int) -> Shapes:
    """Return the shapes of the tensors that each layer has of its own, by path in `memory`."""
    heads, half, value = entry["heads"], entry["key_dim"] // 2, entry["value_dim"]
    shapes: Shapes = {
        "query.weight": (heads * 2 * half, hidden),
        "query.bias": (heads * 2 * half,),
        "keys": (heads, 2, entry["keys"], half),
    }
    if entry["query_norm"]:
        shapes |= {"query_norm.weight": (half,), "query_norm.bias": (half,)}
    if entry["gated"]:
        shapes |= {"gate.weight": (value, hidden), "output.weight": (hidden, value)}
    if entry["bypass"] == "affine":
        shapes |= {"bypass.weight": (hidden, hidden), "bypass.bias": (hidden,)}
    if entry["bypass"] == "bias":
        shapes |= {"bias": (hidden,)}
    if entry["slots"] == "neurons":
        shapes |= {"scale": (1,)}
    return shapes


def table_shapes(entry: Mapping[str, Any], hidden: int) -> Shapes:
    """Return the shapes of the tensors that the layers of an entry share, by path in the table."""
    slots = entry["keys"] ** 2
    if entry["slots"] == "peer":
        return {"down": (slots, hidden), "up": (slots, hidden)}
    if entry["slots"] == "neurons":
        return {part: (slots,) if "bias" in part else (slots, hidden) for part in entry["parts"]}
    return {"weight": (slots, entry["value_dim"])}


def numbers_read(entry: Mapping[str, Any], hidden: int) -> int:
    """Count the numbers that one token reads in one layer.

    That is everything the layer has of its own, and the token's rows of the table.
    """
    row = sum(math.prod(shape[1:]) for shape in table_shapes(entry, hidden).values())
    own = sum(math.prod(shape) for shape in memory_shapes(entry, hidden).values())
    return entry["heads"] * entry["knn"] * row + own


def mlp_numbers(mlp: Mlp, width: int | None = None) -> int:
    """Count the numbers in the matrices of an MLP, or of `width` of its neurons."""
    matrices = 2 + (mlp.gate is not None)
    return matrices * mlp.down.shape[0] * (mlp.width if width is None else width)


def random_memory(
    entry: Mapping[str, Any], hidden: int, name: str, dtype: str, seed: int
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the path and the first values of each tensor of a layer's memory.

    Query and projections are drawn as in Memory Layers at Scale, keys with the variance of its
    uniform ones. The last projection before the stream is zero beside an MLP, where a new memory is
    to add nothing; in the place of an MLP it is drawn too.
    """
    replaces = entry["place"] == "replace"
    for path, shape in memory_shapes(entry, hidden).items():
        if path == "query_norm.weight":
            yield path, constant(1.0, shape, dtype)
        elif path in ("query.bias", "query_norm.bias", "bias", "bypass.bias") or (
            path == "output.weight" and not replaces
        ):
            yield path, constant(0.0, shape, dtype)
        else:
            std = (3 * entry["key_dim"]) ** -0.5 if path == "keys" else (2 / sum(shape)) ** 0.5
            std = shape[1] ** -0.5 if path in ("gate.weight", "output.weight") else std
            yield path, normal(f"{name}.{path}", seed, std, shape, dtype)


def random_table(
    entry: Mapping[str, Any], hidden: int, name: str, dtype: str, seed: int, zero: bool
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the path and the first values of each tensor of a table, made a piece at a time.

    Values are N(0, 1/value_dim). The last matrix of PEER is zero beside an MLP, and with `zero`
    everything is.
    """
    for path, shape in table_shapes(entry, hidden).items():
        if zero or (path == "up" and entry["place"] == "beside"):
            yield path, by_pieces(shape, lambda _, part: constant(0.0, part, dtype))
        else:
            yield path, drawn(f"{name}.{path}", seed, shape[1] ** -0.5, shape, dtype)


def drawn(name: str, seed: int, std: float, shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """Return a table of N(0, std²), drawn a piece at a time, each from a name of its own."""
    return by_pieces(shape, lambda first, part: normal(f"{name}[{first}]", seed, std, part, dtype))


def by_pieces(
    shape: tuple[int, ...], piece: Callable[[int, tuple[int, ...]], LazyTensor]
) -> LazyTensor:
    """Join pieces to a table [n, d], of which the writer holds one piece at a time.

    `piece` makes one from the number of its first row and its shape.
    """
    rows = max(1, PIECE // shape[1])
    return concatenate(
        [piece(i, (min(rows, shape[0] - i), shape[1])) for i in range(0, shape[0], rows)]
    )


def nbytes(tensors: Mapping[str, LazyTensor]) -> int:
    """Return how many bytes the tensors take."""
    return sum(t.nbytes for t in tensors.values())


def width_of(fraction: float, mlp: Mlp, others: int, multiple: int = 8) -> int:
    """Return how many neurons can be kept if a token is to read this fraction of the MLP.

    It reads `others` numbers besides. The result is rounded down to a multiple of `multiple`.
    """
    left = fraction * mlp_numbers(mlp) - others
    return max(0, int(left / mlp_numbers(mlp, 1)) // multiple * multiple)


def knn_of(fraction: float, mlp: Mlp, entry: Mapping[str, Any], hidden: int) -> int:
    """Return how many slots of a table a token can read if it is to read this fraction of the MLP.

    Whatever `knn` the entry has does not count. Raises UsageError where not one slot can be read.
    """
    others, one = (numbers_read({**entry, "knn": k}, hidden) for k in (0, 1))
    knn = int((fraction * mlp_numbers(mlp) - others) / (one - others))
    if knn < 1:
        raise UsageError(
            f"a token that reads {fraction:g} of {mlp_numbers(mlp):,} numbers: "
            f"query and keys alone are {others:,}",
            "give a larger --reads, or a smaller --key-dim",
        )
    return min(knn, entry["keys"] ** 2)


def itemsize(dtype: str) -> int:
    """Return the bytes of one number of a dtype."""
    return DTYPES[dtype][0]
