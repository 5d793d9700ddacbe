"""Convert: plan, write, record, verify. The one way from a checkpoint with operations to a folder
on the disk.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surgery import __version__
from surgery import finetune as training
from surgery.blocks import custom_code
from surgery.checkpoint import Checkpoint, Plan, make_plan
from surgery.demo import MODEL
from surgery.errors import SurgeryError
from surgery.fitting.expert_split import average
from surgery.proof.integrity import damaged_shards, nonfinite, stray_weights
from surgery.report import card
from surgery.storage import (
    Written,
    add,
    check_space,
    check_target,
    finish,
    is_finished,
    open_checkpoint,
    remote,
    write,
)
from surgery.storage.digest import Digest
from surgery.storage.lock import held
from surgery.storage.processes import Group
from surgery.storage.record import read_record
from surgery.workflow.recipe import Recipe, dump, of

if TYPE_CHECKING:
    from surgery.proof.verification import Row, Verification

RECIPE = "recipe.yaml"
BASE_MEMORY = 250_000_000  # measured: the interpreter with torch


class Observer(Protocol):
    """Who is told how far the work is: the command line shows a bar, the library nothing."""

    def stage(
        self, title: str, total: int, unit: str
    ) -> AbstractContextManager[Callable[[int], None]]:
        """A stage of `total` units; the callable that it gives is told each advance."""
        ...


class Silent:
    """An observer that shows nothing."""

    def stage(
        self, title: str, total: int, unit: str
    ) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda n: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished conversion: where it is, what was done, what the verification found (None where it
    was left out).
    """

    folder: Path
    record: dict[str, Any]
    verification: Verification | None
    resumed: int = 0
    already: bool = False
    notes: list[str] = field(default_factory=list)


def default_out(checkpoint: Checkpoint, suffix: str) -> Path:
    """A sibling folder of a source on this disk, a folder here for another: NAME-SUFFIX."""
    location = Path(checkpoint.source.location).expanduser()
    if location.resolve() == MODEL.resolve():
        return Path(f"demo-{suffix}")
    if checkpoint.source.revision is None and location.exists():
        folder = location.resolve() if location.is_dir() else location.resolve().parent
        return folder.parent / f"{folder.name}-{suffix}"
    return Path(f"{checkpoint.source.location.rsplit('/', 1)[-1]}-{suffix}")


_CHANGES = {
    "shared": "shared",
    "drop": "drop",
    "noise": "noise",
}  # of upcycle, and how a folder's name says them


def suffix(checkpoint: Checkpoint) -> str:
    """What the steps amount to, as the end of a folder's name: "mixtral-8x-top2", "relu"."""
    parts = []
    for step in checkpoint.steps:
        p = step.parameters
        bypass = [f"bypass{p['bypass']}"] if p.get("bypass") else []
        if step.operation == "relufy":
            percent = [f"{p['sparsity'] * 100:g}"] if "sparsity" in p else []
            repair = [] if p["repair"] == "none" else [p["repair"]]
            parts.append("-".join([p["activation"], *percent, *repair, *bypass]))
        elif step.operation == "upcycle":
            parts.append(f"{p['target']}-{p['experts']}x-top{p['top_k']}".replace("_", "-"))
            parts += [f"{word}{p[key]:g}" for key, word in _CHANGES.items() if p.get(key)]
        elif step.operation == "carve":
            parts.append("-".join([f"carve-{average(p['active']):.3g}of{p['experts']}", *bypass]))
        else:
            parts.append(str(p.get("activation") or p.get("dtype") or step.operation))
    return "-".join(parts) or "copy"


def convert(
    source: Checkpoint,
    output: Checkpoint,
    out: Path,
    *,
    max_shard_size: int | None = None,
    hardlink: bool = False,
    verify: bool = True,
    finetune: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    command: str = "",
    observer: Observer | None = None,
    group: Group | None = None,
) -> Result:
    """Write `output`, which operations made of `source`, to the folder `out`; record it; verify it.

    `finetune`: options that the script in finetune/ is to have by itself.

    An interrupted run is taken up where it stopped; a finished one is only verified again. The
    other processes of the `group` call `assist`.
    Raises SurgeryError before the first byte for anything that can be known then.
    """
    observer, group = observer or Silent(), group or Group()
    require_trust(source, trust_remote_code)
    card.metadata_of(source)  # fetched now, so that the Hub is not needed after hours of work
    plan = make_plan(output, max_shard_size)
    for number, fingerprint in enumerate(group.gather(plan.fingerprint)):
        if fingerprint != plan.fingerprint:
            raise SurgeryError(
                f"process {number} of {group.size} would write another output than the first",
                "give all of them the same source, options and version of surgery",
            )
    check_target(plan, out, source)
    already = group.broadcast(is_finished(plan, out))
    if already and finetune and finetune != read_record(out).get("finetune"):
        raise SurgeryError(
            f"{out} is finished, and its fine-tune script has other options than these",
            f"remove it (rm -r {out}) or give another folder with --out",
        )
    if not already:
        if verify:
            require_names(source, output)
        check_space(plan, out, hardlink)  # also for what a calibration will download
    with nullcontext() if already else held(out):
        written = None
        if not already:
            made = of(output, max_shard_size=max_shard_size, finetune=finetune)
            written = _write(
                source, output, plan, made, out, hardlink, verify, command, observer, group
            )
        shutil.rmtree(scratch(out), ignore_errors=True)
        fresh = tuple(n for n, digest in written.digests.items() if digest) if written else ()
        verification = (
            verify_folder(source, out, trust_remote_code, observer, fresh) if verify else None
        )
    return Result(
        folder=out,
        record=read_record(out),
        verification=verification,
        resumed=written.resumed if written else 0,
        already=already,
        notes=[n for step in output.steps for n in step.notes],
    )


