"""The sentences about a verification say what its rows say, and call damage by its name."""

from __future__ import annotations

from typing import Any

import pytest

from surgery.proof import verdict


def verification(exact: bool, **rows: Any) -> dict[str, Any]:
    """A verification with these rows, their keys with "__" for a dot."""
    found = [
        {"key": key.replace("__", "."), "check": key, "passed": True, "detail": []} | row
        for key, row in rows.items()
    ]
    sample = {"sequences": 4, "length": 513, "source": "built-in evaluation text"}
    return {"exact": exact, "dtype": "float32", "sample": sample, "passed": True, "rows": found}


def quality(*perplexities: float) -> dict[str, Any]:
    """A verification with the source's and output's perplexity on one text, or on both."""
    keys = [f"perplexity__{who}__{t}" for t in verdict.TEXTS for who in ("source", "output")]
    return verification(
        False, **{k: {"value": v} for k, v in zip(keys, perplexities, strict=False)}
    )


def test_a_changed_function_leads_with_what_it_costs() -> None:
    found = quality(28.91, 58.3, 57.2, 661.4)
    assert verdict.headline(found) == (
        "Another function: perplexity 28.9 → 58.3 on held-out speeches (× 2.02), "
        "57.2 → 661 on another domain (× 11.6)"
    )
    assert verdict.damage(found) == (
        "Damaged: the output's perplexity is × 11.6 the source's on another domain"
    )
    assert verdict.measured_on(found).startswith("Quality is measured, not judged: 4 × 513 tokens")


def test_a_small_loss_is_not_called_damage() -> None:
    assert verdict.damage(quality(20.0, 29.9)) == ""
    assert verdict.damage(quality(20.0, 30.1)) != ""
    assert verdict.damage(verification(True)) == verdict.damage(None) == ""


DIFFERENCE = {"value": 2.19e-05, "limit": 3.816e-05}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (
            {"logits__difference": DIFFERENCE},
            "Same function: fp32 logits differ by at most 2.2e-05 (limit 3.8e-05)",
        ),
        (
            {"logits__undecided": {"value": 1.0}, "logits__difference": DIFFERENCE},
            "Same function: fp64 logits differ by at most 2.2e-05 (limit 3.8e-05)",
        ),
        (
            {"logits__difference": DIFFERENCE | {"value": 0.5, "passed": False}},
            "Not the same function: fp32 logits differ by at most 0.5 (limit 3.8e-05)",
        ),
        (
            {"logits__difference": DIFFERENCE, "logits__control": {"passed": False}},
            "Not proved: the logits would be the same without an MLP",
        ),
        ({"names_missing": {"value": 2, "passed": False}}, "Not compared: the files are not valid"),
        (
            {"nonfinite_logits__source": {"value": 3}},
            "Not compared: the source's logits are NaN or Inf",
        ),
    ],
)
def test_an_exact_conversion_is_proved_or_it_is_not(rows: dict[str, Any], line: str) -> None:
    assert verdict.headline(verification(True, **rows)) == line


def test_checks_of_files_fold_into_one_line_until_one_fails() -> None:
    zero = {"value": 0, "limit": 0}
    rows = {"shards_damaged": zero, "names_missing": zero, "names_unexpected": zero}
    valid = verdict.files_checked(verification(True, **rows))
    assert valid == "Files valid: 3 checks (shards, names)"
    rows["names_missing"] = {"value": 2, "limit": 0, "passed": False}
    assert verdict.files_checked(verification(True, **rows)) == "Files not valid: names_missing: 2"


def test_a_warning_names_its_layers() -> None:
    row = {"check": "warning: idle experts", "warns": True, "layers": [[0, 1.0], [1, 2.0], [4, 1]]}
    assert list(verdict.warnings(verification(True, routers__idle_experts=row))) == [
        "idle experts (layers 0-1, 4)"
    ]


def test_numbers_are_rounded_to_what_they_mean() -> None:
    assert [verdict.figure(v) for v in (25.945, 1234.6, 2.193e-05, 0.0, 7, "nan", 1e304)] == [
        "25.9",
        "1,230",
        "2.19e-05",
        "0",
        "7",
        "nan",
        "1e+304",
    ]
    assert [verdict.times(r) for r in (1.0004, 2.016, 11.56, 1234.5)] == [
        "× 1.00",
        "× 2.02",
        "× 11.6",
        "× 1,230",
    ]
