"""Samples are reproducible, say what they are, and have BOS where the tokenizer puts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers

from surgery import demo
from surgery.calibration.data import sample_ids
from surgery.errors import SurgeryError
from surgery.storage import open_checkpoint

DEMO = Path(demo.__file__).parent / "model"


def test_windows_of_the_text_each_behind_bos() -> None:
    """Without BOS the model would see a sequence it never saw in training."""
    s = sample_ids(open_checkpoint(DEMO), tokens=300, sequence_length=100)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    assert tuple(s.input_ids.shape) == (3, 101)
    assert s.input_ids[:, 0].tolist() == [tokenizer.bos_token_id] * 3
    text = (Path(demo.__file__).parent / "text" / "evaluation.txt").read_text("utf-8")
    expected = tokenizer(text, add_special_tokens=False).input_ids[:300]
    assert s.input_ids[:, 1:].flatten().tolist() == expected
    assert s.text and s.source == "built-in evaluation text"
    other = sample_ids(open_checkpoint(DEMO), tokens=300, sequence_length=100, split="calibration")
    assert s.sha256 != other.sha256


def test_a_short_file_is_repeated_and_a_short_supply_gives_fewer_sequences(tmp_path: Path) -> None:
    """A sequence is always whole."""
    file = tmp_path / "my.txt"
    file.write_text("One two three four five six seven eight nine ten.")
    checkpoint = open_checkpoint(DEMO)
    s = sample_ids(checkpoint, tokens=1000, sequence_length=100, file=file)
    assert tuple(s.input_ids.shape) == (1, 101) and s.source == "my.txt, repeated"
    few = sample_ids(checkpoint, tokens=1000, sequence_length=5, file=file)
    assert few.source == "my.txt" and 2 <= len(few.input_ids) < 200


def test_the_mask_leaves_bos_out() -> None:
    """It is an attention sink with a norm of its own."""
    s = sample_ids(open_checkpoint(DEMO), tokens=300, sequence_length=100)
    assert s.mask.sum() == 300 and not s.mask[:, 0].any()


def test_folders_and_lines_of_json(tmp_path: Path) -> None:
    """Files are read in the order of their names; those of other kinds are not."""
    (tmp_path / "b").mkdir()
    lines = '{"text": "One two three."}\n\n{"text": "Four five.", "id": 7}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b" / "c.md").write_text("Six seven.")
    (tmp_path / "0.bin").write_bytes(b"\xff")
    checkpoint, tokenizer = open_checkpoint(DEMO), transformers.AutoTokenizer.from_pretrained(DEMO)
    s = sample_ids(checkpoint, tokens=10**6, sequence_length=1, file=tmp_path)
    texts = ["One two three.\n\n", "Four five.\n\n", "Six seven."]
    ids = [i for t in texts for i in tokenizer(t, add_special_tokens=False).input_ids]
    assert s.input_ids[:, 1].tolist() == ids
    assert s.source == tmp_path.name
    (tmp_path / "a.jsonl").write_text('{"content": "One two three."}\n')
    with pytest.raises(SurgeryError, match=r"a\.jsonl has a line without \"text\""):
        sample_ids(checkpoint, tokens=10, sequence_length=10, file=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SurgeryError, match=r"no \.txt, \.md, \.jsonl in"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, file=tmp_path / "empty")


def test_only_as_much_is_read_as_is_needed(tmp_path: Path) -> None:
    """The second file is not text, and is never reached."""
    (tmp_path / "a.txt").write_text("One two three four five six seven eight nine ten. " * 20)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    s = sample_ids(open_checkpoint(DEMO), tokens=100, sequence_length=50, file=tmp_path)
    assert s.input_ids.shape == (2, 51)


def test_data_sets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `datasets` itself, from a folder that holds one."""
    pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.jsonl").write_text('{"id": 1, "text": "One two three."}\n' * 50)
    checkpoint, none = open_checkpoint(DEMO), str(tmp_path / "none")
    s = sample_ids(checkpoint, tokens=60, sequence_length=20, dataset=str(tmp_path))
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    once = tokenizer("One two three.\n\n", add_special_tokens=False).input_ids
    assert s.input_ids[:, 1:].flatten().tolist() == (once * 60)[:60]
    with pytest.raises(SurgeryError, match="cannot read the data set"):
        sample_ids(checkpoint, tokens=60, sequence_length=20, dataset=none)


def test_without_datasets_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an optional dependency."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SurgeryError, match="needs the package datasets") as e:
        sample_ids(open_checkpoint(DEMO), tokens=60, sequence_length=20, dataset="a/b")
    assert e.value.hint == "pip install datasets"


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and an empty file."""
    checkpoint, file = open_checkpoint(DEMO), tmp_path / "my.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SurgeryError, match=r"cannot read .*my\.txt"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, file=file)
    file.write_text("")
    with pytest.raises(SurgeryError, match=r"my\.txt holds no text"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, file=file)


def test_random_ids_without_a_tokenizer() -> None:
    """They cover the vocabulary, depend on the seed, and the sample says so."""
    bare = open_checkpoint(DEMO).replace(files=())
    s, again, other = (
        sample_ids(bare, tokens=2000, sequence_length=100, seed=seed) for seed in (0, 0, 1)
    )
    assert not s.text and s.source == "random ids, seed 0 (the checkpoint has no tokenizer)"
    assert tuple(s.input_ids.shape) == (20, 100) and 3500 < s.input_ids.max() < 4096
    assert s.sha256 == again.sha256 != other.sha256


def test_a_tokenizer_that_does_not_load_is_said(tmp_path: Path) -> None:
    """The ids are then random, and the reason is in the source."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO / name)
    (tmp_path / "tokenizer.json").write_text("{")
    s = sample_ids(open_checkpoint(tmp_path), tokens=100, sequence_length=100)
    assert not s.text and "the tokenizer does not load" in s.source
