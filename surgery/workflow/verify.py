"""Verify an output in a folder against its source, and write what was found into its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery import finetune as training
from surgery import operations
from surgery.calibration.settings import Calibration
from surgery.calibration.texts import Text, is_here, is_near, moved, to_measure
from surgery.checkpoint import Checkpoint, Progress
from surgery.checkpoint.row import Row
from surgery.errors import SurgeryError
from surgery.families.classes import without_head
from surgery.operations.operation import Operation, Parameters
from surgery.proof.integrity import damaged_shards, nonfinite, stray_weights
from surgery.proof.require import Require
from surgery.report import card
from surgery.storage import finish, open_checkpoint
from surgery.storage.digest import Digest
from surgery.storage.record import changed
from surgery.workflow.observer import Observer, Silent
from surgery.workflow.record import read_record
from surgery.workflow.request import Demands
from surgery.workflow.trust import require_trust

if TYPE_CHECKING:
    from surgery.proof.comparison import Comparison
    from surgery.proof.verification import Verification


def verify_folder(
    source: Checkpoint,
    folder: Path,
    demands: Demands | None = None,
    observer: Observer | None = None,
    fresh: Iterable[str] = (),
) -> Verification:
    """Verify the output in `folder` against its source; write the result into its surgery.json.

    1. Shards are compared with their recorded sha256, values of the source are looked through.
    2. Names and shapes, then parity or quality, then the operations' own checks.
    3. The record and the card are written.

    `fresh` are shards that were hashed while this very run wrote them.
    """
    observer, demands = observer or Silent(), demands or Demands()
    record = read_record(folder)
    require = demands.require or Require.of(record.get("require"))
    record |= {"require": require.as_dict()} if require.as_dict() else {}
    require_trust(source, demands.trust_remote_code)
    rows, digests = check_files(source, folder, record, fresh, observer)
    from surgery.proof.verification import Verification  # torch and transformers

    exact = bool(record["exact"])
    verification, output = Verification(rows=tuple(rows), exact=exact, dtype=""), None
    if verification.passed:
        output = open_checkpoint(folder)
        require_trust(output, demands.trust_remote_code)
        texts = demands.texts or recorded_texts(record, folder)
        asked = replace(demands, require=require, texts=texts)
        with observer.stage("verifying", 0, "layer") as progress:
            pair = _pair(source, output, exact, asked, progress)
            verification = _verified(pair, record, rows)
    for name, digest in digests.items():
        record["shards"][name] |= digest
    record["verification"] = verification.as_dict()
    finish(folder, record, {} if output is None else card.files(source, output, folder, record))
    return verification


def _pair(
    source: Checkpoint, output: Checkpoint, exact: bool, demands: Demands, progress: Progress
) -> Comparison:
    """Return what is compared, and how."""
    from surgery.proof.comparison import Comparison

    return Comparison(
        source=source,
        output=output,
        exact=exact,
        texts=demands.texts,
        require=demands.require or Require(),
        tokens=demands.tokens or 0,
        allow_nonfinite=demands.allow_nonfinite,
        progress=progress,
    )


def _verified(pair: Comparison, record: Mapping[str, Any], rows: Sequence[Row]) -> Verification:
    """Verify with what the operations of the output bring, after the checks of `rows`."""
    from surgery.proof.verification import verify

    steps = _steps(record)
    return verify(
        pair,
        layers=record["layers"] or None,
        beside=_beside(pair.source, pair.output, steps),
        checks=[check for operation, p in steps for check in operation.checks(p)],
        first=rows,
    )


def texts_of(steps: Iterable[Parameters], whole: Sequence[str] = ()) -> list[Text]:
    """Return the texts to measure quality on: built-in ones, and those that steps were fitted to.

    `whole` are texts that nothing was fitted on.
    """
    found = [Calibration.of(p["calibration"]) for p in steps if p.get("calibration")]
    return to_measure([(c.texts, c.datasets, c.mix) for c in found], whole)


def recorded_texts(
    record: Mapping[str, Any], folder: Path, whole: Sequence[str] = ()
) -> list[Text]:
    """Return the texts to measure an output on; those of its record that are gone are left out.

    A record may be a stranger's, so what it names is read only near the output, where `seen_from`
    would have put it.

    Raises SurgeryError where the record of a calibration is none.
    """
    calibrated = (step for step in record["recipe"] if step.get("calibration"))
    return texts_of(({"calibration": _found(step, folder)} for step in calibrated), whole)


def _found(step: Parameters, folder: Path) -> Calibration:
    """Return the calibration of a recorded step, with its texts as far as they are there."""
    try:
        calibration = Calibration.of(step.get("calibration"))
        near = [t for t in calibration.texts if is_near(t)]
        placed = [moved(text, lambda path: str(folder / path)) for text in near]
    except (AttributeError, TypeError, ValueError) as e:
        raise SurgeryError(
            f"{folder} records a calibration that is none ({str(e)[:100]})", "convert it again"
        ) from None
    here = [text for text in placed if is_here(text)]
    mix = calibration.mix if here or calibration.datasets else None
    return replace(calibration, text=here, mix=mix)


def _steps(record: Mapping[str, Any]) -> list[tuple[Operation, Parameters]]:
    found = ((operations.known(s["operation"]), s) for s in record["recipe"])
    return [(operation, parameters) for operation, parameters in found if operation]


def _beside(
    source: Checkpoint, output: Checkpoint, steps: Sequence[tuple[Operation, Parameters]]
) -> Mapping[str, Checkpoint]:
    """Return the models to show beside the output: where one operation alone was applied."""
    changing = [(o, p) for o, p in steps if o.name != "cast"]
    if len(changing) != 1 or changing[0][0].beside is None:
        return {}
    operation, parameters = changing[0]
    assert operation.beside is not None
    return operation.beside(source, output, parameters)


def require_verifiable(source: Checkpoint, output: Checkpoint) -> None:
    """Check, before the first byte, that a verification could run: names, shapes and text.

    Raises SurgeryError where the output could not load, or the text not be read.
    """
    from surgery.proof.verification import require_text

    _require_names(source, output)
    require_text(source, output, texts_of(step.asked for step in output.steps))


def _require_names(source: Checkpoint, output: Checkpoint) -> None:
    from surgery.calibration.stock import check_names
    from surgery.proof.verification import name_rows

    before = check_names(source)
    if error := without_head(source, before.missing):
        raise error
    for row in name_rows(before, check_names(output)):
        if not row.passed:
            raise SurgeryError(
                f"{row.check}: {row.detail[0]} ({row.value} such)",
                "config.json is of other weights: check its sizes and its architectures",
            )


def _is_editable(name: str) -> bool:
    """Return whether a file of an output is its owner's to edit."""
    return name in card.EDITABLE or name.startswith(f"{training.FOLDER}/")


