"""True fp64: run stock model code with every fp32 that it names replaced by fp64.

Whatever the dtype of a model, its code computes norms, routers, softmax and rope in fp32:
`.to(torch.float32)`, `.float()`, `softmax(..., dtype=torch.float32)`. In an fp64 model these would
limit what can be shown to an accuracy of 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def arithmetic(dtype: torch.dtype) -> Iterator[None]:
    """Compute nothing in fp32 inside, if `dtype` is fp64; otherwise change nothing."""
    if dtype != torch.float64:
        yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # for tensors made from Python numbers
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(default)


class _Double(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return Tensor.double(*args)
        if func is not Tensor.view:  # `view(torch.float32)` asks for bits, not for arithmetic
            args = [_wider(a) for a in args]
            kwargs = {k: _wider(a) for k, a in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
