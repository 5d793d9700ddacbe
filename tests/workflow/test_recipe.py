"""Recipes: what is not understood is an error that names it and its line, and what was made can be
made again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from models import fake
from support import write_llama

from surgery.checkpoint import make_plan
from surgery.demo import MODEL
from surgery.errors import SurgeryError, UsageError
from surgery.operations import names
from surgery.storage import open_checkpoint
from surgery.workflow import recipe
from surgery.workflow.convert import convert_alone

UPCYCLE = "source: demo\noperations:\n  - operation: upcycle\n    experts: 8\n    layers: 0-1,3\n"


@pytest.mark.parametrize(
    ("text", "seen", "hint"),
    [
        (
            "operations:\n  - operation: upcycle\n    expert: 8\n",
            "r.yaml, line 3: upcycle: unknown key 'expert'",
            "did you mean experts?",
        ),
        (
            "operations:\n  - operation: upcicle\n",
            "line 2: unknown 'upcicle'",
            "did you mean upcycle?",
        ),
        ("operations: []\nsuorce: x\n", "line 2: unknown key 'suorce'", "did you mean source?"),
        ("operations:\n  - 3\n", "line 2: item 0 of operations is 3", "keys with values"),
        ("operations:\n\n  - experts: 3\n", "line 3: no operation", "add operation"),
        ("- upcycle\n", "no list of operations", "surgery recipes"),
        ("operations: [", "r.yaml, line 1: not YAML", "mend"),
        (
            "operations:\n  - operation: upcycle\n    experts: eight\n",
            "line 3: upcycle: experts is 'eight'",
            "give a whole number",
        ),
        (
            "operations:\n  - operation: upcycle\n    experts: true\n",
            "line 3: upcycle: experts is True",
            "give a whole number",
        ),
        (
            "operations:\n  - operation: upcycle\n    layers: 0..7\n",
            "line 3: upcycle: layers is '0..7'",
            "0-7,12",
        ),
        (
            "operations:\n  - operation: relufy\n    calibration:\n      token: 9\n",
            "line 4: relufy: unknown key 'token'",
            "tokens?",
        ),
        (
            "calibration: {tokens: many}\noperations: []\n",
            "line 1: tokens is 'many'",
            "give a whole number",
        ),
        ("operations: []\nsource: a\nsource: b\n", "line 3: 'source' a second time", "line 2"),
        (
            "operations: []\npush: {repo: a/b, private: 1}\n",
            "line 2: private is 1",
            "true or false",
        ),
        ("operations: []\nrevision: 123\n", "line 2: revision is 123", "give text"),
    ],
)
def test_what_is_not_understood(text: str, seen: str, hint: str) -> None:
    with pytest.raises(SurgeryError) as caught:
        recipe.parse(text, "r.yaml")
    assert seen in caught.value.message and hint in caught.value.hint, caught.value


def test_a_missing_recipe_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SurgeryError) as caught:
        recipe.load("demo-upcicle")
    assert caught.value.hint == "did you mean demo-upcycle?"
    with pytest.raises(SurgeryError):
        recipe.load(tmp_path / "demo-upcycle.yaml")  # a path is a path


def test_changes() -> None:
    """--set: values are YAML, items are counted, what is absent is made, and a typo is said to be
    in it.
    """
    changes = (
        "operations.0.experts=4",
        "calibration.tokens=64",
        "source=./x",
        "operations.0.noise=1e-3",
        "verify=false",
    )
    changed = recipe.parse(UPCYCLE, "r.yaml", changes)
    assert changed.operations == (
        {"operation": "upcycle", "experts": 4, "layers": [0, 1, 3], "noise": 0.001},
    )
    assert (changed.calibration, changed.source, changed.verify) == ({"tokens": 64}, "./x", False)
    for change, seen in (
        ("operations.0.expert=4", "--set operations.0.expert=4: upcycle: unknown key 'expert'"),
        ("operations.1.experts=4", "no 1 in a list of 1"),
        ("source.x=4", "'demo' has no x"),
        ("experts", "has no key and value"),
        ("source=[", "not YAML"),
    ):
        with pytest.raises(SurgeryError, match="") as caught:
            recipe.parse(UPCYCLE, "r.yaml", [change])
        assert seen in caught.value.message, caught.value
        assert isinstance(caught.value, UsageError) or change == "operations.0.expert=4"


def test_calibration_is_of_all_that_take_one_and_do_not_say_otherwise() -> None:
    text = """
