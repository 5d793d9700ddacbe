"""Texts to take tokens from: built-in domains, files, folders and data sets, each with a weight.

Every text is one domain, and has two parts. Of a built-in domain they are different works
(`surgery.demo.corpus`). Any other text is cut into chunks of at most CHUNK characters, shorter
where a document or a paragraph ends, and every EVERY-th of them is held out: never fitted on, and
left for the verification. Nothing here needs torch.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from surgery.demo import corpus
from surgery.errors import SurgeryError, UsageError
from surgery.files import expanded

Part = Literal["fit", "held_out", "all"]
BUILT_IN = "builtin:"  # before the name of a built-in domain, where a text is asked for
MIX = 0.5  # the built-in share, where texts are given and no share is
CHUNK, EVERY, HELD_OUT = 2_000, 8, 3  # chunk 3, 11, 19, … of a text is held out
SUFFIXES = (".txt", ".md", ".jsonl")  # files of a folder that are read
READ = 2**20  # characters read at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A text of one domain, and its share among others.

    Args:
        domain: its name.
        weight: its share of the tokens, relative to the other texts.
        pieces: yields a part of it, in pieces of about so many characters where it is built in.
        built_in: whether it comes with the package.
    """

    domain: str
    weight: float
    pieces: Callable[[Part, int], Iterator[str]]
    built_in: bool = False


def choose(
    texts: Sequence[str] = (), datasets: Sequence[str] = (), mix: float | None = None
) -> list[Text]:
    """Return the texts to read, whose weights add up to 1.

    Args:
        texts: files, folders and built-in domains (`builtin:NAME`), each perhaps with a weight, as
            in `FILE=2`; 1 where there is none.
        datasets: ids on the Hub, OWNER/NAME or OWNER/NAME:CONFIGURATION, weighted like texts.
        mix: the share of the built-in text, all domains alike. By default it is all of it where
            nothing else is given, and otherwise MIX.

    Raises UsageError for a weight or a share that is none.

    Example:
        >>> [(t.domain, t.weight) for t in choose(["notes.md=3", "builtin:german"], mix=0)]
        [('notes.md', 0.75), ('german', 0.25)]
    """
    given = [_text(*weighted(spec)) for spec in texts]
    given += [_dataset(*weighted(spec)) for spec in datasets]
    require_share(mix, bool(given))
    share = 1.0 if not given else MIX if mix is None else mix
    total = sum(t.weight for t in given)
    own = [replace(t, weight=(1 - share) * t.weight / total) for t in given]
    each = share / len(corpus.domains())
    built_in = [_built_in(domain, each) for domain in corpus.domains()] if share else []
    return _joined([*own, *built_in])


def to_measure(
    fitted: Iterable[tuple[Sequence[str], Sequence[str], float | None]] = (),
    whole: Sequence[str] = (),
) -> list[Text]:
    """Return the texts to measure on, all of one weight.

    Args:
        fitted: the texts, data sets and mix of each calibration, whose held-out parts are measured
            beside the built-in domains; those are left out where every mix is 0.
        whole: texts that nothing was fitted on, which are measured from their beginning.
    """
    found = list(fitted)
    texts = dict.fromkeys(weighted(spec)[0] for given, _, _ in found for spec in given)
    datasets = dict.fromkeys(weighted(spec)[0] for _, given, _ in found for spec in given)
    others = [_text(name, 1.0) for name in texts]
    others += [_dataset(name, 1.0) for name in datasets]
    others += [_whole(weighted(spec)[0]) for spec in whole]
    alone = bool(found) and all(mix == 0 for _, _, mix in found)
    built_in = [] if alone else [_built_in(domain, 1.0) for domain in corpus.domains()]
    return [replace(text, weight=1.0) for text in _joined([*built_in, *others])]


def require_share(mix: float | None, given: bool) -> None:
    """Raise UsageError for a share of the built-in text that is none, or with nothing beside it."""
    if mix is None:
        return
    if not given:
        raise UsageError(f"a mix of {mix}, and no text to mix in", "give --text or --dataset too")
    if not 0 <= mix < 1:
        raise UsageError(f"a mix of {mix}", "give the built-in text's share, from 0 to below 1")


def weighted(spec: str) -> tuple[str, float]:
    """Return the text that "PATH=0.3" names, and its weight; what exists by the name has weight 1.

    Raises UsageError for a weight that is not positive.
    """
    name, equals, number = spec.rpartition("=")
    if not equals or not name or expanded(spec).exists():
        return spec, 1.0
    try:
        weight = float(number)
    except ValueError:
        return spec, 1.0
    if not 0 < weight < math.inf:
        raise UsageError(f"{name} with a weight of {number}", "give a positive number")
    return name, weight


def moved(spec: str, place: Callable[[str], str]) -> str:
    """Return a text with `place` applied to its path, its weight kept.

    Example:
        >>> moved("notes.md=3", lambda path: f"../{path}")
        '../notes.md=3'
    """
    name, _ = weighted(spec)
    return spec if name.startswith(BUILT_IN) else place(name) + spec[len(name) :]


