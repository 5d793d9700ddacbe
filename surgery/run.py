"""Convert: plan, write, record, verify. The one way from a checkpoint with operations to a folder on the disk."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surgery import __version__, modeling
from surgery.checkpoint import (
    Checkpoint,
    Plan,
    check_space,
    check_target,
    finish,
    is_finished,
    make_plan,
    open_checkpoint,
    write,
)
from surgery.checkpoint.integrity import damaged_shards, nonfinite, stray_weights
from surgery.checkpoint.writer import RECORD
from surgery.errors import SurgeryError, UsageError

if TYPE_CHECKING:
    from surgery.verification import Row, Verification

BASE_MEMORY = 250_000_000  # measured: the interpreter with torch


class Observer(Protocol):
    """Who is told how far the work is: the command line shows a bar, the library nothing."""

    def stage(self, title: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """A stage of `total` units; the callable that it gives is told each advance."""
        ...


class Silent:
    """An observer that shows nothing."""

    def stage(self, title: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda n: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished conversion: where it is, what was done, what the verification found (None where it was left out)."""

    folder: Path
    record: dict[str, Any]
    verification: Verification | None
    resumed: int = 0
    already: bool = False
    notes: list[str] = field(default_factory=list)


def default_out(checkpoint: Checkpoint, suffix: str) -> Path:
    """A sibling folder of a source on this disk, a folder here for one of the Hub: NAME-SUFFIX."""
    location = Path(checkpoint.source.location).expanduser()
    if checkpoint.source.revision is None and location.exists():
        folder = location.resolve() if location.is_dir() else location.resolve().parent
        return folder.parent / f"{folder.name}-{suffix}"
    return Path(f"{checkpoint.source.location.rsplit('/', 1)[-1]}-{suffix}")


_CHANGES = {"shared": "shared", "drop": "drop", "noise": "noise"}  # of upcycle, and how a folder's name says them


def suffix(checkpoint: Checkpoint) -> str:
    """What the steps amount to, as the end of a folder's name: "mixtral-8x-top2", "relu"."""
    parts = []
    for step in checkpoint.steps:
        p = step.parameters
        if step.operation == "relufy":
            percent = [f"{p['sparsity'] * 100:g}"] if "sparsity" in p else []
            parts.append("-".join([p["activation"], *percent, *([] if p["repair"] == "none" else [p["repair"]])]))
        elif step.operation == "upcycle":
            parts.append(f"{p['target']}-{p['experts']}x-top{p['top_k']}".replace("_", "-"))
            parts += [f"{word}{p[key]:g}" for key, word in _CHANGES.items() if p.get(key)]
        else:
            parts.append(str(p.get("activation") or p.get("dtype") or step.operation))
    return "-".join(parts) or "copy"


