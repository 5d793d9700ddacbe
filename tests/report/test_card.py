"""The model card: right metadata, right numbers, and never over somebody's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support import write_llama

from surgery.blocks.rules import ACTIVATIONS
from surgery.checkpoint import metadata
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.report import card, methods
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone
from surgery.workflow.verify import verify_folder

SOURCE_CARD = """---
license: other
license_name: own
license_link: LICENSE
language:
- en
- de
pipeline_tag: text-generation
base_model: big/llama
tags: [great]
---
# Llama
The best of all models.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llama(tmp_path_factory.mktemp("card") / "llama", layers=2)
    (folder / "README.md").write_text(SOURCE_CARD)
    (folder / "LICENSE").write_text("do as you like")
    return folder


@pytest.fixture(scope="module")
def upcycled(model: Path) -> Path:
    source = open_checkpoint(model)
    convert_alone(source, upcycle(source, experts=4, top_k=2, drop=0.5), model.parent / "moe")
    return model.parent / "moe"


def split(text: str) -> tuple[dict[str, Any], str]:
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_metadata_follows_the_source(upcycled: Path) -> None:
    """What the Hub reads. The source's own tags and words stay where they are true."""
    head, body = split((upcycled / "README.md").read_text())
    assert head == {
        "base_model": "big/llama",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "license": "other",
        "license_name": "own",
        "license_link": "LICENSE",
        "language": ["en", "de"],
        "pipeline_tag": "text-generation",
        "tags": ["mixture-of-experts", "upcycling", "surgery"],
    }
    assert (
        (upcycled / "LICENSE").is_file()
        and "`other`: LICENSE" in body
        and "best of all" not in body
    )


def test_numbers(upcycled: Path, model: Path) -> None:
    """Before and after: two of four experts are active, everything else once."""
    _, body = split((upcycled / "README.md").read_text())
    rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| ")]
    table = {r[0]: r[1:] for r in rows}
    mlp, router = 2 * 3 * 32 * 64, 2 * 4 * 32
    dense = sum(t.numel for t in open_checkpoint(model).tensors.values())
    assert table["parameters"] == [
        f"{dense / 1e3:.4g} k",
        f"{(dense + 3 * mlp + router) / 1e3:.4g} k",
    ]
    active = dense - 64 * 32  # without the input embedding
    assert table["active parameters per token"] == [
        f"{active / 1e3:.4g} k",
        f"{(active + mlp + router) / 1e3:.4g} k",
    ]
    assert table["architecture"] == ["`llama`", "`mixtral`"]
    assert "every MLP became 4 experts, 2 of them active for a token" in body
    assert (
        "eprint = {2502.19261}" in body
        and "eprint = {2212.05055}" in body
        and "2310.04564" not in body
    )
    assert "```yaml\n" + (upcycled / "recipe.yaml").read_text().rstrip() in body
    assert "Perplexity against its source: × " in body and "trust_remote_code" not in body.replace(
        "without `trust_remote_code`", ""
    )


def test_the_code_runs_from_the_folder_above(upcycled: Path, model: Path) -> None:
    """As it stands, for whoever has the folder; after a push it names the repository for good."""
    _, body = split((upcycled / "README.md").read_text())
    assert 'name = "moe"  # this folder' in body and "model.generate(" in body
    assert "lm_eval --model hf --model_args pretrained=moe," in body
    pushed = card.renamed(upcycled, "me/moe")["README.md"]
    text = pushed.decode()
    assert (
        'name = "me/moe"\n' in text and "pretrained=me/moe," in text and "this folder" not in text
    )
    ours = (upcycled / "README.md").read_bytes()
    (upcycled / "README.md").write_bytes(pushed)
    verify_folder(open_checkpoint(model), upcycled)
    assert 'name = "me/moe"\n' in (upcycled / "README.md").read_text()
    (upcycled / "README.md").write_bytes(ours)


def test_the_card_names_no_path_and_no_option(upcycled: Path, model: Path) -> None:
    """Readers have neither this disk nor the command line that made the model."""
    _, body = split((upcycled / "README.md").read_text())
    assert str(model.parent) not in body and "`llama` after an operation" in body
    assert "--" not in body.partition("The recipe, which")[0]


def test_a_source_in_the_hubs_cache_is_the_base_model(tmp_path: Path) -> None:
    """Its folder names the repository; a config may name where it was loaded from."""
    cached = tmp_path / "models--tiny--llama" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    found = convert_from(write_llama(cached, layers=2), tmp_path / "a")
    assert found["base_model"] == "tiny/llama"
    named = write_llama(tmp_path / "b", layers=2, fields={"_name_or_path": "other/llama"})
    assert convert_from(named, tmp_path / "c")["base_model"] == "other/llama"


def convert_from(model: Path, out: Path) -> dict[str, Any]:
    """The metadata of the card of an upcycled model."""
    source = open_checkpoint(model)
    convert_alone(source, upcycle(source, experts=2), out, verify=False)
    return split((out / "README.md").read_text())[0]


def test_custom_code_is_said(model: Path) -> None:
    source = open_checkpoint(model)
    made = convert_alone(
        source,
        relufy(source, activation="teal", threshold=0.01, repair="none"),
        model.parent / "teal",
        verify=False,
    )
    head, body = split((made.folder / "README.md").read_text())
    assert "custom_code" in head["tags"] and 'dtype="auto", trust_remote_code=True)' in body
    assert "It was left out: nothing here is proved" in body


