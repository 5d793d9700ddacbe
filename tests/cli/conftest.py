"""The command line inside this process, where torch and transformers are imported once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import write_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A llama of 3 layers, 100 kB."""
    return write_llama(tmp_path / "model", layers=3)
