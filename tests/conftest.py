"""Fixtures for all tests: conversions of tiny models, made once, and runs of transformers 4."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# As many workers run as there are cores, and threads of one would wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# transformers imports custom code from a copy in this folder. Test processes that shared the folder
# would overwrite each other's copies.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="surgery-modules-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

# Processes that tests start in other folders import the package of this checkout, also where the
# environment has another one installed.
ROOT = Path(__file__).resolve().parent.parent
_paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths)

JOB = ROOT / "tests" / "transformers_4.py"


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Workshop that makes each conversion once in a session."""
    from models import Workshop

    return Workshop(tmp_path_factory.mktemp("conversions"))


@pytest.fixture(scope="session")
def run_transformers_4() -> Callable[[dict[str, Any]], Any]:
    """A function that runs a job of transformers_4.py with transformers 4.57.

    The environment variable SURGERY_TRANSFORMERS_4 names the folder with that version.
    """
    folder = os.environ.get("SURGERY_TRANSFORMERS_4")
    if not folder:
        pytest.skip("SURGERY_TRANSFORMERS_4 names no folder with transformers 4.57")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(folder).expanduser()),
        "HF_HUB_OFFLINE": "1",
    }

    def run(job: dict[str, Any]) -> Any:
        done = subprocess.run(
            [sys.executable, JOB],
            input=json.dumps(job),
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        result = json.loads(done.stdout)
        assert result["version"].startswith("4.57."), result["version"]
        return result

    return run


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables in a pipe heed COLUMNS, which a shell may have exported."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`call("upcycle", folder)` is `surgery upcycle FOLDER`."""
    from support import Ran

    from surgery.cli import run

    def call(*arguments: object) -> Ran:
        capfd.readouterr()
        code = run(list(map(str, arguments)))
        return Ran(code, *capfd.readouterr())

    return call
