"""Changes to a checkpoint that several operations make: to its config and to its tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.checkpoint.checkpoint import Checkpoint
from surgery.checkpoint.tensors import FLOATS, LazyTensor

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_PIECE = 4 << 20  # values compared at a time


def drop_tied_head(checkpoint: Checkpoint, tied: bool) -> Checkpoint:
    """Leave out the language-model head where it is tied *and* equal to the embedding.

    Where the two differ both are kept; `head_note` says so.
    """
    ends = _ends(checkpoint) if tied else None
    if ends is None or not _same(checkpoint, *ends):
        return checkpoint
    return checkpoint.replace(tensors={n: t for n, t in checkpoint.tensors.items() if n != ends[0]})


def head_note(checkpoint: Checkpoint, tied: bool) -> str:
    """Return a note where the head is tied and the file holds another one; else an empty text.

    Versions of transformers load two different models from such a file.
    """
    ends = _ends(checkpoint) if tied else None
    if ends is None or _same(checkpoint, *ends):
        return ""
    head, embedding = ends
    return (
        f"tie_word_embeddings is set, but {head} differs from {embedding}: both are kept. "
        f"transformers 5 uses {head}, as the verification does; transformers 4 puts the embedding "
        "in its place, which is another model. Set tie_word_embeddings to false in the source to "
        "have the same everywhere"
    )


def _ends(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Return the names of the head and of the embedding, where the file has both."""
    head = next((n for n in HEADS if n in checkpoint.tensors), None)
    embedding = next((n for n in checkpoint.tensors if n.endswith(EMBEDDINGS)), None)
    return (head, embedding) if head and embedding else None


_COMPARED: dict[tuple[str, str], bool] = {}  # by identity: a note is asked for several times


def _same(checkpoint: Checkpoint, head: str, embedding: str) -> bool:
    a, b = checkpoint.tensors[head], checkpoint.tensors[embedding]
    key = a.identity(), b.identity()
    if key not in _COMPARED:
        _COMPARED[key] = equal(a, b)
    return _COMPARED[key]


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
