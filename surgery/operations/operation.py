"""`Operation`: all that is known of one operation, in one record beside its function.

The command line, recipes, model cards, scripts and the verification read the record. Nothing else
in the project names an operation.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks.paper import Paper
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, schema

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.checkpoint.row import Row
    from surgery.proof.comparison import Check, Comparison

Parameters = Mapping[str, Any]  # of a step, as surgery.json and recipes hold them


OWN_TEXT = (
    "calibration on text of your own kind too: --text or --dataset",
    "more text: --tokens",
    "training: finetune/finetune.py in the output",
)


def _nothing(*_: Any) -> tuple[()]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """What the project knows of an operation.

    Args:
        name: of the command, of the function in the Python API and in recipes.
        function: makes a checkpoint of a checkpoint; its keywords are the operation's options, and
            its docstring describes them under "Args:".
        summary: one line for `surgery --help`.
        done: the phrase of a card, as in "every MLP became 8 experts": from the parameters and
            which MLPs it was, "every MLP" or "the MLP of 3 layers".
        why: one or two sentences for the card.
        limits: what a reader must know of a model that was not trained since.
        suffix: the end of an output folder's name.
        papers: those of the methods that the parameters chose.
        tags: of the model on the Hub.
        blocks: kinds of custom-code block that it may put in.
        checks: what its outputs are checked for, beside parity or quality.
        beside: models that the verification shows beside the output of this operation alone.
        makes_zeros: whether it makes products of the MLPs zero, which training then keeps up.
        remedies: what to try where the quality is too bad, from the parameters.
        models: options that hold checkpoints; a recipe names their folders or Hub ids.
        files: options that hold paths of files.
    """

    name: str
    function: Callable[..., Checkpoint]
    summary: str
    done: Callable[[Parameters, str], str]
    why: str
    limits: str = ""
    suffix: Callable[[Parameters], str]
    papers: Callable[[Parameters], Sequence[Paper]] = _nothing
    tags: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    checks: Callable[[Parameters], Sequence[Check]] = _nothing
    beside: Callable[[Checkpoint, Checkpoint, Parameters], Mapping[str, Checkpoint]] | None = None
    makes_zeros: bool = False
    remedies: Callable[[Parameters], Sequence[str]] = _nothing
    models: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def options(self) -> schema.Schema:
        """Return the JSON schema of its options, from signature and docstring of its function."""
        names = {"Checkpoint": str, "Calibration": Calibration}
        return schema.of_function(self.function, names)

    @property
    def calibrates(self) -> bool:
        """Return whether it takes calibration text."""
        return "calibration" in inspect.signature(self.function).parameters

    def described(self, parameters: Parameters) -> str:
        """Return what was done, as a phrase."""
        layers = parameters.get("layers")
        where = "every MLP" if not layers else f"the MLP of {len(layers)} layers"
        return self.done(parameters, where)


def check(module: str, *arguments: Any) -> Check:
    """Return `check(*arguments)` of a module of surgery.proof, which is imported when it runs.

    A record is read far more often than it is verified, and the proof needs torch.
    """

    def run(pair: Comparison, input_ids: Tensor) -> Iterable[Row]:
        proof = importlib.import_module(f"surgery.proof.{module}")
        rows: Iterable[Row] = proof.check(*arguments)(pair, input_ids)
        return rows

    return run


def bypass_phrase(parameters: Parameters) -> str:
    """Return how a card mentions the bypass; empty without one."""
    rank = parameters.get("bypass")
    return f", with a linear bypass of rank {rank}" if rank else ""


def hyphenated(*words: str) -> str:
    """Return the end of a folder's name from its words, less those that are empty."""
    return "-".join(filter(None, words))
