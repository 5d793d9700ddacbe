"""A new operation with a block and a check of its own, and a new rule, in the places that
CONTRIBUTING names and nowhere else.

What could break it: a place that knows operations by name, such as a ladder of `if`s in the card,
the folder's name, a recipe, a fine-tune script or the verification.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import surgery
from surgery import operations
from surgery.blocks import block_config, custom_code, rules, sparse_mlp
from surgery.blocks.custom_code import with_blocks
from surgery.blocks.preconditions import chosen_layers
from surgery.checkpoint import Checkpoint, Step, constant
from surgery.checkpoint.config import BLOCKS
from surgery.checkpoint.row import Row
from surgery.demo import MODEL
from surgery.families import locate
from surgery.operations.operation import Operation
from surgery.storage import open_checkpoint
from surgery.workflow import recipe
from surgery.workflow.convert import convert_alone
from surgery.workflow.record import default_out, suffix

BLOCK = b'''
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ScaledMLP(nn.Module):
    """y = factor * mlp(x). The parts of the MLP keep their names."""

    def __init__(self, base: nn.Module, entry: dict[str, Any], config: Any = None) -> None:
        super().__init__()
        for name, child in base.named_children():
            self.add_module(name, child)
        self.factor = nn.Parameter(torch.ones(1))

    def init_block_weights(self) -> None:
        nn.init.ones_(self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
'''


def scale(checkpoint: Checkpoint, *, factor: float = 1.0, layers: Collection[int] | None = None) -> Checkpoint:  # fmt: skip
    """Return the model with the output of its MLPs scaled.

    Args:
        factor: what outputs are multiplied with.
        layers: default all.
    """
    blocks = locate(checkpoint)
    chosen = chosen_layers(blocks, layers)
    entry = block_config.entry(blocks.family, "scaled", chosen)
    added = {f"{blocks.layer(i)}mlp.factor": constant(factor, (1,), "F32") for i in chosen}
    step = Step(operation="scale", parameters={"factor": factor}, exact=factor == 1, layers=chosen)
    tensors = {**checkpoint.tensors, **added}
    return checkpoint.replace(step=step, tensors=tensors, **with_blocks(checkpoint, [entry]))


def checks(parameters: Any) -> Any:
    def factors(pair: Any, input_ids: torch.Tensor) -> Iterator[Row]:
        found = [t.read().item() for n, t in pair.output.tensors.items() if n.endswith("factor")]
        off = max(abs(f - parameters["factor"]) for f in found)
        yield Row(key="scale.factor", check="factors off", value=off, relation="<=", limit=0.0,
                  passed=off == 0)  # fmt: skip

    return [factors]


OPERATION = Operation(
    name="scale",
    function=scale,
    summary="Scale the output of the MLPs.",
    done=lambda p, where: f"{where} was scaled by {p['factor']:g}",
    why="It shows how an operation is added.",
    suffix=lambda p: f"scaled-{p['factor']:g}",
    tags=("scaling",),
    blocks=("scaled",),
    checks=checks,
)


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the three files of the operation amount to."""
    module = types.ModuleType("surgery.operations.scale")
    module.OPERATION = OPERATION  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "surgery.operations.scale", module)
    every = (*operations.names(), "scale")
    monkeypatch.setattr(operations, "names", lambda: every)
    monkeypatch.setitem(BLOCKS, "scaled", ("scaled_mlp", "ScaledMLP"))
    read = custom_code._read
    monkeypatch.setattr(custom_code, "_read", lambda n: BLOCK if n == "scaled_mlp.py" else read(n))
    operations.find.cache_clear()


@pytest.mark.usefixtures("scaling")
def test_an_operation_is_three_files(tmp_path: Path) -> None:
    source = open_checkpoint(MODEL)
    text = "source: demo\noperations:\n  - operation: scale\n    factor: 0.5\n    layers: 0-2\n"
    output = recipe.apply(recipe.parse(text, "recipe"), source)
    assert default_out(source, suffix(output)).name == "demo-scaled-0.5"
    result = convert_alone(source, output, tmp_path / "out")
    found = {row["key"]: row for row in result.record["verification"]["rows"]}
    assert found["scale.factor"]["value"] == 0 and found["domains.mean"]["value"] > 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "every MLP was scaled by 0.5" in card and "- scaling\n" in card
    assert (tmp_path / "out" / "scaled_mlp.py").read_bytes() == BLOCK
    assert (tmp_path / "out" / "finetune" / "finetune.py").is_file()
    schema = json.dumps(recipe.json_schema())
    assert "what outputs are multiplied with." in schema
    assert surgery.scale is scale


@pytest.mark.usefixtures("scaling")
def test_its_own_check_can_fail(tmp_path: Path) -> None:
    source = open_checkpoint(MODEL)
    output = scale(source, factor=1.0)
    wrong = {n: constant(2.0, (1,), "F32") for n in output.tensors if n.endswith("5.mlp.factor")}
    output = output.replace(tensors={**output.tensors, **wrong})
    result = convert_alone(source, output, tmp_path / "out")
    rows = {row["key"]: row["passed"] for row in result.record["verification"]["rows"]}
    assert not rows["logits.difference"] and not result.record["verification"]["passed"]


def test_a_rule_is_two_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threshold is chosen, and what it computes is what the block computes."""
    monkeypatch.setitem(rules.RULES, "half", rules.Rule(least=0.0))  # type: ignore[arg-type]
    half = rules.Activation(rule="half", act="relu", sparsity=0.9, paper=rules.TEAL, text="half")
    monkeypatch.setitem(rules.ACTIVATIONS, "half", half)  # type: ignore[arg-type]
    line = 'RULES["half"] = Rule(lambda act, g, t: 0.5 * act(g).masked_fill(g < t, 0))'
    code = (Path(sparse_mlp.__file__).read_text() + line).encode()
    read = custom_code._read
    monkeypatch.setattr(custom_code, "_read", lambda n: code if n == "sparse_mlp.py" else read(n))
    monkeypatch.setitem(sparse_mlp.RULES, "half", eval(line.partition(" = ")[2], vars(sparse_mlp)))
    few = {"tokens": 512, "sequence_length": 128, "dtype": "fp32", "device": "cpu"}
    source = open_checkpoint(MODEL)
    output = surgery.relufy(source, activation="half", layers=[0], calibration=few)
    (step,) = output.steps
    assert step.work is not None
    step.work.folder()
    assert step.work.report["0"]["zeros"] == pytest.approx(0.9, abs=0.03)
    assert operations.find("relufy").papers(step.parameters)[-1] is rules.TEAL
