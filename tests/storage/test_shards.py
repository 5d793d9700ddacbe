"""The shards of an output: sizes, order, index, dtypes, file modes, and untouched shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import files_of, llama_config, llama_tensors, write_llama

from surgery.checkpoint import Checkpoint, Plan, make_plan, natural_key, parse_size
from surgery.errors import UsageError
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import Transfer, open_checkpoint, write

INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    """A llama of 12 layers, whose names do not sort by number, with a large embedding."""
    return open_checkpoint(write_llama(tmp_path / "m", shards=3, layers=12, vocab=512))


def written(checkpoint: Checkpoint, out: Path, limit: int | None = None) -> tuple[Plan, Path]:
    """Write a checkpoint; return the plan and the folder."""
    plan = make_plan(checkpoint, limit)
    write(plan, out, source=checkpoint)
    return plan, out


@pytest.mark.parametrize("limit", [1, 5000, 20_000, 33_000, 10**9])
def test_no_shard_is_larger_than_asked(limit: int, source: Checkpoint, tmp_path: Path) -> None:
    """The tensors of a shard have at most `limit` bytes, as in transformers, and none is lost.

    A tensor above the limit has a shard of its own.
    """
    plan, out = written(upcycle(source, experts=2), tmp_path / "out", limit)
    found = {p.name: load_file(p) for p in out.glob("*.safetensors")}
    for tensors in found.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
    names = [n for tensors in found.values() for n in tensors]
    expected = upcycle(source, experts=2).tensors
    assert sorted(names) == sorted(expected)
    if limit == 10**9:
        assert list(found) == ["model.safetensors"] and not (out / INDEX).exists()
        return
    index = json.loads((out / INDEX).read_text())
    values, count = [t for f in found.values() for t in f.values()], len(found)
    assert index["weight_map"] == {n: file for file, tensors in found.items() for n in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in values)
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in values)
    assert set(found) == {f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    files = [p for p in out.iterdir() if p.name[0] != "." and p.name != "surgery.partial.json"]
    assert plan.nbytes == sum(p.stat().st_size for p in files)


def test_layers_follow_each_other(source: Checkpoint, tmp_path: Path) -> None:
    """Shards follow the order of the layers, with layer 2 before layer 10.

    So a layer is in one shard or two, and a walk through the layers reads the disk forwards.
    """
    plan, _ = written(upcycle(source, experts=2), tmp_path / "out", 20_000)
    layers = [[int(n.split(".")[2]) for n, _ in s.tensors if ".layers." in n] for s in plan.shards]
    first = [min(of_shard) for of_shard in layers if of_shard]
    last = [max(of_shard) for of_shard in layers if of_shard]
    assert first == sorted(first) and last[-1] == 11
    assert all(b >= a for a, b in zip(last, first[1:], strict=False))
    assert natural_key("model.layers.2.x") < natural_key("model.layers.10.x")


def test_each_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    """fp32 tensors among bf16 weights stay fp32, and bf16 weights beside them stay bf16."""
    tensors = llama_tensors()
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].float()
    source = open_checkpoint(write_llama(tmp_path / "m", tensors=tensors))
    _, out = written(upcycle(source, experts=2), tmp_path / "out", 10_000)
    found = {n: t for p in out.glob("*.safetensors") for n, t in load_file(p).items()}
    for name, value in found.items():
        assert value.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


def test_untouched_shards_are_byte_identical(source: Checkpoint, tmp_path: Path) -> None:
    """relufy changes config.json alone, so the shards are the source's, headers included."""
    _, out = written(relufy(source, repair="none"), tmp_path / "out")
    before, after = files_of(tmp_path / "m"), files_of(out)
    for name in before:
        assert not name.endswith(".safetensors") or after[name] == before[name], name
    assert json.loads(after[INDEX])["weight_map"] == json.loads(before[INDEX])["weight_map"]
    assert json.loads(after["config.json"])["hidden_act"] == "relu"


