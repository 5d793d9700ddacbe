"""The command line in processes that start in no time: copies of one that has imported torch.

Importing torch takes longer than most commands of the tests do. A forkserver imports it once, and
each command runs in a fork of it, with an environment, a folder and a screen of its own. Neither
transformers nor huggingface_hub is imported before, because they read the environment when they
are. What is about signals, or about the imports themselves, starts an interpreter instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# The parts of torch that transformers imports, and what else takes long.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "numpy"]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


class Process:
    """`surgery ARGUMENTS` in a process of its own, with nothing to read on stdin."""

    def __init__(
        self, arguments: Sequence[object], cwd: Path | None, variables: Mapping[str, str]
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._screen = [Path(self._folder.name, name) for name in ("out", "err")]
        words = [*map(str, arguments)]
        job = (words, str(cwd or Path.cwd()), dict(variables), *self._screen)
        self._process = _server.Process(target=_become, args=job)
        self._process.start()

    def finish(self, timeout: float = 120) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr. Raises TimeoutError after `timeout` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            raise TimeoutError(f"a process was not done after {timeout:g} s")
        out, err = (path.read_text() for path in self._screen)
        self._folder.cleanup()
        return code, out, err


def _become(
    arguments: Sequence[str], cwd: str, variables: dict[str, str], out: Path, err: Path
) -> None:
    """Turn this process into the command line; it ends with its exit code."""
    for descriptor, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT),
        (2, err, os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, mode), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["surgery", *arguments]
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    from surgery.cli import run

    try:
        code = run()
    finally:
        atexit._run_exitfuncs()
    sys.exit(code)
