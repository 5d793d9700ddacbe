"""What a data-driven operation is calibrated on, as data: a recipe can hold it, and planning with
it needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from surgery.calibration.texts import choose, require_share, weighted
from surgery.errors import UsageError
from surgery.files import expanded

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.calibration.data import Sample
    from surgery.calibration.walk import Walk
    from surgery.checkpoint import Checkpoint

GENERATED = "written by the model"  # the domain of what the model writes itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What is read, how much of it, and where it is computed.

    Args:
        tokens: how many are read.
        sequence_length: tokens of a window.
        text: one or several of a file, a folder, and a built-in domain like builtin:german; each
            perhaps with a weight, like notes.txt=2. By default the built-in text of all domains.
        dataset: one or several ids on the Hub, OWNER/NAME or OWNER/NAME:CONFIGURATION, perhaps with
            a weight.
        mix: the share of the built-in text of all domains beside `text` and `dataset`. By default
            0.5; 0 for none.
        generated: the part of the tokens that the model writes itself (generate.py).
        device: by default the fastest there is, as `dtype`.
        memory_budget: bytes of hidden states beyond which they lie in temporary files.
    """

    tokens: int = 65_536
    sequence_length: int = 512
    text: str | Sequence[str] | None = None
    dataset: str | Sequence[str] | None = None
    mix: float | None = None
    generated: float = 0.0
    device: str | None = None
    dtype: str | None = None
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        require_share(self.mix, bool(self.texts or self.datasets))
        for spec in (*self.texts, *self.datasets):
            weighted(spec)
        if self.tokens < 1 or self.sequence_length < 2:
            raise UsageError(
                f"{self.tokens} tokens in windows of {self.sequence_length}", "give more"
            )
        if not 0 <= self.generated <= 1:
            raise UsageError(f"a generated part of {self.generated}", "give a fraction, like 0.5")

    @classmethod
    def of(cls, value: Calibration | Mapping[str, Any] | None) -> Calibration:
        """Return the settings of a recipe or a caller. Raises UsageError for unknown keys."""
        if isinstance(value, Calibration):
            return value
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(value or {}) - set(known)):
            raise UsageError(
                f"unknown key {unknown[0]!r} of calibration", f"known: {', '.join(known)}"
            )
        return cls(**(value or {}))

    def as_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults."""
        found = {k: v for k, v in asdict(self).items() if v != getattr(Calibration(), k)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts that were given, each perhaps with its weight."""
        return _several(self.text)

    @property
    def datasets(self) -> tuple[str, ...]:
        """Return the data sets that were given, each perhaps with its weight."""
        return _several(self.dataset)

    def of_one(self, text: str) -> Calibration:
        """Return the same of one text alone."""
        return replace(self, text=text, dataset=None, mix=0.0)

    @property
    def identity(self) -> str:
        """Return a text that changes when the token ids may.

        A file is known by its content, a data set by its name.
        """
        content = hashlib.sha256()
        for path in (expanded(weighted(spec)[0]) for spec in self.texts):
            content.update(path.read_bytes() if path.is_file() else b"")
        return f"{self.as_dict()} {content.hexdigest()}"

    def sample(self, checkpoint: Checkpoint) -> Sample:
        from surgery.calibration.data import sample_ids

        written = round(self.generated * max(1, self.tokens // self.sequence_length))
        sample = sample_ids(
            checkpoint,
            tokens=max(1, self.tokens - written * self.sequence_length),
            part="fit",
            sequence_length=self.sequence_length,
            texts=choose(self.texts, self.datasets, self.mix),
        )
        return self._extended(sample, checkpoint, written) if written else sample

    def require(self, checkpoint: Checkpoint) -> None:
        """Raise SurgeryError for what would keep a walk from beginning.

        That is a device, a text or a tokenizer that is not there, or ids that the model has no
        embedding for.
        """
        from surgery.calibration.walk import choose_device

        choose_device(self.device)
        replace(self, generated=0.0).sample(checkpoint)
        if self.generated:
            from surgery.calibration.generate import first_id

            first_id(checkpoint)

    def _extended(self, sample: Sample, checkpoint: Checkpoint, written: int) -> Sample:
        """Return the sample, evenly mixed with `written` sequences by the model itself.

        They are mixed because the last rows are held out.
        """
        import torch

        from surgery.calibration.generate import generate
        from surgery.calibration.walk import choose_device, choose_dtype

        device = choose_device(self.device)
        own = generate(
            checkpoint,
            sequences=written,
            length=self.sequence_length,
            dtype=choose_dtype(self.dtype, device),
            device=device,
        )
        own = torch.cat(
            [sample.input_ids[:1, : -self.sequence_length].expand(written, -1), own], dim=1
        )  # BOS, if any
        text = sample.input_ids if self.generated < 1 else sample.input_ids[:0]
        places = torch.cat(
            [(torch.arange(len(part)) + 0.5) / max(1, len(part)) for part in (text, own)]
        )
        order = places.argsort(stable=True)
        names = [*sample.row_domains[: len(text)], *[GENERATED] * written]
        return replace(
            sample,
            input_ids=torch.cat([text, own])[order],
            row_domains=tuple(names[i] for i in order.tolist()) if sample.row_domains else (),
            source=(
                f"{sample.source}, and {written} of {len(text) + written} sequences by the "
                "model itself"
            ),
        )

    def walk(self, checkpoint: Checkpoint, input_ids: Tensor) -> Walk:
        from surgery.calibration.walk import Walk, choose_device, choose_dtype

        device = choose_device(self.device)
        return Walk(
            checkpoint,
            input_ids,
            device=device,
            dtype=choose_dtype(self.dtype, device),
            memory_budget=self.memory_budget,
        )


def _several(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return what is one text, several or none as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())
