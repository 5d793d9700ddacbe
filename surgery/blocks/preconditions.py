"""The checks that every operation makes of its source before it plans anything."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from surgery.blocks import block_config
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.edit import EMBEDDINGS
from surgery.checkpoint.metadata import metadata_of
from surgery.checkpoint.tensors import FLOATS, LazyTensor
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks

# Fields of a config.json that say how the weights are quantised; MLX's is the last.
_CONFIGS = ("quantization_config", "compression_config", "quantization")
_INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
# What the common formats keep beside, or in place of, a matrix NAME.weight. All but the last few
# are nothing else; those are trained parameters in some models, but not beside integers.
_PARTS = (
    "SCB",
    "CB",
    "weight_format",  # LLM.int8() of bitsandbytes
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",  # its 4-bit formats
    "qweight",
    "qzeros",
    "g_idx",  # GPTQ and AWQ
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
    "weight_global_scale",  # compressed-tensors, FP8, NVFP4
    "W_q",  # HQQ
    "weight_blocks",
    "gate_up_proj_blocks",
    "down_proj_blocks",  # MXFP4
    "gate_up_proj_scales",
    "down_proj_scales",
)
_BESIDE_INTEGERS = ("scales", "scale", "biases", "zeros", "zero_point", "zero_points", "meta")
_DEQUANTIZE = "; where there is no original, --dequantize opens the weights as bf16"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PLAIN = "give the original bf16 or fp16 checkpoint, operate, and quantise the result"


def require_plain(checkpoint: Checkpoint) -> None:
    """Raise SurgeryError if the weights are quantised.

    Their MLPs are then not matrices that can be operated on. The config need not say so: a file
    holds integers in the place of weights, or the scales that belong to them.
    """
    for config in (checkpoint.config, checkpoint.text_config):
        for field in _CONFIGS:
            if found := config.get(field):
                given = found if isinstance(found, Mapping) else {"quant_method": found}
                method = given.get("quant_method") or f"{field} of {given.get('bits', '?')} bits"
                message = f"the checkpoint is quantised (quant_method {method!r})"
                raise SurgeryError(message, _plain(checkpoint))
    if name := _quantised(checkpoint.tensors):
        t = checkpoint.tensors[name]
        message = f"the checkpoint is quantised ({name} is {t.dtype} {list(t.shape)})"
        raise SurgeryError(message, _plain(checkpoint))


def _plain(checkpoint: Checkpoint) -> str:
    """Return what to do instead, with the original's name where the source's card has it."""
    return _original(checkpoint) + (_DEQUANTIZE if _is_dequantisable(checkpoint) else "")


def _is_dequantisable(checkpoint: Checkpoint) -> bool:
    """Return whether the matrices are in fp8, or mxfp4 as gpt-oss has it."""
    dtypes = {t.dtype for t in checkpoint.tensors.values()}
    return "F8_E4M3" in dtypes or any(n.endswith("_blocks") for n in checkpoint.tensors)


def _original(checkpoint: Checkpoint) -> str:
    """Return the advice to give the original, with its name where the source's card has it."""
    try:
        named = metadata_of(checkpoint).get("base_model") or ""
    except (OSError, SurgeryError):  # the card is elsewhere, and cannot be had
        return _PLAIN
    base = named if isinstance(named, str) else named[0]
    told = f": its card says that it was made from {base}" if _HUB_ID.fullmatch(base) else ""
    return _PLAIN + told


def _quantised(tensors: Mapping[str, LazyTensor]) -> str:
    """Return the first tensor that only a quantised checkpoint has; an empty text where none is."""
    for name, t in tensors.items():
        owner, _, part = name.rpartition(".")
        if t.dtype.startswith(("F8", "F4", "F6")) or part in _PARTS:
            return name
        # bitsandbytes: NAME.weight.absmax, NAME.weight.quant_state.bitsandbytes__nf4
        if ".quant_state." in name:
            return name
        if t.dtype in _INTEGERS and part.endswith(("weight", "_proj", "kernel")) and t.shape:
            return name
        if part in _BESIDE_INTEGERS and _is_integer(tensors.get(f"{owner}.weight")):
            return f"{owner}.weight"
    return ""


def _is_integer(tensor: LazyTensor | None) -> bool:
    return tensor is not None and tensor.dtype in _INTEGERS


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
    # Layers with a block have tensors of their own.
    operated = {
        i for entry in block_config.changed(blocks.checkpoint.config) for i in entry["layers"]
    }
    layers = [i for i in blocks.dense if i not in operated]
    if not blocks.family.uneven:
        _require_alike(blocks, layers)
    for i in layers:
        mlp = blocks.mlp(i)  # raises where no layer has what an MLP needs
        for t in filter(None, (mlp.gate, mlp.up, mlp.down)):
            if t.dtype not in FLOATS:
                raise SurgeryError(
                    f"the MLP of layer {i} holds {t.dtype}, not floating-point numbers", _PLAIN
                )


def _require_alike(blocks: Blocks, layers: Collection[int]) -> None:
    """Raise SurgeryError where one of these layers lacks a tensor that another has."""
    starts = {i: blocks.layer(i) for i in layers}
    parts = {n.removeprefix(start) for i, start in starts.items() for n in blocks.names(i)}
    for i, start in starts.items():
        if absent := sorted(p for p in parts if start + p not in blocks.checkpoint.tensors):
            raise SurgeryError(
                f"layer {i} has no tensor {start}{absent[0]}, which other layers have", _INCOMPLETE
            )


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
    if repair == "none":
        raise UsageError(
            "a bypass without a repair that fits it", "take --repair ridge or reconstruct"
        )
    hidden = blocks.mlp(blocks.dense[0]).down.shape[0]
    rank = hidden if bypass == "full" else int(bypass)
    if not 0 <= rank <= hidden:
        raise UsageError(
            f"a bypass of rank {rank} in a model of hidden size {hidden}",
            "give a smaller rank, or full",
        )
    return rank
