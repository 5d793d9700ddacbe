"""Fixtures: each conversion is made once, and its script runs in this process."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_model
from scripts import OPERATIONS, SIZES, TINY, Converted

from surgery.demo import MODEL
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """Return a function that makes a conversion by name, once, in bf16 as real models are."""
    root, made = tmp_path_factory.mktemp("converted"), dict[str, Converted]()

    def converted(name: str) -> Converted:
        if name not in made:
            model, operation = OPERATIONS[name]
            source, folder = root / f"{name} source", root / name
            save_model(model, source, dtype=torch.bfloat16, **SIZES)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(MODEL / file, source)
            checkpoint = open_checkpoint(source)
            convert_alone(checkpoint, operation(checkpoint), folder, verify=False)
            made[name] = Converted(source=source, folder=folder)
        return made[name]

    return converted


@pytest.fixture
def train(conversions: Callable[[str], Converted], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that trains a conversion on smoke.txt in this process.

    `train("relufy", "--max_steps=8")` returns the folder it wrote. Skips without the extra
    `finetune`.
    """
    pytest.importorskip("trl")
    numbers = itertools.count()

    def train(converted: str | Converted, *arguments: str, module: Any = None) -> Path:
        converted = conversions(converted) if isinstance(converted, str) else converted
        out = tmp_path / f"trained {next(numbers)}"
        text = converted.script.with_name("smoke.txt")
        script = module or converted.module()
        script.main([*TINY, f"--data={text}", f"--output_dir={out}", *arguments])
        return out

    return train


@pytest.fixture(autouse=True)
def quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Show no bars, cache data sets inside the tests' folder, and use one thread."""
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()
        cache = tmp_path_factory.getbasetemp() / "datasets"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
