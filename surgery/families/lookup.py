"""Find the family of a config, and the MLP blocks of a checkpoint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.families.classes import require_language_model
from surgery.families.dense import DENSE
from surgery.families.family import OPERATED, Family
from surgery.families.mlp import Blocks
from surgery.families.moe import MOE


def known() -> Mapping[str, Family]:
    """Return every family by `model_type`."""
    return DENSE | MOE


def find(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    In multimodal models it is that of `text_config` if known. Raises SurgeryError where no
    `model_type` is in the tables.
    """
    stated = ((config.get("text_config") or {}).get("model_type"), config.get("model_type"))
    types = [str(t).removeprefix(OPERATED) for t in stated if t]
    table = known()
    for t in types:
        if t in table:
            operated = OPERATED + t in stated
            return table[t].gathered if operated and table[t].loose else table[t]
    if not types:
        raise SurgeryError("config.json has no model_type", "is this a Hugging Face checkpoint?")
    near = difflib.get_close_matches(types[0], table, 3)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise SurgeryError(
        f"model_type {types[0]!r} is not supported", f"{hint}`surgery families` lists what is"
    )


def locate(checkpoint: Checkpoint) -> Blocks:
    """Return the decoder layers of a checkpoint.

    Raises SurgeryError where the tensors do not belong to the config, or to no language model.
    """
    family = find(checkpoint.config)
    require_language_model(checkpoint, known())
    count = int(checkpoint.text_config.get(family.layers_key) or 0)
    prefixes = {m["prefix"] for m in _layer_names(family, checkpoint.tensors)}
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
    numbered = re.compile(rf"{re.escape(blocks.prefix)}(\d+)\.")
    found = {int(match[1]) for n in checkpoint.tensors if (match := numbered.match(n))}
    return sorted(index for index in found if index >= blocks.count)


def _layer_names(family: Family, names: Mapping[str, Any]) -> Iterator[re.Match[str]]:
    """Yield the names of tensors in the MLPs of decoder layers.

    Vision towers are left out; the towers of other modalities use other names.
    """
    part = re.escape(family.mlp + "." if family.mlp else family.down + ".")
    pattern = re.compile(rf"(?P<prefix>(?:[\w.]+\.)?{family.layers}\.)(?P<layer>[0-9]+)\.{part}")
    for name in names:
        if "vision" not in name and (match := pattern.match(name)):
            yield match
