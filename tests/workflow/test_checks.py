"""What can be known to fail before the first byte fails alike with and without --dry-run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_model
from support import STAGE, files_of, write_llama

import surgery
from surgery.calibration.data import sample_ids
from surgery.calibration.texts import choose
from surgery.cli import run
from surgery.demo import MODEL
from surgery.errors import SurgeryError
from surgery.workflow.dry_run import describe
from surgery.workflow.request import Request

FEW = ("--tokens", "64", "--sequence-length", "32", "--device", "cpu")
RELUFY = ("relufy", *FEW)
UPCYCLE = ("upcycle", "--experts", "2")
REPLACE = ("--place", "replace", "--layers", "0", "--init", "fit", "--slots", "64", "--knn", "4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A command that must fail, what is done before it, and words of its error."""

    command: tuple[str, ...]
    words: tuple[str, ...]
    before: Callable[[Path], object] = lambda folder: None
    code: int = 1


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def foreign(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.txt").write_text("mine")


def another_output(folder: Path) -> None:
    surgery.write(surgery.splinify(surgery.open(folder / "model")), folder / "out")


def large_ids(folder: Path) -> None:
    """A tokenizer with the ids 0, 3 and 4 beside an embedding of 3 rows."""
    from models import save_tokenizer

    save_tokenizer(folder / "model")
    edit_config(folder, vocab_size=3)
    from safetensors.torch import load_file, save_file

    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    cut = {n: tensors[n][:3].clone() for n in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file({**tensors, **cut}, path, metadata={"format": "pt"})


CASES = {
    "a folder of another": Case(
        command=UPCYCLE, before=foreign, words=("is not empty and is not an output of surgery",)
    ),
    "another output": Case(
        command=UPCYCLE, before=another_output, words=("finished output of another command",)
    ),
    "a pending choice into a folder of another": Case(
        command=("carve", "--allocation", "greedy", *FEW), before=foreign, words=("is not empty",)
    ),
    "a file": Case(
        command=UPCYCLE, before=lambda f: (f / "out").write_text(""), words=("is a file",)
    ),
    "inside the source": Case(
        command=(*UPCYCLE, "--out", "model/out"), words=("would be inside the source",)
    ),
    "code of its own": Case(
        command=UPCYCLE,
        before=lambda f: edit_config(f, auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
        words=("auto_map", "--trust-remote-code"),
    ),
    "a config of other weights": Case(
        command=UPCYCLE,
        before=lambda f: edit_config(f, vocab_size=63),
        words=("shapes mismatched: lm_head.weight",),
    ),
    "no text": Case(command=(*RELUFY, "--text", "absent.txt"), words=("absent.txt",)),
    "no text for a pending choice": Case(
        command=("carve", "--allocation", "greedy", *FEW, "--text", "absent.txt"),
        words=("absent.txt",),
    ),
    "no text for a router": Case(
        command=(*UPCYCLE, "--router", "centroids", *FEW, "--text", "absent.txt"),
        words=("absent.txt",),
    ),
    "no text for a memory": Case(
        command=("memory", *REPLACE, *FEW, "--text", "absent.txt"),
        words=("absent.txt",),
    ),
    "no tokenizer": Case(
        command=(*RELUFY, "--text", "text.txt"),
        before=lambda f: (f / "text.txt").write_text("some text"),
        words=("text.txt cannot be tokenized", "the checkpoint has no tokenizer"),
    ),
    "no device": Case(
        command=(*RELUFY, "--device", "tpu"), words=("no device 'tpu' here", "cpu"), code=2
    ),
    "ids beyond the embedding": Case(
        command=RELUFY,
        before=large_ids,
        words=("gives the id 4, and the model's embedding has 3 rows", "resize_token_embeddings"),
    ),
    "ids beyond the embedding, verified": Case(
        command=UPCYCLE, before=large_ids, words=("the model's embedding has 3 rows",)
    ),
    "a dtype": Case(command=(*UPCYCLE, "--dtype", "int8"), words=("'int8'",), code=2),
    "a size": Case(command=(*UPCYCLE, "--max-shard-size", "big"), words=("'big'",), code=2),
    "no token": Case(command=(*UPCYCLE, "--push", "me/model"), words=("needs a token",)),
    "a URL of another": Case(
        command=(*UPCYCLE, "--out", "memory://test-checks"),
        before=lambda f: put_file("memory://test-checks/thesis.txt"),
        words=("is not empty and does not hold the output",),
    ),
}


def put_file(url: str) -> None:
    import fsspec

    with fsspec.open(url, "w") as file:
        file.write("mine")


def errors_of(
    arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    capfd.readouterr()
    code = run(list(arguments))
    lines = capfd.readouterr().err.splitlines()
    return code, [line for line in lines if not STAGE.fullmatch(line)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_llama(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    return tmp_path


def require_alike(case: Case, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Run the command with and without --dry-run: the same error, and nothing is written."""
    name, *options = case.command
    out = () if "--out" in options else ("--out", "out")
    command = (name, "model", *options, *out)
    before = files_of(folder)
    code, lines = errors_of((*command, "--dry-run"), capfd)
    assert (code, lines) == errors_of(command, capfd)
    assert code == case.code and [line.partition(":")[0] for line in lines] == ["error", "hint"]
    for word in case.words:
        assert word in " ".join(lines)
    assert "bug" not in lines[1] and files_of(folder) == before


@pytest.mark.parametrize("kind", CASES)
def test_a_dry_run_fails_as_the_run_does(
    kind: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    CASES[kind].before(folder)
    require_alike(CASES[kind], folder, capfd)


def test_a_full_disk(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**12, 10**12, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    require_alike(Case(command=UPCYCLE, words=("the disk has 0.00 GB free",)), folder, capfd)


def test_a_folder_where_nobody_may_write(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found out after the calibration. Whoever runs the tests may write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != folder)
    words = ("the output out cannot be written", f"{folder} is not writable")
    require_alike(Case(command=RELUFY, words=words), folder, capfd)


def test_an_output_that_is_there_is_no_fault(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ("upcycle", "model", "--experts", "2", "--out", "out")
    assert run([*command]) == run([*command, "--dry-run"]) == 0


# --- ids and positions ----------------------------------------------------------------------------


def test_the_largest_id_and_the_rows_are_named(folder: Path) -> None:
    large_ids(folder)
    with pytest.raises(SurgeryError, match=r"gives the id 4, .* has 3 rows \(\d+ of 32 ids"):
        sample_ids(
            surgery.open(folder / "model"),
            tokens=32,
            sequence_length=32,
            texts=choose([text_of(folder)], mix=0),
            part="all",
        )


def text_of(folder: Path) -> str:
    (folder / "text.txt").write_text("a b a b")
    return str(folder / "text.txt")


def test_padded_rows_are_no_fault(folder: Path) -> None:
    """Embeddings often have more rows than the tokenizer has ids."""
    from models import save_tokenizer

    save_tokenizer(folder / "model")
    sample = sample_ids(
        surgery.open(folder / "model"),
        tokens=32,
        sequence_length=32,
        texts=choose([text_of(folder)], mix=0),
        part="all",
    )
    assert sample.input_ids.max() == 4


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_table_of_positions_has_an_end(family: str, tmp_path: Path) -> None:
    """Rotary embeddings go on; a table ended in an IndexError, which is no hint."""
    save_model(family, tmp_path)
    source = surgery.open(tmp_path)
    positions = source.config.get("n_positions") or source.config["max_position_embeddings"]
    kept = sample_ids(source, tokens=positions, sequence_length=positions)
    assert kept.input_ids.shape == torch.Size([1, positions])
    with pytest.raises(SurgeryError) as caught:
        surgery.analyze(source, tokens=64, sequence_length=positions + 1)
    assert f"{positions + 1} tokens, and the model has {positions} positions" in str(caught.value)
    assert f"--sequence-length {positions - 1}" in caught.value.hint


def test_an_id_to_generate_from_that_has_no_row() -> None:
    """`generate` begins with the config's BOS, which need not be the tokenizer's."""
    from surgery.calibration.generate import first_id

    source = surgery.open(MODEL)
    assert first_id(source) == source.config["bos_token_id"]
    wrong = source.replace(config={**source.config, "bos_token_id": 10**6})
    with pytest.raises(
        SurgeryError, match=r"the bos_token_id of config\.json gives the id 1000000"
    ):
        first_id(wrong)


# --- notes ----------------------------------------------------------------------------------------


def test_what_is_ignored_is_noted_in_plan_and_record(folder: Path) -> None:
    """Layers that nothing runs, and weights that nothing reads."""
    edit_config(folder, num_hidden_layers=1)
    (folder / "model" / "more.safetensors").write_bytes(b"")
    source = surgery.open(folder / "model")
    output = surgery.splinify(source)
    found = describe(source, output, Request(out=folder / "out"))["notes"]
    assert any("reads model.safetensors: more.safetensors" in note for note in found)
    assert any(note.startswith("layer 1, beyond the number of layers") for note in found)
    surgery.write(output, folder / "out")
    record = json.loads((folder / "out" / "surgery.json").read_text())
    assert record["notes"] == found
    assert "model.layers.1.mlp.up_proj.weight" in surgery.open(folder / "out").tensors
