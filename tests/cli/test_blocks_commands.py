"""The options of `surgery memory` and `surgery splinify` reach the operation, and what they cost is
shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import Call, assert_two_lines


def blocks(call: Call, command: str, model: Path, *arguments: object) -> list[dict[str, Any]]:
    """The entries of config.json that were written."""
    out = model.parent / "out"
    ran = call(command, model, *arguments, "--out", out, "--no-verify", "--json")
    assert ran.code == 0, ran.err
    found: list[dict[str, Any]] = json.loads((out / "config.json").read_text())["surgery_blocks"]
    return found


def test_a_memory_beside_is_verified(call: Call, model: Path) -> None:
    ran = call("memory", model, "--layers", "0,2", "--slots", "64", "--knn", "4", "--key-dim", "8")
    assert ran.code == 0 and "Same function: fp32 logits differ by" in ran.out
    assert (
        "of the memory a token reads" in ran.out
        and (model.parent / "model-memory" / "memory_mlp.py").exists()
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ("--layers", "1", "--slots", "4k", "--heads", "2", "--knn", "8"),
            {"keys": 64, "heads": 2, "knn": 8, "layers": [1]},
        ),
        (
            ("--slots", "64", "--knn", "2", "--kind", "peer", "--sparse-gradients"),
            {"slots": "peer", "sparse_gradients": True, "layers": [0, 1, 2]},
        ),
        (
            ("--slots", "64", "--knn", "2", "--value-dim", "5", "--key-dim", "6"),
            {"value_dim": 5, "key_dim": 6, "place": "beside"},
        ),
        (
            ("--place", "replace", "--init", "zero", "--layers", "1"),
            {"place": "replace", "width": 0, "keys": 64},
        ),
        (
            (
                "--place",
                "replace",
                "--layers",
                "1",
                "--slots",
                "16",
                "--knn",
                "2",
                "--key-dim",
                "2",
                "--reads",
                "0.75",
                "--tokens",
                "64",
            ),
            {"place": "replace", "width": 40, "bypass": "bias"},
        ),
        (
            (
                "--place",
                "replace",
                "--layers",
                "1",
                "--find",
                "product-keys",
                "--knn",
                "30",
                "--key-dim",
                "2",
                "--tokens",
                "64",
            ),
            {"slots": "neurons", "knn": 30, "key_dim": 2, "width": 0, "bypass": "bias"},
        ),
    ],
)
def test_options_of_memory(
    options: tuple[str, ...], expected: dict[str, Any], call: Call, model: Path
) -> None:
    (entry,) = blocks(call, "memory", model, *options)
    assert {k: entry[k] for k in expected} == expected


def test_own_tables(call: Call, model: Path) -> None:
    entries = blocks(
        call, "memory", model, "--layers", "0,2", "--slots", "64", "--knn", "2", "--own-tables"
    )
    assert [(e["layers"], e["shared"]) for e in entries] == [
        ([0], "memory_values_0"),
        ([2], "memory_values_2"),
    ]


def test_the_plan_says_what_a_token_reads(call: Call, model: Path) -> None:
    plan = call(
        "memory",
        model,
        "--place",
        "replace",
        "--layers",
        "1",
        "--slots",
        "16",
        "--knn",
        "2",
        "--key-dim",
        "2",
        "--dry-run",
        "--json",
    ).json
    assert (
        "of the memory a token reads" in plan["notes"][0]
        and "0.41 × what the MLP reads (0.01 MB)" in plan["notes"][0]
    )
    assert not plan["exact"] and not (model.parent / "model-memory").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slots", "1.5M"), "--slots 1.5M is no number of slots"),
        (("--slots", "2M"), "2097152 slots are no square"),
        (("--place", "replace"), "no layers whose MLP is to be replaced"),
        (("--layers", "x"), "'x' does not name layers"),
    ],
)
def test_what_memory_refuses(options: tuple[str, ...], words: str, call: Call, model: Path) -> None:
    assert_two_lines(call("memory", model, *options), words, code=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"function": "spline", "grid": 32, "range": 8.0, "groups": 64}),
        (("--groups", "layer", "--grid", "16"), {"groups": 1, "grid": 16}),
        (
            ("--kind", "rational", "--groups", "8", "--range", "4", "--layers", "1"),
            {"function": "rational", "groups": 8, "range": 4.0, "layers": [1]},
        ),
    ],
)
def test_options_of_splinify(
    options: tuple[str, ...], expected: dict[str, Any], call: Call, model: Path
) -> None:
    (entry,) = blocks(call, "splinify", model, *options)
    assert {k: entry[k] for k in expected} == expected


def test_a_splined_model_is_verified(call: Call, model: Path) -> None:
    ran = call("splinify", model)
    assert (
        ran.code == 0
        and "Same function: fp32 logits differ by" in ran.out
        and "5,568 coefficients were added" in ran.out
    )
    assert_two_lines(call("splinify", model, "--groups", "5"), "5 groups of 64 channels", code=2)
