"""The gradient of the routers is that of the whole model, taken a layer at a time; and what is
wrong with routers is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import LAYERS, sample_ids, save_model

from surgery.checkpoint import Checkpoint, make_plan
from surgery.operations.upcycle import upcycle
from surgery.proof.routing import Routing, check, measure, rows
from surgery.proof.verification import verify
from surgery.storage import open_checkpoint, write

IDS = sample_ids()
ROUTERS = ("router.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight")


def convert(model: str, folder: Path, **options: Any) -> tuple[Checkpoint, Checkpoint]:
    save_model(model, folder / "source")
    source = open_checkpoint(folder / "source")
    made = upcycle(source, **{"experts": 4, "router_std": 0.3, **options})
    write(make_plan(made), folder / "out", source=source)
    return source, open_checkpoint(folder / "out")


@pytest.mark.parametrize(
    ("model", "options", "learns"),
    [
        ("llama", {}, False),
        ("llama", {"drop": 0.5}, True),
        ("gemma3_text", {}, False),
        ("gemma3_text", {"drop": 0.5}, True),
        ("falcon", {"noise": 0.1}, True),
        ("gpt2", {"granularity": 4, "shared": 1, "experts": 12}, True),
        ("qwen3", {"granularity": 2, "experts": 8}, True),
        ("qwen2", {"layers": [0, 2], "drop": 0.5}, True),
    ],
)
def test_gradients_are_those_of_the_whole_model(
    model: str, options: dict[str, Any], learns: bool, tmp_path: Path
) -> None:
    _, output = convert(model, tmp_path, **options)
    eager = {"experts_implementation": "eager"} if transformers.__version__ >= "5" else {}
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, dtype=torch.float32, **eager
    )
    whole.eval()(IDS, labels=IDS).loss.backward()
    want = [p.grad.norm().item() for n, p in whole.named_parameters() if n.endswith(ROUTERS)]
    found = [r.gradient for r in measure(output, IDS)]
    assert len(found) == len(options.get("layers", range(LAYERS)))
    assert found == pytest.approx(want, rel=1e-4, abs=1e-8)
    assert all((g > 1e-3) == learns for g in found)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, ["no gradient"]),
        ({"drop": 0.5}, []),
        ({"drop": 0.5, "top_k": 1}, ["no gradient"]),
        ({"drop": 0.5, "router": "zero"}, ["less than 0.01", "equal routers"]),
        ({"drop": 0.5, "router_std": 20.0}, ["saturated"]),
    ],
)
def test_a_verification_says_what_is_wrong(
    options: dict[str, Any], warned: list[str], tmp_path: Path
) -> None:
    source, output = convert("llama", tmp_path, **options)
    exact = "drop" not in options
    found = verify(source, output, exact=exact, tokens=512, checks=[check()])
    warnings = [r.check for r in found.rows if r.warns]
    assert found.passed and len(warnings) >= len(warned)
    for word in warned:
        assert any(word in w for w in warnings), warnings
    (gradient,) = (r for r in found.rows if r.key == "routers.gradient")
    assert len(gradient.layers) == LAYERS


def test_a_model_that_routed_before_is_not_measured(tmp_path: Path) -> None:
    _, output = convert("llama", tmp_path)
    found = verify(output, output, exact=True, tokens=256)
    assert found.passed and not any("router" in r.check for r in found.rows)


def test_idle_experts_want_enough_choices_to_be_called_so(tmp_path: Path) -> None:
    _, output = convert("llama", tmp_path, router="zero", drop=0.5)
    assert [r.idle for r in measure(output, IDS)] == [2] * LAYERS
    assert [r.idle for r in measure(output, IDS[:1, :8])] == [0] * LAYERS


def test_the_summary_means_over_layers() -> None:
    one = {
        "logit_std": 1.0,
        "largest_probability": 0.5,
        "load_entropy": 0.9,
        "least_load": 0.4,
        "idle": 0,
        "equal": 0,
    }
    each = [Routing(layer=layer, gradient=g, **one) for layer, g in ((2, 0.2), (5, 0.4))]  # type: ignore[arg-type]
    found = {row.key: row for row in rows(each)}
    assert found["routers.gradient"].value == pytest.approx(0.3)
    assert found["routers.gradient"].layers == ((2, 0.2), (5, 0.4))
    assert list(rows([])) == []
