"""A checkpoint: a config, named lazy tensors and side files.

Surgery is a function from checkpoint to checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgery.checkpoint.parsing import is_number
from surgery.checkpoint.tensors import LazyTensor, SourceFile
from surgery.checkpoint.work import Progress, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a checkpoint was read from.

    Args:
        location: a folder, a file, a Hub id or a URL.
        revision: the commit that a Hub id was pinned to.
        folder: the folder on this disk, which no output may touch.
        strip_prefix: what was stripped from the names of tensors.
        dequantize: whether its weights were dequantised.
    """

    location: str
    revision: str | None = None
    folder: str | None = None
    strip_prefix: str | None = None
    dequantize: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A choice of an operation that needs a walk, and that its plan does not wait for.

    Until it is made, the output is described with a provisional choice of the same shapes.

    Args:
        base: what the operation was applied to.
        title: what a progress bar calls the walk.
        total: how many units `progress` is told of.
        identity: a line that changes whenever the choice may.
        choose: makes the choice, told of progress: the parameters that change, as JSON.
        check: raises SurgeryError for what is known to keep the walk from beginning.
        asked: the parameters that ask for the choice, as a recipe holds them.
    """

    base: Checkpoint
    title: str
    total: int
    identity: str
    choose: Callable[[Progress], dict[str, Any]]
    check: Callable[[], None] = lambda: None
    asked: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation that was applied to a checkpoint.

    Args:
        operation: the name of the operation.
        parameters: its parameters.
        exact: whether it claims to compute the same function as before.
        layers: the layers whose MLP it changed.
        notes: what the user should know about it; the card repeats them.
        advice: what whoever converts may try instead; shown once, and in no card.
        work: what must run before its tensors can be read.
        pending: a choice that is made before the output is planned.
    """

    operation: str
    parameters: dict[str, Any]
    exact: bool
    layers: tuple[int, ...]
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    work: Work | None = field(default=None, compare=False)
    pending: Pending | None = field(default=None, compare=False)

    @property
    def asked(self) -> dict[str, Any]:
        """Return the parameters that make the same again, with choices still to be made."""
        return self.parameters | (self.pending.asked if self.pending else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose tensors have not been read.

    Args:
        config: the parsed config.json.
        tensors: lazy tensors by their names on disk.
        files: side files, which are copied byte for byte.
        source: where the checkpoint was read from.
        steps: the operations that were applied to it, in order.
        shards: the safetensors file of the source that holds each tensor whole, by tensor name.
        custom_code: whether loading the source runs code of its own (`auto_map` in its config).
        card: the source's README.md; the card of an output takes over its metadata.
        notes: what the user should know of the source, such as files that are ignored.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    files: tuple[SourceFile, ...] = ()
    source: Source
    steps: tuple[Step, ...] = ()
    shards: Mapping[str, SourceFile] = field(default_factory=dict)
    custom_code: bool = False
    card: SourceFile | None = None
    notes: tuple[str, ...] = ()

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Return the config of the language model, which multimodal models call `text_config`."""
        return self.config.get("text_config") or self.config

    @property
    def exact(self) -> bool:
        """Return whether every step claims to compute the same function as before."""
        return all(step.exact for step in self.steps)

    @property
    def parameters(self) -> int:
        """Return the number of values in all tensors."""
        return sum(t.numel for t in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors in bytes, without headers and side files."""
        return sum(t.nbytes for t in self.tensors.values())

    def replace(self, *, step: Step | None = None, **changes: Any) -> Checkpoint:
        """Return a copy with the fields in `changes` replaced and `step` appended to its steps."""
        steps = (*self.steps, step) if step else self.steps
        made = dataclasses.replace(self, steps=steps, **changes)
        if step and step.work:
            step.work.output = made
        return made


def natural_key(name: str) -> list[tuple[int, str | int]]:
    """Return a sort key that puts `layers.2` before `layers.10`."""
    return [
        (1, int(part)) if is_number(part) else (0, part) for part in re.split(r"([0-9]+)", name)
    ]
