"""Samples are reproducible, say what they are, and have BOS where the tokenizer puts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from surgery import demo
from surgery.calibration.data import sample_ids
from surgery.calibration.texts import choose, weighted
from surgery.demo import corpus
from surgery.errors import SurgeryError, UsageError
from surgery.storage import open_checkpoint

DEMO = Path(demo.__file__).parent / "model"


def whole(texts: Sequence[str] = (), datasets: Sequence[str] = ()) -> dict[str, Any]:
    """Return options that take all of some texts, and nothing beside them."""
    return {"part": "all", "texts": choose(texts, datasets, mix=0)}


def test_windows_of_the_text_each_behind_bos() -> None:
    """Without BOS the model would see a sequence it never saw in training."""
    s = sample_ids(open_checkpoint(DEMO), tokens=300, sequence_length=100)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    assert tuple(s.input_ids.shape) == (3, 101)
    assert s.input_ids[:, 0].tolist() == [tokenizer.bos_token_id] * 3
    assert s.row_domains == corpus.domains()[:3]
    for row, domain in zip(s.input_ids[:, 1:].tolist(), s.row_domains, strict=True):
        text = next(corpus.documents(domain, "held_out")).text[:400].lstrip("\n")
        expected = tokenizer(text, add_special_tokens=False).input_ids
        assert row[:80] == expected[:80]
    assert s.text and s.source == "built-in held-out text of 3 domains"
    other = sample_ids(open_checkpoint(DEMO), tokens=300, sequence_length=100, part="fit")
    assert s.sha256 != other.sha256


def test_every_domain_has_the_same_share_in_any_beginning() -> None:
    """Rows come in turn, so what is held out at the end has every domain too."""
    s = sample_ids(open_checkpoint(DEMO), tokens=36 * 64, sequence_length=64, part="fit")
    assert s.row_domains == 3 * corpus.domains() and s.domains == corpus.domains()
    assert s.domain_of_row.tolist() == 3 * list(range(12))
    assert s.domain_of_token.tolist() == [d for d in s.domain_of_row.tolist() for _ in range(64)]
    last = s.rows(slice(-2, None))
    assert last.domains == corpus.domains()[-2:] and last.domain_of_row.tolist() == [0, 1]
    assert s.as_dict()["domains"] == dict.fromkeys(corpus.domains(), 3)
    assert len({tuple(row) for row in s.input_ids.tolist()}) == 36


def test_texts_have_the_shares_of_their_weights(tmp_path: Path) -> None:
    """The built-in domains share what --mix leaves, and heavy texts are spread evenly."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} has ten thousand words. " * 4000)
    specs = [f"{tmp_path / 'a.txt'}=2", str(tmp_path / "b.txt")]
    s = sample_ids(
        open_checkpoint(DEMO),
        tokens=48 * 32,
        sequence_length=32,
        part="fit",
        texts=choose(specs, mix=0.25),
    )
    assert s.as_dict()["domains"] == {"a.txt": 24, "b.txt": 12} | dict.fromkeys(corpus.domains(), 1)
    assert 10 <= s.row_domains[:24].count("a.txt") <= 14
    assert s.source == "a.txt and b.txt and built-in text of 12 domains"


def test_a_built_in_domain_can_be_asked_for_by_name() -> None:
    """Once, where it is in the mix too: no sequence may come twice."""
    s = sample_ids(
        open_checkpoint(DEMO), tokens=24 * 32, sequence_length=32, texts=choose(["builtin:german"])
    )
    assert s.row_domains.count("german") == 13 and len(s.domains) == 12
    assert len({tuple(row) for row in s.input_ids.tolist()}) == 24


def test_a_text_has_a_part_that_is_never_fitted_on(tmp_path: Path) -> None:
    """The two parts share no line, and together they are the text."""
    file = tmp_path / "my.txt"
    file.write_text("".join(f"Line {i} of a long text, and no other.\n" for i in range(2000)))
    (text,) = choose([str(file)], mix=0)
    fit, held_out = ("".join(text.pieces(part, 0)) for part in ("fit", "held_out"))
    assert sorted((fit + held_out).splitlines()) == sorted(file.read_text().splitlines())
    assert len(held_out) == pytest.approx(len(fit) / 7, rel=0.1)


def test_a_short_text_has_nothing_to_hold_out(tmp_path: Path) -> None:
    """It is left out of what is measured, and alone it is an error."""
    (tmp_path / "my.txt").write_text("One two three four five six seven eight nine ten.")
    given, checkpoint = [str(tmp_path / "my.txt")], open_checkpoint(DEMO)
    s = sample_ids(checkpoint, tokens=64, sequence_length=32, texts=choose(given))
    assert s.row_domains == corpus.domains()[:2]
    with pytest.raises(SurgeryError, match=r"my\.txt: no text is held out"):
        sample_ids(checkpoint, tokens=64, sequence_length=32, texts=choose(given, mix=0))


