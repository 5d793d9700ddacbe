"""What a verification compares, and the form of the checks that operations bring to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surgery.calibration.texts import Text
from surgery.checkpoint import Checkpoint, Progress
from surgery.checkpoint.row import Row
from surgery.proof.require import Require

TOKENS = 2048  # for logits to be compared on
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
        texts: those that quality is measured on; by default the built-in ones of all domains.
        require: limits of the quality, beyond which the verification fails.
        tokens: how many tokens are run; of each text, where quality is measured. 0 stands for as
            many as usual.
        allow_nonfinite: whether a source with which nothing can be compared passes.
        progress: is told of each layer that was run.
    """

    source: Checkpoint
    output: Checkpoint
    exact: bool
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    texts: Sequence[Text] = ()
    require: Require = field(default_factory=Require)
    tokens: int = 0
    allow_nonfinite: bool = False
    progress: Progress = lambda n: None

    @property
    def stored(self) -> torch.dtype:
        """Return the dtype that the output is stored and loaded in."""
        name = self.output.config.get("dtype") or self.output.config.get("torch_dtype")
        found: torch.dtype = getattr(torch, str(name or "float32"))
        return found


# The rows of a check, from the models and token ids [B, T].
Check = Callable[[Comparison, Tensor], Iterable[Row]]
