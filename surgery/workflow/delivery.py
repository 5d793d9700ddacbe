"""Move a finished output to a URL."""

from __future__ import annotations

import shutil

from surgery.checkpoint import Checkpoint, make_plan
from surgery.storage import remote
from surgery.workflow.convert import Result
from surgery.workflow.observer import Observer


def is_delivered(output: Checkpoint, max_shard_size: int | None, url: str) -> bool:
    """Return whether the URL holds this very output.

    Raises SurgeryError where it holds something else.
    """
    return remote.has_output(url, make_plan(output, max_shard_size).fingerprint)


def deliver(result: Result, url: str, observer: Observer) -> None:
    """Send the output's folder to the URL, and remove it here."""
    total = sum(p.stat().st_size for p in result.folder.rglob("*") if p.is_file())
    with observer.stage("sending", total, "B") as progress:
        remote.upload(result.folder, url, result.record["fingerprint"], progress)
    shutil.rmtree(result.folder)
