"""Types that no table knows go through every operation: the quick part of benchmarks/coverage.py.

What a cell asserts is said there: the walk equals the whole model, exact operations keep the
logits, a relufied model has zeros, generates, saves and loads again.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
# One of each kind: how its MLP stands, and how the activation is swapped.
QUICK = {
    ("causal", "olmo3"): {"relufy": "stock", "upcycle": "code"},
    ("causal", "lfm2"): {"relufy": "code"},  # the activation is fixed in its code
    ("causal", "bert"): {},  # the MLP is spread over two modules
    ("causal", "bloom"): {"relufy": "code"},  # its module adds the residual, its GELU is its own
    ("causal", "exaone"): {"relufy": "stock"},  # other names on disk
    ("image", "llava"): {"relufy": "stock", "carve": "ok"},
    ("image", "paligemma"): {"upcycle": "code"},  # its text model begins by a rule of its own
}
# How text passes through them, where that is unusual.
WALKED = {
    ("causal", "electra"): "its head is tied under another name",
    ("causal", "openai-gpt"): "its layers give lists",
    ("causal", "gemma4_text"): "its layers read a table by token besides",
    ("causal", "emu3"): "no Auto class knows its text model",
    ("image", "idefics3"): "it asks where its first tower is, which is not loaded",
    ("image", "mllama"): "text does not pass through every layer",
}
MIXTURES = ("qwen3_next",)


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_", ROOT / "benchmarks/coverage.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kind", "model_type"), QUICK)
def test_every_operation(coverage: ModuleType, kind: str, model_type: str) -> None:
    cells = coverage.cells(kind, model_type)
    assert list(cells) == list(coverage.OPERATIONS)
    assert all(map(coverage.works, cells.values())), cells
    for operation, how in QUICK[kind, model_type].items():
        assert cells[operation] == how


@pytest.mark.parametrize("model_type", MIXTURES)
def test_mixtures_are_walked_and_relufied(coverage: ModuleType, model_type: str) -> None:
    cells = coverage.cells("causal", model_type, ("inspect", "analyze", "relufy", "upcycle"))
    assert (cells["inspect"], cells["analyze"], cells["relufy"]) == ("ok", "ok", "stock")
    assert "is a mixture already" in cells["upcycle"]


@pytest.mark.parametrize(("kind", "model_type"), WALKED, ids=WALKED.values())
def test_the_walk_equals_the_whole_model(coverage: ModuleType, kind: str, model_type: str) -> None:
    cells = coverage.cells(kind, model_type, ("inspect", "analyze"))
    assert cells == {"inspect": "ok", "analyze": "ok"}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("xlm", "reads something else"), ("inkling2_loop_text", "more than once")],
)
def test_layers_that_do_not_follow_one_another_are_not_walked(
    coverage: ModuleType, model_type: str, why: str
) -> None:
    cells = coverage.cells("causal", model_type, ("inspect", "analyze"))
    assert cells["inspect"] == "ok"
    assert "cannot be walked layer by layer" in cells["analyze"] and why in cells["analyze"]


def test_what_has_no_mlp_says_so(coverage: ModuleType) -> None:
    cells = coverage.cells("causal", "mamba2", ("inspect", "analyze"))
    assert cells["inspect"] == "none" and "no MLP of mamba2 is proved" in cells["analyze"]
