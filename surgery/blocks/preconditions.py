"""The checks that every operation makes of its source before it plans anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from surgery.blocks import block_config
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.edit import EMBEDDINGS
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks


def require_plain(checkpoint: Checkpoint) -> None:
    """Raise SurgeryError if the weights are quantised.

    Their MLPs are then not matrices that can be operated on.
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
    """Raise SurgeryError if the checkpoint is incomplete.

    It is where the embedding is absent, or where a layer of a dense model lacks a tensor that other
    layers have or that its MLP needs. The headers tell, before anything is written.
    """
    names = blocks.checkpoint.tensors
    tables = (blocks.family.embedding,) if blocks.family.embedding else EMBEDDINGS
    if not any(n.endswith(tables) for n in names):
        raise SurgeryError(f"the checkpoint has no embedding ({', '.join(tables)})", _INCOMPLETE)
    if blocks.family.is_moe:
        return  # its layers differ by design
    if blocks.family.uneven:
        for index in blocks.dense:
            blocks.mlp(index)
        return
    # Layers with a block have tensors of their own.
    operated = {
        i for entry in block_config.changed(blocks.checkpoint.config) for i in entry["layers"]
    }
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
    """Return the layers to convert, sorted; None stands for all that have an MLP.

    Raises UsageError for a layer that the model does not have, or that has no MLP.
    """
    chosen = tuple(sorted(set(_every(blocks) if layers is None else layers)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= blocks.count:
        raise UsageError(
            f"layers {list(chosen)} of a model with {blocks.count}",
            f"layers are 0 to {blocks.count - 1}",
        )
    if without := sorted(set(chosen) - set(_every(blocks))):
        raise UsageError(
            f"layer {without[0]} of this {blocks.family.model_type} has no dense MLP",
            f"those that have one: {', '.join(map(str, _every(blocks)))}",
        )
    return chosen


def _every(blocks: Blocks) -> tuple[int, ...]:
    return tuple(range(blocks.count)) if blocks.family.is_moe else blocks.dense


def bypass_rank(bypass: int | str, blocks: Blocks, repair: str) -> int:
    """Return the rank of a bypass beside an MLP, given as a number, "full" or "none".

    Raises UsageError for a rank that is impossible, or a repair that would not fit the bypass.
    """
    if not bypass or bypass == "none":
        return 0
    hidden = blocks.mlp(blocks.dense[0]).down.shape[0]
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
