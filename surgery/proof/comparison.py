"""What is compared, and the form of a check that an operation brings to its own proof."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.checkpoint import Checkpoint, Progress
from surgery.checkpoint.row import Row

SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two models, in this `dtype` on this `device`, on `tokens` of each text.

    `exact`: whether the output claims to compute what the source does.
    """

    source: Checkpoint
    output: Checkpoint
    exact: bool
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    tokens: int = 2048
    progress: Progress = lambda n: None

    @property
    def stored(self) -> torch.dtype:
        """The dtype that the output is loaded in."""
        name = self.output.config.get("dtype") or self.output.config.get("torch_dtype")
        found: torch.dtype = getattr(torch, str(name or "float32"))
        return found


Check = Callable[[Comparison, Tensor], Iterable[Row]]  # of the models, on ids [B, T]
