"""What a verification amounts to, in sentences: what became of the function, and of the files.

A verification is read here as surgery.json holds it, so that the command line, the model card and a
later reader of the record say the same. Rows are found by their keys. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DAMAGE = 1.5  # times the source's perplexity in the mean, above which a model is called damaged
DOMAIN, MEAN, WORST = "domain.", "domains.mean", "domains.worst"  # keys of rows
FILES = {  # the checks of files and names, by what a summary calls them
    "shards_damaged": "shards",
    "stray_weights": "no other weights",
    "names_missing": "names",
    "names_unexpected": "names",
    "shapes_mismatched": "shapes",
    "nonfinite_logits.output": "finite logits",
}
NOT_COMPARABLE = "nonfinite_logits.source"  # the row that says that nothing could be compared
_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Verification = Mapping[str, Any]  # as surgery.json holds it
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The perplexity of the source and of the output on one domain."""

    domain: str
    before: float
    after: float
    ratio: float

    def __str__(self) -> str:
        values = f"{figure(self.before)} → {figure(self.after)}"
        return f"{values} on {self.domain} ({times(self.ratio)})"


def rows_by_key(verification: Verification | None) -> dict[str, Row]:
    """Return the rows of a verification by key; none where it was left out."""
    rows = (verification or {}).get("rows") or ()
    return {row["key"]: row for row in rows if "key" in row}


def changes(verification: Verification | None) -> list[Change]:
    """Return the change of perplexity on each domain that it was measured on."""
    rows = rows_by_key(verification)
    return [
        Change(
            domain=key.removeprefix(DOMAIN),
            before=float(row["models"]["source"]["perplexity"]),
            after=float(row["models"]["output"]["perplexity"]),
            ratio=float(row["value"]),
        )
        for key, row in rows.items()
        if key.startswith(DOMAIN)
    ]


def mean(verification: Verification | None) -> float | None:
    """Return the geometric mean of the ratios over all domains; None where none was measured."""
    row = rows_by_key(verification).get(MEAN)
    return None if row is None else float(row["value"])


def worst(verification: Verification | None) -> Change | None:
    """Return the change on the domain that lost most; None where none was measured."""
    return max(changes(verification), key=lambda change: change.ratio, default=None)


def cost(verification: Verification | None) -> str:
    """Return what became of perplexity: the geometric mean over domains, and the worst.

    It is empty where nothing was measured.
    """
    found, most, middle = changes(verification), worst(verification), mean(verification)
    if most is None or middle is None:
        return ""
    if len(found) == 1:
        return str(most)
    mean_of = f"{times(middle)} in the geometric mean of {len(found)} domains"
    return f"{mean_of}, {times(most.ratio)} at worst ({most.domain})"


def damaged(verification: Verification | None) -> bool:
    """Return whether the output costs so much, in the mean of all domains, that it is damaged."""
    middle = mean(verification)
    return middle is not None and not middle <= DAMAGE


def missed(verification: Verification | None) -> float | None:
    """Return the limit of the mean that the output misses; None where it misses none."""
    row = rows_by_key(verification).get(MEAN)
    return None if row is None or row["passed"] else float(row["limit"])


def conclusion(verification: Verification | None, remedies: Sequence[str] = ()) -> str:
    """Return the last line of a conversion: what it costs and, where that is much, what to try.

    It is empty where nothing was measured, as for a conversion that keeps the function.

    Args:
        remedies: what to try where the quality is too bad.
    """
    costs, limit = cost(verification), missed(verification)
    if not costs:
        return ""
    advice = f" Try next: {'; or '.join(remedies)}." if remedies else ""
    if limit is not None:
        return f"Perplexity {costs}: more than the {limit:g} times that are allowed.{advice}"
    if damaged(verification):
        return f"Damaged: perplexity {costs}.{advice}"
    return f"Perplexity {costs}."


