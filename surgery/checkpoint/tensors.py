"""Lazy tensors: a dtype, a shape, and where the bytes will come from.

The bytes are either *extents* of source files (whole tensors, row slices, concatenations), which
the kernel copies without a byte passing through Python, or the result of a *function* of other lazy
tensors, which is computed when the tensor is written. The size is always known beforehand, so a
plan can be made without reading any weight.

Dtypes have the names of safetensors ("BF16"), so that planning does not need torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from surgery.errors import SurgeryError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy
    import torch

# By name in safetensors: bytes per element, name in torch.
DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "U16": (2, "uint16"),
    "U32": (4, "uint32"),
    "U64": (8, "uint64"),
    "BOOL": (1, "bool"),
    "C64": (8, "complex64"),
}
FLOATS = ("F64", "F32", "F16", "BF16")


class SourceFile(Protocol):
    """A file of a checkpoint, on this disk or elsewhere."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> str:
        """Return a text that changes whenever the content may; it enters a plan's fingerprint."""
        ...

    def path(self) -> Path:
        """Return the file on this disk, downloading it first where it is elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes of `file`, beginning at byte `offset`."""

    file: SourceFile
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of known dtype and shape whose value is read or computed later.

    The value comes from one of three sources: `extents`; `compute(*inputs)`; or, with neither, the
    `inputs` joined along the first dimension, which are then written one at a time.

    Args:
        dtype: the name in safetensors, such as "BF16".
        shape: the shape.
        extents: the bytes of source files that make up the value, in order.
        compute: a function that takes the values of `inputs` and returns a torch tensor of this
            dtype and shape.
        inputs: the tensors that the value is computed from.
        recipe: the function and its constants in words ("cast to F32"). Together with the inputs it
            identifies the value, so a plan's fingerprint changes whenever the bytes may.
    """

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...] = ()
    compute: Callable[..., torch.Tensor] | None = field(default=None, compare=False)
    inputs: tuple[LazyTensor, ...] = ()
    recipe: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype][0]

    @property
    def peak_memory(self) -> int:
        """Return the most bytes held while the value is computed; 0 where the kernel copies it."""
        if self.compute is None:
            return max((t.peak_memory for t in self.inputs), default=0)
        held = sum(max(t.nbytes, t.peak_memory) for t in self.inputs)
        return held + 4 * self.numel + self.nbytes  # Functions work in fp32.

    def identity(self) -> str:
        """Return a line of text that changes whenever the bytes may."""
        parts = [self.dtype, str(self.shape), self.recipe]
        parts += [f"{e.file.name}@{e.file.identity}[{e.offset}+{e.length}]" for e in self.extents]
        parts += [hashlib.sha256(t.identity().encode()).hexdigest() for t in self.inputs]
        return "|".join(parts)

    def sources(self) -> Iterator[Extent]:
        """Yield every extent of a source file that the value depends on."""
        yield from self.extents
        for t in self.inputs:
            yield from t.sources()

    def read(self) -> torch.Tensor:
        """Return the value as a torch tensor, in memory that nothing else shares.

        Raises SurgeryError where a source file ends early.
        """
        import torch

        dtype = _torch_dtype(DTYPES[self.dtype][1])
        if self.compute is not None:
            value = self.compute(*(t.read() for t in self.inputs))
            expected = (dtype, self.shape)
            if (value.dtype, tuple(value.shape)) != expected:
                raise AssertionError(
                    f"{self.recipe}: planned {expected}, computed {(value.dtype, value.shape)}"
                )
            return value.contiguous()
        if self.inputs:
            value = torch.empty(self.shape, dtype=dtype)
            parts = value.split([t.shape[0] for t in self.inputs])
            for part, t in zip(parts, self.inputs, strict=True):
                part.copy_(t.read())
            return value
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.read_bytes(), dtype=torch.uint8).view(dtype).view(self.shape)

    @property
    def copied(self) -> bool:
        """Return whether the value consists of extents alone, which the kernel copies."""
        return self.compute is None and not self.inputs

    def read_bytes(self) -> bytearray:
        """Return the bytes of the extents, in order.

        Raises SurgeryError where a source file ends early.
        """
        buffer = bytearray(self.nbytes)
        view, position = memoryview(buffer), 0
        for extent in self.extents:
            with extent.file.path().open("rb", buffering=0) as f:
                f.seek(extent.offset)
                end = position + extent.length
                while position < end:
                    n = f.readinto(view[position:end])
                    if not n:
                        raise SurgeryError(
                            f"{extent.file.name} ended early: it was truncated while it was read",
                            "check the source with `surgery inspect`, "
                            "then run the same command again",
                        )
                    position += n
        return buffer

    # --- views: extents remain extents, which the kernel copies -----------------------------------

    def rows(self, start: int, stop: int) -> LazyTensor:
        """Return rows [start, stop) of the first dimension."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} of a tensor of shape {self.shape}")
        shape = (stop - start, *self.shape[1:])
        if not self.copied:
            recipe = f"rows {start}:{stop}"
            return derive(recipe, lambda t: t[start:stop], self, dtype=self.dtype, shape=shape)
        row = self.nbytes // self.shape[0]
        return LazyTensor(self.dtype, shape, tuple(_slice(self.extents, start * row, stop * row)))

    def reshape(self, *shape: int) -> LazyTensor:
        """Return the same bytes under another shape."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"cannot view {self.shape} as {shape}")
        if not self.copied:
            recipe = f"reshape {shape}"
            return derive(recipe, lambda t: t.reshape(shape), self, dtype=self.dtype, shape=shape)
        return LazyTensor(self.dtype, shape, self.extents)

    # --- functions --------------------------------------------------------------------------------

    def cast(self, dtype: str) -> LazyTensor:
        """Return the values in another dtype, rounded to nearest even."""
        if dtype == self.dtype:
            return self

        def convert(t: torch.Tensor) -> torch.Tensor:
            return t.to(_torch_dtype(DTYPES[dtype][1]))

        return derive(f"cast to {dtype}", convert, self, dtype=dtype, shape=self.shape)

    def transpose(self) -> LazyTensor:
        """Return the transpose of a matrix: [A, B] becomes [B, A]."""
        shape = (self.shape[1], self.shape[0])
        return derive("transpose", lambda t: t.T, self, dtype=self.dtype, shape=shape)

    def map(
        self, recipe: str, function: Callable[[torch.Tensor], torch.Tensor], dtype: str = ""
    ) -> LazyTensor:
        """Return `function` of the values, computed in fp32 and rounded to `dtype`.

        Args:
            recipe: the function and its constants in words.
            function: a function that keeps the shape.
            dtype: by default the dtype of this tensor.
        """
        dtype = dtype or self.dtype

        def compute(t: torch.Tensor) -> torch.Tensor:
            return function(t.float()).to(_torch_dtype(DTYPES[dtype][1]))

        recipe = f"{recipe} in F32, as {dtype}"
        return derive(recipe, compute, self, dtype=dtype, shape=self.shape)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def derive(
    recipe: str,
    function: Callable[..., torch.Tensor],
    *inputs: LazyTensor,
    dtype: str,
    shape: tuple[int, ...],
) -> LazyTensor:
    """Return a tensor that `function` computes from the values of `inputs` when it is written.

    Args:
        recipe: the function in words, with every constant in it; it identifies the value.
        function: takes the values of `inputs` and returns a torch tensor.
        inputs: the tensors that the value is computed from.
        dtype: the dtype that `function` returns.
        shape: the shape that `function` returns.
    """
    return LazyTensor(dtype, shape, compute=function, inputs=inputs, recipe=recipe)


def concatenate(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return the tensors joined along the first dimension.

    They are written one at a time, so no two of them are in memory at once.
    """
    first = tensors[0]
    for t in tensors:
        if (t.dtype, t.shape[1:]) != (first.dtype, first.shape[1:]):
            raise ValueError(f"cannot join {t.dtype} {t.shape} to {first.dtype} {first.shape}")
    shape = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    if all(t.copied for t in tensors):
        return LazyTensor(first.dtype, shape, tuple(e for t in tensors for e in t.extents))
    return LazyTensor(first.dtype, shape, inputs=tuple(tensors), recipe="concatenate")


