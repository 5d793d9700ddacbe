"""Lazy tensors: a dtype, a shape, and where the bytes will come from.

Either *extents* of source files (whole tensors, row slices, concatenations), which the writer lets
the kernel copy without a byte passing through Python, or a *function* of other lazy tensors,
computed when its turn to be written comes. The size is always known beforehand, so a plan can be
made without reading any weight.

Dtypes are safetensors' names ("BF16"), so that planning needs no torch.
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

# bytes per element, torch's name
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
    """A file of the source checkpoint, on this disk or not yet."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes when the content may have: what a plan's fingerprint sees."""
        ...

    def path(self) -> Path:
        """The file on this disk, fetched first where it is elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes of `file` from `offset`."""

    file: SourceFile
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """`dtype`, `shape`, and one of three: `extents`; `compute(*inputs)`, which returns a torch
    tensor of that dtype and shape; or, with neither, the `inputs` one after another along the first
    dimension, so that they are written one at a time.

    `recipe` names the function and its constants ("cast to F32"): with the inputs it identifies the
    value, so that a plan's fingerprint changes whenever an output byte would.
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
        """Upper bound of the bytes held while the value is computed; 0 where the kernel copies
        it.
        """
        if self.compute is None:
            return max((t.peak_memory for t in self.inputs), default=0)
        held = sum(max(t.nbytes, t.peak_memory) for t in self.inputs)
        return held + 4 * self.numel + self.nbytes  # functions work in fp32

    def identity(self) -> str:
        """A line that changes whenever the bytes may."""
        parts = [self.dtype, str(self.shape), self.recipe]
        parts += [f"{e.file.name}@{e.file.identity}[{e.offset}+{e.length}]" for e in self.extents]
        parts += [hashlib.sha256(t.identity().encode()).hexdigest() for t in self.inputs]
        return "|".join(parts)

    def sources(self) -> Iterator[Extent]:
        """Every extent of a source file that the value depends on."""
        yield from self.extents
        for t in self.inputs:
            yield from t.sources()

    def read(self) -> torch.Tensor:
        """The value, in memory, as a torch tensor of this dtype and shape that nothing else
        shares.
        """
        import torch

        if self.compute is not None:
            value = self.compute(*(t.read() for t in self.inputs))
            expected = (getattr(torch, DTYPES[self.dtype][1]), self.shape)
            if (value.dtype, tuple(value.shape)) != expected:
                raise AssertionError(
                    f"{self.recipe}: planned {expected}, computed {(value.dtype, value.shape)}"
                )
            return value.contiguous()
        if self.inputs:
            value = torch.empty(self.shape, dtype=getattr(torch, DTYPES[self.dtype][1]))
            for part, t in zip(
                value.split([t.shape[0] for t in self.inputs]), self.inputs, strict=True
            ):
                part.copy_(t.read())
            return value
        if not self.nbytes:
            return torch.empty(self.shape, dtype=getattr(torch, DTYPES[self.dtype][1]))
        data = torch.frombuffer(self.read_bytes(), dtype=torch.uint8)
        return data.view(getattr(torch, DTYPES[self.dtype][1])).view(self.shape)

    @property
    def copied(self) -> bool:
        """Whether it is extents alone, which the kernel copies."""
        return self.compute is None and not self.inputs

    def read_bytes(self) -> bytearray:
        """The bytes of the extents, in order."""
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
                            "check the source with `surgery inspect`, then run the same command again",
                        )
                    position += n
        return buffer

    # --- views: still extents, copied by the kernel -----------------------------------------------

    def rows(self, start: int, stop: int) -> LazyTensor:
        """Rows [start, stop) of the first dimension."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} of a tensor of shape {self.shape}")
        shape = (stop - start, *self.shape[1:])
        if not self.copied:
            return derive(
                f"rows {start}:{stop}", lambda t: t[start:stop], self, dtype=self.dtype, shape=shape
            )
        row = self.nbytes // self.shape[0]
        return LazyTensor(self.dtype, shape, tuple(_slice(self.extents, start * row, stop * row)))

    def reshape(self, *shape: int) -> LazyTensor:
        """The same bytes under another shape."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"cannot view {self.shape} as {shape}")
        if not self.copied:
            return derive(
                f"reshape {shape}", lambda t: t.reshape(shape), self, dtype=self.dtype, shape=shape
            )
        return LazyTensor(self.dtype, shape, self.extents)

    # --- functions --------------------------------------------------------------------------------

    def cast(self, dtype: str) -> LazyTensor:
        """The values in another dtype (round to nearest even)."""
        if dtype == self.dtype:
            return self
        name = DTYPES[dtype][1]
        return derive(
            f"cast to {dtype}",
            lambda t: t.to(_torch_dtype(name)),
            self,
            dtype=dtype,
            shape=self.shape,
        )

    def transpose(self) -> LazyTensor:
        """The matrix transposed: [A, B] to [B, A]."""
        shape = (self.shape[1], self.shape[0])
        return derive("transpose", lambda t: t.T, self, dtype=self.dtype, shape=shape)

    def map(
        self, recipe: str, function: Callable[[torch.Tensor], torch.Tensor], dtype: str = ""
    ) -> LazyTensor:
        """`function` of the values in fp32, rounded to `dtype` (this tensor's own by default)."""
        dtype = dtype or self.dtype
        name = DTYPES[dtype][1]
        return derive(
            f"{recipe} in F32, as {dtype}",
            lambda t: function(t.float()).to(_torch_dtype(name)),
            self,
            dtype=dtype,
            shape=self.shape,
        )


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
    """A tensor computed by `function` from `inputs` when it is written. `recipe` must name every
    constant in it.
    """
    return LazyTensor(dtype, shape, compute=function, inputs=inputs, recipe=recipe)


def concatenate(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """The tensors one after another along the first dimension; no two of them are in memory when it
    is written.
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
    """A tensor of one value."""

    def make() -> torch.Tensor:
        import torch

        return torch.full(shape, value, dtype=_torch_dtype(DTYPES[dtype][1]))

    return derive(f"constant {value!r}", make, dtype=dtype, shape=shape)


def normal(name: str, seed: int, std: float, shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """N(0, std²). The values depend on (seed, name) alone: any order, any process and any resume
    gives the same bytes.

    Drawn by NumPy's PCG64, whose stream does not depend on the processor, unlike `torch.randn`.
    """

    def make() -> torch.Tensor:
        import torch

        values = (
            _generator(name, seed).standard_normal(math.prod(shape), dtype="float32").reshape(shape)
        )
        return (torch.from_numpy(values) * std).to(_torch_dtype(DTYPES[dtype][1]))

    return derive(f"normal seed={seed} std={std!r} name={name}", make, dtype=dtype, shape=shape)


def _generator(name: str, seed: int) -> numpy.random.Generator:
    import numpy

    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return numpy.random.Generator(numpy.random.PCG64(int.from_bytes(key[:16], "little")))


def _slice(extents: Sequence[Extent], start: int, stop: int) -> Iterator[Extent]:
    """The bytes [start, stop) of the concatenated extents."""
    position = 0
    for e in extents:
        low, high = max(start, position), min(stop, position + e.length)
        if low < high:
            yield Extent(e.file, e.offset + low - position, high - low)
        position += e.length
