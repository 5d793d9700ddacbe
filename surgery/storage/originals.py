"""Models in the form that their makers publish first: Meta's and Mistral's.

Such a folder has params.json in place of config.json, weights under names of its own, and rotary
embeddings that turn neighbours of a head where those of transformers turn its halves. Meta cuts a
large model into parts, which hold a piece of every matrix. All of it is opened as the Hugging Face
model that it is: what a maker does otherwise is a row of `ORIGINALS`, and tensors are lazy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.parsing import read_json
from surgery.checkpoint.tensors import LazyTensor, SourceFile, concatenate, derive
from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, content
from surgery.storage.original_configs import HF, Dimensions, original_of
from surgery.storage.original_tokenizers import read_tokenizer
from surgery.storage.store import File, Store

if TYPE_CHECKING:
    import torch

PART = re.compile(r"consolidated\.([0-9]{2})\.pth")
WHOLE = re.compile(r"consolidated(-[0-9]+-of-[0-9]+)?\.safetensors")
_AGAIN = "download the missing files: each part holds a piece of every matrix"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor goes.

    Args:
        name: its name in transformers.
        shape: its shape, of the letters of `Dimensions.sizes`.
        axis: along which the parts of a model hold its pieces; None where each holds all of it.
        heads: the number of heads whose rows are in the order of neighbours, as its letter.
    """

    name: str
    shape: str
    axis: int | None = None
    heads: str = ""


