"""Export: write a checkpoint as one file that another engine reads.

The file has a temporary name until it is whole and on the disk. What a killed run leaves begins
with a dot, and the next run replaces it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from surgery import files
from surgery.checkpoint import Checkpoint
from surgery.engines import smallthinker
from surgery.engines.gguf import File
from surgery.errors import SurgeryError, UsageError
from surgery.quoting import command
from surgery.storage import check_place
from surgery.storage.lock import held
from surgery.workflow.checks import require_writable
from surgery.workflow.convert import BASE_MEMORY
from surgery.workflow.observer import Observer, Silent
from surgery.workflow.settle import require_space

FORMATS: dict[str, Callable[[Checkpoint, str], File]] = {"gguf": smallthinker.smallthinker}
_IDENTITY = "surgery.fingerprint"  # the key of the metadata that says what the file was made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A file for another engine: what was written, or would be.

    Args:
        file: where it is.
        format: the name of the format.
        architecture: what the engine takes it for.
        type: the type of its matrices.
        nbytes: its size.
        tensors: how many it has.
        peak_memory: about how many bytes are held while it is written.
        already: whether exactly this file was there before.
        notes: what a user of the file should know.
    """

    file: Path
    format: str
    architecture: str
    type: str
    nbytes: int
    tensors: int
    peak_memory: int
    already: bool
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self) | {"file": str(self.file), "notes": list(self.notes)}


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    format: str = "gguf",
    type: str = "bf16",
    dry_run: bool = False,
    observer: Observer | None = None,
) -> Exported:
    """Write a checkpoint as the file `out`.

    Args:
        checkpoint: a stock one, on this disk or elsewhere.
        out: the file.
        format: a name in `FORMATS`.
        type: that of the matrices.
        dry_run: check everything that is checked before the first byte, and write nothing.
        observer: told of the progress.

    Raises SurgeryError for what the engine cannot hold, and before the first byte for a file that
    holds something else and a disk that is too small.
    """
    if format not in FORMATS:
        raise UsageError(f"no format {format!r}", f"choose from {', '.join(FORMATS)}")
    _require_written(checkpoint)
    file = _identified(FORMATS[format](checkpoint, type))
    already = _check(checkpoint, file, out)
    if not already and not dry_run:
        with held(out.parent):
            _write(file, out, observer or Silent())
    return Exported(
        file=out,
        format=format,
        architecture=str(file.metadata["general.architecture"]),
        type=type,
        nbytes=file.nbytes,
        tensors=len(file.tensors),
        peak_memory=BASE_MEMORY + file.peak_memory,
        already=already,
        notes=file.notes,
    )


def _require_written(checkpoint: Checkpoint) -> None:
    """Raise UsageError where values are still to be fitted on text."""
    for step in checkpoint.steps:
        if step.work or step.pending:
            raise UsageError(
                f"what {step.operation} fits on text is not there yet",
                "write the checkpoint with surgery.write, and export that",
            )


def _identified(file: File) -> File:
    """Return the file with a line in its metadata that changes whenever a value may."""
    digest = hashlib.sha256(file.header)
    for tensor in file.tensors:
        digest.update(f"{tensor.value.identity()}\n".encode())
    return replace(file, metadata={**file.metadata, _IDENTITY: digest.hexdigest()})


def _check(checkpoint: Checkpoint, file: File, out: Path) -> bool:
    """Return whether `out` is exactly this file already.

    Raises SurgeryError where it may not be written.
    """
    check_place(out.parent, checkpoint)
    if out.is_dir():
        raise SurgeryError(f"the output {out} is a folder", "give a file with --out")
    if out.exists() or out.is_symlink():
        if _is_there(file, out):
            return True
        raise SurgeryError(
            f"{out} exists, and is not what this command writes",
            f"remove it ({command('rm', '--', out)}) or give another file with --out",
        )
    require_writable(out.parent)
    require_space(out, file.nbytes)
    return False


def _is_there(file: File, out: Path) -> bool:
    try:
        with os.fdopen(files.open_below(out.parent, out.name), "rb") as f:
            return out.stat().st_size == file.nbytes and f.read(len(file.header)) == file.header
    except OSError:
        return False


def _write(file: File, out: Path, observer: Observer) -> None:
    """Write the file under a temporary name, sync it and rename it."""
    partial = out.with_name(files.partial_name(out.name))
    partial.unlink(missing_ok=True)
    try:
        fd = files.create(partial)
        try:
            with observer.stage("writing", file.nbytes, "B") as progress:
                file.write(fd, progress)
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.rename(out)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
