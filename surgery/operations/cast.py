"""Store the floating-point tensors in another dtype, converted as they are written."""

from __future__ import annotations

from surgery.blocks.preconditions import require_plain
from surgery.checkpoint import Checkpoint, Step
from surgery.checkpoint.edit import config_with, float_tensors
from surgery.checkpoint.tensors import DTYPES, FLOATS
from surgery.errors import UsageError
from surgery.operations.operation import Operation

NAMES = {torch_name: dtype for dtype, (_, torch_name) in DTYPES.items() if dtype in FLOATS}
SHORT = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
_MANTISSA = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52}
_EXPONENT = {"BF16": 8, "F16": 5, "F32": 8, "F64": 11}


def cast(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Convert every floating-point tensor, and the dtype that config.json names.

    Args:
        dtype: "bf16", "fp16", "fp32" or "fp64", or a long name like "bfloat16".

    Raises UsageError for another name.
    """
    name = SHORT.get(dtype) or NAMES.get(dtype)
    if name is None:
        raise UsageError(f"unknown dtype {dtype!r}", f"one of: {', '.join([*NAMES, *SHORT])}")
    require_plain(checkpoint)
    floats = float_tensors(checkpoint)
    exact = all(
        _MANTISSA[t.dtype] <= _MANTISSA[name] and _EXPONENT[t.dtype] <= _EXPONENT[name]
        for t in floats.values()
    )
    tensors = {**checkpoint.tensors, **{n: t.cast(name) for n, t in floats.items()}}
    field = DTYPES[name][1]
    config = config_with(checkpoint, {"dtype": field, "torch_dtype": field})
    if "text_config" in config:
        config |= {"dtype": field, "torch_dtype": field}
    step = Step(operation="cast", parameters={"dtype": field}, exact=exact, layers=())
    return checkpoint.replace(step=step, config=config, tensors=tensors)


OPERATION = Operation(
    name="cast",
    function=cast,
    summary="Store the weights in another dtype.",
    done=lambda p, where: f"the weights are stored in {p['dtype']}",
    why="The weights are stored in another dtype.",
    suffix=lambda p: str(p["dtype"]),
)
