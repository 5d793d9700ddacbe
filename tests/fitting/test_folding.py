"""Thresholds, bias and bypass as plain neurons: the same function where the constant is exact, and
a stock model wherever it is close enough.

What could break it: a neuron that is not open, columns of `down` under the wrong neurons, a width
that differs between layers, a class that reads another field than the one that was written, a fit
on something else than what the folded MLP computes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import save_model
from safetensors.torch import load_file, save_file

import surgery
from surgery.checkpoint import Checkpoint, make_plan
from surgery.demo import MODEL
from surgery.errors import SurgeryError, UsageError
from surgery.families import locate
from surgery.fitting.fold import balanced, constant_direction, deviation, folded
from surgery.fitting.measures import error, sparsity
from surgery.fitting.neurons import Neurons
from surgery.fitting.ridge import beginning, ridge
from surgery.fitting.rows import Rows
from surgery.fitting.sizes import affordable_rank, grown
from surgery.operations.relufy import relufy
from surgery.proof import quality
from surgery.storage import open_checkpoint, write
from surgery.workflow.settle import settle

SMALL = {"tokens": 768, "sequence_length": 64, "dtype": "fp32"}
H, F, R = 12, 24, 5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relufied(**parts: Any) -> Neurons:
    """A ReLU MLP in fp64 with a threshold for each neuron, a correction and a bypass."""
    return Neurons(
        gate=random(F, H, seed=1),
        up=random(F, H, seed=2),
        down=random(H, F, seed=3),
        rule="shifted",
        act="relu",
        threshold=random(F, seed=4),
        correction=random(H, seed=5),
        bypass_in=random(R, H, seed=6),
        bypass_out=random(H, R, seed=7),
    )


def inputs(n: int = 400, constant: float = 0.5) -> torch.Tensor:
    """Inputs whose third channel is a constant."""
    z = random(n, H, seed=8)
    z[:, 2] = constant
    return z


def test_folding_is_exact_where_the_constant_is() -> None:
    z, mlp = inputs(), relufied()
    direction = torch.zeros(H, dtype=torch.float64)
    direction[2] = 2.0
    plain = folded(mlp, direction, 40)
    assert (plain.rule, plain.threshold, plain.correction, plain.bypass_out) == (
        "plain",
        *[None] * 3,
    )
    assert (plain.gate.shape, plain.up.shape, plain.down.shape) == ((40, H), (40, H), (H, 40))
    assert (plain(z) - mlp(z)).abs().max() < 1e-12 * mlp(z).abs().max()
    opens = plain.product(z)[:, F : F + R + 1]
    assert torch.allclose(opens[:, :R], z @ mlp.bypass_in.T) and torch.allclose(
        opens[:, R], torch.ones(len(z), dtype=torch.float64)
    )
    assert plain.product(z)[:, F + R + 1 :].count_nonzero() == 0


@pytest.mark.parametrize("own", [False, True])
def test_folding_into_biases_is_exact_for_any_input(own: bool) -> None:
    z, mlp = random(400, H, seed=8), relufied()
    if own:
        biases = {"gate_bias": random(F, seed=9), "up_bias": random(F, seed=10)}
        mlp = dataclasses.replace(mlp, **biases, down_bias=random(H, seed=11))
    plain = folded(mlp, None, 32)
    assert plain.gate_bias.shape == plain.up_bias.shape == (32,)
    assert (plain(z) - mlp(z)).abs().max() < 1e-12 * mlp(z).abs().max()


def test_a_wrong_direction_is_seen() -> None:
    z, mlp = inputs(), relufied()
    direction = torch.zeros(H, dtype=torch.float64)
    direction[2] = 1.9
    assert (folded(mlp, direction, 40)(z) - mlp(z)).abs().max() > 0.01


def test_the_constant_is_found_beside_first_tokens() -> None:
    """The channel is constant but for noise of 2%; first tokens are fifty times as large."""
    z = inputs().float()
    z[:, 2] *= 1 + 0.02 * random(len(z), seed=12).float()
    first = 50 * random(10, H, seed=13).float()
    first[:, 2] = 0.5
    rows = Rows(z=z, y=z, first=Rows(z=first, y=first))
    direction = constant_direction(rows)
    assert deviation(direction, rows) == pytest.approx(0.02, rel=0.3)
    assert (first @ direction - 1).abs().max() < 0.01


def test_a_refit_makes_up_for_what_lacks_to_a_constant() -> None:
    """A constant that is 10% too small costs little once `down` is fitted on what the folded
    neurons compute, on rows that were not fitted on.
    """
    z = inputs(4000).float()
    mlp = relufied()
    mlp = dataclasses.replace(
        mlp, **{n: t.float() for n, t in vars(mlp).items() if isinstance(t, torch.Tensor)}
    )
    rows = Rows(z=z, y=mlp(z))
    plain = folded(mlp, 0.9 * constant_direction(rows), 40)
    assert error(ridge(plain, rows), rows, rows.fitted) < 0.2 * error(plain, rows, rows.fitted)
    assert sparsity(plain, rows, width=F) > sparsity(plain, rows, width=F + R + 1) > 0.2


def test_the_bypass_begins_with_the_best_directions() -> None:
    """What the products cannot give is of rank 2: two directions of inputs give all of it, though
    others vary a hundred times as much.
    """
    mlp = dataclasses.replace(relufied(), correction=None, bypass_in=None, bypass_out=None)
    mlp = dataclasses.replace(
        mlp, **{n: t.float() for n, t in vars(mlp).items() if isinstance(t, torch.Tensor)}
    )
    z = random(3000, H, seed=8).float() * torch.tensor([100.0] * 4 + [1.0] * 8)
    lost = random(H, 2, seed=14).float() @ (random(2, H, seed=15).float() * (torch.arange(H) > 3))
    rows = Rows(z=z, y=mlp(z) + z @ lost.T)
    begun = beginning(mlp, rows, rank=2)
    own = torch.linalg.svd(lost).Vh[:2]
    inside = begun.bypass_in @ own.T @ own
    assert (inside - begun.bypass_in).norm() < 0.06 * begun.bypass_in.norm()
    sizes = balanced(begun, rows).bypassed(z).square().mean(0).sqrt()
    assert torch.allclose(sizes, mlp.product(z).square().mean().sqrt().expand(2), rtol=0.1)


def test_widths_and_ranks() -> None:
    assert [grown(n) for n in (1, 256, 257, 1728)] == [256, 256, 512, 1792]
    assert affordable_rank(100, 100, 8) == 18  # 2 · 18 · 100 of 3 · 100 · 100 / 8
    assert affordable_rank(576, 1536, 8) == 576  # a square matrix is an eighth of the MLP


# --- whole models ---------------------------------------------------------------------------------


def planted(name: str, folder: Path) -> Checkpoint:
    """A random model the first channel of whose stream is a large constant, which no layer writes
    and no MLP uses: what the norm before the MLP gives there varies little.
    """
    save_model(name, folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for key, t in tensors.items():
        if key.endswith("embed_tokens.weight"):
            t[:, 0] = 60
        elif key.endswith(("o_proj.weight", "down_proj.weight")):
            t[0] = 0
        elif key.endswith(("gate_proj.weight", "up_proj.weight", "gate_up_proj.weight")):
            t[:, 0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(folder)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3"])
def test_a_stock_model_is_written_and_runs(name: str, tmp_path: Path) -> None:
    source = planted(name, tmp_path / "source")
    output = settle(relufy(source, activation="shifted", sparsity=0.7, calibration=SMALL))
    assert output.steps[-1].parameters["form"] == "stock"
    write(make_plan(output), tmp_path / "out", source=source)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["hidden_act"]) == (name, "relu")
    assert (config["intermediate_size"], config["always_open_neurons"]) == (256, 208)
    assert "auto_map" not in config and not config.get("mlp_bias")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert {k: v for k, v in info.items() if v} == {}
    assert model.config.always_open_neurons == 208
    ids = model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(
        again.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False), ids
    )
    texts = quality.texts(source, 64, 64)
    written = open_checkpoint(tmp_path / "out")
    models = {"source": source, "swap": quality.plain_swap(source, output), "output": written}
    found = quality.measure(models, texts)
    assert found["output"].sparsity == pytest.approx(0.7, abs=0.06)
    assert locate(written).always_open == 208
    report = output.steps[-1].work.report
    assert all(report[str(i)]["deviation"] < 0.05 for i in range(3))
    assert all(report[str(i)]["repaired"] < 0.5 * report[str(i)]["error"] for i in range(3))


@pytest.mark.parametrize(("name", "form"), [("llama", "biases"), ("qwen2", "code")])
def test_without_a_constant_another_form_is_taken(name: str, form: str, tmp_path: Path) -> None:
    save_model(name, tmp_path, dtype=torch.float32)
    output = settle(relufy(open_checkpoint(tmp_path), calibration=SMALL))
    assert output.steps[-1].parameters["form"] == form
    assert output.config["model_type"] == ("surgery_" * (form == "code")) + name


@pytest.mark.parametrize("operation", ["relufy", "carve"])
def test_always_open_neurons_are_left_alone(operation: str, tmp_path: Path) -> None:
    source = planted("llama", tmp_path / "source")
    output = settle(relufy(source, calibration=SMALL))
    write(make_plan(output), tmp_path / "out", source=source)
    with pytest.raises(SurgeryError, match="the last 208 neurons"):
        getattr(surgery, operation)(open_checkpoint(tmp_path / "out"))


def test_forms_of_a_trained_model_compute_alike() -> None:
    """Biases are exact, so the form with code and that with biases differ by their last refit."""
    source = open_checkpoint(MODEL)
    calibration = {"tokens": 4096, "dtype": "fp32"}
    forms = ("stock", "biases", "code")
    outputs = {f: relufy(source, form=f, calibration=calibration) for f in forms}
    for output in outputs.values():
        output.steps[-1].work.folder()
    found = quality.measure({"source": source, **outputs}, quality.texts(source, 256, 256))
    for text, base in found["source"].perplexity.items():
        ratios = {form: found[form].perplexity[text] / base for form in forms}
        assert max(ratios.values()) < 1.02, ratios
    assert found["biases"].sparsity == pytest.approx(found["code"].sparsity, abs=0.01)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"form": "stock", "activation": "fatrelu"}, "no stock form of fatrelu"),
        ({"form": "stock", "layers": [0]}, "no stock form"),
        ({"form": "stock", "stage": 2}, "no stock form"),
        ({"form": "paper"}, "unknown form 'paper'"),
    ],
)
def test_impossible_forms(options: dict[str, Any], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        relufy(open_checkpoint(MODEL), **options)
    assert seen in str(caught.value)
