"""Find the family of a config, and the MLP blocks of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.families.classes import require_language_model
from surgery.families.dense import DENSE
from surgery.families.family import OPERATED, Family
from surgery.families.mlp import Blocks
from surgery.families.moe import MOE
from surgery.families.remembered import discovered
from surgery.families.roles import TOWERS


def known() -> Mapping[str, Family]:
    """Return every family by `model_type`."""
    return DENSE | MOE


def find(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    It is the row of its `model_type`, or what discovery proves of it (discovery.py); in multimodal
    models the MLPs are those of the language model. Raises SurgeryError where nothing is proved.
    """
    stated = str(config.get("model_type") or "")
    if not stated:
        raise SurgeryError("config.json has no model_type", "is this a Hugging Face checkpoint?")
    kind = stated.removeprefix(OPERATED)
    found = known().get(kind) or discovered({**config, "model_type": kind})
    return found.gathered if stated != kind and found.loose else found


def locate(checkpoint: Checkpoint) -> Blocks:
    """Return the decoder layers of a checkpoint.

    Raises SurgeryError where the tensors do not belong to the config, or to no language model.
    """
    family = find(checkpoint.config)
    require_language_model(checkpoint)
    found = _layer_names(family, checkpoint)
    prefixes = {m["prefix"] for m in found}
    stated = checkpoint.text_config.get(family.layers_key)
    count = int(stated or max((int(m["layer"]) + 1 for m in found), default=0))
    if not prefixes or not count:
        raise SurgeryError(
            f"no tensor of a {family.model_type} layer among {len(checkpoint.tensors)} tensors",
            "give a checkpoint whose tensors belong to its config.json",
        )
    return Blocks(family=family, checkpoint=checkpoint, prefix=min(prefixes, key=len), count=count)


def layers_beyond(checkpoint: Checkpoint) -> list[int]:
    """Return the layers with tensors beyond the number of layers that config.json states.

    No class runs them, except those for multi-token prediction. There are none where the family is
    not known.
    """
    try:
        blocks = locate(checkpoint)
    except SurgeryError:
        return []
    numbered = re.compile(rf"{re.escape(blocks.prefix)}([0-9]+)\.")
    found = {int(match[1]) for n in checkpoint.tensors if (match := numbered.match(n))}
    return sorted(index for index in found if index >= blocks.count)


def _layer_names(family: Family, checkpoint: Checkpoint) -> list[re.Match[str]]:
    """Return the names of tensors in the MLPs of decoder layers.

    The list of layers has its name in the model, or the one that the loader knows on disk. What
    wraps a language model has been called differently by several versions: its last name must do.
    """
    part = re.escape(f"{family.mlp or family.stored(family.down)}.")
    lists = [family.layers_on_disk, family.layers]
    if checkpoint.config.get("text_config"):
        lists.append(family.layers.rpartition(".")[2])
    for layers in map(re.escape, filter(None, lists)):
        pattern = re.compile(rf"(?P<prefix>(?:[\w.]+\.)?{layers}\.)(?P<layer>[0-9]+)\.{part}")
        matches = (pattern.match(n) for n in checkpoint.tensors if not TOWERS.search(n))
        if found := [match for match in matches if match]:
            return found
    return []