def is_here(spec: str) -> bool:
    """Return whether a text is built in, or a file or folder on this disk."""
    name, _ = weighted(spec)
    return name.startswith(BUILT_IN) or expanded(name).is_file() or expanded(name).is_dir()


def is_near(spec: str) -> bool:
    """Return whether a text is built in, or its path is relative and at most two levels up."""
    path = expanded(weighted(spec)[0])
    return not path.is_absolute() and path.parts.count("..") <= 2


def relocated(calibration: dict[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """Return the entry of a calibration, as recipes hold it, with every path of a text moved."""
    text = calibration.get("text")
    if text is None:
        return calibration
    if isinstance(text, str):
        return calibration | {"text": moved(text, place)}
    return calibration | {"text": [moved(spec, place) for spec in text]}


def _joined(texts: Sequence[Text]) -> list[Text]:
    """Return the texts with a built-in domain once, and no name twice."""
    found: dict[str, Text] = {}
    for text in texts:
        same = found.get(text.domain)
        if same and same.built_in and text.built_in:
            found[text.domain] = replace(same, weight=same.weight + text.weight)
            continue
        taken = {*found, *(() if text.built_in else corpus.domains())}
        number, name = 1, text.domain
        while name in taken:
            number += 1
            name = f"{text.domain} ({number})"
        found[name] = replace(text, domain=name)
    return list(found.values())


# --- where the pieces come from -------------------------------------------------------------------


def _built_in(domain: str, weight: float) -> Text:
    if domain not in corpus.domains():
        known = ", ".join(corpus.domains())
        raise UsageError(f"no built-in text of {domain!r}", f"one of {known}")

    def pieces(part: Part, size: int) -> Iterator[str]:
        return corpus.pieces(domain, "held_out" if part == "held_out" else "fit", size)

    return Text(domain=domain, weight=weight, pieces=pieces, built_in=True)


def _text(name: str, weight: float) -> Text:
    if name.startswith(BUILT_IN):
        return _built_in(name.removeprefix(BUILT_IN), weight)
    path = expanded(name)
    return Text(domain=path.resolve().name, weight=weight, pieces=partial(_of_path, path))


def _whole(name: str) -> Text:
    """Return a text all of which is held out."""
    text = _text(name, 1.0)
    if text.built_in:
        return text
    return replace(text, pieces=lambda part, size: text.pieces("all", size))


def _dataset(name: str, weight: float) -> Text:
    return Text(domain=name, weight=weight, pieces=partial(_of_dataset, name))


def _of_path(path: Path, part: Part, size: int) -> Iterator[str]:
    """Yield a part of a file, or of the files of a folder in the order of their names."""
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES)
        if not files:
            raise SurgeryError(
                f"no {', '.join(SUFFIXES)} in {path}",
                "give a file or a folder of plain text in UTF-8",
            )
    return _parted((piece for f in files for piece in _of_file(f)), part)


def _parted(pieces: Iterator[str], part: Part) -> Iterator[str]:
    """Yield a part of a text that has none of its own: see the head of this module."""
    if part == "all":
        yield from pieces
        return
    chunks = (chunk for piece in pieces for chunk in corpus.cut(piece, CHUNK))
    for number, chunk in enumerate(chunks):
        if (number % EVERY == HELD_OUT) == (part == "held_out"):
            yield chunk


def _of_file(file: Path) -> Iterator[str]:
    """Yield a text file in pieces that end at line ends, or the documents of a .jsonl."""
    try:
        with file.open(encoding="utf-8") as f:
            if file.suffix == ".jsonl":
                yield from (str(json.loads(line)["text"]) + "\n\n" for line in f if line.strip())
                return
            while lines := f.readlines(READ):
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as e:
        hint = "give a file of plain text in UTF-8"
        raise SurgeryError(f"cannot read {file}: {e}", hint) from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        hint = 'make every line like {"text": "..."}'
        raise SurgeryError(f'{file} has a line without "text": {e!r}', hint) from None


def _of_dataset(name: str, part: Part, size: int) -> Iterator[str]:
    """Return a part of the documents of a data set's train split, streamed.

    `name` is OWNER/NAME or OWNER/NAME:CONFIGURATION.
    """
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError:
        raise SurgeryError("--dataset needs the package datasets", "pip install datasets") from None
    path, _, configuration = name.partition(":")
    try:
        rows = load_dataset(path, configuration or None, split="train", streaming=True)
        first = next(iter(rows))
    except Exception as e:  # datasets raises whatever its readers raise
        raise SurgeryError(
            f"cannot read the data set {name}: {type(e).__name__}: {str(e).splitlines()[0]}",
            "give OWNER/NAME or OWNER/NAME:CONFIGURATION, or a file with --text",
        ) from None
    columns = [k for k, v in first.items() if isinstance(v, str)]
    column = "text" if "text" in first else next(iter(columns), None)
    if column is None:
        raise SurgeryError(
            f"the data set {name} has no column of text among {', '.join(first)}",
            "give another data set",
        )
    return _parted((str(row[column]) + "\n\n" for row in rows), part)