def _write(
    source: Checkpoint,
    output: Checkpoint,
    plan: Plan,
    made: Recipe,
    out: Path,
    hardlink: bool,
    verify: bool,
    command: str,
    observer: Observer,
    group: Group,
) -> Written:
    """All files of the output; the card only where no verification will write it."""
    prepare(output, out, observer)
    group.broadcast(None)
    with observer.stage("writing", plan.nbytes, "B") as progress:
        written = write(
            plan,
            out,
            source=source,
            hardlink=hardlink,
            hashed=verify,
            progress=progress,
            group=group,
        )
    record = make_record(output, plan, written.digests, command) | (
        {"finetune": made.finetune} if made.finetune else {}
    )
    text = f"# surgery run {RECIPE} --out FOLDER\n{dump(made)}"
    add(out, {RECIPE: text.encode(), **training.files(record, output.config)})
    before = source if source.steps != output.steps else None
    finish(out, record, {} if verify else card.files(before, output, out, record))
    return written


def assist(
    source: Checkpoint,
    output: Checkpoint,
    out: Path,
    group: Group,
    *,
    max_shard_size: int | None = None,
    hardlink: bool = False,
    verify: bool = True,
) -> None:
    """The part of `convert` of a process that is not the first of its group: a share of the
    shards.
    """
    plan = make_plan(output, max_shard_size)
    group.gather(plan.fingerprint)
    if group.broadcast(False):  # finished already
        return
    group.broadcast(None)  # once a calibration has left its results
    prepare(output, out, Silent())
    write(plan, out, source=source, hardlink=hardlink, hashed=verify, group=group)


def is_delivered(output: Checkpoint, max_shard_size: int | None, url: str) -> bool:
    """Whether the URL holds this very output. Raises SurgeryError where it holds something else."""
    return remote.has_output(url, make_plan(output, max_shard_size).fingerprint)


def deliver(result: Result, url: str, observer: Observer) -> None:
    """Move a finished output to a URL."""
    total = sum(p.stat().st_size for p in result.folder.rglob("*") if p.is_file())
    with observer.stage("sending", total, "B") as progress:
        remote.upload(result.folder, url, result.record["fingerprint"], progress)
    shutil.rmtree(result.folder)


def scratch(out: Path) -> Path:
    """Where a calibration keeps its results until they are written: beside the output, as large as
    what it changes.
    """
    return out.with_name(f"{out.name}.calibration")


def prepare(output: Checkpoint, out: Path, observer: Observer) -> None:
    """Run the work that the steps wait for, in their order; what an interrupted run has made is
    taken up.
    """
    for step in output.steps:
        if step.work is not None:
            folder = scratch(out)
            require_space(folder, step.work.nbytes)
            with observer.stage(
                f"{step.operation}: {step.work.title}", step.work.total, "layer"
            ) as progress:
                step.work.prepare(folder, progress)


def require_space(folder: Path, nbytes: int) -> None:
    """SurgeryError where the disk of `folder` has not so many bytes free."""
    free = shutil.disk_usage(next(p for p in folder.resolve().parents if p.exists())).free
    if nbytes > free:
        raise SurgeryError(
            f"{folder} needs {nbytes / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free",
            "free some space, or give a folder on another disk with --out",
        )


