"""surgery.json, the record of a conversion.

It is read from folders that may come from anywhere, so it is checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.parsing import read_json
from surgery.checkpoint.schema import Schema, violations
from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, expanded, open_below, read

RECORD = "surgery.json"
_TEXT, _NUMBER, _OBJECT = {"type": "string"}, {"type": ["integer", "null"]}, {"type": "object"}
_STEP: Schema = {
    "type": "object",
    "required": ["operation"],
    "properties": {"operation": _TEXT, "granularity": _NUMBER, "shared": _NUMBER},
}
_SHARD: Schema = {
    "type": "object",
    "required": ["bytes", "sha256"],
    "properties": {
        "bytes": {"type": "integer"},
        "sha256": {"type": ["string", "null"]},
        "crc32": _TEXT,
    },
}
_SCHEMA: Schema = {
    "type": "object",
    "required": [
        "name",
        "source",
        "command",
        "recipe",
        "exact",
        "layers",
        "fingerprint",
        "shards",
        "verification",
    ],
    "properties": {
        "name": _TEXT,
        "command": _TEXT,
        "fingerprint": _TEXT,
        "exact": {"type": "boolean"},
        "shards": _OBJECT,
        "files": {"type": "object", "additionalProperties": _TEXT},
        "source": {
            "type": "object",
            "required": ["location", "revision"],
            "properties": {
                "location": _TEXT,
                "revision": {"type": ["string", "null"]},
                "strip_prefix": _TEXT,
                "dequantize": {"type": "boolean"},
            },
        },
        "recipe": {"type": "array", "items": _STEP},
        "layers": {"type": "array", "items": {"type": "integer"}},
        "notes": {"type": "array", "items": _TEXT},
        "require": {
            "type": "object",
            "properties": {"max_perplexity": {"type": "number"}},
            "additionalProperties": False,
        },
        "verification": {"type": ["object", "null"]},
        "finetune": {
            "type": "object",
            "additionalProperties": {"type": ["string", "number", "boolean"]},
        },
    },
}
_HINT = "convert the model again"


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of an output.

    Raises SurgeryError where there is none, where it is not the record of a conversion, and where
    it names a file outside its folder.
    """
    path = folder / RECORD
    try:
        record = read_json(read(folder, RECORD, JSON_LIMIT), str(path), _HINT)
    except (FileNotFoundError, NotADirectoryError):
        raise SurgeryError(
            f"no {RECORD} in {folder}", "give a folder that surgery wrote and finished"
        ) from None
    if not isinstance(record, dict):
        raise SurgeryError(f"{path} is not the record of a conversion", _HINT)
    for found in violations(record, _SCHEMA):
        raise SurgeryError(
            f"{path} is not the record of a conversion: {found.message[:200]}", _HINT
        )
    for name, shard in record["shards"].items():
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise SurgeryError(
                f"{path} names a file outside its folder: {name[:200]!r}",
                "do not use this checkpoint: its record is broken or hostile",
            )
        for found in violations(shard, _SHARD, ("shards", name)):
            raise SurgeryError(f"{path}, {name}: {found.message[:200]}", _HINT)
    for name in record.get("files", ()):
        if not _is_inside(name):
            raise SurgeryError(
                f"{path} names a file outside its folder: {name[:200]!r}",
                "do not use this checkpoint: its record is broken or hostile",
            )
    return record


def _is_inside(name: str) -> bool:
    """Return whether a name leads below its folder, by no hidden part."""
    parts = name.split("/")
    return "\0" not in name and not any(not part or part.startswith(".") for part in parts)


def listed(record: Mapping[str, Any]) -> list[str]:
    """Return the files of an output: those that its record lists, and the record."""
    return sorted({*record["shards"], *record.get("files", ()), RECORD})


def changed(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Return the small files of an output that are missing, or not what was written."""
    return [
        name
        for name, sha256 in record.get("files", {}).items()
        if sha256_of(folder, name) != sha256
    ]


def sha256_of(folder: Path, name: str) -> str | None:
    """Return the sha256 of a file below a folder; None where there is no such file.

    Raises SurgeryError for a link, and for anything but a regular file.
    """
    hasher = hashlib.sha256()
    try:
        fd = open_below(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(fd, "rb", buffering=0) as f:
        while data := f.read(4 << 20):
            hasher.update(data)
    return hasher.hexdigest()


def seen_from(folder: Path | None, location: str) -> str:
    """Return a path on this disk as seen from an output's folder; a Hub id or URL as it is.

    Outputs are published, so they name no folder of this disk beyond those around them: what is
    more than two levels up is named as if it were beside the output.
    """
    path = expanded(location)
    if not path.exists() and not location.startswith(("/", ".", "~")):
        return location
    path = path.resolve()
    if folder is not None and len(Path(os.path.commonpath([path, folder.resolve()])).parts) > 1:
        relative = Path(os.path.relpath(path, folder.resolve()))
        if relative.parts.count("..") <= 2:
            return relative.as_posix()
    return f"../{path.name}"
