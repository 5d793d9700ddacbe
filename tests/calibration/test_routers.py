"""Routers that begin from what they read: balanced, of a stated scale, and the same in the model
that is written.

What could break it: inputs taken before the norm or from a model whose experts do not differ yet, a
mean that decides for all tokens alike where a router has no bias, parts of a copy whose rows
differ, a run that was interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCAB, fake, save_model, save_tokenizer
from torch import Tensor

from surgery.calibration.observe import tapped
from surgery.calibration.routers import centroids, class_means, even, figures, with_offsets
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint, make_plan
from surgery.operations.upcycle import upcycle
from surgery.proof.routing import measure
from surgery.storage import open_checkpoint, write

CALIBRATION = {"tokens": 2048, "sequence_length": 64, "dtype": "fp32", "device": "cpu"}
DRAW = torch.Generator().manual_seed(4)


def clouds(sizes: tuple[int, ...], hidden: int = 24, mean: float = 3.0) -> tuple[Tensor, Tensor]:
    """Points [n, H] around random directions and one mean for all, and the cloud [n] of each."""
    directions = torch.nn.functional.normalize(
        torch.randn(len(sizes), hidden, generator=DRAW), dim=1
    )
    kinds = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    noise = 0.1 * torch.randn(len(kinds), hidden, generator=DRAW)
    return directions[kinds] + noise + mean * torch.ones(hidden) / hidden**0.5, kinds


def load_of(logits: Tensor, k: int = 1) -> Tensor:
    return torch.bincount(logits.topk(k, dim=1).indices.flatten(), minlength=logits.shape[1]) / (
        k * len(logits)
    )


def test_even_offsets_spread_the_load() -> None:
    scores = torch.randn(4000, 6, generator=DRAW) + torch.tensor([3.0, 1.0, 0.0, 0.0, -1.0, -2.0])
    assert load_of(scores).min() < 0.005
    found = load_of(scores + even(scores, torch.zeros(6)))
    assert (found * 6 - 1).abs().max() < 0.15


def test_rows_stand_for_centres_and_offsets_without_a_bias() -> None:
    x, _ = clouds((500, 500, 500))
    centres, offsets = torch.randn(3, 24, generator=DRAW), torch.tensor([2.0, 0.0, -1.0])
    want = (x - x.mean(0)) @ centres.T + offsets
    assert (x @ with_offsets(centres, offsets, x).T - want).abs().mean() < 0.1 * want.std()
    assert (x @ centres.T - want).abs().mean() > want.std()  # which the mean would decide


def test_centroids_find_the_kinds_of_tokens_and_split_the_common_one() -> None:
    """Three clouds, one as large as the others together, for four copies: two share it."""
    x, kinds = clouds((1000, 500, 500))
    centres, offsets = centroids(x, 4, seed=0)
    logits = x @ with_offsets(centres, offsets, x).T
    found = logits.argmax(1)
    owners = [set(kinds[found == e].unique().tolist()) for e in range(4)]
    assert sorted(map(sorted, owners)) == [[0], [0], [1], [2]]
    assert (load_of(logits) * 4 - 1).abs().max() < 0.2
    assert torch.equal(centroids(x, 4, seed=0)[0], centres)


def test_class_means_send_a_text_to_its_expert() -> None:
    x, kinds = clouds((1500, 300, 200))
    centres, offsets = class_means(x, kinds, 3)
    found = (x @ with_offsets(centres, offsets, x).T).argmax(1)
    assert (found == kinds).float().mean() > 0.99


def test_figures() -> None:
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    found = figures(logits, logits.argmax(1, keepdim=True))
    p = torch.tensor([0.75, 0.25])
    assert found["load_entropy"] == pytest.approx(
        -(p * p.log()).sum().item() / torch.tensor(2.0).log().item(), abs=1e-4
    )
    assert found["largest_probability"] == pytest.approx(
        torch.tensor(2.0).sigmoid().item(), abs=1e-4
    )
    assert (found["least_load"], found["logit_std"]) == (
        0.5,
        pytest.approx(logits.std().item(), abs=1e-4),
    )


# --- on models ------------------------------------------------------------------------------------


def ids_of(checkpoint: Checkpoint) -> Tensor:
    """Those that it is calibrated on."""
    from surgery.calibration.settings import Calibration

    return Calibration.of(CALIBRATION).sample(checkpoint).input_ids


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"experts": 4}),
        ("llama", {"experts": 4, "drop": 0.5}),
        ("gemma3_text", {"experts": 4, "drop": 0.5}),
        ("gpt2", {"experts": 12, "granularity": 4, "shared": 1, "top_k": 6, "noise": 0.05}),
        ("qwen2", {"experts": 4, "drop": 0.5, "shared": 1}),
        ("phi3", {"experts": 8, "granularity": 2, "top_k": 4, "target": "glm4_moe", "drop": 0.3}),
        ("smollm3", {"experts": 4}),
    ],
)
def test_the_written_model_routes_as_was_calibrated(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Layer for layer on the same text: experts that differ were in place when the next layer's
    inputs were taken.
    """
    save_model(model, tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    made = upcycle(source, router="centroids", calibration=CALIBRATION, **options)
    write(make_plan(made), tmp_path / "out", source=source)
    step = made.steps[-1]
    assert (
        step.work
        and step.parameters["router"] == "centroids"
        and step.parameters["calibration"] == CALIBRATION
    )
    shards = max(1, step.parameters["granularity"] - step.parameters["shared"])
    for found in measure(open_checkpoint(tmp_path / "out"), ids_of(source), shards=shards):
        said = step.work.report[str(found.layer)]
        assert said["logit_std"] == 1.0 and found.logit_std == pytest.approx(1.0, rel=0.02)
        assert (
            found.load_entropy == pytest.approx(said["load_entropy"], abs=0.01)
            and found.load_entropy > 0.9
        )
        assert found.equal == found.idle == 0


def test_parts_of_a_copy_have_equal_rows(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    made = upcycle(
        open_checkpoint(tmp_path),
        granularity=2,
        experts=8,
        top_k=4,
        router="centroids",
        calibration=CALIBRATION,
    )
    rows = made.tensors["model.layers.1.mlp.gate.weight"].read().view(4, 2, -1)
    assert torch.equal(rows[:, 0], rows[:, 1]) and len(rows[:, 0].unique(dim=0)) == 4
    assert made.exact


def test_a_run_that_was_interrupted_goes_on_to_the_same_rows(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    works = [
        upcycle(source, experts=4, drop=0.5, router="centroids", calibration=CALIBRATION)
        .steps[-1]
        .work
        for _ in range(2)
    ]
    left, done = iter((True, False, False)), []

    def stop(n: int) -> None:
        done.append(n)
        if not next(left):
            raise KeyboardInterrupt

    first, second = works
    assert first and second and first.identity == second.identity
    with pytest.raises(KeyboardInterrupt):
        second.prepare(tmp_path / "b", stop)
    first.prepare(tmp_path / "a")
    kept = {
        p.name: p.stat().st_mtime_ns for p in (tmp_path / "b" / second.identity[:16]).glob("[01]")
    }
    second.prepare(tmp_path / "b")
    assert len(kept) == 2
    assert kept == {
        p.name: p.stat().st_mtime_ns for p in (tmp_path / "b" / second.identity[:16]).glob("[01]")
    }
    for i in range(3):
        assert torch.equal(first.get(str(i)), second.get(str(i)))
    assert first.report == second.report


def test_rows_change_with_seed_experts_and_text() -> None:
    def identity(**options: Any) -> str:
        work = (
            upcycle(fake("llama"), router="centroids", **{"experts": 4, **options}).steps[-1].work
        )
        assert work
        return work.identity

    found = {
        identity(),
        identity(seed=1),
        identity(experts=8),
        identity(drop=0.5),
        identity(drop=0.4),
        identity(calibration={"tokens": 4096}),
        identity(target="glm4_moe", shared=0, granularity=2),
    }
    assert len(found) == 7 and identity() in found


def test_each_text_goes_to_its_own_expert(tmp_path: Path) -> None:
    """Class means, in every layer, of two fine-tuned models and a word each."""
    for i, name in enumerate(("base", "first", "second")):
        save_model("llama", tmp_path / name, initializer_range=0.2 + 0.01 * i)
        save_tokenizer(tmp_path / name)
    texts = {word: tmp_path / f"{word}.txt" for word in "ab"}
    for word, path in texts.items():
        path.write_text(f"{word} " * 2000)
    base, *models = (open_checkpoint(tmp_path / n) for n in ("base", "first", "second"))
    made = upcycle(
        base,
        expert_models=models,
        router="class-means",
        expert_texts=list(map(str, texts.values())),
        top_k=1,
        calibration=CALIBRATION,
    )
    assert made.steps[-1].parameters["expert_texts"] == list(map(str, texts.values()))
    ids = torch.tensor([[3] * 32, [4] * 32])
    walk = Walk(made, ids)
    for layer in walk:
        with tapped(layer.module, walk.blocks.family, made.text_config) as taps:
            layer.run()
        chosen = taps.caught["selected"].view(2, 32)[:, 1:]
        assert (chosen == torch.tensor([[0], [1]])).float().mean() > 0.95
    assert ids.max() < VOCAB
