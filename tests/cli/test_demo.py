"""`surgery demo`: both conversions of the embedded model, verified, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_the_demo_upcycles_and_relufies(call: Any, tmp_path: Path) -> None:
    """The upcycled model is the source's function; what the relufied one costs is said."""
    done = call("demo", "--out", tmp_path / "demo", "--json")
    assert done.code == 0, done.err
    source, upcycled, relufied = done.json
    assert upcycled["perplexity"] is None
    assert 30 < source["perplexity"] < relufied["perplexity"] < 1.1 * source["perplexity"]
    assert upcycled["parameters"] == 18_003_264 and upcycled["active_parameters"] == 5_616_960
    assert upcycled["max_logit_difference"] < 1e-4 and relufied["max_logit_difference"] is None
    assert (tmp_path / "demo/upcycled/model.safetensors").is_file()
    again = call("demo", "--out", tmp_path / "demo")
    assert again.code == 0 and "MixtralForCausalLM" in again.out
    order = ["1. surgery run demo-upcycle", "Same function: ", "2. surgery run demo-relufy"]
    places = [again.out.index(part) for part in [*order, "Another function: ", "Next:"]]
    assert places == sorted(places) and again.out.count("Files valid: 6 checks") == 2