def check_files(
    source: Checkpoint,
    folder: Path,
    record: Mapping[str, Any],
    fresh: Iterable[str],
    observer: Observer,
) -> tuple[list[Row], dict[str, Digest]]:
    """Check that files are as recorded, no other weights lie there, and values are finite.

    The card, the recipe and the fine-tune script may be edited: they are no part of the model.
    """
    from surgery.proof.verification import none_of

    shards = record["shards"]
    unread = sum(s["bytes"] for name, s in shards.items() if name not in fresh)
    with observer.stage("reading back", unread + source.nbytes, "B") as progress:
        damaged, digests = damaged_shards(folder, shards, fresh, progress)
        bad = nonfinite(source.tensors, progress)
    stray = stray_weights(folder, {*shards, *record.get("files", ())})
    edited = [n for n in changed(folder, record) if not _is_editable(n)]
    rows = [
        none_of("shards_damaged", "shards damaged", damaged),
        none_of("stray_weights", "weight files of another run", stray),
    ]
    if unhashed := [n for n, s in shards.items() if n in digests and not s["sha256"]]:
        rows.append(
            Row(
                key="shards_first_hashed",
                check="shards with no hash of when they were written",
                value=len(unhashed),
                detail=tuple(unhashed),
            )
        )
    if edited:
        rows.append(none_of("files_changed", "files changed since they were written", edited))
    if bad:
        rows.append(
            Row(
                key="nonfinite_values.source",
                check="warning: NaN or Inf in the source",
                value=len(bad),
                detail=tuple(bad),
                warns=True,
            )
        )
    return rows, digests
