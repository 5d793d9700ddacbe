"""A few thousand inputs of the fuzzer, and the failures that it has found before."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support import llama_config, write_llama

from surgery.errors import SurgeryError
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint
from surgery.workflow import recipe
from surgery.workflow.convert import convert_alone
from surgery.workflow.verify import verify_folder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


def test_broken_and_hostile_files(tmp_path: Path) -> None:
    """Every file of the fuzzer is read or refused, and some of each kind are read, some refused."""
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    assert spec and spec.loader
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    counts, findings = fuzz.fuzz(2000, 1, None, tmp_path)
    assert not findings, "\n".join(findings[:5])
    assert sum(sum(c.values()) for c in counts.values()) == 2000
    # Metadata of a card that cannot be read is dropped with a note: it refuses no checkpoint.
    assert all(c["read"] and (c["refused"] or n == "metadata") for n, c in counts.items()), counts


CONFIGS: tuple[tuple[dict[str, Any], str], ...] = (
    # transformers makes a path of model_type while it reads the config.
    ({"model_type": "../../tmp/x"}, "model_type is '../../tmp/x'"),
    ({"hidden_size": "32"}, "hidden_size is '32'"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
    ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    ({"text_config": [1]}, r"text_config is \[1\]"),
    ({"surgery_blocks": [{"kind": {"a": 1}, "layers": [0]}]}, r"\{'a': 1\}"),
    ({"surgery_blocks": [{"kind": [], "layers": [0]}]}, r"\[\]"),
    ({"torch_dtype": "\ud800"}, "surrogates not allowed"),
)


@pytest.mark.parametrize(("fields", "message"), CONFIGS)
def test_a_config_that_no_model_has(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama_config() | fields))
    with pytest.raises(SurgeryError, match=message):
        open_checkpoint(tmp_path)


def test_a_field_that_is_needed_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path)
    config = llama_config()
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurgeryError, match="json has no hidden_size"):
        upcycle(open_checkpoint(tmp_path), experts=2)


def billion_laughs() -> str:
    """Return a short YAML text whose value has 9 ** 12 lists, each alias standing for nine."""
    text = "a: &a [x, x]\n"
    for i in range(12):
        aliases = [f"*a{i - 1}" if i else "*a"] * 9
        text += f"a{i}: &a{i} [{', '.join(aliases)}]\n"
    return text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (billion_laughs(), "aliases"),
        ("&r [*r]", "aliases"),
        ("[" * 100_000, "brackets"),
        ("- " * 1000, "inside more than"),
        ("operations:\n- operation: relufy\n  layers: 0-99999999999\n", "does not name layers"),
        ("operations:\n- operation: upcycle\n  experts: 0x_\n", "not YAML"),
        ("!!python/object/apply:os.system [true]", "the tag"),
    ],
    ids=["billion laughs", "itself", "brackets", "dashes", "layers", "number", "code"],
)
def test_a_recipe_that_would_take_for_ever(text: str, message: str) -> None:
    with pytest.raises(SurgeryError, match=message):
        recipe.parse(text, "x.yaml")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/dev/zero", "sub/model.safetensors", "config.json"]
)
def test_a_record_that_names_files_elsewhere(name: str, tmp_path: Path) -> None:
    """A record names files in its own folder only: hashing /dev/zero would never end."""
    source = open_checkpoint(write_llama(tmp_path / "m"))
    out = tmp_path / "out"
    convert_alone(source, relufy(source, repair="none"), out, verify=False)
    record = json.loads((out / "surgery.json").read_text())
    record["shards"][name] = {"bytes": 1, "sha256": None}
    (out / "surgery.json").write_text(json.dumps(record))
    with pytest.raises(SurgeryError, match="names a file outside its folder"):
        verify_folder(source, out)
