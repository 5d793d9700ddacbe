"""Opening a checkpoint: every tensor is found once, inside the folder, and no code runs."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import llama_tensors, write_llama, write_shards

from surgery.errors import SurgeryError
from surgery.storage import open_checkpoint

TENSORS = llama_tensors()
INDEX = "model.safetensors.index.json"


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = open_checkpoint(folder).tensors
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name].read(), value) and found[name].read().dtype == value.dtype


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_of_every_shard(shards: int, tmp_path: Path) -> None:
    """All shards are read, not the first one alone."""
    assert_same(write_llama(tmp_path / "m", shards=shards), TENSORS)


def edit_index(folder: Path, **changes: str | None) -> None:
    """Change the files of tensors in the index; None removes a tensor."""
    path = folder / INDEX
    index = json.loads(path.read_text())
    changed = {**index["weight_map"], **changes}
    index["weight_map"] = {n: f for n, f in changed.items() if f is not None}
    path.write_text(json.dumps(index))


def absent_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def promised(folder: Path) -> None:
    edit_index(folder, phantom="model-00001-of-00003.safetensors")


def twice(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, folder / "extra.safetensors")
    edit_index(folder, **{"model.norm.weight": "extra.safetensors"})


def no_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def not_json(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ')


def empty_map(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


def truncated(folder: Path) -> None:
    shard = folder / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def pointer(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )


BROKEN = {
    absent_shard: ("model-00002-of-00003.safetensors", "1 of 3"),
    promised: ("phantom", "model-00001-of-00003.safetensors"),
    twice: ("model.norm.weight", "two shards"),
    no_index: ("3 .safetensors files", INDEX),
    not_json: (INDEX, "not valid JSON"),
    empty_map: (INDEX, "weight_map"),
    truncated: ("model-00003-of-00003.safetensors", "download it again"),
    pointer: ("model-00001-of-00003.safetensors", "git lfs pull"),
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda f: f.__name__)
def test_damage_is_named(damage: Any, tmp_path: Path) -> None:
    """Damage is found when the checkpoint is opened, and the error names the file."""
    folder = write_llama(tmp_path / "m", shards=3)
    damage(folder)
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(folder)
    for word in BROKEN[damage]:
        assert word in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    "escape", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", 7, ["x"]]
)
def test_an_index_cannot_leave_the_folder(escape: Any, tmp_path: Path) -> None:
    """A path outside the folder is refused even though the file exists and is sound."""
    folder = write_llama(tmp_path / "m", shards=3)
    save_file({"secret": torch.ones(1)}, tmp_path / "secret.safetensors")
    edit_index(folder, secret=escape)
    with pytest.raises(SurgeryError, match="outside the checkpoint"):
        open_checkpoint(folder)


def test_tensors_that_the_index_forgets_are_kept(tmp_path: Path) -> None:
    """Tensors in shards without an entry in the index, such as extra heads, are kept."""
    folder = write_llama(tmp_path / "m", shards=3)
    edit_index(folder, **{"model.norm.weight": None})
    assert_same(folder, TENSORS)


def test_of_two_models_the_one_that_transformers_loads(tmp_path: Path) -> None:
    """A model.safetensors goes before shards and their index, as in transformers.

    The verification must see the model that users load.
    """
    folder = write_llama(tmp_path / "m", shards=3)
    save_file({"merged": torch.ones(1)}, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == {"merged"}


def test_a_single_file(tmp_path: Path) -> None:
    """A single file gives its own tensors alone, with the config of its folder."""
    folder = write_llama(tmp_path / "m")
    save_file({"other": torch.ones(1)}, folder / "other.safetensors")
    assert set(open_checkpoint(folder / "model.safetensors").tensors) == set(TENSORS)
    assert set(open_checkpoint(folder / "other.safetensors").tensors) == {"other"}


def test_other_files_are_no_weights(tmp_path: Path) -> None:
    """An adapter or the original format beside the model's one file does not make it ambiguous."""
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    for name in ("adapter_model.safetensors", "consolidated.safetensors", "optimizer.bin"):
        (folder / name).write_bytes(b"no header")
    assert_same(folder, TENSORS)


# --- pytorch_model.bin ----------------------------------------------------------------------------


def write_legacy(folder: Path, shards: int) -> Path:
    """Write a llama as `pytorch_model*.bin`."""
    write_llama(folder, shards=shards)
    weight_map = write_shards(folder, TENSORS, shards)
    for path in (*folder.glob("*.safetensors"), *folder.glob(INDEX)):
        path.unlink()
    renamed = {n: f"pytorch_{Path(f).stem}.bin" for n, f in weight_map.items()}
    for file in set(renamed.values()):
        torch.save({n: t for n, t in TENSORS.items() if renamed[n] == file}, folder / file)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": renamed}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_legacy_files_hold_the_same(shards: int, tmp_path: Path) -> None:
    """Tensors are read as they are, also those that are views of a shared storage."""
    folder = write_legacy(tmp_path / "m", shards)
    assert_same(folder, TENSORS)
    if shards == 1:
        storage = torch.arange(12.0).reshape(3, 4)
        views = {"whole": storage, "column": storage[:, 1], "row": storage[2]}
        views["transposed"] = storage.T
        torch.save(views, folder / "pytorch_model.bin")
        assert_same(folder, views)


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path / "m", 1)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == {"a"}


