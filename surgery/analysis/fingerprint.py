"""Tell one model from another without reading all of it."""

from __future__ import annotations

import hashlib

import torch

from surgery.checkpoint import Checkpoint, LazyTensor
from surgery.families import locate

VALUES = 256  # that are read of each tensor


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return 64 hex digits that change with the MLPs of the model, also by a fine-tune.

    They depend on the activation and, for each tensor of every MLP, on its name, dtype, shape and
    first values; not on where the checkpoint lies.
    """
    blocks, found = locate(checkpoint), hashlib.sha256()
    found.update(f"{checkpoint.config.get('model_type')} {blocks.activation}".encode())
    for index in range(blocks.count):
        for name in sorted(blocks.mlp_names(index)):
            tensor = checkpoint.tensors[name]
            found.update(f"\n{name} {tensor.dtype} {tensor.shape} ".encode())
            found.update(_first(tensor))
    return found.hexdigest()


def _first(tensor: LazyTensor) -> bytes:
    """Return the bytes of the first values; of a computed tensor it is computed whole."""
    few = tensor.rows(0, 1) if tensor.copied and len(tensor.shape) > 1 else tensor
    values = few.read().flatten()[:VALUES].contiguous()
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
