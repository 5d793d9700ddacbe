"""Weights in pickles: `pytorch_model*.bin`, and the `consolidated.*.pth` of Meta.

They are unpickled with `weights_only=True`, so that no code runs, and memory-mapped. Nothing but
the pickle is read: a tensor is where its bytes lie in the file, like one of a safetensors file.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.tensors import DTYPES, Extent, LazyTensor, derive
from surgery.errors import SurgeryError
from surgery.storage.store import File

if TYPE_CHECKING:
    import torch

_HINT = (
    "download it again if it is incomplete; if it is older than torch 1.6 or holds more "
    "than tensors, save the model as safetensors with transformers"
)


def read_pickled(file: File) -> dict[str, LazyTensor]:
    """Return the tensors of a pickle by name; they stay on the disk until read.

    Raises SurgeryError for a file that holds anything but tensors.
    """
    import torch

    try:
        state = _load(file.path())
    except Exception as e:
        # Damaged bytes raise nearly anything, and a truncated file OSError(EINVAL).
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise SurgeryError(
            f"{file.name} cannot be read as plain weights: {reason[:160]}", _HINT
        ) from e
    if not isinstance(state, dict) or not all(
        isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in state.items()
    ):
        raise SurgeryError(
            f"{file.name} holds more than tensors", "save the model's state_dict alone"
        )
    return {name: _lazy(name, t, file) for name, t in state.items()}


def _load(path: Path) -> Any:
    """Return what a pickle holds: tensors without values that know their place in the file.

    A torch that does not tell the places gives tensors of the memory-mapped file.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with zipfile.ZipFile(path) as archive:
        if packed := [i.filename for i in archive.infolist() if i.compress_type]:
            raise ValueError(f"{packed[0]} in it is compressed")
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, "mmap": True}
    with FakeTensorMode():
        state = torch.load(path, **options)
    tensors = state.values() if isinstance(state, dict) else ()
    if all(_offset(t) is not None for t in tensors if isinstance(t, torch.Tensor)):
        return state
    return torch.load(path, **options)


def _offset(tensor: torch.Tensor) -> int | None:
    """Return where the storage of a tensor begins in its file, None where torch does not say."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _lazy(name: str, tensor: torch.Tensor, file: File) -> LazyTensor:
    names = {f"torch.{torch_name}": dtype for dtype, (_, torch_name) in DTYPES.items()}
    if str(tensor.dtype) not in names:
        raise SurgeryError(
            f"{name} in {file.name} has the dtype {tensor.dtype}, which is not supported",
            f"supported: {', '.join(names)}",
        )
    dtype, shape = names[str(tensor.dtype)], tuple(tensor.shape)
    offset = _offset(tensor)
    if offset is None:
        recipe = f"{name} of {file.name}@{file.identity}"
        return derive(recipe, lambda: tensor.detach().clone(), dtype=dtype, shape=shape)
    _require_inside(name, tensor, offset, file)
    itemsize, start = DTYPES[dtype][0], tensor.storage_offset()
    if tensor.is_contiguous():
        extent = Extent(file, offset + start * itemsize, tensor.numel() * itemsize)
        return LazyTensor(dtype, shape, (extent,))
    # A view of a storage, like a transpose: what it takes of the storage is read, then viewed.
    stride, length = tensor.stride(), tensor.untyped_storage().nbytes()
    whole = LazyTensor(dtype, (length // itemsize,), (Extent(file, offset, length),))
    return derive(
        f"view {shape} {stride} {start}",
        lambda t: t.as_strided(shape, stride, start),
        whole,
        dtype=dtype,
        shape=shape,
    )


def _require_inside(name: str, tensor: torch.Tensor, offset: int, file: File) -> None:
    """Raise SurgeryError where a tensor reaches beyond its storage, or that beyond its file."""
    length = tensor.untyped_storage().nbytes()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in sizes)
    beyond = tensor.numel() and (last + 1) * tensor.element_size() > length
    if beyond or offset + length > file.size:
        raise SurgeryError(f"{name} in {file.name} reaches beyond the end of its data", _HINT)