class Bomb:
    """An object whose pickle is a call of `open(path, "w")`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    folder, trace = write_llama(tmp_path / "m"), tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1), "bomb": Bomb(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(SurgeryError, match=r"pytorch_model\.bin cannot be read as plain weights"):
        open_checkpoint(folder)
    assert not trace.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # The bomb does work.
    assert trace.exists()


LEGACY = {
    "raw pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "cannot be read"),
    "old format": (
        lambda p: torch.save({"a": torch.ones(1)}, p, _use_new_zipfile_serialization=False),
        "cannot be read",
    ),
    "text": (lambda p: p.write_text("no weights"), "cannot be read"),
    "empty": (lambda p: p.write_bytes(b""), "cannot be read"),
    "a training checkpoint": (
        lambda p: torch.save({"model": {"a": torch.ones(1)}, "step": 3}, p),
        "more than tensors",
    ),
    "numbered tensors": (lambda p: torch.save({0: torch.ones(1)}, p), "more than tensors"),
    "a list": (lambda p: torch.save([torch.ones(1)], p), "more than tensors"),
    "a complex128": (
        lambda p: torch.save({"a": torch.ones(1, dtype=torch.complex128)}, p),
        "complex128",
    ),
}


@pytest.mark.parametrize("kind", LEGACY)
def test_what_is_no_state_dict_is_one_error(kind: str, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    make, word = LEGACY[kind]
    make(folder / "pytorch_model.bin")
    with pytest.raises(SurgeryError, match=word):
        open_checkpoint(folder)


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_legacy_file_is_one_error(cut: float, tmp_path: Path) -> None:
    folder = write_legacy(tmp_path / "m", 1)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(SurgeryError, match=r"pytorch_model\.bin"):
        open_checkpoint(folder)


# --- what else is in the folder -------------------------------------------------------------------


def test_side_files(tmp_path: Path) -> None:
    """Tokenizer, chat templates, licence and code are side files.

    Other weights, training state and the original format are not, nor are files of the same names
    in folders that have no meaning to us.
    """
    folder = write_llama(tmp_path / "m")
    along = [
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "generation_config.json",
        "LICENSE",
        "LICENSE.txt",
        "USE_POLICY.md",
        "modeling_x.py",
    ]
    stay = [
        "README.md",
        "optimizer.pt",
        "training_args.bin",
        "original/consolidated.00.pth",
        "original/tokenizer.model",
        "original/params.json",
        "model.gguf",
        ".git/config",
        "tokenizers/deep/er/tokenizer.json",
        ".hidden.py",
        "runs/events",
        "pytorch_model.bin",
        "checkpoint-500/tokenizer.json",
        "onnx/model.onnx",
    ]
    for name in (*along, *stay):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    assert sorted(f.name for f in open_checkpoint(folder).files) == sorted(along)


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "config.json").write_text("[]")
    with pytest.raises(SurgeryError, match="not a JSON object"):
        open_checkpoint(folder)


def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    """A path is never sent to the Hub, which would learn names of folders and answer late."""
    for location in (tmp_path / "absent", "./absent", "absent.safetensors", "a/b/c"):
        with pytest.raises(SurgeryError, match="no file or folder"):
            open_checkpoint(location)
    with pytest.raises(SurgeryError, match="no revision"):
        open_checkpoint(write_llama(tmp_path / "m"), revision="main")


# --- what is ignored is said ----------------------------------------------------------------------


def test_weights_that_are_not_read_are_noted(tmp_path: Path) -> None:
    """Two models in a folder: which one was read must not be a guess."""
    folder = write_llama(tmp_path / "m", shards=3)
    assert open_checkpoint(folder).notes == ()
    save_file({"a": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")
    (note,) = open_checkpoint(folder).notes
    assert "reads the 3 shards: model-00001-of-00002.safetensors" in note
    save_file(TENSORS, folder / "model.safetensors")
    (note,) = open_checkpoint(folder).notes
    assert f"reads model.safetensors: {INDEX} and 4 more files" in note


def test_a_key_twice(tmp_path: Path) -> None:
    """JSON takes the last one: said of a config, refused in an index, which names places."""
    folder = write_llama(tmp_path / "m", shards=3)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"rope_theta": 5.0,', 1))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == ("config.json has rope_theta more than once: the last one counts",)
    assert checkpoint.config["rope_theta"] == 10000.0
    index = folder / INDEX
    twice = '{"weight_map": {"model.norm.weight": "model-00001-of-00003.safetensors",'
    index.write_text(re.sub(r'\{.*"weight_map": \{', twice, index.read_text(), count=1))
    with pytest.raises(SurgeryError, match=r"has model\.norm\.weight more than once"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_that_zero_3_left_empty(shards: int, tmp_path: Path) -> None:
    """The names are all there, and the shapes are [0]."""
    empty = {n: t if t.ndim == 1 else torch.empty(0, dtype=t.dtype) for n, t in TENSORS.items()}
    folder = write_llama(tmp_path / "m", tensors=empty, shards=shards)
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(folder)
    assert "has the shape [0] (16 such tensors)" in caught.value.message
    assert "DeepSpeed ZeRO-3 without gathering" in caught.value.message
    assert "stage3_gather_16bit_weights_on_model_save" in caught.value.hint
