"""Operate on the MLP blocks of trained Hugging Face checkpoints.

    import surgery

    source = surgery.open("Qwen/Qwen3-8B")                  # reads headers, no weights
    output = surgery.upcycle(source, experts=8, top_k=2)    # lazy: nothing is computed
    surgery.write(output, "Qwen3-8B-moe")                   # streams
    print(surgery.verify(source, "Qwen3-8B-moe").passed)

Nothing heavy is imported until it is used: `import surgery` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from surgery.errors import SurgeryError, UsageError

if TYPE_CHECKING:
    from surgery.api import (
        analyze,
        carve,
        cast,
        export,
        fold,
        inspect,
        memory,
        open,
        prune,
        relufy,
        sparse_decode,
        splinify,
        upcycle,
        verify,
        write,
    )

__version__ = "0.1.0"
__all__ = [
    "SurgeryError",
    "UsageError",
    "analyze",
    "carve",
    "cast",
    "export",
    "fold",
    "inspect",
    "memory",
    "open",
    "prune",
    "relufy",
    "sparse_decode",
    "splinify",
    "upcycle",
    "verify",
    "write",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("surgery.api"), name)
    # `from surgery import files` asks here before it imports the module.
    if not name.startswith("_") and importlib.util.find_spec(f"surgery.{name}") is None:
        operations = importlib.import_module("surgery.operations")
        if name in operations.names():
            return operations.find(name).function
    raise AttributeError(f"module 'surgery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
