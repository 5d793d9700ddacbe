"""What an output says of itself: its name, and the content of surgery.json."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery import __version__, operations
from surgery.checkpoint import Checkpoint, Plan
from surgery.demo import MODEL
from surgery.storage.digest import Digest

PACKAGES = ("torch", "transformers", "safetensors", "huggingface-hub")


def suffix(checkpoint: Checkpoint) -> str:
    """Return what the steps amount to, as the end of a folder's name: "mixtral-8x-top2", "relu"."""
    steps = checkpoint.steps
    return "-".join(operations.find(s.operation).suffix(s.parameters) for s in steps) or "copy"


def default_out(checkpoint: Checkpoint, suffix: str) -> Path:
    """Return NAME-SUFFIX: beside a source on this disk, in this folder for any other."""
    location = Path(checkpoint.source.location).expanduser()
    if location.resolve() == MODEL.resolve():
        return Path(f"demo-{suffix}")
    if checkpoint.source.revision is None and location.exists():
        folder = location.resolve() if location.is_dir() else location.resolve().parent
        return folder.parent / f"{folder.name}-{suffix}"
    return Path(f"{checkpoint.source.location.rsplit('/', 1)[-1]}-{suffix}")


def make_record(
    output: Checkpoint,
    plan: Plan,
    digests: Mapping[str, Digest | None],
    command: str = "",
    finetune: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of surgery.json. Nothing in it depends on when or how often it was run."""
    source, versions = output.source, {"python": platform.python_version()}
    versions["model-surgery"] = __version__  # a checkout that is not installed has no metadata
    versions |= {package: importlib.metadata.version(package) for package in PACKAGES}
    unknown = {"sha256": None}
    shards = {s.name: {"bytes": s.nbytes, **(digests.get(s.name) or unknown)} for s in plan.shards}
    record = {
        "name": default_out(output, suffix(output)).name,
        "source": {"location": source.location, "revision": source.revision},
        "command": command,
        "recipe": [{"operation": s.operation, **s.parameters} for s in output.steps],
        "notes": [n for s in output.steps for n in s.notes],
        "exact": output.exact,
        "layers": sorted({i for s in output.steps for i in s.layers}),
        "calibration": [s.work.report for s in output.steps if s.work],
        "versions": versions,
        "fingerprint": plan.fingerprint,
        "shards": shards,
        "verification": None,
    }
    return record | ({"finetune": dict(finetune)} if finetune else {})