def test_links_share_the_file_and_copies_do_not(source: Checkpoint, tmp_path: Path) -> None:
    """A copy must have its own inode, or it would change when the source is trained in place."""
    plan = make_plan(relufy(source, repair="none"))
    write(plan, tmp_path / "linked", source=source, transfer=Transfer(hardlink=True))
    write(plan, tmp_path / "copied", source=source)
    for shard in plan.shards:
        inode = (tmp_path / "m" / shard.name).stat().st_ino
        assert (tmp_path / "linked" / shard.name).stat().st_ino == inode
        assert (tmp_path / "copied" / shard.name).stat().st_ino != inode
    assert files_of(tmp_path / "linked") == files_of(tmp_path / "copied")


def test_links_take_no_space(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linked output fits on a full disk, and links to the files, not to a cache's symlinks."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in (tmp_path / "m").glob("*.safetensors"):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    linked = open_checkpoint(tmp_path / "m")
    usage = shutil._ntuple_diskusage(10**9, 10**9, 17 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    plan = make_plan(relufy(linked, repair="none"))
    write(plan, tmp_path / "linked", source=linked, transfer=Transfer(hardlink=True))
    for path in blobs.iterdir():
        assert (tmp_path / "linked" / path.name).lstat().st_ino == path.stat().st_ino


@pytest.mark.parametrize("limit", [None, 20_000])
def test_a_touched_tensor_leaves_no_shard_verbatim(
    limit: int | None, source: Checkpoint, tmp_path: Path
) -> None:
    """The new values are written even though name, dtype and shape are the old ones."""
    name = "model.layers.3.mlp.up_proj.weight"
    doubled = source.tensors[name].map("double", lambda t: 2 * t)
    changed = source.replace(tensors={**source.tensors, name: doubled})
    _, out = written(changed, tmp_path / "out", limit)
    found = open_checkpoint(out).tensors
    assert torch.equal(found[name].read(), 2 * source.tensors[name].read())
    other = "model.layers.4.mlp.up_proj.weight"
    assert torch.equal(found[other].read(), source.tensors[other].read())


def test_a_tensor_left_out_is_not_copied_along(source: Checkpoint, tmp_path: Path) -> None:
    """A tied head that was dropped must not come back with a shard that is copied as a whole."""
    fewer = {n: t for n, t in source.tensors.items() if n != "lm_head.weight"}
    _, out = written(source.replace(tensors=fewer), tmp_path / "out")
    assert "lm_head.weight" not in open_checkpoint(out).tensors


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "weights.safetensors"])
def test_one_file_of_another_name_is_found_by_transformers(name: str, tmp_path: Path) -> None:
    """A single shard of another name needs an index: transformers looks for nothing else."""
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(llama_tensors(), folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(llama_config()))
    _, out = written(relufy(open_checkpoint(folder), repair="none"), tmp_path / "out")
    (file,) = [p.name for p in out.glob("*.safetensors")]
    if file != "model.safetensors":
        assert set(json.loads((out / INDEX).read_text())["weight_map"].values()) == {file}


@pytest.fixture(params=[0o022, 0o002, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_modes_follow_the_umask(umask: int, source: Checkpoint, tmp_path: Path) -> None:
    """Output files have the usual mode.

    With the mode 0600 of temporary files, the group that serves the model could not read them.
    """
    outputs = {"a": upcycle(source, experts=2), "b": relufy(source, repair="none")}
    for out, checkpoint in outputs.items():
        written(checkpoint, tmp_path / out)
        for path in (tmp_path / out).iterdir():
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path


def test_the_config_is_the_last_to_come(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment, a folder that has a config.json has everything else."""
    plan, out, seen = make_plan(upcycle(source, experts=2), 20_000), tmp_path / "out", []
    expected = {s.name for s in plan.shards} | {INDEX}

    def watch(n: int) -> None:
        names = {p.name for p in out.iterdir()}
        seen.append(len(names & expected))
        assert "config.json" not in names or expected <= names

    write(plan, out, source=source, progress=watch)
    assert len(set(seen)) > 10 and (out / "config.json").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500mb", 5 * 10**8),
        ("1.5GiB", 3 * 2**29),
        ("123", 123),
        (" 2 KB ", 2000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 gigabytes", "0", "0.1", "1e9", "5GB5"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)
