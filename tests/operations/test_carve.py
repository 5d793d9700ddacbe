"""A carved model: all experts active are the source, fewer compute what the chosen neurons of the
source add.

What could break it: neurons of gate, up, down or a bias that are put into different orders, a
router of another layer, a choice that is not the one that was fitted.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import transformers
from models import greedy, logits_of, sample_ids, save_model
from support import found_by_transformers_4

from surgery.calibration import data
from surgery.checkpoint import Checkpoint, make_plan
from surgery.demo import MODEL
from surgery.errors import SurgeryError, UsageError
from surgery.fitting import carved_mlp
from surgery.operations.carve import METHODS, carve
from surgery.operations.relufy import relufy
from surgery.proof import quality
from surgery.storage import open_checkpoint, write

SMALL = {"tokens": 768, "sequence_length": 64, "dtype": "fp32"}
CUT = {"experts": 8, "active": 4, "calibration": SMALL}
DEMO: dict[str, Any] = {
    "experts": 16,
    "active": 8,
    "layers": [1, 3, 5],
    "calibration": {"tokens": 2048, "dtype": "fp32"},
}


def source_of(name: str, folder: Path) -> Checkpoint:
    save_model(name, folder)
    return open_checkpoint(folder)


def written(source: Checkpoint, folder: Path, **options: Any) -> tuple[Checkpoint, Any]:
    """The carved checkpoint, and the model that transformers loads of it."""
    output = carve(source, **options)
    return output, loaded(output, source, folder)


def loaded(output: Checkpoint, source: Checkpoint, folder: Path) -> Any:
    """What transformers loads of a checkpoint, once it is written."""
    write(make_plan(output), folder, source=source)
    return from_disk(folder)


def from_disk(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert {k: v for k, v in info.items() if v} == {}
    return model.eval()


def assert_walked(model: Any, folder: Path, length: int) -> None:
    """What transformers loads gives the perplexity that the walk of the written checkpoint does."""
    output = open_checkpoint(folder)
    sample = data.sample_ids(output, tokens=512, sequence_length=length)
    (walked,) = quality.measure({"output": output}, sample).values()
    ids = sample.input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert math.exp(loss) == pytest.approx(walked.mean, rel=1e-3)


PARITY = [
    ("llama", "random", "centroids", 0),
    ("qwen2", "kmeans", "centroids", 0),
    ("gemma3_text", "mass", "trained", 2),
    ("phi3", "coactivation", "trained", 1),
    ("gpt2", "cmoe", "analytic", 2),
    ("falcon", "mass", "analytic", 0),
    ("gpt_neox", "kmeans", "trained", 3),
    ("opt", "mass", "trained", 1),
    ("nemotron", "random", "trained", 1),
    ("llama tied", "cmoe", "analytic", 3),
]


@pytest.mark.parametrize(("name", "method", "router", "shared"), PARITY)
def test_all_active_is_the_source(
    name: str, method: str, router: str, shared: int, tmp_path: Path
) -> None:
    source = source_of(name, tmp_path / "source")
    output, model = written(
        source,
        tmp_path / "out",
        experts=8,
        active=8,
        shared=shared,
        method=method,
        router=router,
        calibration=SMALL,
    )
    assert output.exact and output.steps[-1].parameters["repair"] == "none"
    expected = logits_of(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
    )
    assert (logits_of(model) - expected).abs().max() <= 1e-5 * max(1, expected.std().item())
    orders = [output.steps[-1].work.get(f"{i}.order") for i in range(3)]
    assert all(o.sort().values.tolist() == list(range(len(o))) != o.tolist() for o in orders)


@pytest.mark.parametrize("router", ["centroids", "trained", "analytic"])
def test_a_token_passes_the_chosen_neurons(router: str, tmp_path: Path) -> None:
    """The MLP of the loaded model against the source's, summed over the neurons of the experts that
    its router chose.
    """
    source = source_of("llama", tmp_path / "source")
    output, model = written(source, tmp_path / "out", router=router, shared=1, repair="none", **CUT)
    order = output.steps[-1].work.get("1.order")
    block, draw = model.model.layers[1].mlp, torch.Generator().manual_seed(0)
    x = torch.randn(20, 32, generator=draw)
    gate, up, down = (
        source.tensors[f"model.layers.1.mlp.{p}_proj.weight"].read().float()
        for p in ("gate", "up", "down")
    )
    h = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    _, weights, chosen = block.router(x, block.act)
    assert chosen.shape == (20, 3) and (weights == 1).all()
    expected = torch.stack(
        [
            h[t, kept] @ down[:, kept].T
            for t in range(20)
            for kept in [order.view(8, 6)[torch.tensor([0, *(1 + chosen[t])])].flatten()]
        ]
    )
    with torch.no_grad():
        assert (block(x) - expected).abs().max() < 1e-5


def test_the_shared_neurons_are_those_with_most_mass(tmp_path: Path) -> None:
    """Of a layer one of whose neurons writes a hundred times as much as the others."""
    save_model("llama", tmp_path)
    source = open_checkpoint(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    loud = source.tensors[name].map(
        "one column louder", lambda t: t * torch.where(torch.arange(48) == 17, 100.0, 1.0)
    )
    output = carve(source.replace(tensors={**source.tensors, name: loud}), shared=1, **CUT)
    output.steps[-1].work.folder()
    assert 17 in output.steps[-1].work.get("0.order")[:6]


@pytest.fixture(scope="module")
def demo() -> dict[str, tuple[Checkpoint, quality.Quality]]:
    """The embedded model, three of its layers carved by mass and at random, half of them active."""
    source = open_checkpoint(MODEL)
    models = {
        "source": source,
        "mass": carve(source, **DEMO),
        "plain": carve(source, repair="none", **DEMO),
        "random": carve(source, method="random", **DEMO),
    }
    found = quality.measure(models, quality.texts(source, 128, 128))
    return {name: (models[name], found[name]) for name in models}


def test_mass_beats_random_by_far(demo: dict[str, tuple[Checkpoint, quality.Quality]]) -> None:
    lost = {
        n: quality.geometric_mean(q.over(demo["source"][1]).values()) - 1
        for n, (_, q) in demo.items()
    }
    assert lost["mass"] < 0.7 * lost["random"] and lost["mass"] < lost["plain"]
    agreed = {n: mean(q.agreement.values()) for n, (_, q) in demo.items()}
    assert agreed["mass"] > agreed["random"]


@pytest.mark.parametrize("bypass", [24, "full"])
def test_a_bypass_mends_more(
    bypass: int | str, demo: dict[str, tuple[Checkpoint, quality.Quality]], tmp_path: Path
) -> None:
    """And the model that transformers loads gives what the walk of the written one does."""
    source, plain = demo["source"][0], demo["mass"][0].steps[-1].work.report
    output, model = written(source, tmp_path / "out", **DEMO | {"bypass": bypass})
    found = output.steps[-1].work.report
    assert found["1"]["repaired"] < plain["1"]["repaired"]
    names = sorted(n for n in output.tensors if ".1.mlp.bypass" in n)
    assert [output.tensors[n].shape for n in names] == (
        [(192, 192)] if bypass == "full" else [(24, 192), (192, 24)]
    )
    assert_walked(model, tmp_path / "out", 511)


def test_what_was_fitted_is_reported(demo: dict[str, tuple[Checkpoint, quality.Quality]]) -> None:
    report = demo["mass"][0].steps[-1].work.report
    assert sorted(report) == ["1", "3", "5", "sample"]
    for layer in (report[i] for i in "135"):
        assert layer["repaired"] <= layer["error"]
        assert 0.6 < layer["recall"] < layer["mass_recall"] <= 1
    random = demo["random"][0].steps[-1].work.report
    assert all(report[i]["repaired"] < random[i]["repaired"] for i in "135")


RELUFIED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"activation": "relu", "bypass": "full", "form": "code"}),
    ("llama", {"activation": "drelu", "sparsity": 0.6, "per_neuron": True, "bypass": "none"}),
    ("phi3", {"activation": "teal", "sparsity": 0.5, "per_neuron": True, "bypass": 5}),
    ("gpt2", {"activation": "shifted", "sparsity": 0.6}),
    ("gemma3_text", {"activation": "fatrelu", "sparsity": 0.7, "stage": 2, "bypass": "none"}),
]


def relufied_of(name: str, swap: dict[str, Any], folder: Path) -> tuple[Checkpoint, Any]:
    """A relufied model, read from the disk, and what transformers loads of it."""
    source = source_of(name, folder / "source")
    model = loaded(relufy(source, calibration=SMALL, **swap), source, folder / "relufied")
    return open_checkpoint(folder / "relufied"), model


@pytest.fixture(scope="module")
def carved_whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Checkpoint, Path]]:
    """Relufied models, carved with all parts active; beside the folder what they gave before,
    "<folder>.pt".
    """
    made = {}
    for name, swap in RELUFIED:
        folder = tmp_path_factory.mktemp(name)
        relufied, before = relufied_of(name, swap, folder)
        assert [e["kind"] for e in relufied.config["surgery_blocks"]] == ["sparse"]
        output = carve(relufied, experts=8, active=8, shared=1, calibration=SMALL)
        write(make_plan(output), folder / "out", source=relufied)
        torch.save(
            {"ids": sample_ids(), "logits": logits_of(before), "tokens": greedy(before)},
            folder / "out.pt",
        )
        made[name] = (output, folder / "out")
    return made


@pytest.mark.parametrize("name", [name for name, _ in RELUFIED])
def test_a_relufied_model_is_carved(
    name: str, carved_whole: dict[str, tuple[Checkpoint, Path]], tmp_path: Path
) -> None:
    """Its thresholds go with their neurons, what it adds stays: all active it is the same function,
    in one block a layer, saved again too."""
    output, folder = carved_whole[name]
    (entry,) = output.config["surgery_blocks"]
    assert entry["kind"] == "experts" and output.exact
    want, model = torch.load(f"{folder}.pt"), from_disk(folder)
    assert (logits_of(model) - want["logits"]).abs().max() <= 1e-5 * max(
        1, want["logits"].std().item()
    )
    assert greedy(model) == want["tokens"]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(from_disk(tmp_path)), logits_of(model))
    orders = [output.steps[-1].work.get(f"{i}.order") for i in range(3)]
    assert all(o.sort().values.tolist() == list(range(len(o))) != o.tolist() for o in orders)


def test_transformers_4_gives_the_same_of_it(
    carved_whole: dict[str, tuple[Checkpoint, Path]], tmp_path: Path
) -> None:
    models = found_by_transformers_4(
        {n: folder for n, (_, folder) in carved_whole.items()}, tmp_path
    )
    for found in (models[name] for name, _ in RELUFIED):
        assert "error" not in found, found["error"]
        limit = 1e-5 * max(1.0, found["std"])
        assert (
            found["keys"] == {}
            and found["same_tokens"]
            and max(found["delta"], found["again"]) <= limit
        )


@pytest.mark.parametrize(("name", "swap"), RELUFIED)
def test_a_relufied_model_loads_as_it_was_fitted(
    name: str, swap: dict[str, Any], tmp_path: Path
) -> None:
    """Half of it active: the model that transformers loads is the one of the walk, and a bypass is
    refitted where that helps.
    """
    relufied, _ = relufied_of(name, swap, tmp_path)
    output, model = written(relufied, tmp_path / "out", **CUT)
    beside = {n for n in relufied.tensors if "bypass" in n or "correction" in n}
    assert beside == {n for n in output.tensors if "bypass" in n or "correction" in n}
    refitted = {
        n for n in beside if not torch.equal(relufied.tensors[n].read(), output.tensors[n].read())
    }
    report = output.steps[-1].work.report
    better = [
        f".{i}.mlp.bypass_out"
        for i in range(3)
        if report[str(i)]["repaired"] < report[str(i)]["error"]
    ]
    # Zeros: relufication was worse with it.
    there = {n for n in beside if relufied.tensors[n].read().any()}
    assert refitted == {n for n in there if n.endswith(tuple(better))}
    assert bool(refitted) == (name in ("qwen2", "phi3"))  # the others have no bypass
    assert_walked(model, tmp_path / "out", 64)


def test_what_of_a_relufied_model_cannot_be_carved(tmp_path: Path) -> None:
    swap = {"activation": "relu", "bypass": 5, "form": "code"}
    relufied, _ = relufied_of("llama", swap, tmp_path)
    with pytest.raises(UsageError, match="a bypass of rank 4 for layer 0, which has one of rank 5"):
        carve(relufied, bypass=4, **CUT)
    assert carve(relufied, bypass=5, **CUT).steps[-1].parameters["bypass"] == 5
    plain = carve(relufied, **CUT).steps[-1]
    mlp, beside, router = (
        4e-6 * n for n in (3 * 3 * 32 * 48, 3 * 2 * 5 * 32, 3 * (64 * 33 + 8 * 66))
    )
    assert "bypass" not in plain.parameters
    assert (
        f"reads {mlp / 2 + beside + router:.1f} of {mlp + beside:.1f} MB of the MLPs"
        in plain.notes[1]
    )
    (entry,) = relufied.config["surgery_blocks"]
    cut = relufied.replace(config=relufied.config | {"surgery_blocks": [{**entry, "inputs": True}]})
    with pytest.raises(SurgeryError, match="layer 0 cuts its inputs"):
        carve(cut, **CUT)


def test_layers_that_were_relufied_and_others(tmp_path: Path) -> None:
    """Each with what it has: a bypass of its own, or the one that is asked for."""
    swap = {"activation": "relu", "bypass": 5, "layers": [1]}
    relufied, _ = relufied_of("llama", swap, tmp_path)
    output, _ = written(relufied, tmp_path / "out", **CUT)
    assert [
        (e["layers"], e["bypass"], e["activation"]) for e in output.config["surgery_blocks"]
    ] == [
        ([0, 2], 0, ""),
        ([1], 5, "relu"),
    ]


def two_experts() -> tuple[carved_mlp.Neurons, carved_mlp.Rows, dict[str, Any]]:
    """The sign of channel 3 says which of two experts has the mass, but for first tokens, where
    neuron 0 has it all.
    """
    draw = torch.Generator().manual_seed(0)
    z, first = torch.randn(2000, 16, generator=draw), torch.randn(8, 16, generator=draw)
    z[:, 5], first[:, 5] = 0.0, 4.0
    gate = torch.zeros(8, 16)
    gate[:4, 3], gate[4:, 3], gate[0, 5] = 1.0, -1.0, 50.0
    up, down = torch.randn(8, 16, generator=draw), torch.randn(16, 8, generator=draw)
    neurons = carved_mlp.Neurons(gate=gate, up=up, down=down, rule="plain", act="relu")
    entry = {
        "router": "mlp",
        "weights": "one",
        "factor": 1.0,
        "experts": 2,
        "top_k": 1,
        "group": 1,
        "gate": "gate",
        "router_activation": "tanh",
        "router_width": 8,
        "router_bias": True,
    }
    return (
        neurons,
        carved_mlp.Rows(z=z, y=neurons(z), first=carved_mlp.Rows(z=first, y=neurons(first))),
        entry,
    )


HALF = carved_mlp.ExpertSplit(
    experts=2, active=1, shared=0, method="kmeans", router="trained", repair="none", seed=0
)


def test_a_trained_router_learns_what_decides() -> None:
    neurons, rows, entry = two_experts()
    carved, found = carved_mlp.fit(neurons, dataclasses.replace(rows, first=None), HALF, entry)
    assert sorted(carved.order[:4].tolist()) in ([0, 1, 2, 3], [4, 5, 6, 7])
    assert found["mass_recall"] == found["recall"] > 0.93 and found["oracle_error"] < 1e-10


def test_the_massive_activation_of_first_tokens_is_not_lost() -> None:
    neurons, rows, entry = two_experts()
    carved, found = carved_mlp.fit(neurons, rows, HALF, entry)
    assert found["recall"] > 0.9
    assert rows.first is not None
    ideal = carved.choose(carved.mass(carved_mlp.Neurons.product(carved, rows.first.z)))
    assert torch.equal(carved.route(rows.first.z), ideal) and len(ideal.unique(dim=0)) == 1


def test_the_neurons_are_put_in_order_and_compute_the_same() -> None:
    neurons, rows, _ = two_experts()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    neurons.reorder(order)
    assert torch.allclose(neurons(rows.z), rows.y, atol=1e-5)


def test_nothing_is_calibrated_where_nothing_is_fitted(tmp_path: Path) -> None:
    source = source_of("llama", tmp_path)
    output = carve(source, method="kmeans", router="centroids", repair="none", **CUT)
    order = output.steps[-1].work.get("2.order") if output.steps[-1].work.folder() else None
    assert output.steps[-1].work.report == {} and "calibration" not in output.steps[-1].parameters
    gate = torch.nn.functional.normalize(
        source.tensors["model.layers.2.mlp.gate_proj.weight"].read(), dim=1
    )
    row = output.tensors["model.layers.2.mlp.router.weight"].read()[3]
    assert torch.allclose(row, gate[order.view(8, 6)[3]].mean(0), atol=1e-6)


def test_one_layer(tmp_path: Path) -> None:
    source = source_of("llama", tmp_path)
    output = carve(source, layers=[1], **CUT)
    changed = {n for n in output.tensors if output.tensors[n] is not source.tensors.get(n)}
    assert {n.split(".")[2] for n in changed} == {"1"} and output.config["surgery_blocks"][0][
        "layers"
    ] == [1]
    with pytest.raises(SurgeryError, match="layer 1 has a experts block already"):
        carve(output, **CUT)
    again = carve(output, layers=[0, 2], **CUT)
    assert [e["layers"] for e in again.config["surgery_blocks"]] == [[1], [0, 2]]


def test_layers_may_have_more_or_fewer_active(tmp_path: Path) -> None:
    """Each layer routes to as many as it was fitted for; two with the same number share an
    entry.
    """
    source = source_of("llama", tmp_path / "source")
    output, model = written(
        source, tmp_path / "out", **CUT | {"active": [2, 8, 2]}, shared=1, router="centroids"
    )
    assert [(e["layers"], e["top_k"]) for e in output.config["surgery_blocks"]] == [
        ([0, 2], 1),
        ([1], 7),
    ]
    assert [layer.mlp.router.top_k for layer in model.model.layers] == [1, 7, 1]
    assert output.steps[-1].parameters["active"] == [2, 8, 2] and not output.exact
    assert "2 to 8 of 8 parts of an MLP, 50% of its neurons" in output.steps[-1].notes[0]
    same = {"active": [4, 4, 4], "router": "centroids"}
    assert carve(source, **CUT | same).steps == carve(source, **CUT | {"router": "centroids"}).steps
    with pytest.raises(UsageError, match="2 numbers of active parts for 3 layers"):
        carve(source, **CUT | {"active": [4, 4]})
    with pytest.raises(UsageError, match="0 numbers of active parts for 3 layers"):
        carve(source, **CUT | {"active": []})
    with pytest.raises(UsageError, match="9 active parts of 8"):
        carve(source, **CUT | {"active": [4, 4, 9]})


def test_an_interrupted_carving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("llama", tmp_path / "source")
    fitted: list[int] = []
    real = carved_mlp.fit

    def fit(*arguments: Any) -> Any:
        fitted.append(1)
        if len(fitted) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(carved_mlp, "fit", fit)
    outputs = [carve(source, **CUT) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        outputs[0].steps[-1].work.prepare(tmp_path / "scratch")
    outputs[1].steps[-1].work.prepare(tmp_path / "scratch")
    assert len(fitted) == 4  # the second layer again, and the third; not the first
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(outputs[1].tensors[name].read(), outputs[2].tensors[name].read())


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bytes(method: str, tmp_path: Path) -> None:
    source = source_of("qwen2", tmp_path)
    names = [f"model.layers.1.mlp.{n}" for n in ("down_proj.weight", "router.weight_in")]
    first, second = (carve(source, method=method, layers=[1], **CUT) for _ in range(2))
    assert all(torch.equal(first.tensors[n].read(), second.tensors[n].read()) for n in names)


def test_what_is_read_is_said() -> None:
    """A bypass is read beside the parts that are active."""
    steps = [
        carve(open_checkpoint(MODEL), experts=16, active=4, router="centroids", **options).steps[-1]
        for options in ({}, {"bypass": "full"})
    ]
    mlp, router = 7 * 3 * 192 * 512, 7 * 16 * (192 + 1)
    for step, bypass in zip(steps, (0, 7 * 192**2), strict=True):
        assert "4 of 16 parts of an MLP, 25% of its neurons" in step.notes[0]
        read = (mlp * 2 / 4 + 4 * router + 2 * bypass) / 1e6
        assert f"reads {read:.1f} of {mlp * 2 / 1e6:.1f} MB of the MLPs" in step.notes[1]
    assert [step.parameters.get("bypass") for step in steps] == [None, 192]


@pytest.mark.parametrize(
    ("options", "kind", "seen"),
    [
        ({"experts": 15}, UsageError, "15 experts do not divide 512 neurons"),
        ({"active": 17}, UsageError, "17 active parts of 16"),
        ({"active": 4, "shared": 4}, UsageError, "4 active parts of 16, 4 of them shared"),
        ({"shared": 15, "active": 16}, UsageError, "15 shared parts of 16"),
        ({"experts": 1, "active": 1}, UsageError, "0 shared parts of 1"),
        ({"method": "magic"}, UsageError, "'magic'"),
        ({"router": "oracle"}, UsageError, "'oracle'"),
        ({"repair": "reconstruct"}, UsageError, "'reconstruct'"),
        ({"layers": [7]}, UsageError, "[7]"),
        ({"calibration": {"token": 3}}, UsageError, "'token'"),
    ],
)
def test_impossible_options(options: dict[str, Any], kind: type[Exception], seen: str) -> None:
    with pytest.raises(kind) as caught:
        carve(open_checkpoint(MODEL), **options)
    assert seen in str(caught.value)
