"""`fold` turns a relufied model with code into a stock one that computes nearly the same.

What could break it: fields or files of the code that stay, tensors of a block that no class
expects, a layer whose inputs hold no constant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fitting.test_folding import planted
from models import save_model

import surgery
from surgery.checkpoint import make_plan
from surgery.errors import SurgeryError
from surgery.operations.fold import fold
from surgery.operations.relufy import relufy
from surgery.proof import quality
from surgery.storage import open_checkpoint, write

SMALL = {"tokens": 768, "sequence_length": 64, "dtype": "fp32"}


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_model_with_code_becomes_a_stock_one(name: str, tmp_path: Path) -> None:
    source = planted(name, tmp_path / "source")
    coded = relufy(source, sparsity=0.7, form="code", bypass=6, calibration=SMALL)
    write(make_plan(coded), tmp_path / "code", source=source)
    before = open_checkpoint(tmp_path / "code")
    write(make_plan(fold(before, calibration=SMALL)), tmp_path / "out", source=before)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["hidden_act"]) == (name, "relu")
    assert (
        config["architectures"]
        == json.loads((tmp_path / "source/config.json").read_text())["architectures"]
    )
    assert not {"auto_map", "surgery_blocks"} & config.keys()
    assert not list((tmp_path / "out").glob("*.py"))
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert {k: v for k, v in info.items() if v} == {}
    models = {"code": before, "stock": open_checkpoint(tmp_path / "out")}
    found = quality.measure(models, quality.texts(source, 64, 64))
    for text, perplexity in found["code"].perplexity.items():
        assert found["stock"].perplexity[text] == pytest.approx(perplexity, rel=0.05)
        assert found["stock"].agreement[text] > 0.8
    assert found["stock"].sparsity == pytest.approx(found["code"].sparsity, abs=0.03)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"activation": "fatrelu", "bypass": "none"}, "rule fatrelu"),
        ({"activation": "relu", "stage": 2, "bypass": "none"}, "stage 2"),
        ({"activation": "shifted", "layers": [0]}, "layer 1 has no sparse block"),
    ],
)
def test_what_does_not_fit_into_neurons(options: dict[str, Any], seen: str, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path, dtype=torch.float32)
    coded = relufy(open_checkpoint(tmp_path), **options, form="code", calibration=SMALL)
    with pytest.raises(SurgeryError, match=seen):
        fold(coded)


def test_a_stock_model_has_nothing_to_fold(tmp_path: Path) -> None:
    save_model("llama", tmp_path, dtype=torch.float32)
    with pytest.raises(SurgeryError, match="no custom-code blocks"):
        surgery.fold(open_checkpoint(tmp_path))


def test_inputs_without_a_constant_are_refused_by_name_of_the_layer(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path / "source", dtype=torch.float32)
    source = open_checkpoint(tmp_path / "source")
    coded = relufy(source, form="code", calibration=SMALL)
    write(make_plan(coded), tmp_path / "code", source=source)
    folded = fold(open_checkpoint(tmp_path / "code"), calibration=SMALL)
    with pytest.raises(SurgeryError, match="layer 0 hold no constant"):
        write(make_plan(folded), tmp_path / "out", source=source)
    assert not (tmp_path / "out/config.json").exists()
