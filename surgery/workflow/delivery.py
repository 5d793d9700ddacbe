"""Move a finished output to a URL."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath

from surgery.checkpoint import Checkpoint, make_plan
from surgery.storage import remote
from surgery.storage.lock import HELD, LOCK
from surgery.workflow.convert import Result
from surgery.workflow.observer import Observer


def is_delivered(output: Checkpoint, max_shard_size: int | None, url: str) -> bool:
    """Return whether the URL holds this very output.

    Raises SurgeryError where it holds something else.
    """
    return remote.has_output(url, make_plan(output, max_shard_size).fingerprint)


def deliver(result: Result, url: str, observer: Observer) -> None:
    """Send what the record of an output lists to the URL, and remove that here."""
    sizes = remote.sizes_of(result.folder, result.record)
    with observer.stage("sending", sum(sizes.values()), "B") as progress:
        remote.upload(result.folder, url, result.record, progress)
    _remove(result.folder, [*sizes, LOCK, HELD])


def _remove(folder: Path, names: list[str]) -> None:
    """Remove files of an output, and each folder that is empty then; a stranger's files stay."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    parents = {parent for name in names for parent in PurePosixPath(name).parents}
    for parent in sorted(parents, reverse=True):
        with suppress(OSError):  # it is not empty
            (folder / parent).rmdir()