def constant(value: float, shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """Return a tensor all of whose elements are `value`."""

    def make() -> torch.Tensor:
        import torch

        return torch.full(shape, value, dtype=_torch_dtype(DTYPES[dtype][1]))

    return derive(f"constant {value!r}", make, dtype=dtype, shape=shape)


def normal(name: str, seed: int, std: float, shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """Return random values from N(0, std²).

    The values depend on (seed, name) alone, so they are the same in any order, in any process and
    after any interruption. They are drawn by NumPy's PCG64, whose stream, unlike that of
    `torch.randn`, does not depend on the processor.
    """

    def make() -> torch.Tensor:
        import torch

        flat = _generator(name, seed).standard_normal(math.prod(shape), dtype="float32")
        return (torch.from_numpy(flat.reshape(shape)) * std).to(_torch_dtype(DTYPES[dtype][1]))

    return derive(f"normal seed={seed} std={std!r} name={name}", make, dtype=dtype, shape=shape)


def _generator(name: str, seed: int) -> numpy.random.Generator:
    import numpy

    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return numpy.random.Generator(numpy.random.PCG64(int.from_bytes(key[:16], "little")))


def _slice(extents: Sequence[Extent], start: int, stop: int) -> Iterator[Extent]:
    """Yield the extents of bytes [start, stop) of the concatenated extents."""
    position = 0
    for e in extents:
        low, high = max(start, position), min(stop, position + e.length)
        if low < high:
            yield Extent(e.file, e.offset + low - position, high - low)
        position += e.length
