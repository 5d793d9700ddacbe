"""What a memory layer may be and starts as: options, shapes, bytes, and the random tensors of the
published inits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from surgery.checkpoint import LazyTensor, concatenate, constant, normal
from surgery.checkpoint.tensors import DTYPES
from surgery.errors import UsageError
from surgery.families import Mlp

Shapes = dict[str, tuple[int, ...]]
MASSES, PLACED = (
    2**28,
    2**25,
)  # of neurons on tokens, that their lookup is trained on and that they are placed by
PIECE = 2**22  # numbers of a table that are drawn at a time


def memory_shapes(entry: Mapping[str, Any], hidden: int) -> Shapes:
    """What a layer has of its own, by path in `memory`."""
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
    """What the layers of an entry share, by path in the table."""
    slots = entry["keys"] ** 2
    if entry["slots"] == "peer":
        return {"down": (slots, hidden), "up": (slots, hidden)}
    if entry["slots"] == "neurons":
        return {part: (slots,) if "bias" in part else (slots, hidden) for part in entry["parts"]}
    return {"weight": (slots, entry["value_dim"])}


def numbers_read(entry: Mapping[str, Any], hidden: int) -> int:
    """Numbers that one token reads in one layer: everything the layer has of its own, and its rows
    of the table.
    """
    row = sum(math.prod(shape[1:]) for shape in table_shapes(entry, hidden).values())
    own = sum(math.prod(shape) for shape in memory_shapes(entry, hidden).values())
    return entry["heads"] * entry["knn"] * row + own


def mlp_numbers(mlp: Mlp, width: int | None = None) -> int:
    """Numbers of an MLP, or of `width` of its neurons."""
    matrices = 2 + (mlp.gate is not None)
    return matrices * mlp.down.shape[0] * (mlp.width if width is None else width)


def random_memory(
    entry: Mapping[str, Any], hidden: int, name: str, dtype: str, seed: int
) -> Iterator[tuple[str, LazyTensor]]:
    """Query and projections as Memory Layers at Scale draws them, keys of the variance of its
    uniform ones; what is added to the stream last is zero beside an MLP, and drawn too in its
    place."""
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
    """Values N(0, 1/value_dim), a piece at a time; the last matrix of PEER, and all of it where
    `zero`, is zero.
    """
    for path, shape in table_shapes(entry, hidden).items():
        if zero or (path == "up" and entry["place"] == "beside"):
            yield path, by_pieces(shape, lambda _, part: constant(0.0, part, dtype))
        else:
            yield path, drawn(f"{name}.{path}", seed, shape[1] ** -0.5, shape, dtype)


def drawn(name: str, seed: int, std: float, shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """N(0, std²), a piece at a time, each by its name."""
    return by_pieces(shape, lambda first, part: normal(f"{name}[{first}]", seed, std, part, dtype))


def by_pieces(
    shape: tuple[int, ...], piece: Callable[[int, tuple[int, ...]], LazyTensor]
) -> LazyTensor:
    """A table [n, d] of `piece(first row, its shape)`, of which one at a time is held when it is
    written.
    """
    rows = max(1, PIECE // shape[1])
    return concatenate(
        [piece(i, (min(rows, shape[0] - i), shape[1])) for i in range(0, shape[0], rows)]
    )


def nbytes(tensors: Mapping[str, LazyTensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def width_of(fraction: float, mlp: Mlp, others: int, multiple: int = 8) -> int:
    """How many neurons may be kept beside `others` numbers, for a token to read this fraction of
    the MLP; a multiple of 8.
    """
    left = fraction * mlp_numbers(mlp) - others
    return max(0, int(left / mlp_numbers(mlp, 1)) // multiple * multiple)


def knn_of(fraction: float, mlp: Mlp, entry: Mapping[str, Any], hidden: int) -> int:
    """How many slots may be read of a table for a token to read this fraction of the MLP; `entry`
    reads none yet.

    Raises UsageError where that is none.
    """
    others, one = (numbers_read({**entry, "knn": k}, hidden) for k in (0, 1))
    knn = int((fraction * mlp_numbers(mlp) - others) / (one - others))
    if knn < 1:
        raise UsageError(
            f"a token that reads {fraction:g} of {mlp_numbers(mlp):,} numbers: query and keys alone are {others:,}",
            "give a larger --reads, or a smaller --key-dim",
        )
    return min(knn, entry["keys"] ** 2)


def itemsize(dtype: str) -> int:
    return DTYPES[dtype][0]
