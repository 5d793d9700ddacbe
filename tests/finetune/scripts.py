"""Tiny models with the demo's tokenizer, their conversions, and the scripts beside them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from surgery.checkpoint import Checkpoint
from surgery.operations.carve import carve
from surgery.operations.memory import memory
from surgery.operations.relufy import relufy
from surgery.operations.splinify import splinify
from surgery.operations.upcycle import upcycle

SIZES = {"vocab_size": 4096, "num_hidden_layers": 2, "initializer_range": 0.1}
TINY = (
    "--max_length=32",
    "--per_device_train_batch_size=2",
    "--use_cpu=True",
    "--disable_tqdm=True",
    "--learning_rate=1e-3",
    "--logging_steps=1",
)
CALIBRATION = {"tokens": 512, "sequence_length": 64}
# By name: the model that is converted, and the operation.
OPERATIONS: dict[str, tuple[str, Callable[[Checkpoint], Checkpoint]]] = {
    "copy": ("llama", lambda c: c),
    "relufy": ("llama with llama3 rope", lambda c: relufy(c, repair="none")),
    "relufy gpt2": ("gpt2", lambda c: relufy(c, repair="none")),
    "fatrelu": ("llama", lambda c: relufy(c, activation="fatrelu", threshold=0.05, repair="none")),
    "mixtral": ("llama", lambda c: upcycle(c, experts=4, top_k=2)),
    "qwen2_moe": ("qwen2", lambda c: upcycle(c, experts=4, top_k=2)),
    "glm4_moe": ("llama", lambda c: upcycle(c, experts=8, top_k=4, granularity=2)),
    "llama4_text": ("smollm3", lambda c: upcycle(c, experts=4)),
    "relufied mixtral": ("llama", lambda c: upcycle(relufy(c, repair="none"), experts=4, top_k=2)),
    "carve": (
        "llama",
        lambda c: carve(c, experts=4, active=2, shared=1, calibration=CALIBRATION),
    ),
    "memory": ("llama", lambda c: memory(c, layers=[1], slots=64, knn=4, key_dim=16)),
    "memory, sparse gradients": (
        "llama",
        lambda c: memory(c, slots=64, knn=4, key_dim=16, kind="peer", sparse_gradients=True),
    ),
    "memory of neurons": (
        "llama",
        lambda c: memory(
            memory(c, layers=[0], slots=64, knn=4, key_dim=16),
            layers=[1],
            place="replace",
            find="product-keys",
            calibration=CALIBRATION,
        ),
    ),
    "splines": ("llama", lambda c: splinify(c)),
}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A conversion on disk, and its script."""

    source: Path
    folder: Path

    @property
    def script(self) -> Path:
        """Return the path of the script."""
        return self.folder / "finetune" / "finetune.py"

    def module(self) -> Any:
        """Import the script anew, because a test may change its tables."""
        spec = importlib.util.spec_from_file_location("finetune", self.script)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        # HfArgumentParser resolves the types of the script's Options there.
        sys.modules["finetune"] = module
        spec.loader.exec_module(module)
        return module

    def weights(self, folder: Path | None = None) -> dict[str, torch.Tensor]:
        """Return every tensor of the conversion, or of what was trained into `folder`."""
        files = sorted((folder or self.folder).glob("*.safetensors"))
        return {n: t for file in files for n, t in load_file(file).items()}

    def changed(self, folder: Path) -> set[str]:
        """Return the names of the tensors that training changed."""
        before, after = self.weights(), self.weights(folder)
        assert before.keys() == after.keys()
        return {n for n in before if not torch.equal(before[n], after[n])}


def history(folder: Path) -> list[dict[str, Any]]:
    """Return what was logged, step by step."""
    state = json.loads((folder / "trainer_state.json").read_text())
    log: list[dict[str, Any]] = state["log_history"]
    return [row for row in log if "loss" in row]
