"""The options of a conversion that are not about the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """How an output is to be written.

    Args:
        out: the folder that it goes to.
        max_shard_size: bytes of the largest shard; None keeps the default.
        hardlink: whether to link to source files that stay as they are, instead of copying them.
        verify: whether to verify the output once it is written.
        allow_nonfinite: whether a source passes whose logits are NaN or Inf, so that nothing can be
            compared with it.
        finetune: options that the script in finetune/ is to have as its defaults.
        trust_remote_code: whether code that comes with the checkpoints may run.
        command: the command line, for the record.
    """

    out: Path
    max_shard_size: int | None = None
    hardlink: bool = False
    verify: bool = True
    allow_nonfinite: bool = False
    finetune: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    command: str = ""
