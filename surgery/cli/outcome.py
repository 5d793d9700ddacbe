"""What a conversion came to: where it is, what became of the function, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from surgery.cli import following, screen
from surgery.proof import verdict
from surgery.proof.verdict import FILES, TEXTS
from surgery.quoting import printable
from surgery.report import methods

if TYPE_CHECKING:
    from surgery.workflow.convert import Result

SHOWN = 5  # lines of detail below a row
_OUTSIDE = {"config_fields_ignored"}  # rows that are shown as notes
_BESIDE = ("perplexity", "agreement", "zeros", "left")  # kinds of row with a column for each model


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

    `advice` is what whoever converts may try instead; where the model is damaged, the remedies of
    its operations are shown in its place.
    """
    notes, damage = list(record.get("notes") or ()), verdict.damage(verification)
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
    if damage:
        screen.show(f"{damage}.")
    for line in methods.remedies(record) if damage else advice:
        screen.show(f"try: {line}")


def show_next(folder: Path, record: Mapping[str, Any], *, pushed: str = "") -> None:
    """Print the commands that come next, ready to copy."""
    if found := following.commands(folder, record, pushed=pushed):
        screen.show("\nNext:")
        for label, command in found:
            screen.show(f"  {label:<11}{command}")


def report_failure(folder: Path) -> None:
    """Print that an output did not pass, on stderr."""
    screen.echo(f"error: {printable(str(folder))} does not pass its verification", err=True)
    record = printable(str(folder / "surgery.json"))
    screen.echo(f"hint: {record} names what failed; the output stays for you to look at", err=True)


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
    keys = [key.split(".") for key in rows if key.startswith("perplexity.")]
    names = list(dict.fromkeys(".".join(key[1:-1]) for key in keys)) or ["source", "output"]
    names.sort(key=lambda name: name == "output")
    table = screen.columns("", *names)
    for text, label in TEXTS.items():
        _add(table, f"perplexity, {label}", verdict.figure, _each(rows, "perplexity", names, text))
    for text, label in TEXTS.items():
        found = {"output": rows.get(f"agreement.{text}")}
        _add(table, f"next tokens as the source's, {label}", verdict.share, found, names)
    zeros = _each(rows, "zeros", names)
    _add(table, "exact zeros among the MLPs' products", verdict.share, zeros)
    for what in ("bytes", "flops"):
        if row := rows.get(f"left.{what}"):
            _add(table, str(row["check"]), verdict.share, {"output": row}, names)
    return table


def _each(
    rows: Mapping[str, Any], kind: str, names: list[str], text: str = ""
) -> dict[str, Mapping[str, Any] | None]:
    """Return the row of each model."""
    end = f".{text}" if text else ""
    return {name: rows.get(f"{kind}.{name}{end}") for name in names}


def _add(
    table: Table,
    label: str,
    shown: Any,
    found: Mapping[str, Mapping[str, Any] | None],
    names: list[str] | None = None,
) -> None:
    """Add a line, unless no model has a value."""
    if any(found.values()):
        each = (found.get(name) for name in names or found)
        table.add_row(label, *(shown(row["value"]) if row else "" for row in each))


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
