"""Tensors that are made together and in order, as by a walk through the layers over text.

Their dtypes and shapes are known before, so that a plan needs no data. Their values are kept in a
scratch folder, a file each, from which the writer lets the kernel copy them. The work finds there
what an interrupted run has made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery import files
from surgery.checkpoint.tensors import DTYPES, Extent, LazyTensor

if TYPE_CHECKING:
    import torch

    from surgery.checkpoint.checkpoint import Checkpoint

# A callback for the number of units (bytes, layers) that were done since the last call.
Progress = Callable[[int], None]
REPORT, NOTES = "report.json", "notes.json"  # when all is done; until then


@dataclass(frozen=True, slots=True)
class ScratchFile:
    """The file of a promised tensor."""

    work: Work
    name: str
    size: int

    @property
    def identity(self) -> str:
        return self.work.identity

    def path(self) -> Path:
        return self.work.folder() / self.name


def identity(operation: str, checkpoint: Checkpoint, *parts: Any) -> str:
    """Return a line that changes whenever a fitted value may: the source's tensors and `parts`.

    `parts` are the options, the calibration's identity and whatever else the values depend on.
    """
    tensors = "\n".join(f"{n} {t.identity()}" for n, t in sorted(checkpoint.tensors.items()))
    return f"{operation} {' '.join(map(str, parts))}\n{tensors}"


class Work:
    """Work that makes promised tensors when they are needed.

    Args:
        identity: a line that changes whenever a value may: source, parameters, data.
        run: called with the work and a progress callback. It must `put` every tensor that was
            promised, and may `note` figures in `report`.
        total: the number of units that the progress callback counts (layers).
        title: of the stage, for the screen.
        peak_memory: an upper bound in bytes.
        check: raises SurgeryError for what is known to keep the work from beginning, such as text
            that is not there.
    """

    def __init__(
        self,
        identity: str,
        run: Callable[[Work, Progress], None],
        *,
        total: int,
        title: str = "calibrating",
        peak_memory: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.identity = hashlib.sha256(identity.encode()).hexdigest()
        self.title, self.total, self.peak_memory = title, total, peak_memory
        self.report: dict[str, Any] = {}
        self._run, self.check = run, check
        self._folder: Path | None = None
        # A loader reads with several threads: one prepares, the others wait.
        self._lock = threading.RLock()
        self._promised: dict[str, LazyTensor] = {}
        self._output: Checkpoint | None = None

    @property
    def output(self) -> Checkpoint:
        """Return the checkpoint that the promised tensors are part of."""
        assert self._output is not None, "a step with this work is part of no checkpoint yet"
        return self._output

    @output.setter
    def output(self, checkpoint: Checkpoint) -> None:
        self._output = checkpoint

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._promised.values())

    def promise(self, name: str, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
        """Return the tensor that the work will put under this name."""
        file = ScratchFile(self, name, LazyTensor(dtype, shape).nbytes)
        tensor = LazyTensor(
            dtype, shape, (Extent(file, 0, file.size),), recipe=f"calibrated {name}"
        )
        self._promised[name] = tensor
        return tensor

    def folder(self) -> Path:
        """Return where the values are; the work runs first where nobody has prepared it."""
        with self._lock:
            if self._folder is None:
                folder = Path(tempfile.mkdtemp(prefix="surgery-"))
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                self.prepare(folder)
            assert self._folder is not None
            return self._folder

    def prepare(self, folder: Path, progress: Progress = lambda n: None) -> None:
        """Make every promised tensor, in `folder`/identity, where what an interrupted run has made
        is kept.
        """
        with self._lock:
            self._prepare(folder, progress)

    def _prepare(self, folder: Path, progress: Progress) -> None:
        if self._folder is not None:
            progress(self.total)
            return
        self._folder = folder / self.identity[:16]
        self._folder.mkdir(parents=True, exist_ok=True)
        self.report.update(_read(self._folder / REPORT) or _read(self._folder / NOTES) or {})
        if self.done:
            progress(self.total)
            return
        try:
            self._run(self, progress)
        except BaseException:
            self._folder = None
            raise
        if missing := [n for n in self._promised if not self.has(n)]:
            raise AssertionError(f"{self.title} never made {missing[0]}")
        _write(self._folder / REPORT, json.dumps(self.report).encode())

    @property
    def done(self) -> bool:
        return (
            self._folder is not None
            and (self._folder / REPORT).is_file()
            and all(map(self.has, self._promised))
        )

    def has(self, name: str) -> bool:
        assert self._folder is not None
        path = self._folder / name
        return path.is_file() and path.stat().st_size == self._promised[name].nbytes

    def promised(self, name: str) -> bool:
        return name in self._promised

    def has_all(self, prefix: str) -> bool:
        """Return whether every promised tensor whose name begins so is made."""
        return all(self.has(n) for n in self._promised if n.startswith(prefix))

    def lazy(self, name: str) -> LazyTensor:
        """Return the tensor that was promised under this name."""
        return self._promised[name]

    def put(self, name: str, value: torch.Tensor) -> None:
        """Keep a value, rounded to the promised dtype."""
        import torch

        promised = self._promised[name]
        if tuple(value.shape) != promised.shape:
            raise AssertionError(f"{name}: promised {promised.shape}, made {tuple(value.shape)}")
        value = value.detach().cpu().to(getattr(torch, DTYPES[promised.dtype][1])).contiguous()
        assert self._folder is not None
        _write(self._folder / name, value.reshape(-1).view(torch.uint8).numpy().tobytes())

    def note(self, key: str, value: Any) -> None:
        """Leave a figure in the report, where a run that goes on after an interruption finds it."""
        assert self._folder is not None
        self.report[key] = value
        _write(self._folder / NOTES, json.dumps(self.report).encode())

    def get(self, name: str) -> torch.Tensor:
        """Return a value that was put, in the promised dtype."""
        return self._promised[name].read()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write(path: Path, data: bytes) -> None:
    files.write(path.parent, path.name, data, sync=False)
