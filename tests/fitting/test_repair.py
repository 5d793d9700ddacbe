"""A relufied model is repaired: closed-form solutions against independent ones, and what is written
is what was fitted.

What could break it: a threshold that stands for another sparsity, a solution for other rows than
its own, a layer that is fitted on another stream than it will read, a tensor that lands under
another name or transposed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import logits_of, save_model

from surgery.calibration.settings import Calibration
from surgery.calibration.texts import to_measure
from surgery.checkpoint import Checkpoint, make_plan
from surgery.demo import MODEL
from surgery.errors import UsageError
from surgery.fitting.allocation import allocate, cost
from surgery.fitting.cross_validation import validated
from surgery.fitting.measures import error, sparsity
from surgery.fitting.neurons import Neurons, turned
from surgery.fitting.ridge import ridge, solve
from surgery.fitting.rows import Rows
from surgery.fitting.thresholds import thresholded
from surgery.operations.relufy import relufy
from surgery.proof import quality
from surgery.storage import open_checkpoint, write

SMALL = {"tokens": 768, "sequence_length": 64, "dtype": "fp32"}
FAMILIES = ("llama", "qwen2", "gemma3_text", "phi3", "gpt2", "granite", "olmo2")


def neurons(rule: str = "plain", act: str = "relu") -> tuple[Neurons, Rows]:
    """An MLP that was SiLU's, F = 24 and H = 12, and rows of its original."""
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(s, generator=draw) for s in ((24, 12), (24, 12), (12, 24)))
    z = torch.randn(2000, 12, generator=draw)
    y = (torch.nn.functional.silu(z @ gate.T) * (z @ up.T)) @ down.T
    made = Neurons(
        gate=gate,
        up=up,
        down=down,
        rule=rule,
        act=act,
        threshold=torch.zeros(1),
        threshold_up=torch.zeros(1),
    )
    return made, Rows(z=z, y=y, weight=1 / y.square().mean(1))


def test_ridge_is_weighted_least_squares() -> None:
    mlp, rows = neurons()
    fitted = ridge(mlp, rows, damping=1e-9, bias=True)
    n, root = rows.fitted, rows.weight[: rows.fitted, None].sqrt().double()
    h = torch.cat([mlp.product(rows.z[:n]), torch.ones(n, 1)], dim=1).double()
    expected = torch.linalg.lstsq(h * root, rows.y[:n].double() * root).solution.T
    assert (fitted.down - expected[:, :-1]).abs().max() < 1e-3
    assert (fitted.correction - expected[:, -1]).abs().max() < 1e-3
    assert error(fitted, rows, n) < 0.8 * error(mlp, rows, n)


def test_a_full_bypass_is_least_squares_of_products_and_inputs() -> None:
    mlp, rows = neurons()
    fitted = ridge(mlp, rows, damping=1e-9, bias=True, rank=12)
    n, root = rows.fitted, rows.weight[: rows.fitted, None].sqrt().double()
    h = torch.cat([mlp.product(rows.z[:n]), torch.ones(n, 1), rows.z[:n]], dim=1).double()
    expected = torch.linalg.lstsq(h * root, rows.y[:n].double() * root).solution.T
    assert (fitted.down - expected[:, :24]).abs().max() < 1e-3
    assert (fitted.correction - expected[:, 24]).abs().max() < 1e-3
    assert (fitted.bypass_out - expected[:, 25:]).abs().max() < 1e-3 and fitted.bypass_in is None


def test_a_bypass_takes_the_directions_that_matter() -> None:
    """What is missing is a map of rank 2 of inputs, one direction of which is a hundred times
    larger than the others.
    """
    mlp, rows = neurons()
    draw = torch.Generator().manual_seed(1)
    z = rows.z * torch.tensor([100.0] + [1.0] * 11)
    lost = torch.randn(12, 2, generator=draw) @ torch.randn(2, 12, generator=draw)
    rows = Rows(z=z, y=mlp(z) + z @ lost.T)
    errors = [error(ridge(mlp, rows, damping=1e-9, rank=r), rows, rows.fitted) for r in (0, 1, 2)]
    assert errors[0] > 100 * errors[1] > 10_000 * errors[2]


def test_ridge_leaves_alone_what_misses_nothing() -> None:
    mlp, rows = neurons(act="silu")
    assert (ridge(mlp, rows, bias=True).down - mlp.down).abs().max() < 1e-4


def test_blocks_come_near_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, rows = neurons()
    whole = error(ridge(mlp, rows), rows)
    monkeypatch.setattr("surgery.fitting.ridge.BLOCK", 10)
    monkeypatch.setattr("surgery.fitting.ridge.SWEEPS", 12)
    assert error(ridge(mlp, rows), rows) < 1.05 * whole


