"""`verify` passes what is right, and each kind of wrong fails in its own row with the value
seen.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compared import verify

from surgery import demo
from surgery.calibration.data import sample_ids
from surgery.calibration.texts import to_measure
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint, constant
from surgery.demo import corpus
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.proof.parity import without_mlp
from surgery.proof.require import Require
from surgery.proof.verification import (
    Row,
    Verification,
    savings_rows,
    sequence_length,
    tokens_each,
)
from surgery.storage import open_checkpoint

DEMO = Path(demo.__file__).parent / "model"
DOWN, EMBEDDING = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"
GATE = "logits max|Δ| in fp64"


def tiny(folder: Path, model_type: str = "mistral", **options: Any) -> Checkpoint:
    """A random model without a tokenizer."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        **{"vocab_size": 61, "max_position_embeddings": 512, **options},
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return open_checkpoint(folder)


def changed(checkpoint: Checkpoint, **tensors: Any) -> Checkpoint:
    return checkpoint.replace(tensors={**checkpoint.tensors, **tensors})


def row(verification: Verification, part: str) -> Row:
    (found,) = [r for r in verification.rows if part in r.check]
    return found


def test_an_identical_checkpoint_passes_and_the_control_catches(tmp_path: Path) -> None:
    checkpoint, seen = tiny(tmp_path), []
    v = verify(checkpoint, checkpoint, exact=True, tokens=512, progress=lambda *a: seen.append(a))
    assert v.passed
    assert row(v, "logits max").value == 0
    control = row(v, "control")
    assert "layer 2" in control.check and control.value > 100 * control.limit
    assert seen == [(1,)] * (3 + 3 + 1)  # layers: source, output, control


