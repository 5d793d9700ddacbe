"""Samples are reproducible, say what they are, and put BOS where the tokenizer does."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from surgery import demo
from surgery.calibration.data import sample_ids
from surgery.checkpoint import open_checkpoint
from surgery.errors import SurgeryError

DEMO = Path(demo.__file__).parent / "model"


def test_windows_of_the_text_each_behind_bos() -> None:
    s = sample_ids(open_checkpoint(DEMO), tokens=300, sequence_length=100)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    assert tuple(s.input_ids.shape) == (3, 101) and s.input_ids[:, 0].tolist() == [tokenizer.bos_token_id] * 3
    text = (Path(demo.__file__).parent / "text" / "evaluation.txt").read_text("utf-8")
    assert s.input_ids[:, 1:].flatten().tolist() == tokenizer(text, add_special_tokens=False).input_ids[:300]
    assert s.text and s.source == "built-in evaluation text"
    other = sample_ids(open_checkpoint(DEMO), tokens=300, sequence_length=100, split="calibration")
    assert s.sha256 != other.sha256


def test_a_short_file_is_repeated_and_a_short_supply_gives_fewer_sequences(tmp_path: Path) -> None:
    file = tmp_path / "my.txt"
    file.write_text("One two three four five six seven eight nine ten.")
    checkpoint = open_checkpoint(DEMO)
    s = sample_ids(checkpoint, tokens=1000, sequence_length=100, file=file)
    assert tuple(s.input_ids.shape) == (1, 101) and s.source == "my.txt, repeated"
    few = sample_ids(checkpoint, tokens=1000, sequence_length=5, file=file)
    assert few.source == "my.txt" and 2 <= len(few.input_ids) < 200


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    checkpoint, file = open_checkpoint(DEMO), tmp_path / "my.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SurgeryError, match=r"cannot read .*my\.txt"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, file=file)
    file.write_text("")
    with pytest.raises(SurgeryError, match=r"my\.txt holds no text"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, file=file)


def test_random_ids_without_a_tokenizer(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(DEMO)
    s = sample_ids(checkpoint.replace(files=()), tokens=2000, sequence_length=100)
    assert not s.text and s.source == "random ids, seed 0 (the checkpoint has no tokenizer)"
    assert tuple(s.input_ids.shape) == (20, 100) and 3500 < s.input_ids.max() < 4096
    assert s.sha256 == sample_ids(checkpoint.replace(files=()), tokens=2000, sequence_length=100).sha256
    assert s.sha256 != sample_ids(checkpoint.replace(files=()), tokens=2000, sequence_length=100, seed=1).sha256


def test_a_tokenizer_that_does_not_load_is_said(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO / name)
    (tmp_path / "tokenizer.json").write_text("{")
    s = sample_ids(open_checkpoint(tmp_path), tokens=100, sequence_length=100)
    assert not s.text and "the tokenizer does not load" in s.source
