"""Downloaded files of a source that is elsewhere, kept on this disk while they are needed.

Either all of them are kept, or only the shards that were read last.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from surgery import files
from surgery.errors import SurgeryError
from surgery.storage import scratch

# Shards that streaming keeps: a layer that crosses from one shard to the next needs both.
KEEP = 2


def cache_home() -> Path:
    """Return the folder where Hugging Face libraries keep what they download.

    It comes from the variables that huggingface_hub reads, without importing it.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    home = os.environ.get("HF_HOME") or default
    return Path(home).expanduser()


class Staging:
    """A folder below cache_home()/surgery that belongs to this process.

    It is removed when the process ends. The folder that a killed run left behind is taken over.

    Args:
        name: the source, from which the folder gets its name.
        keep: how many shards may be in it at most; the least recently used one is removed first.
            None keeps all.
    """

    def __init__(self, name: str, keep: int | None = None) -> None:
        self.name, self.keep = re.sub(r"[^\w.-]+", "--", name), keep
        self._folder: Path | None = None
        self._shards: dict[Path, None] = {}  # the least recently used first
        # By thread: the shard that it was given last, and that it may be about to open.
        self._given: dict[int, Path] = {}
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        """Return the folder, claimed at the first use."""
        if self._folder is None:
            self._folder, lock = _claim(cache_home() / "surgery", self.name)
            weakref.finalize(self, _remove, self._folder, lock)
            if self.keep is not None:
                # A killed run may have left more than `keep` shards.
                for path in self._folder.rglob("*.safetensors"):
                    path.unlink()
        return self._folder

    def path(self, name: str, size: int, identity: str, fetch: Callable[[Path], None]) -> Path:
        """Return the file of this name, size and identity; `fetch(path)` downloads it if needed."""
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
        """Remove shards before another one comes, except those that another thread may open."""
        others = {t.ident for t in threading.enumerate()} - {threading.get_ident()}
        needed = {path for ident, path in self._given.items() if ident in others}
        for path in [p for p in self._shards if p not in needed]:
            if self.keep is None or len(self._shards) < self.keep:
                break
            del self._shards[path]
            path.unlink(missing_ok=True)


def _claim(root: Path, name: str) -> tuple[Path, int]:
    """Return the first of the folders name, name.1, name.2, … that is free, and the lock on it.

    One that surgery did not make is passed over.
    """
    for n in itertools.count():
        folder = root / (f"{name}.{n}" if n else name)
        try:
            scratch.claim(folder)
            lock = files.open_lock(folder / ".lock")
        except SurgeryError:
            continue  # Somebody else's folder has this name.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return folder, lock
    raise AssertionError


def _remove(folder: Path, lock: int) -> None:
    scratch.remove(folder)
    os.close(lock)
