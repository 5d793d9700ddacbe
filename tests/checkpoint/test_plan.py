"""Plans: the sizes that people write, the names of shards, the dtype of a config without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import llama_tensors, write_llama

from surgery.checkpoint import make_plan
from surgery.checkpoint.edit import config_with, drop_tied_head, equal, head_note
from surgery.checkpoint.plan import parse_size
from surgery.errors import UsageError
from surgery.operations.cast import cast
from surgery.storage import open_checkpoint


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500 MB", 5 * 10**8),
        ("1.5GiB", 3 * 2**29),
        ("7", 7),
        ("2KiB", 2048),
        ("3mib", 3 << 20),
        ("1tb", 10**12),
        ("1TiB", 1 << 40),
        ("1KB", 1000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.1", "GB", "-1GB", "5XB", "1e9", "5 GB x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_shards_are_kept_packed_and_named(tmp_path: Path) -> None:
    """No shard exceeds the limit unless one tensor does, and the index names every tensor once."""
    source = open_checkpoint(write_llama(tmp_path / "m", layers=2, shards=3))
    kept = make_plan(source)
    assert [s.name for s in kept.shards] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert all(s.verbatim and s.nbytes == s.verbatim.size for s in kept.shards)
    packed = make_plan(source, 20_000)
    sizes = [sum(t.nbytes for _, t in s.tensors) for s in packed.shards]
    assert max(sizes) <= 20_000 < sizes[0] + sizes[1] and not any(s.verbatim for s in packed.shards)
    index = json.loads(packed.small["model.safetensors.index.json"])
    assert set(index["weight_map"]) == set(source.tensors)
    parameters = sum(t.numel for t in source.tensors.values())
    assert index["metadata"] == {"total_parameters": parameters, "total_size": 2 * parameters}
    assert packed.parameters == parameters
    exact = sum(t.nbytes for t in source.tensors.values())
    assert [s.name for s in make_plan(source, exact).shards] == ["model.safetensors"]
    assert len(make_plan(source, exact - 1).shards) == 2
    less = dict(list(source.tensors.items())[:-1])
    assert not any(s.verbatim for s in make_plan(source.replace(tensors=less)).shards)
    assert packed.fingerprint != kept.fingerprint == make_plan(source).fingerprint


def test_a_config_without_a_dtype_gets_the_one_of_most_values(tmp_path: Path) -> None:
    tensors = llama_tensors(layers=1)
    tensors |= {n: t.float() for n, t in tensors.items() if "norm" in n}
    folder = write_llama(tmp_path / "m", layers=1, tensors=tensors)
    config = json.loads((folder / "config.json").read_text())
    for change, dtype in (({}, "float16"), ({"torch_dtype": "float16"}, "float16")):
        del config["torch_dtype"]
        config |= change
        (folder / "config.json").write_text(json.dumps(config))
        made = json.loads(make_plan(open_checkpoint(folder)).small["config.json"])
        assert made["dtype"] == made["torch_dtype"] == (dtype if change else "bfloat16")
        config["torch_dtype"] = None


def tied(folder: Path, head: torch.Tensor | None) -> Any:
    tensors = llama_tensors(layers=1)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if head is None else head
    return open_checkpoint(write_llama(folder, layers=1, tensors=tensors))


def test_a_tied_head_is_left_out_only_where_it_is_the_embedding(tmp_path: Path) -> None:
    same = tied(tmp_path / "same", None)
    values = same.tensors["model.embed_tokens.weight"].read().clone()
    values[-1, -1] += 1
    other = tied(tmp_path / "other", values)
    assert set(same.tensors) - set(drop_tied_head(same, True).tensors) == {"lm_head.weight"}
    assert drop_tied_head(same, False) is same and drop_tied_head(other, True) is other
    assert not head_note(same, True) and not head_note(other, False)
    assert head_note(other, True).startswith("tie_word_embeddings is set, but lm_head.weight")


def test_equal_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are compared to the last row, piece by piece, and a dtype or a shape is no value."""
    monkeypatch.setattr("surgery.checkpoint.edit._PIECE", 100)
    source = tied(tmp_path / "m", None)
    a, b = source.tensors["lm_head.weight"], source.tensors["model.embed_tokens.weight"]

    def last(t: torch.Tensor) -> torch.Tensor:
        out = t.clone()
        out[-1, 0] += 1
        return out

    assert equal(a, b) and equal(a, a) and not equal(a, b.map("last", last))
    assert not equal(a, cast(source, "fp32").tensors["lm_head.weight"])
    assert not equal(a, source.tensors["model.norm.weight"])


def test_fields_of_the_language_model_are_changed_where_they_stand(tmp_path: Path) -> None:
    plain = open_checkpoint(write_llama(tmp_path / "m", layers=1))
    assert config_with(plain, {"hidden_act": "relu"})["hidden_act"] == "relu"
    outer = plain.replace(config={"text_config": {"hidden_act": "silu", "n": 1}, "hidden_act": 0})
    changed = config_with(outer, {"hidden_act": "relu"})
    assert changed == {"text_config": {"hidden_act": "relu", "n": 1}, "hidden_act": 0}
    assert outer.config["text_config"]["hidden_act"] == "silu"
