"""Names with the prefix of a wrapper are refused with its name, and stripped on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from support import Call, files_of, llama_tensors, write_llama

import surgery as api
from surgery.errors import SurgeryError, UsageError
from surgery.storage import open_checkpoint

TENSORS = llama_tensors()


def inside(name: str) -> str:
    return name.replace("self_attn.", "self_attn._orig_mod.")


def wrapped(folder: Path, rename: Callable[[str], str]) -> Path:
    return write_llama(folder, tensors={rename(n): t for n, t in TENSORS.items()})


WRAPPERS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "compiled": (lambda n: f"_orig_mod.{n}", "_orig_mod.", "torch.compile"),
    "compiled inside": (inside, "_orig_mod.", "torch.compile"),
    "DDP": (lambda n: f"module.{n}", "module.", "DistributedDataParallel"),
    "PEFT": (lambda n: f"base_model.model.{n}", "base_model.model.", "PEFT"),
    "FSDP": (
        lambda n: f"_fsdp_wrapped_module.{n}".replace("mlp.", "_fsdp_wrapped_module.mlp."),
        "_fsdp_wrapped_module.",
        "FSDP",
    ),
    "DDP, compiled": (
        lambda n: f"module._orig_mod.{n}",
        "module._orig_mod.",
        "DistributedDataParallel and torch.compile",
    ),
    "DDP, compiled inside": (
        lambda n: f"module.{inside(n)}",
        "module._orig_mod.",
        "DistributedDataParallel and torch.compile",
    ),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_prefix_is_named_and_stripped_on_request(kind: str, tmp_path: Path) -> None:
    """The prefix that the hint gives is the one that makes the names right."""
    rename, prefix, origin = WRAPPERS[kind]
    folder = wrapped(tmp_path / "m", rename)
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(folder)
    assert f"the prefix {prefix} in their names, which {origin} adds" in caught.value.message
    assert f"--strip-prefix {prefix} " in caught.value.hint
    checkpoint = api.open(folder, strip_prefix=prefix)
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == {
        n: tuple(t.shape) for n, t in TENSORS.items()
    }
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(checkpoint.tensors[name].read(), TENSORS[name])


def test_any_prefix_can_be_stripped(tmp_path: Path) -> None:
    """An unknown prefix is removed from the beginning alone, and once."""
    folder = wrapped(tmp_path / "m", lambda n: f"model.{n}")
    assert set(open_checkpoint(folder, strip_prefix="model.").tensors) == set(TENSORS)


def test_an_adapter_that_is_not_merged(tmp_path: Path) -> None:
    """Stripping its prefix would leave the adapter out."""
    start = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {f"base_model.model.{n}": t for n, t in TENSORS.items()}
    tensors |= {f"{start}.lora_A.default.weight": torch.ones(2, 32)}
    with pytest.raises(SurgeryError, match="adapter that is not merged") as caught:
        open_checkpoint(write_llama(tmp_path / "m", tensors=tensors))
    assert "merge_and_unload()" in caught.value.hint


def test_a_prefix_that_no_name_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"begins with 'module\.', among 21"):
        open_checkpoint(write_llama(tmp_path / "m"), strip_prefix="module.")


def test_names_that_would_become_one(tmp_path: Path) -> None:
    tensors = {**TENSORS, "ema.model.norm.weight": torch.ones(32)}
    with pytest.raises(SurgeryError, match=r"two tensors would be called 'model\.norm\.weight'"):
        open_checkpoint(write_llama(tmp_path / "m", tensors=tensors), strip_prefix="ema.")


def test_the_output_has_the_stripped_names_and_can_be_made_again(
    tmp_path: Path, call: Call
) -> None:
    """The record and the recipe hold the prefix, and `verify` strips it from the source."""
    folder, out = wrapped(tmp_path / "m", lambda n: f"module.{n}"), tmp_path / "out"
    ran = call("upcycle", folder, "--strip-prefix", "module.", "--out", out)
    assert ran.code == 0, ran.err
    assert "module. was stripped from the names" in ran.out
    assert not [n for n in open_checkpoint(out).tensors if n.startswith("module.")]
    assert json.loads((out / "surgery.json").read_text())["source"]["strip_prefix"] == "module."
    assert yaml.safe_load((out / "recipe.yaml").read_text())["strip_prefix"] == "module."
    assert call("verify", folder, out).code == 0
    again = tmp_path / "again"
    assert call("run", out / "recipe.yaml", "--out", again).code == 0
    ours = files_of(again)
    assert ours["model.safetensors"] == files_of(out)["model.safetensors"]


def test_a_copied_shard_is_not_copied_with_its_old_names(tmp_path: Path) -> None:
    """A conversion that changes no tensor copies whole shards, except where names change."""
    folder = wrapped(tmp_path / "m", lambda n: f"module.{n}")
    source = api.open(folder, strip_prefix="module.")
    api.write(source, tmp_path / "out")
    assert set(open_checkpoint(tmp_path / "out").tensors) == set(TENSORS)
