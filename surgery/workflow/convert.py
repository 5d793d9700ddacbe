"""Convert: plan, write, record, verify. The one way from operations on a checkpoint to a folder."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery import finetune as training
from surgery import operations
from surgery.checkpoint import Checkpoint, Plan, make_plan
from surgery.checkpoint.metadata import unread
from surgery.errors import SurgeryError
from surgery.report import card
from surgery.storage import (
    Written,
    add,
    finish,
    write,
)
from surgery.storage.lock import held
from surgery.storage.processes import Group
from surgery.storage.scratch import remove
from surgery.workflow.checks import check_request, check_run, scratch_folder
from surgery.workflow.observer import Observer, Silent
from surgery.workflow.recipe import dump, recipe_of
from surgery.workflow.record import make_record, notes_of, read_record
from surgery.workflow.request import Demands, Request
from surgery.workflow.settle import prepare, settle
from surgery.workflow.verify import texts_of, verify_folder

if TYPE_CHECKING:
    from surgery.proof.verification import Verification

BASE_MEMORY = 250_000_000  # measured: the interpreter with torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished conversion: where it is, what was done, what the verification found.

    `verification` is None where it was left out; `resumed` counts shards of an earlier run.
    `advice` is what whoever converts may try instead; `has_zeros` says whether skipping them may
    pay.
    """

    folder: Path
    record: dict[str, Any]
    verification: Verification | None
    resumed: int = 0
    already: bool = False
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    custom_code: bool = False
    has_zeros: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One conversion under way."""

    source: Checkpoint
    output: Checkpoint
    plan: Plan
    request: Request
    observer: Observer
    group: Group

    @property
    def out(self) -> Path:
        """Return the folder of the output."""
        return self.request.out


def convert(
    source: Checkpoint,
    output: Checkpoint,
    request: Request,
    *,
    observer: Observer | None = None,
    group: Group | None = None,
) -> Result | None:
    """Write `output`, which operations made of `source`, to a folder; record and verify it.

    An interrupted run is taken up where it stopped; a finished one is only verified again. Every
    process of a `group` calls this; it returns None in all but the first.

    1. Everything that can be known to fail is checked, before the first byte.
    2. Choices that need a walk are made, and the output is planned and checked with them.
    3. Calibrations run in the first process; all of them write their share of the shards.
    4. The first process records the output and verifies it.

    Raises SurgeryError before the first byte for anything that can be known then.
    """
    observer, group = observer or Silent(), group or Group()
    check_request(source, request)
    run = _Run(
        source=source,
        output=output,
        plan=make_plan(output, request.max_shard_size),
        request=request,
        observer=observer,
        group=group,
    )
    run = _settled(run)
    _require_same_plan(run)
    already: bool = group.first(partial(_is_there, run))
    if group.rank:
        if not already:
            _write(run)
        return None
    with nullcontext() if already else held(run.out):
        written = None if already else _finished(run, _write(run))
        remove(scratch_folder(run.out))
        found = _verified(run, written) if request.verify else None
    return _result(run, written, found)


def _result(run: _Run, written: Written | None, found: Verification | None) -> Result:
    """Return what was done; `written` is None where the output was there already."""
    steps = run.output.steps
    return Result(
        folder=run.out,
        record=read_record(run.out),
        verification=found,
        resumed=written.resumed if written else 0,
        already=written is None,
        notes=notes_of(run.output),
        advice=[advice for step in steps for advice in step.advice],
        custom_code=run.output.custom_code,
        has_zeros=any(r.makes_zeros for s in steps if (r := operations.known(s.operation))),
    )


def _verified(run: _Run, written: Written | None) -> Verification:
    """Verify the output; shards that this run has hashed are not read again.

    Texts are where the command has them, which may not be where the record does.
    """
    fresh = written.fresh if written else ()
    demands = Demands(
        trust_remote_code=run.request.trust_remote_code,
        allow_nonfinite=run.request.allow_nonfinite,
        require=run.request.require,
        texts=texts_of(step.asked for step in run.output.steps),
    )
    return verify_folder(run.source, run.out, demands, run.observer, fresh)


def _settled(run: _Run) -> _Run:
    """Return the run with its pending choices made, after every check that needs none of them."""
    if not any(step.pending for step in run.output.steps):
        return run
    run.group.first(partial(_is_there, run))
    output = settle(run.output, scratch_folder(run.out), run.observer, run.group)
    return replace(run, output=output, plan=make_plan(output, run.request.max_shard_size))


def convert_alone(
    source: Checkpoint,
    output: Checkpoint,
    out: Path,
    *,
    observer: Observer | None = None,
    **options: Any,
) -> Result:
    """Convert in one process: see `convert`. `options` are the other fields of a Request."""
    result = convert(source, output, Request(out=out, **options), observer=observer)
    assert result is not None
    return result


def _require_same_plan(run: _Run) -> None:
    """Raise SurgeryError where the processes would write different outputs."""
    for number, fingerprint in enumerate(run.group.gather(run.plan.fingerprint)):
        if fingerprint != run.plan.fingerprint:
            raise SurgeryError(
                f"process {number} of {run.group.size} would write another output than the first",
                "give all of them the same source, options and version of surgery",
            )


def _is_there(run: _Run) -> bool:
    """Return whether the output is finished already, after every check before the first byte."""
    unread(run.source)  # fetched now, so that the Hub is not needed after hours of work
    return check_run(run.source, run.output, run.plan, run.request)


def _write(run: _Run) -> Written:
    """Calibrate in the first process, then write this process's share of the shards."""

    def calibrate() -> None:
        prepare(run.output, scratch_folder(run.out), run.observer)

    run.group.first(calibrate)
    if run.group.rank:
        prepare(run.output, scratch_folder(run.out), Silent())  # what the first has left there
    with run.observer.stage("writing", run.plan.nbytes, "B") as progress:
        return write(
            run.plan,
            run.out,
            source=run.source,
            transfer=run.request.transfer,
            progress=progress,
            group=run.group,
        )


def _finished(run: _Run, written: Written) -> Written:
    """Write what stands beside the weights; the card only where no verification will write it."""
    output, request, finetune = run.output, run.request, run.request.finetune
    made = replace(
        recipe_of(output, run.out),
        max_shard_size=request.max_shard_size,
        require=request.require,
        finetune=dict(finetune or {}),
    )
    record = make_record(output, run.plan, written.digests, request.command, finetune, run.out)
    record["notes"] += filter(None, [unread(run.source)])
    text = f"# surgery run {card.RECIPE} --out FOLDER\n{dump(made)}"
    add(
        run.out,
        record,
        {card.RECIPE: text.encode(), **training.files(record, output.config, run.out)},
    )
    before = run.source if run.source.steps != output.steps else None
    finish(
        run.out, record, {} if run.request.verify else card.files(before, output, run.out, record)
    )
    return written
