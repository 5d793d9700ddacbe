"""Quantised weights as the bf16 weights that they stand for, a tensor at a time.

Some models were only ever published quantised (DeepSeek-V3, gpt-oss). On request their tensors are
opened as transformers dequantises them, bit for bit. Each way to store a matrix is a row of
`FORMS`; nothing is computed before the tensor is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.tensors import LazyTensor, concatenate, derive
from surgery.errors import SurgeryError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

CONFIGS = ("quantization_config", "compression_config")  # fields that a dequantised model has not
_ORIGINAL = "give the original bf16 or fp16 checkpoint, operate, and quantise the result"
# The values of four bits, as microscaling (MX) formats and NVFP4 have them.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A way to store a matrix.

    Args:
        values: the end of the name that holds the values; what is before it is the matrix's name.
        scales: the end of the name that holds their scales.
        dtype: of the values.
        unused: ends of names that a dequantised matrix has no use for, like scales of its input.
        matrix: the matrix, from its name, values, scales and the config of the quantisation.
    """

    values: str
    scales: str
    dtype: str
    unused: tuple[str, ...] = ()
    matrix: Callable[[str, LazyTensor, LazyTensor, Mapping[str, Any]], LazyTensor]


def dequantised(
    config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]
) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """Return config and tensors with every quantised matrix as bf16.

    Raises UsageError where nothing is quantised, and SurgeryError for values that have no row in
    `FORMS` or whose scales do not fit them.
    """
    parts = (config, config.get("text_config") or {})
    told = (part.get(k) for part in parts for k in CONFIGS)
    settings: Mapping[str, Any] = next((v for v in told if isinstance(v, Mapping)), {})
    found, used = dict[str, LazyTensor](), set[str]()
    for name, values in tensors.items():
        for form in FORMS:
            base = name.removesuffix(form.values)
            scales = tensors.get(base + form.scales)
            if name.endswith(form.values) and values.dtype == form.dtype and scales is not None:
                found[_named(base, form)] = form.matrix(base, values, scales, settings)
                used |= {name, base + form.scales, *(base + end for end in form.unused)}
                break
    if not found:
        raise _nothing(settings, tensors)
    kept = {n: t for n, t in tensors.items() if n not in used}
    if left := [n for n, t in kept.items() if t.dtype.startswith("F8")]:
        raise SurgeryError(
            f"{left[0]} is {kept[left[0]].dtype} and has no scales ({len(left)} such tensors)",
            _ORIGINAL,
        )
    return _plain(config), kept | found


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what it says of a quantisation, in its text_config as well."""
    kept = {k: v for k, v in config.items() if k not in CONFIGS}
    if isinstance(text := kept.get("text_config"), Mapping):
        kept["text_config"] = _plain(text)
    return kept


def _named(base: str, form: Form) -> str:
    return base if form.values != "weight" else f"{base}weight"


def _nothing(settings: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> SurgeryError:
    if not settings and not any(t.dtype.startswith(("F8", "I8", "U8")) for t in tensors.values()):
        return UsageError("nothing is quantised here", "leave --dequantize out")
    method = str(settings.get("quant_method") or "unknown")[:80]
    return SurgeryError(
        f"weights quantised by {method!r} cannot be dequantised; fp8 with scales and mxfp4 can",
        _ORIGINAL,
    )


# --- eight bits -----------------------------------------------------------------------------------


def _fp8(
    base: str, values: LazyTensor, scales: LazyTensor, settings: Mapping[str, Any]
) -> LazyTensor:
    """Return values [A, B] times scales: one for all, for each row, or for each block."""
    shape = values.shape
    if len(shape) != 2:
        raise SurgeryError(f"{base}weight is {values.dtype} {list(shape)}: no matrix", _ORIGINAL)
    grid = (1,) * (2 - len(scales.shape)) + scales.shape
    if len(scales.shape) == 1 and scales.shape[0] != 1:
        grid = (scales.shape[0], 1)  # one for each row
    blocks = [_block(shape[i], grid[i], settings, i) for i in (0, 1)]
    if len(grid) != 2 or not all(blocks):
        raise SurgeryError(
            f"{base}weight is {list(shape)} and its scales are {list(scales.shape)}, which are not "
            "those of its blocks",
            "download the checkpoint again, or give the original",
        )

    def compute(q: Tensor, s: Tensor) -> Tensor:
        import torch

        s = (s.float() - 127).exp2() if s.dtype == torch.uint8 else s.float()
        s = s.reshape(grid)
        for axis, block in enumerate(blocks):
            s = s.repeat_interleave(block, axis).narrow(axis, 0, shape[axis])
        return (q.float() * s).bfloat16()

    recipe = f"times scales {list(grid)} of blocks {blocks}, in F32, as BF16"
    return derive(recipe, compute, values, scales, dtype="BF16", shape=shape)


def _block(size: int, parts: int, settings: Mapping[str, Any], axis: int) -> int:
    """Return how many rows or columns share a scale; 0 where so many parts do not fit.

    The last block may be smaller, where the config tells the size of the others.
    """
    told = settings.get("weight_block_size")
    if isinstance(told, list) and len(told) == 2 and isinstance(told[axis], int):
        block = told[axis]
        if block > 0 and -(-size // block) == parts:
            return int(block)
    return size // parts if parts > 0 and size % parts == 0 else 0


# --- four bits ------------------------------------------------------------------------------------


def _mxfp4(
    base: str, values: LazyTensor, scales: LazyTensor, settings: Mapping[str, Any]
) -> LazyTensor:
    """Return the experts [E, B·32, A] of packed values [E, A, B, 16] and exponents [E, A, B].

    Experts are computed one by one, so that one of them is in memory.
    """
    shape = values.shape
    if len(shape) != 4 or shape[3] != 16 or scales.shape != shape[:3] or scales.dtype != "U8":
        raise SurgeryError(
            f"{base}_blocks is {list(shape)} and its scales are {scales.dtype} "
            f"{list(scales.shape)}: no mxfp4 of gpt-oss",
            "download the checkpoint again, or give the original",
        )
    experts, rows, blocks, _ = shape

    def compute(packed: Tensor, exponents: Tensor) -> Tensor:
        import torch

        table = torch.tensor(_FP4, dtype=torch.bfloat16)
        pairs = torch.stack([packed & 0x0F, packed >> 4], dim=-1)  # [1, A, B, 16, 2]
        found = table[pairs.int()].flatten(3)
        found = torch.ldexp(found, exponents.int().unsqueeze(-1) - 127)
        return found.reshape(1, rows, blocks * 32).transpose(1, 2).contiguous()

    return concatenate(
        [
            derive(
                "mxfp4, transposed, as BF16",
                compute,
                values.rows(i, i + 1),
                scales.rows(i, i + 1),
                dtype="BF16",
                shape=(1, blocks * 32, rows),
            )
            for i in range(experts)
        ]
    )


_INPUT = ("input_scale", "activation_scale")
FORMS = (
    # DeepSeek-V3 and the fp8 of transformers; compressed-tensors, FBGEMM and ModelOpt.
    Form(values="weight", scales="weight_scale_inv", dtype="F8_E4M3", unused=_INPUT, matrix=_fp8),
    Form(values="weight", scales="weight_scale", dtype="F8_E4M3", unused=_INPUT, matrix=_fp8),
    Form(values="_blocks", scales="_scales", dtype="U8", matrix=_mxfp4),  # gpt-oss
)
