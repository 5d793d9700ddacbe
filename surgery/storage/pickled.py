"""Legacy weights, `pytorch_model*.bin`.

They are unpickled with `weights_only=True`, so that no code runs, and memory-mapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgery.checkpoint.tensors import DTYPES, LazyTensor, derive
from surgery.errors import SurgeryError
from surgery.storage.store import File

if TYPE_CHECKING:
    import torch


def read_legacy(file: File) -> dict[str, LazyTensor]:
    """Return the tensors of a `pytorch_model*.bin` by name; they stay on the disk until read.

    Raises SurgeryError for a file that holds anything but tensors.
    """
    import torch

    path = file.path()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:
        # Damaged bytes raise nearly anything, and a truncated file OSError(EINVAL).
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise SurgeryError(
            f"{file.name} cannot be read as plain weights: {reason[:160]}",
            "download it again if it is incomplete; if it is older than torch 1.6 or holds more "
            "than tensors, save the model as safetensors with transformers",
        ) from e
    if not isinstance(state, dict) or not all(
        isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in state.items()
    ):
        raise SurgeryError(
            f"{file.name} holds more than tensors", "save the model's state_dict alone"
        )
    return {name: _lazy(name, t, file) for name, t in state.items()}


def _lazy(name: str, tensor: torch.Tensor, file: File) -> LazyTensor:
    names = {f"torch.{torch_name}": dtype for dtype, (_, torch_name) in DTYPES.items()}
    if str(tensor.dtype) not in names:
        raise SurgeryError(
            f"{name} in {file.name} has the dtype {tensor.dtype}, which is not supported",
            f"supported: {', '.join(names)}",
        )
    return derive(
        f"{name} of {file.name}@{file.identity}",
        lambda: tensor.detach().clone(),
        dtype=names[str(tensor.dtype)],
        shape=tuple(tensor.shape),
    )
