"""What every operation asks of its source before it plans anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from surgery.blocks import block_config
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.edit import EMBEDDINGS
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks


def require_plain(checkpoint: Checkpoint) -> None:
    """Raises SurgeryError for quantised weights: their MLPs are not matrices that can be operated
    on.
    """
    for config in (checkpoint.config, checkpoint.text_config):
        if quantization := config.get("quantization_config") or config.get("compression_config"):
            method = (
                quantization.get("quant_method", "unknown")
                if isinstance(quantization, Mapping)
                else quantization
            )
            raise SurgeryError(
                f"the checkpoint is quantised (quant_method {method!r})",
                "give the original bf16 or fp16 checkpoint, operate, and quantise the result",
            )
    for name, t in checkpoint.tensors.items():
        if t.dtype.startswith("F8") or name.endswith(
            (".qweight", ".weight_packed", ".weight_scale_inv")
        ):
            raise SurgeryError(
                f"the checkpoint is quantised ({name} is {t.dtype})",
                "give the original bf16 or fp16 checkpoint, operate, and quantise the result",
            )


def require_whole(blocks: Blocks) -> None:
    """Raises SurgeryError where a layer of a dense model lacks a tensor that its other layers have
    or its MLP needs, or
    where the embedding is absent: known from the headers, before anything is written."""
    names = blocks.checkpoint.tensors
    if not any(n.endswith(EMBEDDINGS) for n in names):
        raise SurgeryError(
            f"the checkpoint has no embedding ({', '.join(EMBEDDINGS)})", _INCOMPLETE
        )
    if blocks.family.is_moe:
        return  # its layers differ by design
    operated = {
        i for entry in block_config.changed(blocks.checkpoint.config) for i in entry["layers"]
    }  # have their own
    layers = {i: blocks.layer(i) for i in range(blocks.count) if i not in operated}
    parts = {n.removeprefix(start) for i, start in layers.items() for n in blocks.names(i)}
    for i, start in layers.items():
        if absent := sorted(part for part in parts if start + part not in names):
            raise SurgeryError(
                f"layer {i} has no tensor {start}{absent[0]}, which other layers have", _INCOMPLETE
            )
        blocks.mlp(i)  # raises where no layer has what an MLP needs


_INCOMPLETE = "the checkpoint is incomplete: download it again"


def chosen_layers(blocks: Blocks, layers: Collection[int] | None) -> tuple[int, ...]:
    """The layers to convert, sorted; all where none are named. Raises UsageError for a layer that
    is not there.
    """
    chosen = tuple(sorted(set(range(blocks.count) if layers is None else layers)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= blocks.count:
        raise UsageError(
            f"layers {list(chosen)} of a model with {blocks.count}",
            f"layers are 0 to {blocks.count - 1}",
        )
    return chosen


def bypass_rank(bypass: int | str, blocks: Blocks, repair: str) -> int:
    """The rank of a bypass beside an MLP: a number, or "full". Raises UsageError where there can be
    none.
    """
    if not bypass:
        return 0
    hidden = blocks.mlp(0).down.shape[0]
    rank = hidden if bypass == "full" else int(bypass)
    if not 0 <= rank <= hidden:
        raise UsageError(
            f"a bypass of rank {rank} in a model of hidden size {hidden}",
            "give a smaller rank, or full",
        )
    if repair == "none":
        raise UsageError(
            "a bypass without a repair that fits it", "take --repair ridge or reconstruct"
        )
    return rank
