"""`surgery families` says what was measured, and why something does not work."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support import Call

from surgery.checkpoint import Checkpoint, Source
from surgery.errors import SurgeryError
from surgery.families import Blocks
from surgery.families.coverage import KINDS, OPERATIONS, Measured, measured, works
from surgery.families.lookup import known


def test_counts(call: Call) -> None:
    out = call("families").out
    for operation in OPERATIONS:
        for kind in KINDS:
            assert str(measured().count(kind, operation)) in out
            assert str(measured().count(kind, operation, "dense")) in out
    assert "commonest reason" in out and "refuse mixtures by design" in out


def test_one_type(call: Call) -> None:
    out = call("families", "starcoder2").out
    assert "starcoder2 (text)" in out and "stock" in out
    out = call("families", "mamba").out
    assert "no MLP of mamba is proved" in " ".join(out.split())


def test_types_are_sorted_by_what_they_have() -> None:
    """Operations on dense MLPs are counted of the types that have some."""
    found = measured()
    assert found.sort("causal", "llama") == "dense"
    assert found.sort("causal", "mixtral") == found.sort("causal", "qwen3_next") == "mixture"
    assert found.sort("causal", "mamba") == "none"
    for kind in KINDS:
        assert sum(found.sorts(kind).values()) == len(found.rows[kind])
        for operation in OPERATIONS:
            assert found.count(kind, operation, "dense") <= found.sorts(kind)["dense"]


def sorted_as(refusal: str) -> str:
    """Return the sort of a type whose carving was refused so."""
    rows = {"causal": {"new": {"inspect": "ok", "carve": refusal}}}
    return Measured(transformers="5", rows=rows).sort("causal", "new")


def test_refusals_of_mixtures_are_told_from_others() -> None:
    """A measured type is a mixture by the words of its refusal, so these must stay known."""
    mixture = known()["mixtral"]
    empty = Checkpoint(config={"model_type": "mixtral"}, tensors={}, source=Source(location="x"))
    family = dataclasses.replace(mixture, uneven=True)
    uneven = Blocks(family=family, checkpoint=empty, prefix="model.layers.", count=2)
    for refuse in (mixture.require_dense, lambda: uneven.dense):
        with pytest.raises(SurgeryError) as caught:
            refuse()
        assert sorted_as(caught.value.message) == "mixture"
    assert sorted_as("layers of zamba share one MLP") == "dense"


def test_an_unknown_type_is_told_its_neighbours(call: Call) -> None:
    done = call("families", "olmo33")
    assert done.code == 2 and "olmo3" in done.err


def test_json_has_every_cell(call: Call) -> None:
    found = json.loads(call("families", "--json").out)
    assert found["transformers"] == measured().transformers
    types = {(t["kind"], t["model_type"]): t for t in found["types"]}
    assert all(row[o] for row in types.values() for o in OPERATIONS)
    assert types["text", "llama"]["native"][0] == "mixtral"
    assert found["counts"]["causal"]["relufy"] == sum(
        works(t["relufy"]) for (kind, _), t in types.items() if kind == "text"
    )
