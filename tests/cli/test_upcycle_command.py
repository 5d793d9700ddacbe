"""The options of `surgery upcycle` reach the operation, and what it decides is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import Call, assert_two_lines, llama_tensors, write_llama


def step(call: Call, *arguments: object) -> dict[str, Any]:
    """The parameters that were recorded."""
    ran = call("upcycle", *arguments, "--no-verify", "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = ran.json["recipe"][0]
    return found


def test_a_deepseek_shape(call: Call, model: Path) -> None:
    """Finer experts in groups, a shared one, the first layer dense; verified, and the choice of the
    target is said.
    """
    ran = call("upcycle", model, "--granularity", "4", "--shared", "1", "--dense-first", "1")
    assert ran.code == 0 and "Same function: " in ran.out and "Files valid: " in ran.out
    assert "try: glm4_moe holds this llama exactly in this shape" in ran.out
    (out,) = model.parent.glob("model-glm4-moe-*")
    config = json.loads((out / "config.json").read_text())
    expected = {
        "n_group": 8,
        "topk_group": 2,
        "n_routed_experts": 24,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "intermediate_size": 64,
        "routed_scaling_factor": 3.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }
    assert {k: config.get(k, "absent") for k in expected} == expected


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        (("--drop", "0.5", "--noise", "0.01"), {"drop": 0.5, "noise": 0.01}),
        (
            ("--router", "zero", "--experts", "4", "--top-k", "1"),
            {"router": "zero", "experts": 4, "top_k": 1},
        ),
        (
            ("--target", "glm4_moe", "--shared", "0", "--seed", "3"),
            {"target": "glm4_moe", "shared": 0, "seed": 3},
        ),
        (("--target", "glm4_moe", "--dense-first", "2"), {"layers": [2]}),
    ],
)
def test_options_are_recorded(
    options: tuple[str, ...], recorded: dict[str, Any], call: Call, model: Path
) -> None:
    found = step(call, model, *options)
    assert {k: found[k] for k in recorded} == recorded


def test_several_models(call: Call, model: Path, tmp_path: Path) -> None:
    other = write_llama(
        tmp_path / "other", tensors={n: t + 1 for n, t in llama_tensors(layers=3).items()}, layers=3
    )
    out = tmp_path / "mixed"
    found = step(
        call, model, "--expert", model, "--expert", other, "--attention", "average", "--out", out
    )
    assert found["expert_models"] == ["../model", "../other"] and found["experts"] == 2
    ran = call("verify", model, out)
    assert ran.code == 0 and "Another function: perplexity" in ran.out
    assert "logits max" not in ran.out


def test_a_number_of_experts_given_as_an_expert(call: Call, model: Path) -> None:
    assert_two_lines(
        call("upcycle", model, "--expert", "8"), "--expert 8 would be a model", "--experts", code=2
    )


def test_an_expert_that_is_not_there(call: Call, model: Path) -> None:
    assert_two_lines(
        call("upcycle", model, "--expert", "/absent/model"), "no file or folder /absent/model"
    )


def test_a_granularity_that_does_not_divide(call: Call, model: Path) -> None:
    ran = call("upcycle", model, "--granularity", "7")
    assert_two_lines(ran, "granularity 7 does not divide 64 neurons", "8 does", code=2)


def test_a_custom_code_block(call: Call, model: Path) -> None:
    """By name, and verified by the code that goes along; what the routers do is shown."""
    ran = call("upcycle", model, "--target", "surgery", "--experts", "4")
    assert ran.code == 0 and "Same function: " in ran.out and "trust_remote_code=True" in ran.out
    assert (
        "gradient of the routers" in ran.out
        and "warning: no gradient reaches the router" in ran.out
    )
    (out,) = model.parent.glob("model-surgery-4x-top2")
    assert {p.name for p in out.glob("*.py")} == {
        "modeling_surgery.py",
        "experts_mlp.py",
        "sparse_kernel.py",
        "sparse_mlp.py",
    }


def test_calibrated_routers(call: Call, model: Path) -> None:
    """Planned without data; then the figures of each layer are in the record, and the scale is the
    stated one.
    """
    options = (
        "--router",
        "centroids",
        "--drop",
        "0.5",
        "--experts",
        "4",
        "--tokens",
        "256",
        "--sequence-length",
        "32",
    )
    planned = call("upcycle", model, *options, "--dry-run", "--json")
    assert planned.code == 0 and planned.json["exact"] is False
    ran = call("upcycle", model, *options, "--no-verify", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["recipe"][0]["calibration"] == {"tokens": 256, "sequence_length": 32}
    (report,) = ran.json["calibration"]
    assert {k: report[k]["logit_std"] for k in "012"} == dict.fromkeys("012", 1.0)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (("--tokens", "256"), "text for a router that begins normal"),
        (("--expert-text", "a.txt"), "texts of experts"),
        (("--router", "class-means"), "class means of 0 texts for 0 models"),
    ],
)
def test_text_that_no_router_reads(
    options: tuple[str, ...], seen: str, call: Call, model: Path
) -> None:
    assert_two_lines(
        call("upcycle", model, *options),
        seen,
        "--router" if "class" not in seen else "--expert",
        code=2,
    )
