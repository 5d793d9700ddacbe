"""A checkpoint: a config, named lazy tensors, side files. Surgery is a function from checkpoint to
checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgery.checkpoint.tensors import LazyTensor, SourceFile
from surgery.checkpoint.work import Progress, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a checkpoint was read from: a folder, a file or a Hub id, and the commit it was pinned
    to.
    """

    location: str
    revision: str | None = None
    folder: str | None = None  # the folder on this disk, which no output may touch


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A choice of an operation that needs a walk, and that its plan does not wait for.

    The output is planned with a provisional choice of the same shapes. `choose(progress)` makes
    the real one: the parameters that change, as JSON. `base` is what the operation was applied to;
    `identity` changes whenever the choice may; `total` counts what `progress` is told.
    """

    base: Checkpoint
    title: str
    total: int
    identity: str
    choose: Callable[[Progress], dict[str, Any]]
    asked: dict[str, Any]  # the parameters that ask for the choice, as a recipe holds them


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation that was applied: its name, its parameters, and whether it claims to keep the
    function exactly.
    """

    operation: str
    parameters: dict[str, Any]
    exact: bool
    layers: tuple[int, ...]  # the layers whose MLP it changed
    notes: tuple[str, ...] = ()  # what the user should know
    work: Work | None = field(default=None, compare=False)  # runs before its tensors can be read
    pending: Pending | None = field(default=None, compare=False)  # is settled before the plan

    @property
    def asked(self) -> dict[str, Any]:
        """The parameters that make the same again: those that ask for a choice that is pending."""
        return self.parameters | (self.pending.asked if self.pending else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """`config` is the parsed config.json; `tensors` maps on-disk names to lazy tensors; `files` are
    copied byte for byte.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    files: tuple[SourceFile, ...] = ()
    source: Source
    steps: tuple[Step, ...] = ()
    shards: Mapping[str, SourceFile] = field(
        default_factory=dict
    )  # tensor -> the source file that holds it whole
    custom_code: bool = False
    card: SourceFile | None = None  # the source's README.md, of which an output takes the metadata

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config: `text_config` in multimodal models, else the
        whole.
        """
        return self.config.get("text_config") or self.config

    @property
    def exact(self) -> bool:
        """Whether every step claims to keep the function."""
        return all(step.exact for step in self.steps)

    @property
    def parameters(self) -> int:
        return sum(t.numel for t in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def replace(self, *, step: Step | None = None, **changes: Any) -> Checkpoint:
        """A copy with `changes`, and `step` appended to what was done."""
        steps = (*self.steps, step) if step else self.steps
        made = dataclasses.replace(self, steps=steps, **changes)
        if step and step.work:
            step.work.output = made
        return made


def natural_key(name: str) -> list[tuple[int, str | int]]:
    """Sorts `layers.2` before `layers.10`."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
