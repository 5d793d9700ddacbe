"""Types that no table knows go through every operation: the quick part of benchmarks/coverage.py.

What a cell asserts is said there: the walk equals the whole model, exact operations keep the
logits, a relufied model has zeros, generates, saves and loads again.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import surgery
from surgery.families.roles import TOWERS

ROOT = Path(__file__).parent.parent
# One of each kind: how its MLP stands, and how the activation is swapped.
QUICK = {
    ("causal", "olmo3"): {"relufy": "stock", "upcycle": "code"},
    ("causal", "lfm2"): {"relufy": "code"},  # the activation is fixed in its code
    ("causal", "bert"): {},  # the MLP is spread over two modules
    ("causal", "bloom"): {"relufy": "code"},  # its module adds the residual, its GELU is its own
    ("causal", "exaone"): {"relufy": "stock"},  # other names on disk
    ("image", "llava"): {"relufy": "stock", "carve": "ok"},
    ("causal", "falcon_h1"): {"upcycle": "code"},  # the body computes buffers of its layers
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


# The commonest wrappers, and what the model class wants of an image of 56 x 56 pixels beside it.
WRAPPERS: dict[str, dict[str, Any]] = {
    "llava": {},
    "gemma3": {},
    "internvl": {},
    "idefics3": {"images": 1},
    "smolvlm": {"images": 1},
    "mistral3": {"image_sizes": torch.tensor([[56, 56]])},
    "qwen2_5_vl": {"image_grid_thw": torch.tensor([[1, 4, 4]])},
    "qwen3_vl": {"image_grid_thw": torch.tensor([[1, 4, 4]])},
}


def prompt(model: Any, beside: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs of a prompt with an image, as a processor would make them."""
    given = {k: v for k, v in beside.items() if k != "images"}
    shape = (1, beside["images"], 3, 56, 56) if "images" in beside else (1, 3, 56, 56)
    if "image_grid_thw" in given:  # patches are given as rows
        tower = model.config.vision_config
        shape = (16, 3 * tower.temporal_patch_size * tower.patch_size**2)
    given["pixel_values"] = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = model.get_image_features(**given)
    features = getattr(found, "pooler_output", found)
    each = features if isinstance(features, tuple | list) else [features]
    count = sum(f.flatten(0, -2).shape[0] for f in each)
    token = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    given["input_ids"] = torch.tensor([[5, 6, 7] + [token] * count + [8, 9, 10, 11]])
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = (given["input_ids"] == token).long()
    return given


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_a_wrapper_reads_images_as_before(
    coverage: ModuleType, model_type: str, tmp_path: Path
) -> None:
    """The language tower is operated on, the others and the processor's files are carried."""
    subject = coverage.Subject("image", model_type, tmp_path)
    files = {"preprocessor_config.json": b'{"size": 56}\n', "chat_template.jinja": b"{{ x }}\n"}
    for name, data in files.items():
        (tmp_path / "source" / name).write_bytes(data)
    inputs = prompt(subject.model, WRAPPERS[model_type])
    with torch.no_grad():
        wanted = subject.model(**inputs, use_cache=False).logits
        other = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
        assert not torch.allclose(subject.model(**other, use_cache=False).logits, wanted, atol=1e-2)
        output = surgery.upcycle(subject.source, experts=4, top_k=2)
        found = subject.written(output, "upcycle")(**inputs, use_cache=False).logits
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert {n: (tmp_path / "upcycle" / n).read_bytes() for n in files} == files
    after = surgery.open(tmp_path / "upcycle")
    towers = [n for n in subject.source.tensors if TOWERS.search(n)]
    assert towers
    for name in towers:
        assert torch.equal(after.tensors[name].read(), subject.source.tensors[name].read()), name
