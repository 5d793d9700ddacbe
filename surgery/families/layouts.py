"""Layouts of experts on disk: from MLPs in the layout of Linear to tensors by path in a layer.

Shapes: E experts of width w, H hidden_size; gate and up [w, H], down [H, w]. Names of one tensor
per expert are written wherever the model class reads them, because transformers 4 does not
recognise fused ones: it loads random experts without an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from surgery.checkpoint import LazyTensor, concatenate, constant, derive
from surgery.families.mlp import Mlp

if TYPE_CHECKING:
    import torch

Tensors = dict[str, LazyTensor]
Place = Callable[[Sequence[Mlp]], Tensors]


def per_expert(gate: str, up: str, down: str) -> Place:
    """Return the layout with one tensor per expert and matrix; `{e}` in a path is the expert."""

    def place(experts: Sequence[Mlp]) -> Tensors:
        out: Tensors = {}
        for e, mlp in enumerate(experts):
            assert mlp.gate is not None
            for path, tensor in ((gate, mlp.gate), (up, mlp.up), (down, mlp.down)):
                out[f"{path.format(e=e)}.weight"] = tensor
        return out

    return place


def usual(module: str) -> Place:
    """Return the layout {module}.gate_proj, {module}.up_proj and {module}.down_proj."""
    return per_expert(f"{module}.gate_proj", f"{module}.up_proj", f"{module}.down_proj")


def granite(experts: Sequence[Mlp]) -> Tensors:
    """Return Granite's fused tensors, whose extents remain extents that the kernel copies.

    input_linear is [E, 2w, H], the rows of gate and then those of up; output_linear is [E, H, w].
    """
    (w, h), e = experts[0].up.shape, len(experts)
    gate_up, down = _gate_up_rows(experts), concatenate([mlp.down for mlp in experts])
    return {
        "block_sparse_moe.input_linear.weight": gate_up.reshape(e, 2 * w, h),
        "block_sparse_moe.output_linear.weight": down.reshape(e, h, w),
    }


def granite_shared(experts: Sequence[Mlp]) -> Tensors:
    """Return the one shared expert: input_linear [2w, H] and output_linear [H, w]."""
    return {
        "shared_mlp.input_linear.weight": _gate_up_rows(experts),
        "shared_mlp.output_linear.weight": experts[0].down,
    }


def _gate_up_rows(experts: Sequence[Mlp]) -> LazyTensor:
    return concatenate([t for mlp in experts for t in (mlp.gate, mlp.up) if t is not None])


def llama4(experts: Sequence[Mlp]) -> Tensors:
    """Return gate_up_proj [E, H, 2w] (columns of gate, then of up) and down_proj [E, w, H]."""
    gate_up = _stacked(experts, "gate, then up, transposed", _beside)
    return {
        "feed_forward.experts.gate_up_proj": gate_up,
        "feed_forward.experts.down_proj": _downs(experts),
    }


def gpt_oss(experts: Sequence[Mlp]) -> Tensors:
    """Return gate_up_proj [E, H, 2w] with alternating columns, down_proj [E, w, H], and biases.

    The class computes (up + 1)·gate·sigmoid(gate·alpha); a bias of -1 on up cancels the 1.
    """
    (w, h), e, dtype = experts[0].up.shape, len(experts), experts[0].up.dtype
    one_off = derive(
        "0 and -1 in turn",
        lambda t: t.new_tensor([0.0, -1.0]).repeat(e, w),
        constant(0.0, (1,), dtype),
        dtype=dtype,
        shape=(e, 2 * w),
    )
    return {
        "mlp.experts.gate_up_proj": _stacked(experts, "gate and up in turn, transposed", _in_turn),
        "mlp.experts.gate_up_proj_bias": one_off,
        "mlp.experts.down_proj": _downs(experts),
        "mlp.experts.down_proj_bias": constant(0.0, (e, h), dtype),
    }


def _stacked(experts: Sequence[Mlp], recipe: str, join: Callable[..., torch.Tensor]) -> LazyTensor:
    """Return gate and up of all experts, [E, H, 2w], joined by `join` one expert at a time."""
    w, h = experts[0].up.shape
    each = [
        derive(recipe, join, mlp.gate, mlp.up, dtype=mlp.up.dtype, shape=(h, 2 * w))
        for mlp in experts
        if mlp.gate
    ]
    return concatenate(each).reshape(len(experts), h, 2 * w)


def _beside(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([gate, up]).T.contiguous()


def _in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.stack([gate.T, up.T], -1).flatten(1)


def _downs(experts: Sequence[Mlp]) -> LazyTensor:
    h, w = experts[0].down.shape
    return concatenate([mlp.down.transpose() for mlp in experts]).reshape(len(experts), w, h)
