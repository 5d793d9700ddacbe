"""What a verification found, in the words that lead a screen and a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.proof.texts import TEXTS

TOO_MUCH = 1.5  # times the source's perplexity: nobody may take it for the same model
FILES = {  # rows that say whether the files are a model at all
    "shards_damaged": "shards",
    "stray_weights": "weights",
    "names_missing": "names",
    "names_unexpected": "names",
    "shapes_mismatched": "shapes",
    "nonfinite_logits.output": "finite logits",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The perplexity of source and output on one text."""

    text: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


def rows_of(verification: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the rows by their keys; rows of older versions have none, and are left out."""
    found = (verification or {}).get("rows") or ()
    return {row["key"]: row for row in found if "key" in row}


def costs(verification: Mapping[str, Any] | None) -> list[Cost]:
    """Return what the conversion costs on each text."""
    rows, found = rows_of(verification), []
    for name, words in TEXTS.items():
        pair = [rows.get(f"perplexity.{whose}.{name}") for whose in ("source", "output")]
        values = [row["value"] for row in pair if row and isinstance(row["value"], float)]
        if len(values) == 2:
            found.append(Cost(text=words, before=values[0], after=values[1]))
    return found


def finding(verification: Mapping[str, Any]) -> str:
    """Return the one sentence that matters: the same function, or what it costs to be another."""
    rows, difference = rows_of(verification), rows_of(verification).get("logits.difference")
    if verification["exact"]:
        if difference is None:
            return "The output was not compared with its source: see the rows that failed"
        word = "Same function" if verification["passed"] else "NOT shown to be the same function"
        found = f"{word}: logits differ by at most {difference['value']:.2g}"
        control = rows.get("logits.control")
        beside = f", a zeroed MLP gives {control['value']:.2g}" if control else ""
        return f"{found} (limit {difference['limit']:.2g}{beside})"
    each = [
        f"{c.before:.4g} → {c.after:.4g} on {c.text} (× {c.ratio:.3g})" for c in costs(verification)
    ]
    if not each:
        return "Another function, and its quality was not measured: see the rows that failed"
    return "Another function: perplexity " + ", ".join(each)


def damage(verification: Mapping[str, Any]) -> str:
    """Return a sentence where the quality is too bad to publish; empty where it is not."""
    worst = max(costs(verification), key=lambda c: c.ratio, default=None)
    if verification["exact"] or worst is None or worst.ratio <= TOO_MUCH:
        return ""
    return (
        f"This costs a lot: on {worst.text} the perplexity is {worst.ratio:.3g} times the source's"
    )


def files_line(verification: Mapping[str, Any]) -> str:
    """Return one line for the checks of files; it names what failed."""
    rows = [row for key, row in rows_of(verification).items() if key in FILES]
    failed = [row["check"] for row in rows if not row["passed"]]
    what = ", ".join(dict.fromkeys(FILES.values()))
    return f"Files NOT valid: {', '.join(failed)}" if failed else f"Files valid: {what}"