def test_the_limit_grows_with_the_std_of_the_logits(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    v = verify(checkpoint, checkpoint, exact=True, tokens=256)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        std = model(v.sample.input_ids).logits.std(correction=0).item()
    assert std > 1
    assert row(v, "logits max").limit == pytest.approx(1e-5 * std, rel=1e-6)


def test_the_control_runs_the_layers_after_the_one_it_zeroes(tmp_path: Path) -> None:
    """Zeroing layer 0 by hand gives the same logits as going on from the hidden states that were
    kept.
    """
    checkpoint = tiny(tmp_path)
    control = row(verify(checkpoint, checkpoint, exact=True, tokens=256, layers=[0]), "control")
    by_hand = row(
        verify(checkpoint, without_mlp(checkpoint, 0), exact=True, tokens=256),
        "logits max|Δ| in fp32",
    )
    assert control.value == by_hand.value > control.limit


def test_a_control_that_changes_nothing_fails(tmp_path: Path) -> None:
    """A last MLP that is zero anyway: parity would not see a wrong one."""
    checkpoint = without_mlp(tiny(tmp_path), 2)
    v = verify(checkpoint, checkpoint, exact=True, tokens=256)
    assert row(v, "logits max").passed and not row(v, "control").passed and not v.passed


def sharp(folder: Path, **options: Any) -> Checkpoint:
    """Attention scores of some hundreds: the softmax turns the rounding of the layer before into
    1e-4 of the logits.
    """
    source = tiny(folder, **options)
    scaled = {
        n: t.map("x 100", lambda x: x * 100) for n, t in source.tensors.items() if "q_proj" in n
    }
    return changed(source, **scaled)


def test_where_fp32_rounds_too_much_fp64_decides(tmp_path: Path) -> None:
    """And the control is held to the same limit in fp64: in fp32 rounding alone would pass it."""
    source, seen = sharp(tmp_path), []
    v = verify(
        source,
        upcycle(source, experts=4),
        exact=True,
        tokens=1024,
        progress=lambda *a: seen.append(a),
    )
    informs, gate, control = row(v, "fp64 decides"), row(v, GATE), row(v, "control")
    assert v.passed and informs.limit is None and "more than 1.1" in informs.check
    assert informs.value > 10 * gate.limit and gate.limit == pytest.approx(1.1e-5, rel=0.05)
    assert gate.value < 1e-6 * gate.limit and gate.detail == ("1 × 511 tokens",)
    assert control.limit == gate.limit and control.value > 1 and "in fp64" in control.check
    assert len(seen) > 3 + 3 + 1  # layers in fp32, and again in fp64


def test_the_rounding_of_the_source_alone_is_shown(tmp_path: Path) -> None:
    """What fp32 cannot tell: the source's own logits, from those in fp64, on the sequence that was
    walked again.
    """
    source = sharp(tmp_path)
    found = row(
        verify(source, upcycle(source, experts=4), exact=True, tokens=1024),
        "rounding of the source alone",
    )
    ids = sample_ids(source, tokens=1024, sequence_length=511).input_ids
    each = []
    for i in range(len(ids)):
        walks = [
            Walk(source, ids[i : i + 1], dtype=dtype) for dtype in (torch.float32, torch.float64)
        ]
        for walk in walks:
            for layer in walk:
                layer.run()
        a, b = (torch.cat([x for _, x in walk.logits()], dim=1) for walk in walks)
        each.append((a - b).abs().max().item())
    assert (
        any(found.value == pytest.approx(value, rel=0.2) for value in each) and found.value > 1e-5
    )


def test_the_control_in_fp64_can_fail(tmp_path: Path) -> None:
    """A last MLP that is zero anyway: in fp32 the rounding alone exceeds the limit, and would hide
    that.
    """
    source = without_mlp(sharp(tmp_path), 2)
    output = upcycle(source, experts=4)
    v = verify(source, output, exact=True, tokens=256)
    assert row(v, GATE).passed and row(v, "in fp32").value > row(v, GATE).limit
    assert not row(v, "control").passed and not v.passed


def slightly_more(output: Checkpoint, part: str) -> Checkpoint:
    return changed(
        output,
        **{
            n: t.map("x 1.001", lambda x: x * 1.001) for n, t in output.tensors.items() if part in n
        },
    )


WRONG: dict[str, Any] = {
    "one expert by 1e-3": lambda c: slightly_more(c, "layers.1.mlp.experts.0.down_proj.weight"),
    "routing weights not renormalised": lambda c: c.replace(
        config={**c.config, "norm_topk_prob": False}
    ),
    "rope theta by 1e-4": lambda c: c.replace(
        config={
            **c.config,
            "rope_theta": 10001.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10001.0},
        }
    ),
    "epsilon of the norms by 1e-6": lambda c: c.replace(config={**c.config, "rms_norm_eps": 2e-6}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_fails_in_fp64(tmp_path: Path, wrong: str) -> None:
    """The difference in fp32 is then no larger than what rounding alone may give."""
    source = sharp(tmp_path, model_type="qwen3", head_dim=16)
    output = upcycle(source, experts=4)
    v = verify(source, WRONG[wrong](output), exact=True, tokens=256)
    gate = row(v, GATE)
    assert not v.passed and not gate.passed and gate.value > gate.limit
    assert [r.check for r in v.rows if not r.passed] == [gate.check]


def test_fp64_takes_the_sequence_that_differs_most(tmp_path: Path) -> None:
    """A token of the third sequence alone has another embedding in the output: the others agree."""
    source = tiny(tmp_path, vocab_size=1999)
    v = verify(source, source, exact=True, tokens=2048)
    own = set(v.sample.input_ids[2].tolist()) - set(
        v.sample.input_ids[[0, 1, 3]].flatten().tolist()
    )
    scale = torch.ones(1999, 1)
    scale[min(own)] = 1.01
    embedding = source.tensors[EMBEDDING].map("one row", lambda x: x * scale)
    v = verify(source, changed(source, **{EMBEDDING: embedding}), exact=True, tokens=2048)
    assert len(v.sample.input_ids) == 4
    assert row(v, GATE).value == pytest.approx(row(v, "in fp32").value, rel=1e-3) and not v.passed


def test_fields_that_the_class_ignores_are_named(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    checkpoint = checkpoint.replace(config={**checkpoint.config, "my_own_field": 1})
    assert row(verify(checkpoint, checkpoint, exact=True, tokens=64), "ignores").detail == (
        "my_own_field",
    )


def test_a_perturbed_tensor_fails_with_the_value(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path)
    down = checkpoint.tensors[DOWN].map("add 1e-3", lambda t: t + 1e-3)
    v = verify(checkpoint, changed(checkpoint, **{DOWN: down}), exact=True, tokens=256)
    parity = row(v, GATE)
    assert not v.passed and not parity.passed and parity.value > parity.limit


@pytest.mark.parametrize(
    "wrong", [{"rope_theta": 500.0}, {"rms_norm_eps": 0.1}, {"sliding_window": None}]
)
def test_a_wrong_config_fails_where_names_and_shapes_agree(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    """The window only shows on sequences that are longer: 200 positions of 264."""
    checkpoint = tiny(tmp_path, sliding_window=200)
    config = {k: v for k, v in checkpoint.config.items() if k != "rope_parameters"} | {
        "rope_theta": 10000.0
    }
    source = checkpoint.replace(config=config)
    v = verify(source, checkpoint.replace(config=config | wrong), exact=True, tokens=264)
    assert all(r.passed for r in v.rows if "names" in r.check or "shapes" in r.check)
    assert not row(v, GATE).passed
    assert verify(source, source, exact=True, tokens=264).passed


def test_names_and_shapes_are_found_by_name(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    extra = constant(1.0, (2, 2), "F32")
    tensors = {n: t for n, t in source.tensors.items() if n != DOWN}
    missing = verify(source, source.replace(tensors=tensors), exact=True)
    assert (
        row(missing, "missing").detail == (DOWN,) and not missing.passed and missing.sample is None
    )
    unexpected = verify(source, changed(source, surplus=extra), exact=True)
    assert row(unexpected, "unexpected").detail == ("surplus",) and not unexpected.passed
    shape = verify(source, changed(source, **{DOWN: constant(0.0, (32, 47), "F32")}), exact=True)
    assert row(shape, "mismatched").detail == (f"{DOWN}: (32, 47) on disk, (32, 48) in the class",)
    carried = verify(
        changed(source, surplus=extra), changed(source, surplus=extra), exact=False, tokens=256
    )
    assert carried.passed and row(carried, "carried over").detail == ("surplus",)


def test_logits_that_are_not_finite_fail(tmp_path: Path) -> None:
    """NaN compares false with everything, so a careless maximum would lose it."""
    source = tiny(tmp_path)
    output = changed(source, **{DOWN: constant(math.nan, (32, 48), "F32")})
    for exact in (True, False):
        v = verify(source, output, exact=exact, tokens=256)
        found = row(v, "output logits not finite")
        assert found.value > 0 and found.limit == 0 and not found.passed and not v.passed
        assert "nonfinite_logits.source" not in {r.key for r in v.rows}
    assert not row(verify(source, output, exact=True, tokens=256), "logits max").passed
    json.loads(json.dumps(v.as_dict(), allow_nan=False))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_source_that_is_not_finite_passes_only_where_allowed(
    exact: bool, allowed: bool, tmp_path: Path
) -> None:
    """No comparison with it means anything, and what was not compared is not passed."""
    source = changed(tiny(tmp_path), **{DOWN: constant(math.nan, (32, 48), "F32")})
    v = verify(source, source, exact=exact, tokens=256, allow_nonfinite=allowed)
    rows = {r.key: r for r in v.rows}
    assert rows["nonfinite_logits.source"].value > 0 and v.passed == allowed
    assert "logits.difference" not in rows and "domains.mean" not in rows


def test_random_ids_are_said_and_are_no_text(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    v = verify(source, source, exact=True, tokens=256)
    assert v.sample.source == "random ids, seed 0 (the checkpoint has no tokenizer)"
    assert not [r for r in v.rows if "perplexity" in r.check]
    assert (
        v.as_dict()["sample"]["sha256"]
        == verify(source, source, exact=True, tokens=256).sample.sha256
    )


STRICT = Require(max_perplexity=1.01)
SPEECHES = to_measure([(["builtin:speeches"], [], 0.0)])


def test_perplexity_is_that_of_the_stock_model() -> None:
    """Windows of 256 tokens behind BOS, which is never predicted: 2 x 256 scored tokens."""
    source = open_checkpoint(DEMO)
    output = without_mlp(source, 3)
    v = verify(source, output, exact=False, tokens=512, texts=SPEECHES)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = v.sample.input_ids
    assert tuple(ids.shape) == (2, 257) and ids[:, 0].tolist() == [1, 1]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    rows = {r.key: r for r in v.rows}
    found = rows["domain.speeches"]
    assert found.models["source"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found.detail == ("512 tokens",) and v.passed
    before, after = (found.models[name]["perplexity"] for name in ("source", "output"))
    assert found.value == pytest.approx(after / before) and found.value > 1
    assert found.models["source"]["agreement"] == 1 > found.models["output"]["agreement"]
    assert rows["domains.mean"].value == pytest.approx(found.value) == rows["domains.worst"].value


def test_every_domain_is_a_row_and_their_geometric_mean_counts() -> None:
    """A domain that is not measured could be ruined unseen; an arithmetic mean would hide less."""
    source = open_checkpoint(DEMO)
    v = verify(source, without_mlp(source, 3), exact=False, tokens=64, require=STRICT)
    rows = {r.key: r for r in v.rows}
    ratios = {d: rows[f"domain.{d}"].value for d in corpus.domains()}
    mean, worst = rows["domains.mean"], rows["domains.worst"]
    assert mean.value == pytest.approx(math.prod(ratios.values()) ** (1 / 12))
    assert worst.value == max(ratios.values()) == ratios[worst.detail[0]]
    assert v.sample.as_dict()["domains"] == dict.fromkeys(corpus.domains(), 1)
    assert mean.limit == 1.01 and not mean.passed and not v.passed
    assert verify(source, source, exact=False, tokens=64, require=STRICT).passed


def test_few_texts_are_measured_longer() -> None:
    """One domain has as many tokens as all of them had; twelve have 512 each."""
    assert tokens_each(SPEECHES) == 4096 and tokens_each(to_measure()) == tokens_each([]) == 512


def test_what_was_fitted_on_is_measured_beside_the_built_in_domains(tmp_path: Path) -> None:
    """Only its held-out part, unless nothing was fitted on it; and alone with a mix of 0."""
    (tmp_path / "my.txt").write_text("".join(f"Line {i} of a text.\n" for i in range(3000)))
    own = str(tmp_path / "my.txt")
    for mix, count in ((None, 13), (0.2, 13), (0.0, 1)):
        found = to_measure([([f"{own}=3"], [], mix)])
        assert len(found) == count and found[-1].domain == "my.txt"
    assert len(to_measure([([own], [], 0.0), ([], [], None)])) == 13
    held_out = "".join(found[-1].pieces("held_out", 0))
    assert 0 < len(held_out) < len(Path(own).read_text()) / 7
    (*_, whole) = to_measure(whole=[own])
    assert "".join(whole.pieces("held_out", 0)) == Path(own).read_text()


@pytest.mark.parametrize(
    ("model_type", "options", "expected"),
    [
        ("mistral", {"sliding_window": 600}, 664),
        ("mistral", {"sliding_window": 100}, 512),
        ("mistral", {"sliding_window": 780}, 799),  # positions end before window + 64
        (
            "mistral",
            {"sliding_window": 4096},
            512,
        ),  # a window beyond the positions is never in force
        ("qwen2", {"sliding_window": 600, "use_sliding_window": False}, 512),
        ("qwen2", {"sliding_window": 600, "use_sliding_window": True, "max_window_layers": 3}, 512),
        ("qwen2", {"sliding_window": 600, "use_sliding_window": True, "max_window_layers": 1}, 664),
    ],
)
def test_sequences_are_longer_than_a_window_in_force(
    tmp_path: Path, model_type: str, options: dict[str, Any], expected: int
) -> None:
    checkpoint = tiny(tmp_path, model_type, max_position_embeddings=800, **options)
    assert sequence_length(checkpoint, checkpoint, exact=True) == expected
    assert sequence_length(checkpoint, checkpoint, exact=False) == 256


@pytest.mark.parametrize(
    ("activation", "expected"), [("fatrelu", 2 / 3 + 1 / 8), ("teal", 5 / 6 + 1 / 8)]
)
def test_a_bypass_is_read_on_top_of_what_is_left(activation: str, expected: float) -> None:
    """F = 512 and H = 192, half of the products zero: of 3FH, gate and half of up and down, or half
    of down alone, and H².
    """
    output = relufy(open_checkpoint(DEMO), activation=activation, bypass="full", form="code")
    for found in savings_rows(output, [0.5] * 7):
        assert found.value == pytest.approx(expected, rel=1e-3)