source: demo
calibration: {tokens: 128, sequence_length: 64}
dtype: fp16
operations:
  - operation: relufy
    activation: relu
    bypass: none
    calibration: {tokens: 256}
  - operation: relufy
    activation: relu2
"""
    chosen = recipe.parse(text, "r.yaml")
    steps = recipe.apply(chosen, recipe.open_source(chosen)).steps
    assert [s.parameters.get("calibration") for s in steps] == [
        {"tokens": 256, "sequence_length": 64},
        {"tokens": 128, "sequence_length": 64},
        None,
    ]
    assert steps[2].parameters == {"dtype": "float16"}


def operations(**more: Any) -> list[tuple[dict[str, Any], ...]]:
    """Each operation in an unusual form, and two in one pass."""
    relufy = {
        "operation": "relufy",
        "repair": "ridge",
        "calibration": {"tokens": 64, "sequence_length": 32},
    }
    upcycle = {"operation": "upcycle", "seed": 3}
    return [
        ({**upcycle, "granularity": 4, "shared": 1, "dense_first": 1, "target": "glm4_moe"},),
        ({**upcycle, "experts": 4, "drop": 0.5, "noise": 1e-3, "router": "zero"},),
        ({**relufy, "activation": "fatrelu", "sparsity": 0.7, "per_neuron": True},),
        (
            {**relufy, "activation": "relu", "bypass": "none"},
            {**upcycle, "experts": 2, "top_k": 1},
            {"operation": "cast", "dtype": "fp16"},
        ),
        ({"operation": "splinify", "grid": 8, "layers": [1]},),
        ({"operation": "memory", "slots": 1024, "layers": "0,2", "seed": 3},),
        (
            {
                "operation": "memory",
                "place": "replace",
                "find": "product-keys",
                "layers": [1],
                "reads": 0.6,
                "calibration": {"tokens": 64, "sequence_length": 32},
            },
        ),
        (
            {**relufy, "activation": "relu", "bypass": "none"},
            {
                "operation": "carve",
                "experts": 4,
                "active": 2,
                "calibration": {"tokens": 64, "sequence_length": 32},
            },
        ),
    ]


@pytest.mark.parametrize("entries", operations(), ids=lambda e: "+".join(o["operation"] for o in e))
def test_an_output_says_how_to_make_it_again(
    entries: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    """The recipe.yaml in an output gives its bytes again, whatever was left to defaults."""
    model = write_llama(tmp_path / "model", layers=3)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"source": str(model), "operations": list(entries)}))
    made: list[Path] = []
    for name in ("first", "again"):
        chosen = recipe.load(path)
        source = recipe.open_source(chosen)
        size = None if chosen.max_shard_size is None else int(chosen.max_shard_size)
        convert_alone(
            source,
            recipe.apply(chosen, source),
            tmp_path / name,
            max_shard_size=size or 60_000,
            verify=False,
        )
        made.append(tmp_path / name)
        path = tmp_path / name / "recipe.yaml"
        assert str(tmp_path) not in path.read_text()
    first, again = (
        {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} for folder in made
    )
    differ = [n for n in first if first[n] != again.get(n)]
    # Both say why a target was chosen.
    assert set(differ) <= {"README.md", "surgery.json"} and set(first) == set(again)
    assert len([n for n in first if n.endswith(".safetensors")]) > 1


def test_one_pass_over_the_disk(tmp_path: Path) -> None:
    """relufy then upcycle is written once, straight from the source's bytes, and nothing stands
    between.
    """
    chosen = recipe.parse(
        "source: demo\noperations:\n  - {operation: relufy, repair: none}\n"
        "  - {operation: upcycle, experts: 2}\n",
        "r",
    )
    source = recipe.open_source(chosen)
    output = recipe.apply(chosen, source)
    assert output.config["model_type"] == "mixtral" and output.config["hidden_act"] == "relu"
    written = {
        e.file.name
        for shard in make_plan(output).shards
        for _, t in shard.tensors
        for e in t.sources()
    }
    assert written == {"model.safetensors"}
    assert [s.operation for s in output.steps] == ["relufy", "upcycle"]


def test_the_schema_knows_every_parameter() -> None:
    """It is made from the signatures; each key says what it is."""
    known = recipe.json_schema()
    items = {
        i["properties"]["operation"]["const"]: i
        for i in known["properties"]["operations"]["items"]["anyOf"]
    }
    assert set(items) == set(names())
    upcycle = items["upcycle"]["properties"]
    assert upcycle["experts"]["type"] == ["integer", "null"] and upcycle["drop"] == upcycle[
        "drop"
    ] | {
        "type": "number",
        "default": 0.0,
    }
    assert "anyOf" in upcycle["layers"] and "copies" in upcycle["experts"]["description"]
    relufy = items["relufy"]["properties"]
    calibration = relufy["calibration"]["anyOf"][0]["properties"]
    assert calibration["tokens"]["type"] == "integer" and calibration["tokens"]["default"] == 65536
    assert {"type": "array", "items": {"type": "string"}} in calibration["text"]["anyOf"]
    for item in items.values():
        for name, each in item["properties"].items():
            assert {"type", "anyOf", "const", "enum"} & set(each), (item, name)
    json.dumps(known)


def test_shipped_recipes_are_understood() -> None:
    """All of them load; the names that `surgery recipes` lists say what they do in a line."""
    for name, line in recipe.shipped().items():
        chosen = recipe.load(name)
        assert chosen.source and chosen.operations and 20 < len(line) < 120, name
        assert (chosen.source == "demo") == name.startswith("demo-")


DEMOS = [n for n in recipe.shipped() if n.startswith("demo-")]


@pytest.mark.parametrize("name", DEMOS)
def test_demo_recipes_run(name: str, tmp_path: Path) -> None:
    """Each is a conversion that its verification accepts (here on less text, which it takes from
    one place).
    """
    chosen = recipe.load(name, ["calibration.tokens=1024"])
    source = recipe.open_source(chosen)
    result = convert_alone(source, recipe.apply(chosen, source), tmp_path / "out")
    assert result.verification is not None and result.verification.passed
    assert open_checkpoint(tmp_path / "out").config != open_checkpoint(MODEL).config


# Model types of the shipped recipes' sources.
SIZES = {
    "llama": {},
    "mistral": {},
    "qwen3": {"head_dim": 4},
}


@pytest.mark.parametrize("name", [n for n in recipe.shipped() if not n.startswith("demo-")])
def test_shipped_recipes_fit_their_source(name: str) -> None:
    """Planned on a small model of the source's architecture, the file's every operation applies."""
    chosen = recipe.load(name)
    kind = next(k for k in SIZES if k in str(chosen.source).lower().replace("-", ""))
    output = recipe.apply(chosen, fake(kind, width=64, **SIZES[kind]))
    assert [s.operation for s in output.steps] == [e["operation"] for e in chosen.operations]


def test_what_a_recipe_requires_is_checked() -> None:
    """A limit that is none is named with its line, and one that is reaches the conversion."""
    text = "source: demo\nrequire:\n  max_perplexity: {}\noperations:\n  - operation: relufy\n"
    made = recipe.parse(text.format(1.25), "r.yaml")
    assert made.require is not None and made.require.max_perplexity == 1.25
    assert "max_perplexity: 1.25" in recipe.dump(made)
    with pytest.raises(SurgeryError, match=r"line 2: a perplexity of at most 0 times"):
        recipe.parse(text.format(0), "r.yaml")
    with pytest.raises(SurgeryError, match=r"line 3: max_perplexity is 'much'"):
        recipe.parse(text.format("much"), "r.yaml")
