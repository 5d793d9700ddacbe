"""The types of values in a GGUF file, and how floats are rounded to them.

Quantised types divide each row into blocks of 32 values with a scale d in fp16 of their own. The
rounding is that of llama.cpp (ggml-quants.c, `quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`),
byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgery.errors import SurgeryError

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray

BLOCK = 32  # values that share a scale
_HALF_MAX = 65504.0  # the largest finite fp16


@dataclass(frozen=True, slots=True)
class Type:
    """A type of values.

    Args:
        number: its number in a file (`enum ggml_type`).
        block: how many values are stored together; a row has a multiple of them.
        nbytes: the bytes of a block.
        file_type: the number that says of a whole file that most of it has this type.
        most: the largest magnitude that it holds.
    """

    number: int
    block: int
    nbytes: int
    file_type: int
    most: float


_FLOAT_MAX = 3.4028234e38
TYPES = {
    "f32": Type(0, 1, 4, 0, _FLOAT_MAX),
    "f16": Type(1, 1, 2, 1, _HALF_MAX),
    "bf16": Type(30, 1, 2, 32, 3.389e38),
    "q8_0": Type(8, BLOCK, 2 + BLOCK, 7, 127 * _HALF_MAX),
    "q4_0": Type(2, BLOCK, 2 + BLOCK // 2, 2, 8 * _HALF_MAX),
}


def encode(values: Array, kind: str, name: str) -> bytes:
    """Return values in fp32, rows of a multiple of the type's block, as the bytes of a type.

    Args:
        values: in fp32.
        kind: a name in `TYPES`.
        name: the tensor's, for the error.

    Raises SurgeryError for NaN, and for a value that is too large for the type.
    """
    import numpy

    largest = float(numpy.abs(values).max(initial=0.0))
    if not largest <= TYPES[kind].most:
        raise SurgeryError(
            f"{name} holds {largest:g}, which {kind} cannot hold",
            "give --type bf16 or f32" if largest <= _FLOAT_MAX else "the source is damaged there",
        )
    return _ENCODERS[kind](values)


def _bf16(values: Array) -> bytes:
    """Round to nearest, ties to even; subnormal numbers stay."""
    import numpy

    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    rounded = bits + numpy.uint32(0x7FFF) + ((bits >> numpy.uint32(16)) & numpy.uint32(1))
    return (rounded >> numpy.uint32(16)).astype("<u2").tobytes()


def _q8_0(values: Array) -> bytes:
    """Round to d·q with q in -127…127 and d = max|x| / 127; halves go away from zero."""
    import numpy

    blocks = values.reshape(-1, BLOCK)
    d = numpy.abs(blocks).max(axis=1, keepdims=True) / numpy.float32(127)
    scaled = blocks * _inverse(d)
    size = numpy.abs(scaled)
    # As C's roundf does: adding a half and cutting would round 0.49999997 up.
    whole = numpy.floor(size)
    whole += numpy.floor(2 * (size - whole))
    q = (numpy.sign(scaled) * whole).astype(numpy.int8)
    return numpy.concatenate((_half(d), q.view(numpy.uint8)), axis=1).tobytes()


def _q4_0(values: Array) -> bytes:
    """Round to d·(q - 8), q in 0…15, with a d that gives the largest magnitude q = 0."""
    import numpy

    blocks = values.reshape(-1, BLOCK)
    largest = numpy.abs(blocks).argmax(axis=1)[:, None]
    d = numpy.take_along_axis(blocks, largest, axis=1) / numpy.float32(-8)
    q = (blocks * _inverse(d) + numpy.float32(8.5)).astype(numpy.uint8).clip(0, 15)
    half = BLOCK // 2
    return numpy.concatenate((_half(d), q[:, :half] | q[:, half:] << 4), axis=1).tobytes()


def _inverse(d: Array) -> Array:
    """Return 1/d, and 0 where d is 0 or so small that its inverse is infinite."""
    import numpy

    with numpy.errstate(divide="ignore", over="ignore"):
        inverse = numpy.float32(1) / d
    return numpy.where(numpy.isfinite(inverse), inverse, numpy.float32(0))


def _half(d: Array) -> Array:
    """Return scales as the bytes of fp16, [n, 2]."""
    import numpy

    return d.astype("<f2").view(numpy.uint8)


_ENCODERS: dict[str, Callable[[Array], bytes]] = {
    "f32": lambda values: values.astype("<f4").tobytes(),
    "f16": lambda values: values.astype("<f2").tobytes(),
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
}
