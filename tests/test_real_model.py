"""A real model through the whole tool: SURGERY_REAL_MODEL=FOLDER pytest -m slow. Minutes, and a few
gigabytes of disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import transformers

import surgery
from surgery.workflow.convert import convert_alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def model() -> str:
    folder = os.environ.get("SURGERY_REAL_MODEL")
    if not folder:
        pytest.skip("SURGERY_REAL_MODEL names no folder")
    return folder


def greedy(folder: str | Path) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    inputs = tokenizer("The people of the United States", return_tensors="pt")
    return model.generate(inputs.input_ids, max_new_tokens=16, do_sample=False)[0].tolist()


def test_an_upcycled_model_passes_and_says_the_same(model: str, tmp_path: Path) -> None:
    source = surgery.open(model)
    result = convert_alone(source, surgery.upcycle(source, experts=4), tmp_path / "moe")
    assert result.verification is not None and result.verification.passed
    assert greedy(tmp_path / "moe") == greedy(model)


def test_a_relufied_model_loads_and_its_perplexity_is_known(model: str, tmp_path: Path) -> None:
    source = surgery.open(model)
    result = convert_alone(source, surgery.relufy(source, repair="none"), tmp_path / "relu")
    assert result.verification is not None and result.verification.passed
    values = {r.check: r.value for r in result.verification.rows}
    assert values["perplexity over the source's, geometric mean over domains"] > 1
