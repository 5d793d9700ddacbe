"""Families that were discovered before, kept in the user's cache.

Discovery imports torch and runs a small model; what it found depends on the config's fields and on
the version of transformers alone. A file that is damaged is ignored, and written again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from surgery import files
from surgery.checkpoint.parsing import read_json
from surgery.checkpoint.schema import of_dataclass, violations
from surgery.errors import SurgeryError
from surgery.families.family import Family
from surgery.storage.staging import cache_home

# What a change of the rules of discovery must change, so that nothing older is taken.
RULES = 13
# Fields of a config that say nothing about the model class.
_SILENT = (
    "_name_or_path",
    "architectures",
    "transformers_version",
    "surgery_blocks",
    "auto_map",
    "dtype",
    "torch_dtype",
)
_FIELDS = {f.name for f in dataclasses.fields(Family)} - {"defaults"}
_TUPLES = ("pre_norms", "loose")


def discovered(config: Mapping[str, Any]) -> Family:
    """Return the family that discovery finds for a config, or found for one like it.

    Raises SurgeryError as `discover` does; a refusal is not remembered, since it may be one of this
    machine, where a library is missing.
    """
    fields = {k: v for k, v in config.items() if k not in _SILENT}
    return _discovered(json.dumps(fields, sort_keys=True, default=str))


@cache
def _discovered(text: str) -> Family:
    path = _path(text)
    found = _read(path)
    if found is None:
        from surgery.families.discovery import discover

        found = discover(json.loads(text))
        _write(path, found)
    return found


def _path(text: str) -> Path:
    key = f"{RULES}\n{version('transformers')}\n{text}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return cache_home() / "surgery" / "families" / f"{name}.json"


def _read(path: Path) -> Family | None:
    """Return what a file of the cache holds, None where that is not what `_write` wrote."""
    try:
        fields = read_json(files.content(path, files.JSON_LIMIT), str(path), "")
    except (OSError, SurgeryError):
        return None
    shaped = isinstance(fields, dict) and set(fields) == _FIELDS
    if not shaped or next(violations(fields, of_dataclass(Family)), None):
        return None
    return Family(**fields | {n: tuple(fields[n]) for n in _TUPLES})


def _write(path: Path, family: Family) -> None:
    fields = {n: getattr(family, n) for n in sorted(_FIELDS)}
    try:
        data = json.dumps(fields, sort_keys=True).encode()
        files.write(path.parent, path.name, data, sync=False)
    except (SurgeryError, OSError):
        return  # without a cache it is discovered again
