"""Model classes that are no language models: how each is recognised, and what to do instead.

A config's `architectures` names the class that was saved. A classifier has the MLPs of its family,
but no head whose logits could be compared.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.checkpoint.edit import HEADS
from surgery.errors import SurgeryError

_OWN_HEAD = "operate on the language model that it was trained from, then train this head again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Classes whose head is not that of a language model.

    Args:
        names: a pattern of the class's name.
        what: completes "CLASS is …".
    """

    names: str
    what: str


# The first row that fits is taken.
_HEADS = (
    Head(names=r"ForSequenceClassification$", what="a classifier or a reward model"),
    Head(names=r"(ForReward|Reward)\w*$", what="a reward model"),
    Head(names=r"ForTokenClassification$", what="a classifier of tokens"),
    Head(names=r"ForQuestionAnswering$", what="a model for question answering"),
    Head(names=r"(ForMultipleChoice|DoubleHeadsModel)$", what="a model for multiple choice"),
    Head(names=r"ForMaskedLM$", what="a model of masked text"),
)


@dataclass(frozen=True, slots=True)
class Named:
    """A model class that no Auto class leads to, with the method that they have."""

    cls: Any

    def from_config(self, config: Any, *, dtype: Any = None, **options: Any) -> Any:
        """Build the model, as an Auto class does."""
        return self.cls._from_config(config, dtype=dtype)


def named_after(config: Any) -> Named | None:
    """Return the one language model beside a config class of transformers; None if there is none.

    The text models of some wrappers have classes that no Auto class knows (Emu3, Mllama).
    """
    place = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(place)
    except ImportError:
        return None
    found = [
        c
        for n, c in vars(module).items()
        if n.endswith(("ForCausalLM", "ForConditionalGeneration"))
        and getattr(c, "config_class", None) is type(config)
    ]
    return Named(found[0]) if len(found) == 1 else None


def require_language_model(checkpoint: Checkpoint) -> None:
    """Raise SurgeryError for a class that is no language model."""
    name = _class(checkpoint)
    for head in _HEADS:
        if re.search(head.names, name):
            raise SurgeryError(f"{name} is {head.what}: it has no language-model head", _OWN_HEAD)


def without_head(checkpoint: Checkpoint, missing: Sequence[str]) -> SurgeryError | None:
    """Return the error for the body of a model, which was saved without its head.

    It is None where it is another tensor that is missing, or another class.
    """
    name = _class(checkpoint)
    if not name.endswith("Model") or not any(m.endswith(HEADS) for m in missing):
        return None
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    return SurgeryError(
        f"{name} is the body of a language model, without its head ({missing[0]})",
        f"give the whole model, a {whole}; without it nothing can be compared",
    )


def _class(checkpoint: Checkpoint) -> str:
    """Return the class that was saved, "" where the config names none."""
    return str((checkpoint.config.get("architectures") or [""])[0])
