"""Changes to a checkpoint that several operations make: to its config and to its tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.checkpoint.checkpoint import Checkpoint
from surgery.checkpoint.tensors import FLOATS, LazyTensor

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_PIECE = 4 << 20  # values compared at a time


def drop_tied_head(checkpoint: Checkpoint, tied: bool) -> tuple[Checkpoint, list[str]]:
    """Leave out the language-model head where it is tied *and* equal to the embedding.

    Where the two differ both are kept. Returns the checkpoint and the notes for the user.
    """
    head = next((n for n in HEADS if n in checkpoint.tensors), None)
    embedding = next((n for n in checkpoint.tensors if n.endswith(EMBEDDINGS)), None)
    if not tied or head is None or embedding is None:
        return checkpoint, []
    if not equal(checkpoint.tensors[head], checkpoint.tensors[embedding]):
        note = f"tie_word_embeddings is set, but {head} differs from {embedding}: both are kept"
        return checkpoint, [note]
    tensors = {n: t for n, t in checkpoint.tensors.items() if n != head}
    return checkpoint.replace(tensors=tensors), []


def equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two tensors hold the same values, reading them piece by piece."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.extents and a.extents == b.extents:
        return True
    import torch

    step = max(1, _PIECE // max(1, a.numel // a.shape[0]))
    pieces = ((i, min(a.shape[0], i + step)) for i in range(0, a.shape[0], step))
    return all(torch.equal(a.rows(i, j).read(), b.rows(i, j).read()) for i, j in pieces)


def float_tensors(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """Return the tensors with a floating-point dtype, by name."""
    return {n: t for n, t in checkpoint.tensors.items() if t.dtype in FLOATS}


def config_with(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with fields of the language model changed.

    The fields are those of `text_config` where there is one.
    """
    config = dict(checkpoint.config)
    if config.get("text_config"):
        config["text_config"] = {**config["text_config"], **changes}
        return config
    return config | dict(changes)
