"""Write a figure of matplotlib to a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from surgery import files
from surgery.storage import enter


def save(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure in the format that the suffix of `path` names."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=dpi)
    files.write(path.parent, path.name, buffer.getvalue(), sync=False)
    enter(path.parent, [path.name])