def test_the_next_verification_rewrites_ours_and_never_an_edited_one(
    upcycled: Path, model: Path
) -> None:
    path, source = upcycled / "README.md", open_checkpoint(model)
    ours = path.read_text()
    verify_folder(source, upcycled)
    assert path.read_text() == ours and card.is_ours(upcycled)
    path.write_text(ours.replace("## Limits", "## My own words"))
    verify_folder(source, upcycled)
    assert "## My own words" in path.read_text() and not card.is_ours(upcycled)
    assert card.renamed(upcycled, "y") == {}
    path.write_text(ours)


def test_a_source_with_a_broken_card(tmp_path: Path) -> None:
    """Its metadata is as good as absent, whatever stands there."""
    for i, text in enumerate(
        (
            "---\nlicense: [\n---\n",
            "no metadata",
            "---\n- a\n---\n",
            "\ufeff---\nlicense: mit\n---\n",
        )
    ):
        folder = write_llama(tmp_path / str(i))
        (folder / "README.md").write_text(text)
        assert metadata.metadata_of(open_checkpoint(folder)) == (
            {"license": "mit"} if i == 3 else {}
        )


def test_every_paper_is_cited() -> None:
    """Each operation's methods are cited, whatever its options."""
    for name, activation in ACTIVATIONS.items():
        cited = methods.papers("relufy", {"activation": name})
        assert activation.paper in cited and all(p.number in p.bibtex for p in cited)
    options = {"granularity": 4, "drop": 0.5, "expert_models": ["a/b"]}
    numbers = [paper.number for paper in methods.papers("upcycle", options)]
    assert numbers == ["2212.05055", "2410.07524", "2401.06066", "2502.19261", "2403.07816"]


def front_matter(folder: Path, text: str) -> tuple[dict[str, Any], str]:
    """Return the metadata of a model with this README.md, and the note on it."""
    folder = write_llama(folder, layers=1)
    (folder / "README.md").write_text(text, encoding="utf-8")
    source = open_checkpoint(folder)
    return metadata.metadata_of(source), metadata.unread(source)


def test_words_up_to_their_limits_are_followed(tmp_path: Path) -> None:
    """The longest word and the last of a list are taken over, and the next is not."""
    for i, (value, kept) in enumerate(
        (
            ("x" * metadata.MAX_WORD, "x" * metadata.MAX_WORD),
            ("x" * (metadata.MAX_WORD + 1), None),
            ("'a\tb'", "a\tb" if "a\tb".isprintable() else None),
            ("3", None),
            ("[en, 3, [de], fr]", ["en", "fr"]),
            (f"[{', '.join(['en'] * (metadata.MAX_WORDS + 1))}]", ["en"] * metadata.MAX_WORDS),
        )
    ):
        found, note = front_matter(tmp_path / str(i), f"---\nlicense: {value}\n---\n")
        assert found.get("license") == kept and note == ""


def test_a_card_that_ends_too_late_is_noted(tmp_path: Path) -> None:
    """Metadata are read within a limit; without an end inside it there are none."""
    head = "---\nlicense: mit\n"
    assert front_matter(tmp_path / "open", head) == ({}, "")
    filled = f"{head}# {'x' * (metadata.MAX_METADATA - len(head) - 2)}"
    found, note = front_matter(tmp_path / "full", filled)
    assert found == {} and note.startswith("the metadata of the source's README.md has no end; ")
    assert front_matter(tmp_path / "less", filled[:-1]) == ({}, "")
    found, note = front_matter(tmp_path / "broken", "---\nlicense: [\n---\n")
    assert found == {} and "line 2: not YAML" in note


@pytest.mark.parametrize(
    ("location", "revision", "link"),
    [
        ("../models/llama", None, "`llama`"),
        ("s3://bucket/llama", None, "`s3://bucket/llama`"),
        ("demo", None, "The model embedded in surgery"),
        ("a/b", "0123456789abcdef", "[a/b](https://huggingface.co/a/b) at `0123456789ab`"),
        ("a/b/c", "0123456789abcdef", "`a/b/c` at `0123456789ab`"),
        ("../b", "main", "`../b` at `main`"),
    ],
)
def test_the_source_is_linked_where_it_can_be(
    location: str, revision: str | None, link: str
) -> None:
    assert card._link({"location": location, "revision": revision}) == link


PASSED = {"passed": True, "rows": []}
NOT_COMPARED = {
    "key": "nonfinite_logits.source",
    "check": "x",
    "value": 3,
    "passed": True,
    "detail": [],
}


@pytest.mark.parametrize(
    ("exact", "verification", "sentence"),
    [
        (True, None, "It should compute what its source does; that was not verified."),
        (False, None, "It does not compute what its source does; that was not verified."),
        (True, PASSED | {"rows": [NOT_COMPARED]}, "It should compute what its source does; that"),
        (False, PASSED | {"rows": [NOT_COMPARED]}, "It does not compute what its source does; "),
        (False, PASSED, "What it costs in quality could not be measured."),
    ],
)
def test_the_first_paragraph_claims_what_was_checked(
    exact: bool, verification: Any, sentence: str
) -> None:
    found = card._cost({"exact": exact, "verification": verification})
    assert found.startswith(sentence)
    assert ("was not checked: the source's logits are NaN or Inf" in found) == bool(
        verification and verification["rows"]
    )
