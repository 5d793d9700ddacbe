"""The gradient of the routers is that of the whole model, and faults of routers are warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compared import verify
from models import LAYERS, sample_ids, save_model

from surgery.checkpoint import Checkpoint, make_plan
from surgery.operations.upcycle import upcycle
from surgery.proof.routing import Routing, check, measure, rows
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
        ({}, ["no_gradient"]),
        ({"drop": 0.5}, []),
        ({"drop": 0.5, "top_k": 1}, ["no_gradient"]),
        ({"drop": 0.5, "router": "zero"}, ["idle_experts", "equal_copies"]),
        ({"drop": 0.5, "router_std": 20.0}, ["saturated"]),
    ],
)
def test_a_verification_says_what_is_wrong(
    options: dict[str, Any], warned: list[str], tmp_path: Path
) -> None:
    source, output = convert("llama", tmp_path, **options)
    found = verify(source, output, exact="drop" not in options, checks=[check()], tokens=512)
    seen = {r.key: r for r in found.rows}
    assert found.passed and {f"routers.{name}" for name in warned} <= {
        key for key, row in seen.items() if row.warns
    }
    assert len(seen["routers.gradient"].layers) == LAYERS


def test_a_model_that_routed_before_is_not_measured(tmp_path: Path) -> None:
    _, output = convert("llama", tmp_path)
    found = verify(output, output, exact=True, tokens=256)
    assert found.passed and not any(r.key.startswith("routers.") for r in found.rows)


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
    layers = [(2, 0.2), (5, 0.4)]
    last = list(rows([Routing(layer=i, gradient=g, **one) for i, g in layers]))[-1]  # type: ignore[arg-type]
    assert last.key == "routers.gradient" and last.value == pytest.approx(0.3)
    assert last.layers == tuple(layers)
    assert list(rows([])) == []