def test_a_dead_neuron_does_not_break_the_solution() -> None:
    mlp, rows = neurons()
    mlp = dataclasses.replace(mlp, gate_bias=torch.tensor([-1e9] + [0.0] * 23))
    fitted = ridge(mlp, rows)
    assert torch.equal(fitted.down[:, 0], mlp.down[:, 0]) and fitted.down.isfinite().all()


def test_the_output_of_first_tokens_is_kept() -> None:
    """One neuron writes a thousand times what others do, on first tokens alone."""
    mlp, rows = neurons()
    mlp.gate[0] = mlp.gate[0] * 0.01
    first = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    first -= (first @ mlp.gate[0] / mlp.gate[0].square().sum())[:, None] * mlp.gate[0]
    first += 3000 * mlp.gate[0] / mlp.gate[0].square().sum()
    kept = Rows(z=first, y=mlp(first), weight=1 / mlp(first).square().mean(1))
    for given, low, high in (
        (rows, 0.01, 1.0),
        (dataclasses.replace(rows, first=kept), 0.0, 0.005),
    ):
        fitted = ridge(mlp, given)
        assert low < error(fitted, kept) < high
        assert error(fitted, rows, rows.fitted) < 0.85 * error(mlp, rows, rows.fitted)


def test_what_fp32_cannot_solve_is_summed_in_fp64() -> None:
    """In fp32 the Gram matrix is all fours, exactly singular whatever the order of the sums."""
    asked = []

    def sums(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(dtype)
        x = torch.tensor([[2.0, 2.0], [0.0, 1e-4]], dtype=torch.float64)
        gram = x.T @ x
        return gram.to(dtype), (torch.tensor([[3.0, 2.0]], dtype=torch.float64) @ gram).to(dtype)

    solved = solve(sums, damping=1e-16)
    assert asked == [torch.float32, torch.float64]
    assert (solved - torch.tensor([[3.0, 2.0]])).abs().max() < 1e-3


@pytest.mark.parametrize("rule", ["fatrelu", "shifted", "cats", "teal", "drelu"])
@pytest.mark.parametrize("per_neuron", [False, True])
def test_thresholds_give_the_sparsity(rule: str, per_neuron: bool) -> None:
    mlp, rows = neurons(rule, "silu" if rule in ("cats", "teal") else "relu")
    found = thresholded(mlp, rows, 0.8, per_neuron)
    assert sparsity(found, rows) == pytest.approx(0.8, abs=0.01)
    assert found.threshold.shape == ((24,) if per_neuron else (1,))


def test_neurons_turn_to_where_relu_of_up_keeps_their_energy() -> None:
    """Inputs on one side of each row of `up`, or of its opposite: turned, all of the products
    survive a ReLU of `up`.
    """
    draw = torch.Generator().manual_seed(2)
    z = torch.randn(500, 12, generator=draw) + 4
    sign = torch.where(torch.arange(24) % 3 == 0, -1.0, 1.0)
    up = sign[:, None] * (torch.rand(24, 12, generator=draw) + 0.1)
    made = neurons("drelu")[0]
    mlp = dataclasses.replace(made, gate=made.gate.abs(), up=up, up_bias=sign)
    plain = dataclasses.replace(mlp, rule="fatrelu")
    found = turned(mlp, Rows(z=z, y=plain(z)))
    assert torch.equal(found.up, up * sign[:, None])
    assert torch.equal(found.up_bias, torch.ones(24))
    assert torch.allclose(found(z), plain(z), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(mlp(z), plain(z), atol=1.0)


def test_greedy_allocation_takes_the_cheapest_step() -> None:
    """Layer 1 costs nothing until 0.8, layer 0 much at once: at a mean of 0.6 all of the rise goes
    to layer 1.
    """
    levels = (0.4, 0.6, 0.8, 0.9)
    costs = {0: [1.0, 3.0, 9.0, 20.0], 1: [1.0, 1.01, 1.02, 30.0]}
    assert allocate(costs, levels, 0.6) == pytest.approx({0: 0.4, 1: 0.8})
    assert allocate(costs, levels, 0.65) == pytest.approx({0: 0.5, 1: 0.8})
    assert allocate(costs, levels, 0.3) == pytest.approx({0: 0.3, 1: 0.3})


def test_a_higher_sparsity_costs_more() -> None:
    mlp, rows = neurons("shifted")
    costs = cost(mlp, "silu", rows, (0.6, 0.75, 0.9))
    assert 0 < costs[0] < costs[1] < costs[2]


def checkpoint_of(name: str, folder: Path) -> Checkpoint:
    """A tiny random model, in bf16."""
    save_model(name, folder, dtype=torch.bfloat16)
    return open_checkpoint(folder)


# --- whole models ---------------------------------------------------------------------------------


SPEECHES = to_measure([(["builtin:speeches"], [], 0.0)])


def measured(*models: Checkpoint) -> list[quality.Quality]:
    sample = quality.texts(models[0], 512, 64, SPEECHES)
    return list(quality.measure({str(i): m for i, m in enumerate(models)}, sample).values())


@pytest.mark.parametrize("activation", ["fatrelu", "drelu", "teal"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_is_written_as_it_was_fitted(
    name: str, activation: str, tmp_path: Path
) -> None:
    """Random models: the share of zeros of the written output is what was asked for, in the class
    that loads it.
    """
    if name == "gpt2" and activation == "drelu":
        pytest.skip("no gate")
    source = checkpoint_of(name, tmp_path / "source")
    output = relufy(source, activation=activation, sparsity=0.85, calibration=SMALL)
    write(make_plan(output), tmp_path / "out", source=source)
    written = open_checkpoint(tmp_path / "out")
    before, after = measured(source, written)
    assert after.sparsity == pytest.approx(0.85, abs=0.06) and before.sparsity < 0.01
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert {k: v for k, v in info.items() if v} == {}
    report = output.steps[-1].work.report
    assert sorted(report) == ["0", "1", "2", "sample"]
    assert all(report[str(i)]["repaired"] <= report[str(i)]["error"] for i in range(3))
    layer = model.get_submodule(model.base_model_prefix).get_submodule(known_layers(written))[1]
    entry = written.config["surgery_blocks"][0]
    on_disk = output.tensors[
        next(n for n in output.tensors if ".1." in n and n.endswith("mlp.threshold"))
    ].read()
    assert torch.equal(getattr(layer, entry["mlp"]).threshold, on_disk) and on_disk > 0


def known_layers(checkpoint: Checkpoint) -> str:
    return str(checkpoint.config["surgery_blocks"][0]["stack"])


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_shifted_relu_is_stock_where_the_family_has_biases(name: str, tmp_path: Path) -> None:
    source = checkpoint_of(name, tmp_path / "source")
    options = {"activation": "shifted", "sparsity": 0.7, "form": "biases", "bypass": "none"}
    output = relufy(source, **options, calibration=SMALL)
    write(make_plan(output), tmp_path / "out", source=source)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["hidden_act"], config["mlp_bias"]) == (name, "relu", True)
    written = open_checkpoint(tmp_path / "out")
    (after,) = measured(written)
    assert after.sparsity == pytest.approx(0.7, abs=0.06)
    bias = written.tensors["model.layers.0.mlp.gate_proj.bias"].read()
    assert (
        bias.unique().numel() == 1
        and written.tensors["model.layers.0.mlp.up_proj.bias"].read().count_nonzero() == 0
    )


def test_the_demo_model_is_repaired() -> None:
    """A trained model: the swap costs 8% of perplexity, and the repair takes most of that away,
    also on text unlike the rest; relu stays stock.
    """
    source = open_checkpoint(MODEL)
    output = relufy(source, bypass="none", calibration={"tokens": 6144, "dtype": "fp32"})
    assert output.config == dict(source.config) | {"hidden_act": "relu"} and not output.custom_code
    sample = quality.texts(source, 256, 256)
    models = {"source": source, "swap": quality.plain_swap(source, output), "output": output}
    found = quality.measure(models, sample)
    ratios = {name: q.over(found["source"]) for name, q in found.items()}
    mean = {name: quality.geometric_mean(by.values()) for name, by in ratios.items()}
    assert mean["swap"] > 1.1 and mean["output"] < 1.03 and max(ratios["output"].values()) < 1.1
    assert found["output"].sparsity > 0.55 and min(found["output"].agreement.values()) > 0.8


def test_a_bypass_mends_more_and_is_written_as_fitted(tmp_path: Path) -> None:
    """On a trained model; the swap on its own is shown without what the repair adds."""
    source = open_checkpoint(MODEL)
    plain, *bypassed = (
        relufy(
            source, activation="fatrelu", bypass=b, calibration={"tokens": 4096, "dtype": "fp32"}
        )
        for b in (0, 32, "full")
    )
    sizes = [{n.rpartition(".")[2] for n in o.tensors if ".bypass" in n} for o in bypassed]
    assert sizes == [{"bypass_in", "bypass_out"}, {"bypass_out"}]
    assert (
        bypassed[0].steps[-1].parameters["bypass"] == 32
        and bypassed[1].steps[-1].parameters["bypass"] == 192
    )
    write(make_plan(bypassed[0]), tmp_path / "out", source=source)
    low, full, swap = measured(
        open_checkpoint(tmp_path / "out"), bypassed[1], quality.plain_swap(source, bypassed[1])
    )
    assert (
        full.perplexity["speeches"] < swap.perplexity["speeches"] and abs(low.sparsity - 0.8) < 0.02
    )
    errors = [
        o.steps[-1].work.report["0"]["repaired"]
        for o in (bypassed[1], bypassed[0], plain)
        if o.steps[-1].work.folder()
    ]
    assert errors == sorted(errors)
    again = measured(quality.plain_swap(source, plain))[0]
    assert swap.perplexity["speeches"] == pytest.approx(again.perplexity["speeches"], rel=0.01)


def test_one_layer_and_stage_two(tmp_path: Path) -> None:
    """Only the layer that was named changes; stage 2 also makes what its projections read
    sparse.
    """
    source = checkpoint_of("llama", tmp_path / "source")
    options = {"activation": "relu", "stage": 2, "layers": [1], "bypass": "none"}
    output = relufy(source, **options, calibration=SMALL)
    changed = {n for n in output.tensors if output.tensors[n] is not source.tensors.get(n)}
    assert changed == {"model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.correction"}
    write(make_plan(output), tmp_path / "out", source=source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    )
    seen: dict[int, torch.Tensor] = {}
    for i in (0, 1):
        model.model.layers[i].mlp.gate_proj.register_forward_pre_hook(
            lambda m, x, i=i: seen.__setitem__(i, x[0])
        )
    model(torch.arange(20)[None])
    assert seen[1].min() == 0 and seen[0].min() < 0


def test_an_interrupted_calibration_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint_of("llama", tmp_path / "source")
    fitted: list[int] = []

    def interrupted(mlp: Neurons, rows: Rows, **options: Any) -> Any:
        fitted.append(1)
        if len(fitted) == 2:
            raise KeyboardInterrupt
        return validated(mlp, rows, **options)

    monkeypatch.setattr("surgery.fitting.cross_validation.validated", interrupted)
    outputs = [relufy(source, bypass="none", calibration=SMALL) for _ in range(3)]
    work = outputs[0].steps[-1].work
    with pytest.raises(KeyboardInterrupt):
        work.prepare(tmp_path / "scratch")
    outputs[1].steps[-1].work.prepare(tmp_path / "scratch")
    assert len(fitted) == 4  # the second layer again, and the third; not the first
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(outputs[1].tensors[name].read(), outputs[2].tensors[name].read())
    assert sorted(outputs[1].steps[-1].work.report) == ["0", "1", "2", "sample"]


@pytest.mark.parametrize(
    ("options", "kind", "seen"),
    [
        ({"activation": "relu", "sparsity": 0.8}, UsageError, "no threshold"),
        ({"activation": "fatrelu", "sparsity": 1.2}, UsageError, "1.2"),
        ({"activation": "fatrelu", "sparsity": 0.8, "threshold": 0.1}, UsageError, "both"),
        ({"bypass": 4000}, UsageError, "4000"),
        ({"bypass": 4, "repair": "none"}, UsageError, "without a repair"),
        ({"repair": "magic"}, UsageError, "'magic'"),
        ({"activation": "gelu"}, UsageError, "'gelu'"),
        ({"layers": [7]}, UsageError, "[7]"),
        ({"layers": [-1, 2]}, UsageError, "[-1, 2]"),
        ({"stage": 3}, UsageError, "stage 3"),
        ({"activation": "fatrelu", "allocation": "fair"}, UsageError, "'fair'"),
        ({"calibration": {"token": 3}}, UsageError, "'token'"),
    ],
)
def test_impossible_options(options: dict[str, Any], kind: type[Exception], seen: str) -> None:
    with pytest.raises(kind) as caught:
        relufy(open_checkpoint(MODEL), **options)
    assert seen in str(caught.value)


def test_opt_gets_a_block_where_its_loose_parts_are_gathered(tmp_path: Path) -> None:
    """A threshold of 0 changes nothing, and one that nothing reaches leaves no product."""
    source = checkpoint_of("opt", tmp_path / "source")
    found = []
    for threshold in (0.0, 1e9):
        output = relufy(source, activation="teal", threshold=threshold, repair="none")
        assert {e["kind"] for e in output.config["surgery_blocks"]} == {"gathered", "sparse"}
        write(make_plan(output), tmp_path / f"{threshold}", source=source)
        found.append(opt_logits(tmp_path / f"{threshold}"))
    want = opt_logits(tmp_path / "source")
    assert torch.equal(found[0], want) and not torch.allclose(found[1], want, atol=0.01)


@torch.no_grad()
def opt_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    return logits_of(model.eval())


def test_the_same_settings_have_the_same_identity(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    settings = Calibration(text=str(text))
    first = settings.identity
    text.write_text("two")
    assert settings.identity != first and Calibration().identity != first
