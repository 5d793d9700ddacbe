"""A memory in the MLP's place is what was fitted to the layer's rows, and what is written is what
the walk computed.

What could break it: keys that are not where the inputs are, a key's bias that is lost, values for
other slots, neurons that are not those that matter, a layer that is fitted on another stream than
it will read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from models import load, logits_of, sample_ids, save_model
from operated import loaded

from surgery.blocks import block_config
from surgery.calibration.install import observe
from surgery.calibration.settings import Calibration
from surgery.calibration.walk import Walk
from surgery.checkpoint import make_plan
from surgery.demo import MODEL
from surgery.errors import SurgeryError, UsageError
from surgery.families import known, locate
from surgery.fitting import memory_fit, memory_init
from surgery.fitting.neurons import Neurons
from surgery.fitting.rows import Rows
from surgery.operations.memory import memory
from surgery.operations.relufy import relufy
from surgery.proof import quality
from surgery.storage import open_checkpoint, write

SMALL: dict[str, Any] = {"tokens": 768, "sequence_length": 64, "dtype": "fp32"}
TINY: dict[str, Any] = {
    "place": "replace",
    "slots": 16,
    "heads": 2,
    "knn": 2,
    "key_dim": 4,
    "calibration": SMALL,
}
SPEC: dict[str, Any] = {
    "place": "replace",
    "slots": "pkm",
    "shared": "memory_values_0",
    "heads": 2,
    "keys": 8,
    "knn": 4,
    "key_dim": 6,
    "value_dim": 12,
    "query_norm": False,
    "gated": False,
    "activation": "gelu",
    "bypass": "bias",
    "width": 0,
    "sparse_gradients": False,
}


def entry(**changes: Any) -> dict[str, Any]:
    return block_config.entry(known()["llama"], "memory", [0], **{**SPEC, **changes})


def rows(count: int = 4000) -> Rows:
    """Inputs around 40 centres in 12 dimensions, and targets that are a table of those centres."""
    draw = torch.Generator().manual_seed(0)
    centres, table = torch.randn(40, 12, generator=draw) * 3, torch.randn(40, 12, generator=draw)
    which = torch.randint(40, (count,), generator=draw)
    z = centres[which] + 0.1 * torch.randn(count, 12, generator=draw)
    return Rows(z=z, y=table[which], weight=None)


# --- the fit --------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_score_orders_the_keys_of_a_half_by_their_distance() -> None:
    """q·k - ‖k‖²/2 falls as ‖q - k‖² grows; the last dimension of a query is 1."""
    data = rows()
    made = memory_fit.keys(data.z, entry(), seed=0)
    q = made.query(data.z[:50]).view(50, 2, 2, 3)
    assert torch.allclose(q[..., -1], torch.ones(50, 2, 2))
    for head in range(2):
        for side in range(2):
            scores = q[:, head, side] @ made.keys[head, side].T
            distances = torch.cdist(q[:, head, side, :-1], made.keys[head, side, :, :-1])
            assert torch.equal(scores.argmax(1), distances.argmin(1))


@torch.no_grad()
def test_queries_are_white_and_keys_are_where_they_are() -> None:
    data = rows()
    made = memory_fit.keys(data.z, entry(), seed=0)
    q = made.query(data.z).view(-1, 2, 2, 3)[..., :-1].flatten(2)
    for head in range(2):
        assert (
            torch.allclose(torch.cov(q[:, head].T), torch.eye(4), atol=0.02)
            and q[:, head].mean(0).abs().max() < 1e-3
        )
    nearest = torch.cdist(q[:, 0, :2], made.keys[0, 0, :, :-1]).min(1).values
    assert nearest.mean() < 0.5


@torch.no_grad()
def test_values_are_the_ridge_regression_on_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "VALUE_DAMPING", 1e-3)
    data = rows()
    made = memory_fit.keys(data.z[: data.fitted], entry(), seed=0)
    table = memory_fit.values(made, data)
    slots, weights = memory_fit.codes(made, data.z[: data.fitted])
    x = torch.zeros(data.fitted, 64).scatter_add_(1, slots, weights).double()
    gram = x.T @ x
    gram.diagonal().add_(1e-3 * gram.diagonal().mean())
    torch.testing.assert_close(
        table.double(),
        torch.linalg.solve(gram, x.T @ data.y[: data.fitted].double()),
        atol=1e-2,
        rtol=1e-2,
    )
    rest = memory_fit.missed(data, lambda z: memory_fit.look_up(made, table, z))
    assert memory_fit.size(rest, data.fitted) < 0.2 * memory_fit.size(data, data.fitted)
    _, bias = memory_fit.affine(data)
    linear = memory_fit.missed(data, lambda z: z @ memory_fit.affine(data)[0].T + bias)
    # A table is no linear map.
    assert memory_fit.size(rest, data.fitted) < 0.5 * memory_fit.size(linear, data.fitted)


@torch.no_grad()
def test_the_affine_map_is_found() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias, z = (
        torch.randn(12, 12, generator=draw),
        torch.randn(12, generator=draw),
        torch.randn(3000, 12, generator=draw),
    )
    found = memory_fit.affine(
        Rows(z=z, y=z @ weight.T + bias, weight=torch.rand(3000, generator=draw))
    )
    assert (found[0] - weight).abs().max() < 0.15 * weight.abs().max()  # it shrinks
    assert (found[1] - bias).abs().max() < 0.15 * bias.abs().max()


@torch.no_grad()
def test_the_neurons_that_write_most_are_kept() -> None:
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(s, generator=draw) for s in ((24, 12), (24, 12), (12, 24)))
    loud = torch.tensor([3, 4, 11, 20])
    down[:, loud] *= 30
    neurons = Neurons(gate=gate, up=up, down=down, rule="plain", act="silu")
    kept = memory_fit.best(neurons, rows(500), 4)
    assert (
        torch.equal(kept.gate, gate[loud])
        and torch.equal(kept.down, down[:, loud])
        and torch.equal(kept.up, up[loud])
    )


@torch.no_grad()
def test_a_neuron_that_only_the_first_tokens_need_is_kept() -> None:
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(s, generator=draw) for s in ((24, 12), (24, 12), (12, 24)))
    z, first = torch.randn(500, 12, generator=draw).abs(), torch.randn(16, 12, generator=draw)
    first[:, 5] = -20.0
    gate[7], up[7] = 0.0, 0.0
    gate[7, 5] = up[7, 5] = -20.0
    neurons = Neurons(gate=gate, up=up, down=down, rule="plain", act="relu")
    data = Rows(z=z, y=neurons(z))
    for given, there in (
        (data, False),
        (dataclasses.replace(data, first=Rows(z=first, y=neurons(first))), True),
    ):
        assert (memory_fit.best(neurons, given, 4).gate[:, 5] == -20).any() == there


@torch.no_grad()
def test_a_memory_that_does_not_help_starts_empty() -> None:
    """The targets are noise, so that what it learned is worth nothing on other rows."""
    draw = torch.Generator().manual_seed(0)
    checkpoint = open_checkpoint(MODEL)
    mlp = locate(checkpoint).mlp(0)
    hidden = mlp.down.shape[0]
    noise = Rows(
        z=torch.randn(600, hidden, generator=draw),
        y=torch.randn(600, hidden, generator=draw),
        weight=None,
    )
    found, figures = memory_fit.fit(
        mlp, "silu", noise, entry(value_dim=hidden, bypass="affine"), seed=0
    )
    assert not found["table.weight"].any() and figures["error"] == figures["without memory"]


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["slots", "fit"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "phi3", "gpt2", "granite", "olmo2", "llama with biases"]
)
@torch.no_grad()
def test_what_is_written_is_what_the_walk_computed(name: str, init: str, tmp_path: Path) -> None:
    """Loaded by transformers it gives the logits of a walk; it is nearer to the source than no MLP
    is.
    """
    save_model(
        name.removesuffix(" with biases"),
        tmp_path / "source",
        **({"mlp_bias": True} if "biases" in name else {}),
    )
    checkpoint = open_checkpoint(tmp_path / "source")
    options = TINY | {"init": init, "layers": [0, 2]} | ({"reads": 0.9} if init == "slots" else {})
    output, nothing = (
        memory(checkpoint, **options),
        memory(checkpoint, **(options | {"init": "zero"})),
    )
    for folder, made in (("output", output), ("nothing", nothing)):
        write(make_plan(made), tmp_path / folder, source=checkpoint)
    want = logits_of(load(tmp_path / "source")[0])
    got, without = (logits_of(loaded(tmp_path / folder)) for folder in ("output", "nothing"))
    # The MLPs are of random weights: a linear map has little of them.
    most = {"slots": 0.7, "fit": 1.0}[init]
    assert (got - want).square().mean() < most * (without - want).square().mean()
    walk = Walk(open_checkpoint(tmp_path / "output"), sample_ids())
    for layer in walk:
        layer.run()
    walked = torch.cat([part for _, part in walk.logits()], dim=1)
    torch.testing.assert_close(walked, got, rtol=0, atol=1e-5)
    report = output.steps[-1].work.report  # type: ignore[union-attr]
    assert {"0", "2", "sample"} <= set(report) and 0 < report["0"]["error"] <= report["0"][
        "without memory"
    ] < 1


def test_bytes_are_what_was_asked_for() -> None:
    checkpoint = open_checkpoint(MODEL)
    for reads in (0.4, 0.6):
        output = memory(
            checkpoint,
            place="replace",
            layers=[1],
            reads=reads,
            slots=64,
            heads=1,
            knn=4,
            key_dim=8,
        )
        (made,) = output.config["surgery_blocks"]
        mlp = locate(checkpoint).mlp(1)
        hidden = mlp.down.shape[0]
        read = memory_init.numbers_read(made, hidden) + 3 * hidden * made["width"]
        assert read <= reads * 3 * hidden * mlp.width < read + 8 * 3 * hidden
        assert output.tensors["model.layers.1.mlp.up_proj.weight"].shape == (made["width"], hidden)
        assert output.parameters < checkpoint.parameters


def test_perplexity_of_the_demo_model_by_init() -> None:
    """The fitted inits keep the model, the published random one ruins it."""
    checkpoint = open_checkpoint(MODEL)
    options: dict[str, Any] = {
        "place": "replace",
        "layers": [0],
        "slots": 256,
        "calibration": {"tokens": 2048, "dtype": "fp32"},
    }
    models = {
        init: memory(checkpoint, **options, init=init)
        for init in ("slots", "fit", "zero", "random")
    }
    for made in models.values():
        if (work := made.steps[-1].work) is not None:
            work.folder()
    found = quality.measure({"source": checkpoint, **models}, quality.texts(checkpoint, 128, 128))
    ratio = {n: quality.geometric_mean(q.over(found["source"]).values()) for n, q in found.items()}
    assert ratio["slots"] < ratio["fit"] < ratio["zero"] and ratio["slots"] < 1.2, ratio
    assert ratio["random"] > 5 * ratio["slots"], ratio


@torch.no_grad()
def test_distilled_neurons_are_nearer() -> None:
    """On rows of a real layer that were not fitted on; gate, up and down all move."""
    checkpoint = open_checkpoint(MODEL)
    calibration = Calibration(tokens=4096, dtype="fp32")
    sample = calibration.sample(checkpoint)
    # It ends when it is forgotten.
    steps_of_walk = calibration.walk(checkpoint, sample.input_ids).steps()
    layer = next(steps_of_walk)
    blocks = locate(checkpoint)
    data = observe(layer, blocks, sample, list(layer.outputs()), feedback=0.0)
    made = entry(value_dim=data.z.shape[1], width=64)
    plain, distilled = (
        memory_fit.fit(blocks.mlp(0), "silu", data, made, 0, steps) for steps in (0, 40)
    )
    assert distilled[1]["without memory"] < 0.95 * plain[1]["without memory"]
    assert all(
        not torch.equal(distilled[0][part], plain[0][part]) for part in ("gate", "up", "down")
    )


def test_the_cheapest_layers_are_chosen() -> None:
    checkpoint = open_checkpoint(MODEL)
    options: dict[str, Any] = {
        "place": "replace",
        "layers": "auto",
        "slots": 256,
        "calibration": {"tokens": 512},
    }
    one, two = (memory(checkpoint, **options, count=n).steps[-1].layers for n in (1, 2))
    assert len(one) == 1 and len(two) == 2 and set(one) < set(two)
    with pytest.raises(UsageError, match="99 layers of a model with"):
        memory(checkpoint, **options, count=99)


def test_an_interrupted_fit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(MODEL)
    options: dict[str, Any] = {
        "place": "replace",
        "layers": [1, 2],
        "slots": 64,
        "knn": 4,
        "calibration": {"tokens": 512, "dtype": "fp32"},
    }
    fit = memory_fit.fit
    fitted: list[int] = []

    def counted(*arguments: Any) -> Any:
        fitted.append(len(fitted))
        if len(fitted) == 2:
            raise KeyboardInterrupt
        return fit(*arguments)

    monkeypatch.setattr(memory_fit, "fit", counted)
    with pytest.raises(KeyboardInterrupt):
        memory(checkpoint, **options).steps[-1].work.prepare(tmp_path)  # type: ignore[union-attr]
    second = memory(checkpoint, **options).steps[-1].work
    assert second is not None
    second.prepare(tmp_path)
    assert len(fitted) == 3
    whole = memory(checkpoint, **options).steps[-1].work
    assert whole is not None
    whole.prepare(tmp_path / "whole")
    assert all(torch.equal(second.get(n), whole.get(n)) for n in whole._promised)


def test_a_layer_that_has_a_block_is_refused() -> None:
    checkpoint = relufy(open_checkpoint(MODEL), repair="none", layers=[1])
    with pytest.raises(SurgeryError, match="layer 1 has a sparse block already"):
        memory(checkpoint, **TINY, layers=[1])
    assert [
        e["kind"]
        for e in memory(checkpoint, **TINY, init="zero", layers=[2]).config["surgery_blocks"]
    ] == [
        "sparse",
        "memory",
    ]
