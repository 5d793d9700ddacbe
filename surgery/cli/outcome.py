"""What a conversion came to: where it is, what became of the function, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from surgery.cli import following, screen
from surgery.proof import verdict
from surgery.proof.verdict import DOMAIN, FILES, MEAN, WORST
from surgery.quoting import printable
from surgery.report import methods
from surgery.storage.record import RECORD

if TYPE_CHECKING:
    from surgery.workflow.convert import Result

SHOWN = 5  # lines of detail below a row
_OUTSIDE = {"config_fields_ignored"}  # rows that are shown as notes
# Kinds of row that the table of models shows. Domains fold into their mean and the worst.
_BESIDE = ("perplexity", "domain", "domains", "zeros", "left")


def show_result(result: Result) -> None:
    """Print the outcome of a conversion, without what to do next."""
    size = sum(s["bytes"] for s in result.record["shards"].values())
    how = ""
    if result.already:
        how = " (was there already)"
    elif result.resumed:
        how = f" (resumed: {result.resumed} shards)"
    screen.show(f"wrote {screen.gigabytes(size)} to {result.folder}{how}")
    verification = result.verification.as_dict() if result.verification else None
    show_verification(verification, result.record, result.advice)


def show_verification(
    verification: Mapping[str, Any] | None, record: Mapping[str, Any], advice: Sequence[str] = ()
) -> None:
    """Print what became of the function, the rows that matter, and what a person should know.

    `advice` is what whoever converts may try instead; where the model is damaged, `show_conclusion`
    shows the remedies of its operations in its place.
    """
    notes = list(record.get("notes") or ())
    if verification:
        screen.show(verdict.headline(verification))
        for table in _tables(verification):
            screen.show("")
            screen.show(table)
        screen.show(f"\n{verdict.files_checked(verification)}")
        if measured := verdict.measured_on(verification):
            screen.show(measured)
    if fields := verdict.ignored_fields(verification):
        notes.append(f"the model class ignores these config fields: {', '.join(fields)}")
    screen.show_notes(notes)
    for warning in verdict.warnings(verification):
        screen.show(f"warning: {warning}")
    for line in () if verdict.damaged(verification) else advice:
        screen.show(f"try: {line}")


def show_conclusion(verification: Mapping[str, Any] | None, record: Mapping[str, Any]) -> None:
    """Print the last line: what the conversion costs and, where that is much, what to try next."""
    if line := verdict.conclusion(verification, methods.remedies(record)):
        screen.show(f"\n{line}")


def show_next(folder: Path, record: Mapping[str, Any], *, pushed: str = "") -> None:
    """Print the commands that come next, ready to copy."""
    if found := following.commands(folder, record, pushed=pushed):
        screen.show("\nNext:")
        for label, command in found:
            screen.show(f"  {label:<11}{command}")


def report_failure(folder: Path, record: Mapping[str, Any]) -> None:
    """Print that an output did not pass, on stderr, and why, where it is its quality."""
    verification = record.get("verification")
    hint = f"{folder / RECORD} names what failed; the output stays for you to look at"
    if verdict.missed(verification) is not None:
        hint = verdict.conclusion(verification, methods.remedies(record))
    name = printable(str(folder))
    screen.echo(f"error: {name} does not pass its verification", err=True)
    screen.echo(f"hint: {printable(hint)}", err=True)


# --- tables ---------------------------------------------------------------------------------------


def _tables(verification: Mapping[str, Any]) -> list[Table]:
    """Return the table of models and that of the checks, as far as they have rows.

    Checks of files and names are left out while all of them pass.
    """
    rows = verdict.rows_by_key(verification)
    folds = all(row["passed"] for key, row in rows.items() if key in FILES)
    checks = [
        row
        for key, row in rows.items()
        if key.partition(".")[0] not in _BESIDE
        and not (folds and key in FILES)
        and not (row.get("warns") or key in _OUTSIDE)
    ]
    found = [_models(rows), _checks(checks)]
    return [table for table in found if table.row_count]


def _models(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return what was measured, with a column for each model."""
    wide = [row for key in (MEAN, "perplexity") if (row := rows.get(key))]
    names = list(wide[0]["models"] if wide else ("source", "output"))
    table = screen.columns("", *names)
    for label, row in _perplexities(rows):
        _add(table, label, verdict.figure, _of_models(row, "perplexity"), names)
    if mean := rows.get(MEAN):
        agreed = {"output": _of_models(mean, "agreement")["output"]}
        _add(table, "next tokens as the source's", verdict.share, agreed, names)
    zeros = {name: _value(rows.get(f"zeros.{name}")) for name in names}
    _add(table, "exact zeros among the MLPs' products", verdict.share, zeros, names)
    for what in ("bytes", "flops"):
        if left := rows.get(f"left.{what}"):
            _add(table, str(left["check"]), verdict.share, {"output": left["value"]}, names)
    return table


def _perplexities(
    rows: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of perplexity that the screen shows, each with its label."""
    domains = [key.removeprefix(DOMAIN) for key in rows if key.startswith(DOMAIN)]
    if "perplexity" in rows:
        yield "perplexity", rows["perplexity"]
    if len(domains) == 1:
        yield f"perplexity, {domains[0]}", rows[f"{DOMAIN}{domains[0]}"]
    elif domains:
        yield f"perplexity, mean of {len(domains)} domains", rows[MEAN]
        yield f"perplexity, worst: {rows[WORST]['detail'][0]}", rows[WORST]


def _of_models(row: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a figure of each model."""
    return {name: values.get(what) for name, values in row["models"].items()}


def _value(row: Mapping[str, Any] | None) -> Any:
    return None if row is None else row["value"]


def _add(
    table: Table, label: str, shown: Any, found: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Add a line, unless no model has a value."""
    values = [found.get(name) for name in names]
    if any(value is not None for value in values):
        table.add_row(label, *("" if value is None else shown(value) for value in values))


def _checks(rows: list[Mapping[str, Any]]) -> Table:
    """Return the rows of checks, each with its limit; those that failed with what was found."""
    limits = any("limit" in row for row in rows)
    table = screen.columns("check", "value", *(("limit", "") if limits else ()))
    for row in rows:
        table.add_row(*_cells(row)[: len(table.columns)])
        detail = row["detail"] or [f"layer {i}: {v}" for i, v in row.get("layers", ())]
        if detail and not row["passed"]:
            shown = detail[:SHOWN] + (["…"] if len(detail) > SHOWN else [])
            table.add_row("  " + "\n  ".join(shown))
    return table


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if "limit" not in row:
        return row["check"], verdict.figure(row["value"]), "", ""
    relation = str(row["relation"]).replace("<=", "≤")
    limit, value = verdict.small(row["limit"]), verdict.small(row["value"])
    return row["check"], value, f"{relation} {limit}", "ok" if row["passed"] else "FAILED"
