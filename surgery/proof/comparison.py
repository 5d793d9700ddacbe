"""What a verification compares, and the form of the checks that operations bring to it."""

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
    """Two models and how they are compared.

    Args:
        source: the model that was operated on.
        output: what became of it.
        exact: whether the output claims to compute what the source does.
        dtype: what both are computed in.
        device: where both are computed.
        tokens: how many tokens are run; of each text, where quality is measured.
        allow_nonfinite: whether a source with which nothing can be compared passes.
        progress: is told of each layer that was run.
    """

    source: Checkpoint
    output: Checkpoint
    exact: bool
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    tokens: int = 2048
    allow_nonfinite: bool = False
    progress: Progress = lambda n: None

    @property
    def stored(self) -> torch.dtype:
        """The dtype that the output is stored and loaded in."""
        name = self.output.config.get("dtype") or self.output.config.get("torch_dtype")
        found: torch.dtype = getattr(torch, str(name or "float32"))
        return found


# The rows of a check, from the models and token ids [B, T].
Check = Callable[[Comparison, Tensor], Iterable[Row]]