def require_trust(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Refuse a checkpoint whose config names code of its own, unless the user trusts it or it is
    what surgery wrote.
    """
    if checkpoint.custom_code and not trust_remote_code and not _is_ours(checkpoint):
        raise SurgeryError(
            f"{checkpoint.source.location} brings code of its own (auto_map in config.json)",
            "read that code, then give --trust-remote-code to let it run",
        )


def _is_ours(checkpoint: Checkpoint) -> bool:
    code = {f.name: f.path().read_bytes() for f in checkpoint.files if f.name.endswith(".py")}
    configs = [dict(checkpoint.config)]
    for file in checkpoint.files:
        if file.name.endswith("_config.json"):
            try:
                found = json.loads(file.path().read_bytes())
            except ValueError:
                return False
            configs += [found] if isinstance(found, dict) else []
    return bool(code) and custom_code.runs_only_ours(configs, code)


def require_names(source: Checkpoint, output: Checkpoint) -> None:
    """Names and shapes against the model class, before the first byte: SurgeryError where the
    output could not load.
    """
    from surgery.calibration.stock import check_names
    from surgery.proof.verification import name_rows

    for row in name_rows(check_names(source), check_names(output)):
        if not row.passed:
            raise SurgeryError(
                f"{row.check}: {row.detail[0]} ({row.value} such)",
                "the checkpoint does not fit its config.json: fetch it again, or mend the config",
            )


def make_record(
    output: Checkpoint, plan: Plan, digests: dict[str, Digest | None], command: str
) -> dict[str, Any]:
    """The content of surgery.json: nothing in it depends on when or how often the command ran."""
    source, versions = output.source, {"python": platform.python_version()}
    versions["model-surgery"] = __version__  # a checkout that is not installed has no metadata
    for package in ("torch", "transformers", "safetensors", "huggingface-hub"):
        versions[package] = importlib.metadata.version(package)
    return {
        "name": default_out(output, suffix(output)).name,
        "source": {"location": source.location, "revision": source.revision},
        "command": command,
        "recipe": [{"operation": s.operation, **s.parameters} for s in output.steps],
        "notes": [n for s in output.steps for n in s.notes],
        "exact": output.exact,
        "layers": sorted({i for s in output.steps for i in s.layers}),
        "calibration": [s.work.report for s in output.steps if s.work],
        "versions": versions,
        "fingerprint": plan.fingerprint,
        "shards": {
            s.name: {"bytes": s.nbytes, **(digests.get(s.name) or {"sha256": None})}
            for s in plan.shards
        },
        "verification": None,
    }


def verify_folder(
    source: Checkpoint,
    folder: Path,
    trust_remote_code: bool = False,
    observer: Observer | None = None,
    fresh: Iterable[str] = (),
) -> Verification:
    """Verify the output in `folder` against its source, and write what was found into its
    surgery.json.

    `fresh` are shards that were hashed while this very run wrote them.
    """
    observer = observer or Silent()
    record = read_record(folder)
    require_trust(source, trust_remote_code)
    rows, digests = check_files(source, folder, record["shards"], fresh, observer)
    from surgery.proof.verification import Verification, verify  # torch and transformers

    verification, output = (
        Verification(rows=tuple(rows), exact=bool(record["exact"]), dtype=""),
        None,
    )
    if verification.passed:
        output = open_checkpoint(folder)
        require_trust(output, trust_remote_code)
        with observer.stage("verifying", 0, "layer") as progress:
            verification = verify(
                source,
                output,
                exact=bool(record["exact"]),
                layers=record["layers"] or None,
                repaired=_is_repaired(record),
                torn=_granularity(record),
                first=rows,
                progress=progress,
            )
    for name, digest in digests.items():
        record["shards"][name] |= digest
    record["verification"] = verification.as_dict()
    finish(folder, record, {} if output is None else card.files(source, output, folder, record))
    return verification


def _is_repaired(record: dict[str, Any]) -> bool:
    """Whether weights were fitted after a swap of the activation, and nothing else was done to
    them.
    """
    steps = [s for s in record["recipe"] if s["operation"] != "cast"]
    return bool(steps) and all(
        s["operation"] == "relufy" and s.get("repair") != "none" for s in steps
    )


def _granularity(record: dict[str, Any]) -> int:
    """The routed experts that make up a copy of the MLP; 1 where copies are whole."""
    steps = [s for s in record["recipe"] if s["operation"] == "upcycle"]
    return max([1, *(int(s.get("granularity") or 1) - int(s.get("shared") or 0) for s in steps)])


def check_files(
    source: Checkpoint,
    folder: Path,
    shards: dict[str, Any],
    fresh: Iterable[str],
    observer: Observer,
) -> tuple[list[Row], dict[str, Digest]]:
    """Rows on the files: shards as recorded, no weights of another run, values of the source
    finite.
    """
    from surgery.proof.verification import Row

    total = sum(s["bytes"] for name, s in shards.items() if name not in fresh) + source.nbytes
    with observer.stage("reading back", total, "B") as progress:
        damaged, digests = damaged_shards(folder, shards, fresh, progress)
        bad = nonfinite(source.tensors, progress)
    stray = stray_weights(folder, shards)
    rows = [
        Row(
            check=check,
            value=len(names),
            relation="<=",
            limit=0,
            passed=not names,
            detail=tuple(names),
        )
        for check, names in (("shards damaged", damaged), ("weight files of another run", stray))
    ]
    if bad:
        rows.append(
            Row(check="warning: NaN or Inf in the source", value=len(bad), detail=tuple(bad))
        )
    return rows, digests
