"""The defaults in the tables of families are those of transformers, in both versions.

A conversion writes these values out, because the target's class assumes different ones. A wrong
value gives a model that loads without a complaint and computes another function.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from models import fake
from transformers_4 import fields_of

from surgery.checkpoint import make_plan
from surgery.families import known
from surgery.families.dense import DENSE
from surgery.families.moe import MOE
from surgery.families.targets import ROUTES
from surgery.operations.upcycle import upcycle

SIZES = {"num_attention_heads": 4, "hidden_size": 32}
WITH_DEFAULTS = [t for t, f in DENSE.items() if f.defaults]
NOT_IN_4 = {"nemotron_h"}
# Fields that a route requires.
NEEDED: dict[str, dict[str, Any]] = {"mistral glm4_moe": {"sliding_window": None}}
# Fields that differ by nature.
IDENTITY = {
    "model_type",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_name_or_path",
}


def keys_of(model_type: str) -> list[str]:
    """Return the config keys that a family's row names."""
    f = known()[model_type]
    keys = [f.hidden_key, f.width_key, f.layers_key, f.activation_key]
    return [k for k in (*keys, *((f.experts_key, f.top_k_key) if f.is_moe else ())) if k]


def silent_pair(model_type: str, target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config.json that has sizes alone, and that of the upcycled model."""
    checkpoint = fake(model_type, **NEEDED.get(f"{model_type} {target}", {}))
    result = upcycle(checkpoint, experts=2, target=target)
    return dict(checkpoint.config), json.loads(make_plan(result).small["config.json"])


ROUTE_NAMES = [f"{r.source} {r.target}" for r in ROUTES]


@pytest.fixture(scope="module")
def in_4(run_transformers_4: Any) -> dict[str, Any]:
    """The fields that the classes of transformers 4 make of all configs, read in one process."""
    job: dict[str, Any] = {}
    for t in known():
        config = {"model_type": t, **(SIZES if t in WITH_DEFAULTS else {})}
        job[t] = {"config": config, "fields": [*keys_of(t), *known()[t].defaults]}
    for name in ROUTE_NAMES:
        for kind, config in zip(("source", "output"), silent_pair(*name.split()), strict=True):
            job[f"{name} {kind}"] = {"config": config}
    result: dict[str, Any] = run_transformers_4({"configs": job})["configs"]
    return result


def check_defaults(model_type: str, found: dict[str, Any]) -> None:
    keys, assumed = DENSE[model_type].defaults, DENSE[model_type].effective(SIZES)
    assert {k: found.get(k, "absent") for k in keys} == {k: assumed[k] for k in keys}


@pytest.mark.parametrize("model_type", WITH_DEFAULTS)
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    found = fields_of({"model_type": model_type, **SIZES}, list(DENSE[model_type].defaults))
    check_defaults(model_type, found or {})


@pytest.mark.parametrize("model_type", WITH_DEFAULTS)
def test_defaults_are_those_of_the_class_in_4(model_type: str, in_4: dict[str, Any]) -> None:
    check_defaults(model_type, in_4[model_type])


def check_keys(model_type: str, found: dict[str, Any]) -> None:
    family = known()[model_type]
    assert set(keys_of(model_type)) <= set(found)
    if family.activation_key:
        assert found[family.activation_key] == family.activation


@pytest.mark.parametrize("model_type", [*DENSE, *MOE])
def test_the_row_names_keys_of_the_class(model_type: str) -> None:
    check_keys(model_type, fields_of({"model_type": model_type}, keys_of(model_type)) or {})


@pytest.mark.parametrize("model_type", [*DENSE, *MOE])
def test_the_row_names_keys_of_the_class_in_4(model_type: str, in_4: dict[str, Any]) -> None:
    if model_type in NOT_IN_4:
        assert in_4[model_type] is None
    else:
        check_keys(model_type, in_4[model_type])


def meaning(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with one form for what classes write in different ways.

    These are windows that are off, the usual head_dim, and rotary embeddings of whole heads.
    """
    size = config["hidden_size"] // config["num_attention_heads"]
    window, head_dim = config.get("sliding_window") or None, config.get("head_dim") or size
    out = config | {"sliding_window": window, "head_dim": head_dim}
    if rope := config.get("rope_parameters"):
        whole = ("partial_rotary_factor", 1.0)
        out["rope_parameters"] = {k: v for k, v in rope.items() if (k, v) != whole}
    return out


def check_same_meaning(source: dict[str, Any], output: dict[str, Any], route: str) -> None:
    """Assert that every field that both classes have is equal, unless the route changes it."""
    meant = next(set(r.config) for r in ROUTES if f"{r.source} {r.target}" == route)
    source, output = meaning(source), meaning(output)
    fields = (set(source) & set(output)) - IDENTITY - meant
    assert len(fields) > 15
    assert {k: (source[k], output[k]) for k in sorted(fields) if source[k] != output[k]} == {}


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_a_silent_config_keeps_its_meaning(route: str) -> None:
    """Every field that the two classes share but default differently must have been written."""
    source, output = silent_pair(*route.split())
    check_same_meaning(fields_of(source) or {}, fields_of(output) or {}, route)


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_a_silent_config_keeps_its_meaning_in_4(route: str, in_4: dict[str, Any]) -> None:
    check_same_meaning(in_4[f"{route} source"], in_4[f"{route} output"], route)
