"""Folders for what is needed for a while: each has a mark, and only a marked one is ever removed.

So a folder of the user's that happens to have the name of ours is neither filled nor deleted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from surgery import files
from surgery.errors import SurgeryError

MARK = ".surgery-scratch"


def claim(folder: Path) -> None:
    """Make a scratch folder, or take up the one that an earlier run has left.

    Raises SurgeryError where something else has its name.
    """
    require_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files.mark(folder / MARK)


def require_free(folder: Path) -> None:
    """Raise SurgeryError where something else has the name of a scratch folder."""
    if folder.is_symlink() or (folder.exists() and not (is_ours(folder) or _is_empty(folder))):
        raise SurgeryError(
            f"{folder} is in the way: results are kept there for a while, and surgery did not make "
            "it",
            "move it away, or give another --out",
        )


def is_ours(folder: Path) -> bool:
    """Return whether a folder is one that `claim` has made."""
    mark = folder / MARK
    return not folder.is_symlink() and mark.is_file() and not mark.is_symlink()


def remove(folder: Path) -> None:
    """Remove a scratch folder; one without the mark stays."""
    if is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())
