"""Make the choices that a plan does not wait for, and prepare what calibrations give.

`carve --allocation greedy` and `memory --layers auto` choose by a walk of the source. Until the
output is written they are planned with a provisional choice of the same sizes, so that a dry run
walks nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from surgery import files
from surgery.checkpoint import Checkpoint, Pending
from surgery.errors import SurgeryError
from surgery.storage import scratch
from surgery.storage.processes import Group
from surgery.workflow.observer import Observer, Silent
from surgery.workflow.recipe import apply_step


def settle(
    output: Checkpoint,
    folder: Path | None = None,
    observer: Observer | None = None,
    group: Group | None = None,
) -> Checkpoint:
    """Return `output` with every pending choice made; the first process of the group makes them.

    1. The first step that waits for a choice is found, and what it was applied to is prepared.
    2. The choice is made by a walk, or taken from `folder`, where an interrupted run left it.
    3. The step is applied again with the choice, and then every step after it.

    Every process of a group calls this.
    """
    observer, group = observer or Silent(), group or Group()
    while waiting := [i for i, step in enumerate(output.steps) if step.pending]:
        step, later = output.steps[waiting[0]], output.steps[waiting[0] + 1 :]
        pending = step.pending
        assert pending is not None
        choose = partial(_choose, pending, folder, observer)
        choice: dict[str, Any] = group.first(choose)
        output = apply_step(pending.base, step.operation, step.asked | choice)
        for following in later:
            output = apply_step(output, following.operation, following.asked)
    return output


def _choose(pending: Pending, folder: Path | None, observer: Observer) -> dict[str, Any]:
    if folder is None:
        return pending.choose(lambda n: None)
    scratch.claim(folder)
    prepare(pending.base, folder, observer)
    name = hashlib.sha256(pending.identity.encode()).hexdigest()[:16]
    kept = folder / f"choice-{name}.json"
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    with observer.stage(pending.title, pending.total, "layer") as progress:
        choice = pending.choose(progress)
    files.write(folder, kept.name, json.dumps(choice).encode(), sync=False)
    return choice


def prepare(output: Checkpoint, folder: Path, observer: Observer) -> None:
    """Run the work that the steps wait for, in their order.

    What an interrupted run has left in `folder` is taken up.
    """
    for step in output.steps:
        if step.work is not None:
            scratch.claim(folder)
            require_space(folder, step.work.nbytes)
            title = f"{step.operation}: {step.work.title}"
            with observer.stage(title, step.work.total, "layer") as progress:
                step.work.prepare(folder, progress)


def require_space(folder: Path, nbytes: int) -> None:
    """Raise SurgeryError where the disk of `folder` has fewer bytes free."""
    free = shutil.disk_usage(next(p for p in folder.resolve().parents if p.exists())).free
    if nbytes > free:
        raise SurgeryError(
            f"{folder} needs {nbytes / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free",
            "free some space, or give a folder on another disk with --out",
        )
