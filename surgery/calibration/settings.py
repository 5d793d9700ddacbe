"""What a data-driven operation is calibrated on, as data: a recipe can hold it, and planning with it needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.calibration.data import Sample
    from surgery.calibration.walk import Walk
    from surgery.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """`tokens` of the built-in mixed text, of `text` (a file or folder) or of `dataset` (a Hub id), in windows of
    `sequence_length`. `device` and `dtype`: by default the fastest there is. `memory_budget`: bytes of hidden states
    beyond which they lie in temporary files."""

    tokens: int = 65_536
    sequence_length: int = 512
    text: str | None = None
    dataset: str | None = None
    device: str | None = None
    dtype: str | None = None
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.text and self.dataset:
            raise UsageError(f"both a text ({self.text}) and a data set ({self.dataset})", "give one of them")
        if self.tokens < 1 or self.sequence_length < 2:
            raise UsageError(f"{self.tokens} tokens in windows of {self.sequence_length}", "give more")

    @classmethod
    def of(cls, value: Calibration | Mapping[str, Any] | None) -> Calibration:
        """From what a recipe or a caller gives. Raises UsageError for a key that is none."""
        if isinstance(value, Calibration):
            return value
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(value or {}) - set(known)):
            raise UsageError(f"unknown key {unknown[0]!r} of calibration", f"known: {', '.join(known)}")
        return cls(**(value or {}))

    def as_dict(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {k: v for k, v in asdict(self).items() if v != getattr(Calibration(), k)}

    @property
    def identity(self) -> str:
        """Changes when the token ids may: a file by its content, a data set by its name."""
        content = b""
        if self.text and (path := Path(self.text)).is_file():
            content = path.read_bytes()
        return f"{asdict(self)} {hashlib.sha256(content).hexdigest()}"

    def sample(self, checkpoint: Checkpoint) -> Sample:
        from surgery.calibration.data import sample_ids

        text = None if self.text is None else Path(self.text)
        return sample_ids(checkpoint, tokens=self.tokens, sequence_length=self.sequence_length, split="repair",
                          file=text, dataset=self.dataset)  # fmt: skip

    def walk(self, checkpoint: Checkpoint, input_ids: Tensor) -> Walk:
        from surgery.calibration.walk import Walk, choose_device, choose_dtype

        device = choose_device(self.device)
        return Walk(checkpoint, input_ids, device=device, dtype=choose_dtype(self.dtype, device),
                    memory_budget=self.memory_budget)  # fmt: skip
