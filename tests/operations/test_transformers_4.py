"""What is written loads in transformers 4.57 too, with the same logits.

It ignores what only transformers 5 says (rope_parameters, dtype, a tokenizer class that it has not)
without a word: a model then loads with rope_theta 10000, in fp32, and speaks gibberish.
"""

from __future__ import annotations

from typing import Any

import pytest
from models import RELUFIED, UPCYCLED


@pytest.fixture(scope="module")
def found(workshop: Any, run_transformers_4: Any) -> dict[str, Any]:
    """Every conversion, in one process: its import costs more than all the models."""
    names = (*UPCYCLED, *RELUFIED)
    job = {
        n: {"folder": str(workshop.convert(n).output), "expected": str(workshop.expected(n))}
        for n in names
    }
    result: dict[str, Any] = run_transformers_4({"models": job})["models"]
    return result


@pytest.mark.parametrize("name", [*UPCYCLED, *RELUFIED])
def test_logits_and_tokens_are_the_same(name: str, found: dict[str, Any]) -> None:
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["keys"] == {}
    assert result["delta"] <= 1e-5 * max(1.0, result["std"])
    assert result["same_tokens"]
    case = (UPCYCLED | RELUFIED)[name]
    assert result["dtype"] == str(case.dtype)
    assert result["tokenizer"] == ([3, 4] if case.tokenizer else None)
