"""What every operation asks of its source first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from surgery import modeling
from surgery.checkpoint import Checkpoint, InlineFile, LazyTensor
from surgery.checkpoint.tensors import FLOATS
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_PIECE = 4 << 20


BLOCK = 11_008  # neurons that are fitted together: a Gram matrix of 485 MB in fp32


def require_plain(checkpoint: Checkpoint) -> None:
    """Raises SurgeryError for quantised weights: their MLPs are not matrices that can be operated on."""
    for config in (checkpoint.config, checkpoint.text_config):
        if quantization := config.get("quantization_config") or config.get("compression_config"):
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
            raise SurgeryError(f"the checkpoint is quantised (quant_method {method!r})",
                               "give the original bf16 or fp16 checkpoint, operate, and quantise the result")  # fmt: skip
    for name, t in checkpoint.tensors.items():
        if t.dtype.startswith("F8") or name.endswith((".qweight", ".weight_packed", ".weight_scale_inv")):
            raise SurgeryError(f"the checkpoint is quantised ({name} is {t.dtype})",
                               "give the original bf16 or fp16 checkpoint, operate, and quantise the result")  # fmt: skip


def require_whole(blocks: Blocks) -> None:
    """Raises SurgeryError where a layer of a dense model lacks a tensor that its other layers have or its MLP needs, or
    where the embedding is absent: known from the headers, before anything is written."""
    names = blocks.checkpoint.tensors
    if not any(n.endswith(EMBEDDINGS) for n in names):
        raise SurgeryError(f"the checkpoint has no embedding ({', '.join(EMBEDDINGS)})", _INCOMPLETE)
    if blocks.family.is_moe:
        return  # its layers differ by design
    operated = {i for entry in modeling.changed(blocks.checkpoint.config) for i in entry["layers"]}  # have their own
    layers = {i: blocks.layer(i) for i in range(blocks.count) if i not in operated}
    parts = {n.removeprefix(start) for i, start in layers.items() for n in blocks.names(i)}
    for i, start in layers.items():
        if absent := sorted(part for part in parts if start + part not in names):
            raise SurgeryError(f"layer {i} has no tensor {start}{absent[0]}, which other layers have", _INCOMPLETE)
        blocks.mlp(i)  # raises where no layer has what an MLP needs


_INCOMPLETE = "the checkpoint is incomplete: download it again"


def chosen_layers(blocks: Blocks, layers: Collection[int] | None) -> tuple[int, ...]:
    """The layers to convert, sorted; all where none are named. Raises UsageError for a layer that is not there."""
    chosen = tuple(sorted(set(range(blocks.count) if layers is None else layers)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= blocks.count:
        raise UsageError(f"layers {list(chosen)} of a model with {blocks.count}", f"layers are 0 to {blocks.count - 1}")
    return chosen


def with_blocks(checkpoint: Checkpoint, entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What of a checkpoint changes as these blocks (surgery/modeling) are put in: its config and the code that goes along.

    Raises SurgeryError where no code can go along.
    """
    config = dict(checkpoint.config) | modeling.config_changes(checkpoint.config, entries)
    code = modeling.files(modeling.base_type(config), modeling.kinds(config))
    files = (*(f for f in checkpoint.files if f.name not in code), *(InlineFile(n, data) for n, data in code.items()))
    return {"config": config, "files": files, "custom_code": True}


def gathered(checkpoint: Checkpoint) -> Checkpoint:
    """The same model, where its class keeps the parts of MLPs in the layer itself (OPT): they are put into a module, that a block
    can take the place of. The code that does so goes along. Raises SurgeryError as `require_plain` does."""
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    if not blocks.family.loose:
        return checkpoint
    entry = modeling.gathered(blocks.family, range(blocks.count))
    names = {
        f"{blocks.layer(i)}{part}.{kind}": f"{blocks.layer(i)}{entry['mlp']}.{part}.{kind}"
        for i in range(blocks.count) for part in entry["parts"] for kind in ("weight", "bias")
    }  # fmt: skip
    tensors = {names.get(name, name): t for name, t in checkpoint.tensors.items()}
    return checkpoint.replace(tensors=tensors, **with_blocks(checkpoint, [entry]))


def drop_tied_head(checkpoint: Checkpoint, tied: bool) -> tuple[Checkpoint, list[str]]:
    """Leave out a head that is tied *and* equal to the embedding; where they differ keep both, and say so."""
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
    """Whether two tensors hold the same values; read piece by piece."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.extents and a.extents == b.extents:
        return True
    import torch

    step = max(1, _PIECE // max(1, a.numel // a.shape[0]))
    pieces = ((i, min(a.shape[0], i + step)) for i in range(0, a.shape[0], step))
    return all(torch.equal(a.rows(i, j).read(), b.rows(i, j).read()) for i, j in pieces)


def float_tensors(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """The tensors that hold floating-point values."""
    return {n: t for n, t in checkpoint.tensors.items() if t.dtype in FLOATS}


def config_with(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with fields of the language model changed, inside `text_config` where there is one."""
    config = dict(checkpoint.config)
    if config.get("text_config"):
        config["text_config"] = {**config["text_config"], **changes}
        return config
    return config | dict(changes)


def bypass_rank(bypass: int | str, blocks: Blocks, repair: str) -> int:
    """The rank of a bypass beside an MLP: a number, or "full". Raises UsageError where there can be none."""
    if not bypass:
        return 0
    hidden = blocks.mlp(0).down.shape[0]
    rank = hidden if bypass == "full" else int(bypass)
    if not 0 <= rank <= hidden:
        raise UsageError(f"a bypass of rank {rank} in a model of hidden size {hidden}", "give a smaller rank, or full")
    if repair == "none":
        raise UsageError("a bypass without a repair that fits it", "take --repair ridge or reconstruct")
    return rank


def fit_nbytes(hidden: int, width: int, rank: int = 0) -> int:
    """What the closed-form fit of a `down` [H, F] and a bypass of this rank adds up, in fp32: one Gram matrix, and twice what stands
    against it (repair.py)."""
    columns = min(width, BLOCK) + rank
    return 4 * columns * (columns + 2 * hidden)
