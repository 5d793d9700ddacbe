"""Everything that can be known to fail before the first byte: the same for a run and a dry run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint import Checkpoint, Plan
from surgery.errors import SurgeryError
from surgery.quoting import command
from surgery.storage import check_place, check_space, check_target, is_finished
from surgery.storage.scratch import require_free
from surgery.workflow.record import read_record
from surgery.workflow.request import Request
from surgery.workflow.settle import require_space
from surgery.workflow.trust import require_trust
from surgery.workflow.verify import require_verifiable


def scratch_folder(out: Path) -> Path:
    """Return where calibrations keep their results until they are written: beside the output."""
    return out.with_name(f"{out.name}.calibration")


def check_request(source: Checkpoint, request: Request) -> None:
    """Check whose code would run, and where the output would be written.

    Raises SurgeryError.
    """
    require_trust(source, request.trust_remote_code)
    check_place(request.out, source)
    require_writable(request.out)


def check_run(source: Checkpoint, output: Checkpoint, plan: Plan, request: Request) -> bool:
    """Make every other check, and return whether the output is finished already.

    An output with a choice that is pending has a provisional plan, so that it cannot be told
    whether a folder holds this very output.

    Raises SurgeryError.
    """
    out, pending = request.out, any(step.pending for step in output.steps)
    check_target(None if pending else plan, out, source)
    if not pending and is_finished(plan, out):
        _require_same_script(out, request.finetune)
        return True
    if request.verify:
        require_verifiable(source, output)
    check_space(plan, out, request.transfer)  # also for what a calibration will download
    if pending or any(step.work for step in output.steps):
        require_free(scratch_folder(out))
    for step in output.steps:
        if step.work:
            require_space(scratch_folder(out), step.work.nbytes)
            step.work.check()
        if step.pending:
            step.pending.check()
    return False


def require_writable(out: Path) -> None:
    """Raise SurgeryError where this user may not make the folder, or write into it."""
    existing = next(p for p in (out, *out.resolve().parents) if p.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SurgeryError(
            f"the output {out} cannot be written: {existing} is not writable",
            "give a folder of your own with --out",
        )


def _require_same_script(out: Path, finetune: Mapping[str, Any]) -> None:
    """Raise SurgeryError where a finished output has a fine-tune script of other options."""
    if finetune and finetune != read_record(out).get("finetune"):
        raise SurgeryError(
            f"{out} is finished, and its fine-tune script has other options than these",
            f"remove it ({command('rm', '-r', '--', out)}) or give another folder with --out",
        )