@pytest.mark.parametrize(
    ("texts", "mix", "message"),
    [
        (["a.txt=0"], None, r"a\.txt with a weight of 0"),
        (["a.txt=inf"], None, r"weight of inf"),
        (["a.txt"], 1.0, r"a mix of 1\.0"),
        ([], 0.5, r"no text to mix in"),
        (["builtin:klingon"], None, r"no built-in text of 'klingon'"),
    ],
)
def test_weights_and_shares_that_are_none(
    texts: list[str], mix: float | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose(texts, mix=mix)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    """A weight is a number behind the last one, unless a file has that very name."""
    odd = tmp_path / "lr=0.3"
    assert weighted(str(odd)) == (str(tmp_path / "lr"), 0.3)
    odd.write_text("x")
    assert weighted(str(odd)) == (str(odd), 1.0)
    assert weighted(f"{odd}=2") == (str(odd), 2.0)
    assert weighted("a=b.txt") == ("a=b.txt", 1.0)


def test_texts_of_one_name_are_two_domains(tmp_path: Path) -> None:
    """Also where the name is that of a built-in domain."""
    for name in ("a", "b"):
        (tmp_path / name / "python").mkdir(parents=True)
    found = choose([str(tmp_path / name / "python") for name in ("a", "b")], mix=0)
    assert [t.domain for t in found] == ["python (2)", "python (3)"]


def test_a_short_file_is_repeated_and_a_short_supply_gives_fewer_sequences(tmp_path: Path) -> None:
    """A sequence is always whole."""
    file = tmp_path / "my.txt"
    file.write_text("One two three four five six seven eight nine ten.")
    checkpoint = open_checkpoint(DEMO)
    s = sample_ids(checkpoint, tokens=1000, sequence_length=100, **whole([str(file)]))
    assert tuple(s.input_ids.shape) == (1, 101) and s.source == "my.txt, repeated"
    few = sample_ids(checkpoint, tokens=1000, sequence_length=5, **whole([str(file)]))
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
    s = sample_ids(checkpoint, tokens=10**6, sequence_length=1, **whole([str(tmp_path)]))
    texts = ["One two three.\n\n", "Four five.\n\n", "Six seven."]
    ids = [i for t in texts for i in tokenizer(t, add_special_tokens=False).input_ids]
    assert s.input_ids[:, 1].tolist() == ids
    assert s.source == tmp_path.name
    (tmp_path / "a.jsonl").write_text('{"content": "One two three."}\n')
    with pytest.raises(SurgeryError, match=r"a\.jsonl has a line without \"text\""):
        sample_ids(checkpoint, tokens=10, sequence_length=10, **whole([str(tmp_path)]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SurgeryError, match=r"no \.txt, \.md, \.jsonl in"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, **whole([str(tmp_path / "empty")]))


def test_only_as_much_is_read_as_is_needed(tmp_path: Path) -> None:
    """The second file is not text, and is never reached."""
    (tmp_path / "a.txt").write_text("One two three four five six seven eight nine ten. " * 20)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    s = sample_ids(open_checkpoint(DEMO), tokens=100, sequence_length=50, **whole([str(tmp_path)]))
    assert s.input_ids.shape == (2, 51)


def test_data_sets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `datasets` itself, from a folder that holds one."""
    pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.jsonl").write_text('{"id": 1, "text": "One two three."}\n' * 50)
    checkpoint, none = open_checkpoint(DEMO), str(tmp_path / "none")
    s = sample_ids(checkpoint, tokens=60, sequence_length=20, **whole(datasets=[str(tmp_path)]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    once = tokenizer("One two three.\n\n", add_special_tokens=False).input_ids
    assert s.input_ids[:, 1:].flatten().tolist() == (once * 60)[:60]
    with pytest.raises(SurgeryError, match="cannot read the data set"):
        sample_ids(checkpoint, tokens=60, sequence_length=20, **whole(datasets=[none]))


def test_without_datasets_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an optional dependency."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SurgeryError, match="needs the package datasets") as e:
        sample_ids(open_checkpoint(DEMO), tokens=60, sequence_length=20, **whole(datasets=["a/b"]))
    assert e.value.hint == "pip install datasets"


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and an empty file."""
    checkpoint, file = open_checkpoint(DEMO), tmp_path / "my.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SurgeryError, match=r"cannot read .*my\.txt"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, **whole([str(file)]))
    file.write_text("")
    with pytest.raises(SurgeryError, match=r"my\.txt holds no text"):
        sample_ids(checkpoint, tokens=10, sequence_length=10, **whole([str(file)]))


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
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    s = sample_ids(open_checkpoint(tmp_path), tokens=100, sequence_length=100)
    assert not s.text and "the tokenizer does not load" in s.source
