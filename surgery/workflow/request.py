"""The options of a conversion or a verification that are not about the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.calibration.texts import Text
from surgery.proof.require import Require
from surgery.storage import Transfer


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
        require: what the verification is to find for the output to pass.
        finetune: options that the script in finetune/ is to have as its defaults.
        trust_remote_code: whether code that comes with the checkpoints may run.
        command: the command line, for the record.
    """

    out: Path
    max_shard_size: int | None = None
    hardlink: bool = False
    verify: bool = True
    allow_nonfinite: bool = False
    require: Require = field(default_factory=Require)
    finetune: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    command: str = ""

    @property
    def transfer(self) -> Transfer:
        """Return how bytes get into the output."""
        return Transfer(hardlink=self.hardlink, hashed=self.verify)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """How an output is to be verified.

    Args:
        trust_remote_code: whether code that comes with the checkpoints may run.
        allow_nonfinite: whether a source passes whose logits are NaN or Inf, so that nothing can be
            compared with it.
        require: what the verification is to find; by default what the record requires.
        texts: those that quality is measured on; by default the ones of the record.
        tokens: how many tokens of each text; None for as many as usual.
    """

    trust_remote_code: bool = False
    allow_nonfinite: bool = False
    require: Require | None = None
    texts: Sequence[Text] = ()
    tokens: int | None = None
