"""Legacy `pytorch_model*.bin`: unpickled with `weights_only=True` (no code runs) and memory-mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgery.checkpoint.files import File
from surgery.checkpoint.tensors import DTYPES, LazyTensor, derive
from surgery.errors import SurgeryError

if TYPE_CHECKING:
    import torch


def read_legacy(file: File) -> dict[str, LazyTensor]:
    """The tensors of a `pytorch_model*.bin`. They stay on the disk until they are read.

    Raises SurgeryError for a file that holds anything but tensors.
    """
    import pickle

    import torch

    try:
        state = torch.load(file.path(), map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise SurgeryError(f"{file.name} cannot be read as plain weights: {reason[:160]}",
                           "only files saved by torch 1.6 or later that hold nothing but tensors are read; save the "
                           "model as safetensors with transformers") from e  # fmt: skip
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise SurgeryError(f"{file.name} holds more than tensors", "save the model's state_dict alone")
    return {name: _lazy(name, t, file) for name, t in state.items()}


def _lazy(name: str, tensor: torch.Tensor, file: File) -> LazyTensor:
    names = {f"torch.{torch_name}": dtype for dtype, (_, torch_name) in DTYPES.items()}
    return derive(f"{name} of {file.name}@{file.identity}", lambda: tensor.detach().clone(), dtype=names[str(tensor.dtype)],
                  shape=tuple(tensor.shape))  # fmt: skip