def headline(verification: Verification) -> str:
    """Return one line that says what became of the function."""
    rows = rows_by_key(verification)
    if not compared(verification):
        return "Not compared: the source's logits are NaN or Inf"
    if verification["exact"]:
        return _sameness(verification, rows)
    costs = cost(verification)
    if not costs:
        return "Another function: its quality was not measured, the files are not valid"
    return f"Another function: perplexity {costs}"


def _sameness(verification: Verification, rows: Mapping[str, Row]) -> str:
    """Return the headline of a conversion that claims to keep the function."""
    if "logits.difference" not in rows:
        return "Not compared: the files are not valid"
    row = rows["logits.difference"]
    dtype = str(verification.get("dtype"))
    kind = "fp64" if "logits.undecided" in rows else _SHORT.get(dtype, dtype)
    differ = f"{kind} logits differ by at most {small(row['value'])} (limit {small(row['limit'])})"
    if not row["passed"]:
        return f"Not the same function: {differ}"
    if not rows.get("logits.control", {"passed": True})["passed"]:
        return "Not proved: the logits would be the same without an MLP"
    return f"Same function: {differ}"


def compared(verification: Verification | None) -> bool:
    """Return whether the two models could be compared; NaN or Inf in the source prevents it."""
    return NOT_COMPARABLE not in rows_by_key(verification)


def files_checked(verification: Verification) -> str:
    """Return one line about the checks of files and names."""
    rows = [row for key, row in rows_by_key(verification).items() if key in FILES]
    if failed := [f"{row['check']}: {row['value']}" for row in rows if not row["passed"]]:
        return f"Files not valid: {'; '.join(failed)}"
    names = dict.fromkeys(FILES[row["key"]] for row in rows)
    return f"Files valid: {len(rows)} checks ({', '.join(names)})"


def measured_on(verification: Verification) -> str:
    """Return one line that says what the comparison was made on; empty where there was none."""
    sample = verification.get("sample")
    if not sample:
        return ""
    size = f"{sample['sequences']} × {sample['length']} tokens, {sample['source']}"
    if verification["exact"]:
        return f"Compared on {size}"
    return f"Quality is measured{judged(verification)}: {size}"


def judged(verification: Verification) -> str:
    """Return ", not judged" where nothing was required of the quality."""
    limited = "limit" in rows_by_key(verification).get(MEAN, {})
    return " and held to a limit" if limited else ", not judged"


def warnings(verification: Verification | None) -> Iterator[str]:
    """Yield a line for each row that a person should see although it has no limit."""
    for row in rows_by_key(verification).values():
        if row.get("warns"):
            layers = [int(index) for index, _ in row.get("layers") or ()]
            where = f" (layers {spans(layers)})" if layers else ""
            if names := row["detail"][:5]:
                where = f": {', '.join(names)}{', …' if len(row['detail']) > 5 else ''}"
            yield f"{row['check'].removeprefix('warning: ')}{where}"


def ignored_fields(verification: Verification | None) -> Sequence[str]:
    """Return the config fields that the output's class ignores, by name."""
    row = rows_by_key(verification).get("config_fields_ignored")
    return list(row["detail"]) if row else []


# --- numbers --------------------------------------------------------------------------------------


def figure(value: Any) -> str:
    """Return a number with three significant digits: 25.9, 1,230, 2.19e-05; text as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else f"{rounded:.3g}"


def small(value: Any) -> str:
    """Return a bound or a difference with two significant digits."""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def times(ratio: float) -> str:
    """Return a factor: "× 1.02", "× 11.6"."""
    return f"× {ratio:.2f}" if ratio < 10 else f"× {figure(ratio)}"


def share(value: Any) -> str:
    """Return a fraction as a percentage."""
    return f"{value:.1%}" if isinstance(value, int | float) else str(value)


def spans(numbers: Sequence[int]) -> str:
    """Return numbers in order with their runs folded: "0-6, 9"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
