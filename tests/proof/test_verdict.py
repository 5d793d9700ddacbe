"""The sentences about a verification say what its rows say, and call damage by its name."""

from __future__ import annotations

import math
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


def quality(limit: float | None = None, **ratios: float) -> dict[str, Any]:
    """A verification of a source with perplexity 20 on every domain."""
    mean = math.prod(ratios.values()) ** (1 / len(ratios))
    bound = {} if limit is None else {"limit": limit, "passed": mean <= limit}
    models = {
        d: {"source": {"perplexity": 20}, "output": {"perplexity": 20 * r}}
        for d, r in ratios.items()
    }
    rows = {f"domain__{d}": {"value": r, "models": models[d]} for d, r in ratios.items()}
    return verification(False, **rows, domains__mean={"value": mean} | bound)


def test_a_changed_function_leads_with_what_it_costs() -> None:
    found = quality(speeches=1.0, c=1.21, german=1.331)
    costs = "perplexity × 1.17 in the geometric mean of 3 domains, × 1.33 at worst (german)"
    assert verdict.headline(found) == f"Another function: {costs}"
    assert verdict.conclusion(found, ["--this"]) == f"P{costs[1:]}."
    assert verdict.measured_on(found).startswith("Quality is measured, not judged: 4 × 513 tokens")
    alone = quality(speeches=1.5)
    assert verdict.headline(alone) == "Another function: perplexity 20 → 30 on speeches (× 1.50)"


def test_what_costs_too_much_says_so_and_what_to_try() -> None:
    found = quality(speeches=1.2, german=3.0)
    assert verdict.conclusion(found, ["--this", "--that"]) == (
        "Damaged: perplexity × 1.90 in the geometric mean of 2 domains, × 3.00 at worst (german). "
        "Try next: --this; or --that."
    )


def test_a_small_loss_is_not_called_damage() -> None:
    """What counts is the mean of all domains."""
    assert not verdict.damaged(quality(a=1.49)) and verdict.damaged(quality(a=1.51))
    assert not verdict.damaged(quality(a=1.0, b=2.0)) and verdict.damaged(quality(a=math.nan))
    assert not verdict.damaged(verification(True)) and not verdict.damaged(None)
    assert verdict.conclusion(verification(True)) == ""


def test_a_limit_that_is_missed_is_named() -> None:
    found = quality(1.2, speeches=1.3)
    assert verdict.missed(found) == 1.2 and verdict.missed(quality(1.2, speeches=1.1)) is None
    assert verdict.conclusion(found, ["--this"]) == (
        "Perplexity 20 → 26 on speeches (× 1.30): more than the 1.2 times that are allowed. "
        "Try next: --this."
    )
    assert verdict.measured_on(found).startswith("Quality is measured and held to a limit: ")


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
        "25.9", "1,230", "2.19e-05", "0", "7", "nan", "1e+304",
    ]  # fmt: skip
    assert [verdict.times(r) for r in (1.0004, 2.016, 11.56, 1234.5)] == [
        "× 1.00", "× 2.02", "× 11.6", "× 1,230",
    ]  # fmt: skip
