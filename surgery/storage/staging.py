"""Files of a source that is elsewhere, on this disk while they are needed: every one of them, or a
few at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

KEEP = 2  # shards at a time when streaming: a layer that crosses from one to the next needs both


def cache_home() -> Path:
    """Where Hugging Face keeps what it fetches. Without importing huggingface_hub, which reads the
    same variables.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    home = os.environ.get("HF_HOME") or default
    return Path(home).expanduser()


class Staging:
    """A folder below cache_home()/surgery, this process's own until it ends, when it is removed.
    One that a killed run left is taken over.

    `keep`: the shards in it at most, the least recently used leaves first; None: all.
    """

    def __init__(self, name: str, keep: int | None = None) -> None:
        self.name, self.keep = re.sub(r"[^\w.-]+", "--", name), keep
        self._folder: Path | None = None
        self._shards: dict[Path, None] = {}  # the least recently used first
        self._given: dict[
            int, Path
        ] = {}  # by thread, what it was given last and may be about to open
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder, lock = _claim(cache_home() / "surgery", self.name)
            weakref.finalize(self, _remove, self._folder, lock)
            if self.keep is not None:  # what a killed run left may be more than that
                for path in self._folder.rglob("*.safetensors"):
                    path.unlink()
        return self._folder

    def path(self, name: str, size: int, identity: str, fetch: Callable[[Path], None]) -> Path:
        """The file of that name, size and identity; `fetch(path)` gets it where it is not there."""
        with self._lock:
            path = self.folder / hashlib.sha256(identity.encode()).hexdigest()[:16] / name
            self._shards.pop(path, None)
            if not (path.is_file() and path.stat().st_size == size):
                if path.suffix == ".safetensors":
                    self._make_room()
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f".{path.name}.partial")
                fetch(partial)
                partial.replace(path)
            if path.suffix == ".safetensors":
                self._shards[path] = None
                self._given[threading.get_ident()] = path
            return path

    def _make_room(self) -> None:
        """Before another shard comes; what another thread is about to open stays."""
        others = {t.ident for t in threading.enumerate()} - {threading.get_ident()}
        needed = {path for ident, path in self._given.items() if ident in others}
        for path in [p for p in self._shards if p not in needed]:
            if self.keep is None or len(self._shards) < self.keep:
                break
            del self._shards[path]
            path.unlink(missing_ok=True)


def _claim(root: Path, name: str) -> tuple[Path, int]:
    """The first folder of that name, or name.1, name.2, … that no other process holds, and the lock
    on it.
    """
    for n in itertools.count():
        folder = root / (f"{name}.{n}" if n else name)
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return folder, lock
    raise AssertionError


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
