"""The command line inside this process, where torch and transformers are imported once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import Call, Ran, write_llama


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """`call("upcycle", folder)` is `surgery upcycle FOLDER`."""
    from surgery.cli import run

    def call(*arguments: object) -> Ran:
        capfd.readouterr()
        code = run(list(map(str, arguments)))
        return Ran(code, *capfd.readouterr())

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A llama of 3 layers, 100 kB."""
    return write_llama(tmp_path / "model", layers=3)