# By name in the original, outside the layers and in layer N. V tokens, D hidden, F in the MLP,
# Q and K heads times their size.
OUTSIDE = {
    "tok_embeddings.weight": Place(name="model.embed_tokens.weight", shape="VD", axis=0),
    "norm.weight": Place(name="model.norm.weight", shape="D"),
    "output.weight": Place(name="lm_head.weight", shape="VD", axis=0),
}
INSIDE = {
    "attention_norm.weight": Place(name="input_layernorm.weight", shape="D"),
    "ffn_norm.weight": Place(name="post_attention_layernorm.weight", shape="D"),
    "attention.wq.weight": Place(name="self_attn.q_proj.weight", shape="QD", axis=0, heads="q"),
    "attention.wk.weight": Place(name="self_attn.k_proj.weight", shape="KD", axis=0, heads="k"),
    "attention.wv.weight": Place(name="self_attn.v_proj.weight", shape="KD", axis=0),
    "attention.wo.weight": Place(name="self_attn.o_proj.weight", shape="DQ", axis=1),
    "feed_forward.w1.weight": Place(name="mlp.gate_proj.weight", shape="FD", axis=0),
    "feed_forward.w3.weight": Place(name="mlp.up_proj.weight", shape="FD", axis=0),
    "feed_forward.w2.weight": Place(name="mlp.down_proj.weight", shape="DF", axis=1),
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Frequencies of the rotary embeddings, which transformers computes.
_COMPUTED = re.compile(r"(layers\.[0-9]+\.attention\.(inner_attention\.)?)?rope\.freqs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An original as the Hugging Face model that it is.

    Args:
        config: its config.json.
        tensors: its tensors, under the names of transformers.
        files: those that stand for files of the source.
        left: the files of the source that these stand for, which stay behind.
        notes: what the user should know.
    """

    config: dict[str, Any]
    tensors: dict[str, LazyTensor]
    files: tuple[SourceFile, ...]
    left: tuple[str, ...]
    notes: tuple[str, ...]


# --- recognition ----------------------------------------------------------------------------------


def is_original(store: Store, has_weights: bool) -> bool:
    """Return whether a source is to be opened as an original: where it is nothing else.

    Args:
        store: the files of the source.
        has_weights: whether there are weights of a Hugging Face checkpoint among them.
    """
    named = "params.json" in store.files and bool(_weights(store))
    return named and not ("config.json" in store.files and has_weights)


def is_part_of_original(name: str) -> bool:
    """Return whether a file of this name belongs to the original form of a model."""
    file = name.rpartition("/")[2]
    return bool(PART.fullmatch(file) or WHOLE.fullmatch(file))


def _weights(store: Store) -> list[str]:
    return sorted(n for n in store.files if PART.fullmatch(n) or WHOLE.fullmatch(n))


# --- opening --------------------------------------------------------------------------------------


def open_original(store: Store, read: Callable[[File], dict[str, LazyTensor]]) -> Opened:
    """Return an original as a Hugging Face model, without reading a matrix.

    Args:
        store: the files of the source.
        read: returns the tensors of a file of weights.

    Raises SurgeryError for parts that are missing or unlike, and for a model of another build.
    """
    params = _params(store)
    kind = original_of(params, store.location)
    dimensions = Dimensions.of(params, store.location)
    parts = _parts(store, read)
    tensors = _tensors(parts, dimensions)
    tied = bool(params.get("tied_embeddings")) or _is_tied(tensors, kind.twice)
    if tied:
        tensors.pop(HEAD, None)
    tokenizer = read_tokenizer(store, params)
    config, notes = kind.config(params, dimensions, tokenizer, tied)
    config["vocab_size"] = tensors[EMBEDDING].shape[0]
    many = f"{len(parts)} parts" if len(parts) > 1 else _weights(store)[0]
    opened = f"the source is in {kind.maker}'s original form ({many}): its config.json is made of"
    return Opened(
        config=config,
        tensors=tensors,
        files=tokenizer.files,
        left=tokenizer.left,
        notes=(f"{opened} params.json", *notes, *tokenizer.notes),
    )


def _params(store: Store) -> dict[str, Any]:
    where = f"params.json of {store.location}"
    params = read_json(content(store.files["params.json"].path(), JSON_LIMIT), where, HF)
    if not isinstance(params, dict):
        raise SurgeryError(f"{where} is not a JSON object", HF)
    return params


def _parts(
    store: Store, read: Callable[[File], dict[str, LazyTensor]]
) -> list[dict[str, LazyTensor]]:
    """Return the tensors of each part: those of Meta hold the same names, those of Mistral not.

    Raises SurgeryError where a part is missing, or unlike the first.
    """
    names = _weights(store)
    numbered = [n for n in names if PART.fullmatch(n)]
    if not numbered:
        whole = dict[str, LazyTensor]()
        for name in names:
            whole |= read(store.files[name])
        return [whole]
    expected = [f"consolidated.{i:02d}.pth" for i in range(len(numbered))]
    if absent := sorted(set(expected) - set(numbered)):
        raise SurgeryError(
            f"{absent[0]} is not in {store.location}, which has {numbered[-1]}", _AGAIN
        )
    parts = [read(store.files[n]) for n in numbered]
    for name, part in zip(numbered[1:], parts[1:], strict=True):
        _require_alike(parts[0], part, name)
    return parts


def _require_alike(
    first: Mapping[str, LazyTensor], part: Mapping[str, LazyTensor], file: str
) -> None:
    if differing := sorted(set(first) ^ set(part)):
        holder = file if differing[0] in part else "consolidated.00.pth"
        raise SurgeryError(
            f"{differing[0]} is in {holder} alone ({len(differing)} such tensors): the parts are "
            "of different models",
            "download all parts of one model",
        )
    for name, a in first.items():
        if (a.dtype, a.shape) != (part[name].dtype, part[name].shape):
            b = part[name]
            raise SurgeryError(
                f"{name} is {a.dtype} {list(a.shape)} in consolidated.00.pth and "
                f"{b.dtype} {list(b.shape)} in {file}",
                "download all parts of one model",
            )


def _tensors(
    parts: Sequence[Mapping[str, LazyTensor]], dimensions: Dimensions
) -> dict[str, LazyTensor]:
    """Return every tensor under its name in transformers, joined of the parts.

    Raises SurgeryError where one is missing, unknown or of another shape than params.json says.
    """
    places = _places(dimensions.layers)
    found = {n for n in parts[0] if not _COMPUTED.fullmatch(n)}
    if unknown := sorted(found - set(places)):
        raise SurgeryError(
            f"{unknown[0]} is no tensor of a dense model of {dimensions.layers} layers "
            f"({len(unknown)} such tensors)",
            HF,
        )
    if absent := [n for n in places if n not in found and n != "output.weight"]:
        raise SurgeryError(
            f"the weights lack {absent[0]} ({len(absent)} such tensors)",
            "download the model again: it is incomplete",
        )
    return {p.name: _tensor(n, p, parts, dimensions) for n, p in places.items() if n in found}


def _places(layers: int) -> dict[str, Place]:
    """Return where each tensor of a model goes, by its name in the original."""
    inside = {
        f"layers.{i}.{name}": Place(
            name=f"model.layers.{i}.{p.name}", shape=p.shape, axis=p.axis, heads=p.heads
        )
        for i in range(layers)
        for name, p in INSIDE.items()
    }
    return OUTSIDE | inside


def _tensor(
    name: str, place: Place, parts: Sequence[Mapping[str, LazyTensor]], dimensions: Dimensions
) -> LazyTensor:
    """Return the tensor for a place, joined of its pieces in the parts."""
    pieces = [part[name] for part in parts]
    wanted = tuple(dimensions.sizes.get(letter, 0) for letter in place.shape)
    axis = _axis(pieces, place, wanted)
    whole = _joined([_in_halves(p, place, dimensions, len(parts)) for p in pieces], axis)
    # The number of tokens is that of the tensors where params.json leaves it open.
    if any(a != b for a, b in zip(whole.shape, wanted, strict=False) if b) or (
        len(whole.shape) != len(wanted)
    ):
        raise SurgeryError(
            f"{name} is {list(whole.shape)} of {len(parts)} parts, and params.json says "
            f"[{', '.join(str(n or 'any') for n in wanted)}]",
            _AGAIN if len(parts) > 1 else "download the model again: its files do not belong",
        )
    return whole


def _axis(pieces: Sequence[LazyTensor], place: Place, wanted: Collection[int]) -> int | None:
    """Return the axis of a tensor's pieces: embeddings were cut by columns before Llama 3."""
    shape, hidden = pieces[0].shape, [*wanted][-1]
    if place.name == EMBEDDING and len(shape) == 2 and shape[1] != hidden:
        return 1
    return place.axis


def _joined(pieces: Sequence[LazyTensor], axis: int | None) -> LazyTensor:
    first = pieces[0]
    if axis is None or len(pieces) == 1:
        return first
    if axis == 0:
        return concatenate(pieces)

    def join(*values: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat(values, 1)

    shape = (first.shape[0], sum(p.shape[1] for p in pieces))
    return derive("columns side by side", join, *pieces, dtype=first.dtype, shape=shape)


def _in_halves(tensor: LazyTensor, place: Place, dimensions: Dimensions, parts: int) -> LazyTensor:
    """Return the rows of each head with the first ones of all pairs before the second ones.

    A pair of neighbours is what the original turns together; transformers turns row i of a head
    with row i + half.
    """
    if not place.heads:
        return tensor
    heads, rows = dimensions.heads[place.heads] // parts, tensor.shape[0]
    if not heads or rows != heads * dimensions.head_dim or rows % 2:
        return tensor  # The shape is going to be refused.

    def halve(t: torch.Tensor) -> torch.Tensor:
        return t.view(heads, -1, 2, t.shape[1]).transpose(1, 2).reshape(t.shape)

    recipe = f"rotary halves of {heads} heads"
    return derive(recipe, halve, tensor, dtype=tensor.dtype, shape=tensor.shape)


_ROWS = 4096  # of a table, compared at once


def _is_tied(tensors: Mapping[str, LazyTensor], twice: bool) -> bool:
    """Return whether the head is the embedding: it is absent or, written twice, has its values.

    Two matrices that differ do so in their first rows.
    """
    head, embedding = tensors.get(HEAD), tensors[EMBEDDING]
    if head is None or head.identity() == embedding.identity():
        return True
    if not twice or not (head.copied and embedding.copied):
        return False
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    starts = range(0, head.shape[0], _ROWS)
    pieces = ([t.rows(i, min(i + _ROWS, t.shape[0])) for t in (head, embedding)] for i in starts)
    return all(a.read_bytes() == b.read_bytes() for a, b in pieces)