def describe(plan: Plan, out: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """What `--dry-run` shows: every file with its size, bytes in all, peak memory, free space, notes."""
    existing = next(p for p in (out, *out.resolve().parents) if p.exists())
    return {
        "out": str(out),
        "model_type": checkpoint.config.get("model_type"),
        "parameters": plan.parameters,
        "bytes": plan.nbytes,
        "shards": [{"name": s.name, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in plan.shards],
        "files": sorted(plan.small),
        "peak_memory": BASE_MEMORY + max([plan.peak_memory, *(s.work.peak_memory for s in checkpoint.steps if s.work)]),
        "free_space": shutil.disk_usage(existing).free,
        "exact": checkpoint.exact,
        "fingerprint": plan.fingerprint,
        "notes": [n for step in checkpoint.steps for n in step.notes],
    }


def convert(source: Checkpoint, output: Checkpoint, out: Path, *, max_shard_size: int | None = None,
            hardlink: bool = False, verify: bool = True, trust_remote_code: bool = False, command: str = "",
            observer: Observer | None = None) -> Result:  # fmt: skip
    """Write `output`, which operations made of `source`, to the folder `out`; record it; verify it.

    An interrupted run is taken up where it stopped; a finished one is only verified again.
    Raises SurgeryError before the first byte for anything that can be known then.
    """
    observer = observer or Silent()
    require_trust(source, trust_remote_code)
    plan = make_plan(output, max_shard_size)
    check_target(plan, out, source)
    already = is_finished(plan, out)
    if verify and not already:
        require_names(source, output)
    resumed = 0
    if not already:
        check_space(plan, out, hardlink)  # also for what a calibration will download
        prepare(output, out, observer)
        with observer.stage("writing", plan.nbytes, "B") as progress:
            written = write(plan, out, source=source, hardlink=hardlink, hashed=verify, progress=progress)
        resumed = written.resumed
        record = make_record(output, plan, written.sha256, command)
        finish(out, record)
        shutil.rmtree(scratch(out), ignore_errors=True)
    record = read_record(out)
    fresh = () if already else tuple(n for n, digest in written.sha256.items() if digest)
    verification = verify_folder(source, out, trust_remote_code, observer, fresh) if verify else None
    return Result(folder=out, record=read_record(out) if verify else record, verification=verification, resumed=resumed,
                  already=already, notes=[n for step in output.steps for n in step.notes])  # fmt: skip


def scratch(out: Path) -> Path:
    """Where a calibration keeps its results until they are written: beside the output, as large as what it changes."""
    return out.with_name(f"{out.name}.calibration")


def prepare(output: Checkpoint, out: Path, observer: Observer) -> None:
    """Run the work that the steps wait for, in their order; what an interrupted run has made is taken up."""
    for step in output.steps:
        if step.work is not None:
            folder = scratch(out)
            require_space(folder, step.work.nbytes)
            with observer.stage(f"{step.operation}: {step.work.title}", step.work.total, "layer") as progress:
                step.work.prepare(folder, progress)


def require_space(folder: Path, nbytes: int) -> None:
    """SurgeryError where the disk of `folder` has not so many bytes free."""
    free = shutil.disk_usage(next(p for p in folder.resolve().parents if p.exists())).free
    if nbytes > free:
        raise SurgeryError(f"{folder} needs {nbytes / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free",
                           "free some space, or give a folder on another disk with --out")  # fmt: skip


def require_trust(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Refuse a checkpoint whose config names code of its own, unless the user trusts it or it is what surgery wrote."""
    if checkpoint.custom_code and not trust_remote_code and not _is_ours(checkpoint):
        raise SurgeryError(f"{checkpoint.source.location} brings code of its own (auto_map in config.json)",
                           "read that code, then give --trust-remote-code to let it run")  # fmt: skip


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
    return bool(code) and modeling.runs_only_ours(configs, code)


def require_names(source: Checkpoint, output: Checkpoint) -> None:
    """Names and shapes against the model class, before the first byte: SurgeryError where the output could not load."""
    from surgery.calibration.stock import check_names
    from surgery.verification import name_rows

    for row in name_rows(check_names(source), check_names(output)):
        if not row.passed:
            raise SurgeryError(f"{row.check}: {row.detail[0]} ({row.value} such)",
                               "the checkpoint does not fit its config.json: fetch it again, or mend the config")  # fmt: skip


def make_record(output: Checkpoint, plan: Plan, sha256: dict[str, str | None], command: str) -> dict[str, Any]:
    """The content of surgery.json: nothing in it depends on when or how often the command ran."""
    source, versions = output.source, {"python": platform.python_version()}
    versions["model-surgery"] = __version__  # a checkout that is not installed has no metadata
    for package in ("torch", "transformers", "safetensors", "huggingface-hub"):
        versions[package] = importlib.metadata.version(package)
    return {
        "source": {"location": source.location, "revision": source.revision},
        "command": command,
        "recipe": [{"operation": s.operation, **s.parameters} for s in output.steps],
        "exact": output.exact,
        "layers": sorted({i for s in output.steps for i in s.layers}),
        "calibration": [s.work.report for s in output.steps if s.work],
        "versions": versions,
        "fingerprint": plan.fingerprint,
        "shards": {s.name: {"bytes": s.nbytes, "sha256": sha256.get(s.name)} for s in plan.shards},
        "verification": None,
    }


def read_record(folder: Path) -> dict[str, Any]:
    """surgery.json of an output. Raises SurgeryError where there is none, or none that can be read."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except FileNotFoundError:
        raise SurgeryError(f"no {RECORD} in {folder}", "give a folder that surgery wrote, whole") from None
    except ValueError as e:
        raise SurgeryError(f"{folder / RECORD} is not valid JSON: {e}", "convert the model again") from None
    if not isinstance(record, dict) or not isinstance(record.get("shards"), dict):
        raise SurgeryError(f"{folder / RECORD} is no record of a conversion", "convert the model again")
    return record


def verify_folder(source: Checkpoint, folder: Path, trust_remote_code: bool = False, observer: Observer | None = None,
                  fresh: Iterable[str] = ()) -> Verification:  # fmt: skip
    """Verify the output in `folder` against its source, and write what was found into its surgery.json.

    `fresh` are shards that were hashed while this very run wrote them.
    """
    observer = observer or Silent()
    record = read_record(folder)
    require_trust(source, trust_remote_code)
    rows, sha256 = check_files(source, folder, record["shards"], fresh, observer)
    from surgery.verification import Verification, verify  # torch and transformers

    verification = Verification(rows=tuple(rows), exact=bool(record["exact"]), dtype="")
    if verification.passed:
        output = open_checkpoint(folder)
        require_trust(output, trust_remote_code)
        with observer.stage("verifying", 0, "layer") as progress:
            verification = verify(source, output, exact=bool(record["exact"]), layers=record["layers"] or None, repaired=_is_repaired(record),
                                  torn=_granularity(record), first=rows,
                                  progress=lambda what, done, total: progress(1))  # fmt: skip
    for name, digest in sha256.items():
        record["shards"][name]["sha256"] = digest
    record["verification"] = verification.as_dict()
    finish(folder, record)
    return verification


def _is_repaired(record: dict[str, Any]) -> bool:
    """Whether weights were fitted after a swap of the activation, and nothing else was done to them."""
    steps = [s for s in record["recipe"] if s["operation"] != "cast"]
    return bool(steps) and all(s["operation"] == "relufy" and s.get("repair") != "none" for s in steps)


def _granularity(record: dict[str, Any]) -> int:
    """The routed experts that make up a copy of the MLP; 1 where copies are whole."""
    steps = [s for s in record["recipe"] if s["operation"] == "upcycle"]
    return max([1, *(int(s.get("granularity") or 1) - int(s.get("shared") or 0) for s in steps)])


def check_files(source: Checkpoint, folder: Path, shards: dict[str, Any], fresh: Iterable[str],
                observer: Observer) -> tuple[list[Row], dict[str, str]]:  # fmt: skip
    """Rows on the files: shards as recorded, no weights of another run, values of the source finite."""
    from surgery.verification import Row

    total = sum(s["bytes"] for name, s in shards.items() if name not in fresh) + source.nbytes
    with observer.stage("reading back", total, "B") as progress:
        damaged, sha256 = damaged_shards(folder, shards, fresh, progress)
        bad = nonfinite(source.tensors, progress)
    stray = stray_weights(folder, shards)
    rows = [
        Row(check=check, value=len(names), relation="<=", limit=0, passed=not names, detail=tuple(names))
        for check, names in (("shards damaged", damaged), ("weight files of another run", stray))
    ]
    if bad:
        rows.append(Row(check="warning: NaN or Inf in the source", value=len(bad), detail=tuple(bad)))
    return rows, sha256


def parse_layers(text: str | None) -> set[int] | None:
    """Layer numbers from "0-7,12,20-23". Raises UsageError for anything else."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"{text!r} does not name layers", "write them like 0-7,12,20-23")
        chosen |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen
