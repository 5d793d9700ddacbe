"""What an output says of itself: its name, and the content of surgery.json."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from surgery import __version__, operations
from surgery.calibration.texts import relocated
from surgery.checkpoint import Checkpoint, Plan, Source, Step
from surgery.checkpoint.edit import head_note
from surgery.demo import DEMO, MODEL
from surgery.errors import SurgeryError
from surgery.families import find, layers_beyond
from surgery.files import expanded
from surgery.storage import record as stored
from surgery.storage.digest import Digest
from surgery.storage.record import RECORD, seen_from

PACKAGES = ("torch", "transformers", "safetensors", "huggingface-hub")


def suffix(checkpoint: Checkpoint) -> str:
    """Return what the steps amount to, as the end of a folder's name: "mixtral-8x-top2", "relu"."""
    steps = checkpoint.steps
    records = ((operations.known(s.operation), s) for s in steps)
    return "-".join(r.suffix(s.parameters) if r else s.operation for r, s in records) or "copy"


def default_out(checkpoint: Checkpoint, suffix: str) -> Path:
    """Return NAME-SUFFIX: beside a source on this disk, in this folder for any other."""
    location = expanded(checkpoint.source.location)
    if location.resolve() == MODEL.resolve():
        return Path(f"demo-{suffix}")
    if checkpoint.source.revision is None and location.exists():
        folder = location.resolve() if location.is_dir() else location.resolve().parent
        return folder.parent / f"{folder.name}-{suffix}"
    return Path(f"{checkpoint.source.location.rsplit('/', 1)[-1]}-{suffix}")


def notes_of(output: Checkpoint) -> list[str]:
    """Return what the user should know: of the source, and of each step."""
    notes = [*output.notes, *(note for step in output.steps for note in step.notes)]
    if note := head_note(output, _is_tied(output)):
        notes.append(note)
    if beyond := layers_beyond(output):
        which = f"layer {beyond[0]}" if len(beyond) == 1 else f"layers {beyond[0]} to {beyond[-1]}"
        notes.append(
            f"{which}, beyond the number of layers in config.json: copied as in the source"
        )
    return notes


def _is_tied(output: Checkpoint) -> bool:
    """Return whether the config, or the default of its class, ties the head to the embedding."""
    config = output.text_config
    with suppress(SurgeryError):  # a copy of a model whose family is unknown
        config = find(output.config).effective(config)
    return bool(config.get("tie_word_embeddings"))


def make_record(
    output: Checkpoint,
    plan: Plan,
    digests: Mapping[str, Digest | None],
    command: str = "",
    finetune: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Return the content of surgery.json. Nothing in it depends on when or how often it was run.

    Paths in it are as seen from `folder`, the output's.
    """
    source, versions = output.source, {"python": platform.python_version()}
    versions["model-surgery"] = __version__  # a checkout that is not installed has no metadata
    versions |= {package: importlib.metadata.version(package) for package in PACKAGES}
    unknown = {"sha256": None}
    shards = {s.name: {"bytes": s.nbytes, **(digests.get(s.name) or unknown)} for s in plan.shards}
    record = {
        "name": default_out(output, suffix(output)).name,
        "source": _source(source, folder),
        "command": _without_paths(command),
        "recipe": [_step(s, folder) for s in output.steps],
        "notes": notes_of(output),
        "exact": output.exact,
        "layers": sorted({i for s in output.steps for i in s.layers}),
        "calibration": [s.work.report for s in output.steps if s.work],
        "versions": versions,
        "fingerprint": plan.fingerprint,
        "shards": shards,
        "files": {n: hashlib.sha256(data).hexdigest() for n, data in plan.small.items()},
        "verification": None,
    }
    return record | ({"finetune": dict(finetune)} if finetune else {})


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of an output, whose steps are those of known operations.

    Raises SurgeryError where there is none, and where it is not the record of a conversion.
    """
    found = stored.read_record(folder)
    for step in found["recipe"]:
        try:
            operations.check_step(step)
        except SurgeryError as e:
            raise SurgeryError(f"{folder / RECORD}: {e.message}", e.hint) from None
    return found


def _source(source: Source, folder: Path | None) -> dict[str, Any]:
    """Return where the source is, and how it was opened."""
    opened = {"strip_prefix": source.strip_prefix, "dequantize": source.dequantize}
    asked = {key: value for key, value in opened.items() if value}
    return {"location": _place(source, folder), "revision": source.revision, **asked}


def _place(source: Source, folder: Path | None) -> str:
    if source.revision:
        return source.location
    embedded = expanded(source.location).resolve() == MODEL.resolve()
    return DEMO if embedded else seen_from(folder, source.location)


def _step(step: Step, folder: Path | None) -> dict[str, Any]:
    """Return a step's parameters, with paths as seen from the output's folder."""
    record = operations.known(step.operation)
    found: dict[str, Any] = {"operation": step.operation, **step.parameters}
    for key in (*record.models, *record.files) if record else ():
        if found.get(key):
            found[key] = [seen_from(folder, location) for location in found[key]]
    calibration = found.get("calibration") or {}
    if "text" in calibration:
        found["calibration"] = relocated(calibration, lambda path: seen_from(folder, path))
    return found


def _without_paths(command: str) -> str:
    """Return the command with the last part of each absolute path; the rest is private."""
    words = shlex.split(command)
    return shlex.join(Path(w).name if w.startswith(("/", "~")) else w for w in words)
