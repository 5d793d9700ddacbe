"""The Python API: the README's example runs as it stands, and operations compose into one pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import surgery
from surgery.demo import MODEL

ROOT = Path(__file__).parent.parent


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["5,616,960 of 18,003,264 parameters are active", "True"]


def test_operations_compose_into_one_pass(tmp_path: Path) -> None:
    """The second operation sees the config and the tensors of the first; nothing is written between
    them.
    """
    source = surgery.open(MODEL)
    out = surgery.write(
        surgery.upcycle(surgery.relufy(source, repair="none"), experts=2),
        tmp_path / "both",
        max_shard_size="10MB",
    )
    both = surgery.open(out)
    assert both.config["model_type"] == "mixtral" and both.config["hidden_act"] == "relu"
    verification = surgery.verify(source, out)
    assert verification.passed and not verification.exact
    relufied = surgery.write(surgery.relufy(source, repair="none"), tmp_path / "relu")
    upcycled = surgery.write(
        surgery.upcycle(surgery.open(relufied), experts=2), tmp_path / "two", max_shard_size="10MB"
    )
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(shards) == 2 and all(
        (out / n).read_bytes() == (upcycled / n).read_bytes() for n in shards
    )


def test_a_checkpoint_that_was_never_written_is_analysed() -> None:
    """Zeros of the relufied model, seen before a byte of it is on the disk."""
    source = surgery.open(MODEL)
    zeros = [
        surgery.analyze(c, tokens=512).mean(lambda m: m.product.zero)
        for c in (source, surgery.relufy(source, repair="none"))
    ]
    assert zeros[0] == 0 and zeros[1] > 0.4


def test_nothing_heavy_is_imported() -> None:
    heavy = {"torch", "transformers", "numpy", "rich", "huggingface_hub"}
    code = f"import surgery, sys; assert not {heavy} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'relufi'"):
        _ = surgery.relufi  # type: ignore[attr-defined]
    assert {"open", "upcycle", "write"} <= set(dir(surgery))
