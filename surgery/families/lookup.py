"""Find the family of a config, and the MLP blocks of a checkpoint."""

from __future__ import annotations

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
from surgery.families.remembered import discovered


def known() -> Mapping[str, Family]:
    """Return every family by `model_type`."""
    return DENSE | MOE


def find(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    In multimodal models it is that of `text_config` if known. A `model_type` that is in no table is
    looked up by discovery (discovery.py). Raises SurgeryError where that proves nothing.
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
    found = discovered(_stock(config))
    operated = str(config.get("model_type")).startswith(OPERATED)
    return found.gathered if operated and found.loose else found


def _stock(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config without the custom-code blocks that surgery put into it."""
    kind = str(config.get("model_type")).removeprefix(OPERATED)
    return {k: v for k, v in config.items() if k != "surgery_blocks"} | {"model_type": kind}


def locate(checkpoint: Checkpoint) -> Blocks:
    """Return the decoder layers of a checkpoint.

    Raises SurgeryError where the tensors do not belong to the config, or to no language model.
    """
    family = find(checkpoint.config)
    require_language_model(checkpoint, known())
    found = list(_layer_names(family, checkpoint.tensors))
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
