"""Write a plan, one tensor at a time, each straight to its place in its shard.

Extents are copied by the kernel (`copy_file_range`, which shares the blocks on file systems that
can), so memory use does not grow with the model. A shard has a temporary name until it is complete
and synced, and config.json comes last, so a folder that has one is complete.

`surgery.partial.json` marks a folder as an unfinished output and holds the plan's fingerprint. The
same command continues from the finished shards; any other command is refused. Each finished shard
has its digest in a file beside it until the record is written, so that one which has changed since
is found: a run that goes on takes no digest of a file that it has not written.

Several processes (see `processes`) divide the shards, and rank 0 does everything else. Of the file
system that they share they need only that files can be created, renamed and looked up.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery import files
from surgery.checkpoint.checkpoint import Checkpoint
from surgery.checkpoint.compat import dump
from surgery.checkpoint.parsing import read_json
from surgery.checkpoint.plan import INDEX, Plan, Shard
from surgery.checkpoint.tensors import SourceFile
from surgery.checkpoint.work import Progress
from surgery.errors import SurgeryError
from surgery.quoting import command
from surgery.storage.digest import Digest
from surgery.storage.downloads import bytes_on_disk
from surgery.storage.lock import HELD, LOCK
from surgery.storage.processes import Group, divide
from surgery.storage.record import RECORD, read_record, sha256_of
from surgery.storage.staging import cache_home
from surgery.storage.stream import stream

MARKER = "surgery.partial.json"
SLACK = 16 << 20  # bytes left free on the disk
# Seconds within which a shared file system shows one machine what another has written.
PATIENCE = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """How bytes get into an output.

    Args:
        hardlink: whether a shard that equals a source file is linked to it instead of copied, where
            both are on the same file system.
        hashed: whether to compute each shard's digest while it is written. Linked shards are not
            read for it. Shards of an earlier run that computed no digest are written again.
    """

    hardlink: bool = False
    hashed: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What `write` has done.

    Args:
        folder: the output.
        digests: by shard name, as first written; None where it was not computed. Empty on ranks
            other than 0.
        fresh: the shards whose digest this run computed while it wrote them.
        resumed: how many shards an earlier run had finished.
    """

    folder: Path
    digests: dict[str, Digest | None]
    fresh: tuple[str, ...]
    resumed: int


def write(
    plan: Plan,
    out: Path,
    *,
    source: Checkpoint,
    transfer: Transfer | None = None,
    progress: Progress = lambda n: None,
    group: Group | None = None,
) -> Written:
    """Write a plan to the folder `out`, or finish what an interrupted run has begun there.

    Args:
        plan: what to write.
        out: the folder.
        source: the checkpoint that was converted; its folder is never written to.
        transfer: whether shards are linked and hashed; by default they are copied and hashed.
        progress: told the bytes as they are written.
        group: the processes that share the work. On rank 0 `write` returns when everything is
            there, on the other ranks when their own shards are.

    Raises SurgeryError, before the first byte, for a folder that holds something else and for a
    disk that is too small; and later where a file cannot be read or written.
    """
    group, transfer = group or Group(), transfer or Transfer()
    if not group.rank:
        _begin(plan, out, source, transfer)
    earlier = group.broadcast(_finished(plan, out, transfer))
    if not _appears(out / MARKER, None, group):
        raise SurgeryError(
            f"{out} is not the folder that the first process writes",
            "give --out on a file system that all processes share",
        )
    if not group.rank:
        progress(sum(s.nbytes for s in plan.shards if s.name in earlier))
    todo = [s for s in plan.shards if s.name not in earlier]
    progress = group.counting(progress)
    mine = [todo[i] for i in divide([s.nbytes for s in todo], group)]
    own = {s.name: _write_shard(s, out, transfer, progress) for s in mine}
    new: dict[str, Digest | None] = {}
    for part in group.gather(own):
        new |= part
    if not group.rank:
        _end(plan, out, group)
    return Written(
        folder=out,
        digests={} if group.rank else earlier | new,
        fresh=tuple(name for name, digest in new.items() if digest),
        resumed=len(earlier),
    )


def _finished(plan: Plan, out: Path, transfer: Transfer) -> dict[str, Digest | None]:
    """Return the digests of the shards that an earlier run finished, as it computed them."""
    recorded = _recorded(plan, out)
    found: dict[str, Digest | None] = {}
    for shard in plan.shards:
        path = out / shard.name
        if not _has(path, shard.nbytes):
            continue
        digest = _kept_digest(path) or recorded.get(shard.name)
        linked = transfer.hardlink and shard.verbatim and path.samefile(shard.verbatim.path())
        if digest or linked or not transfer.hashed:
            found[shard.name] = digest
    return found


def _recorded(plan: Plan, out: Path) -> dict[str, Digest]:
    """Return the digests in the record of this plan's output, where it was finished once."""
    if _fingerprint_of(out / RECORD) != plan.fingerprint:
        return {}
    try:
        shards = read_record(out)["shards"]
    except SurgeryError:
        return {}
    return {
        name: {key: s[key] for key in ("sha256", "crc32") if key in s}
        for name, s in shards.items()
        if s["sha256"]
    }


def _kept_digest(shard: Path) -> Digest | None:
    """Return the digest that was written beside a finished shard, or None where there is none."""
    try:
        data = files.read(shard.parent, digest_name(shard.name), files.JSON_LIMIT)
        found = read_json(data, "a digest", "")
        return {key: str(found[key]) for key in ("sha256", "crc32")}
    except (OSError, SurgeryError, KeyError, TypeError):
        return None


def digest_name(shard: str) -> str:
    """Return the name of the file that holds a shard's digest until the record does."""
    return f".{shard}.digest"


def _begin(plan: Plan, out: Path, source: Checkpoint, transfer: Transfer) -> None:
    """Check the folder and the disk, mark the folder as unfinished, and write the side files."""
    check_target(plan, out, source)
    check_space(plan, out, transfer)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / MARKER).exists():
        _write_small(out, MARKER, dump({"fingerprint": plan.fingerprint}))
    for name in plan.small:
        if name not in (INDEX, "config.json"):
            _write_small(out, name, plan.small[name])


def _end(plan: Plan, out: Path, group: Group) -> None:
    """Write the index and config.json, which make the folder a model, once every shard is there."""
    for shard in plan.shards:
        if not _appears(out / shard.name, shard.nbytes, group):
            raise SurgeryError(
                f"{out / shard.name} was written but is not there", "run the same command again"
            )
    for name in (INDEX, "config.json"):
        if name in plan.small:
            _write_small(out, name, plan.small[name])
    _sync_folder(out)


def add(out: Path, record: dict[str, Any], small: Mapping[str, bytes]) -> None:
    """Write small files into an output, each by name and content, and list them in `record`."""
    for name, data in small.items():
        _write_small(out, name, data)
        record.setdefault("files", {})[name] = hashlib.sha256(data).hexdigest()


def enter(folder: Path, names: Iterable[str]) -> None:
    """List files that a later command has just written in the record of an output.

    Args:
        folder: what the names are relative to: an output or a folder in one. Anywhere else this
            does nothing.
        names: of the files.
    """
    for out in (folder, folder.resolve().parent):
        try:
            record = read_record(out)
        except (OSError, SurgeryError):
            continue
        files_of = record.setdefault("files", {})
        inside = folder.resolve().relative_to(out.resolve())
        before = dict(files_of)
        for name in ((inside / n).as_posix() for n in names):
            if sha256 := sha256_of(out, name):
                files_of[name] = sha256
        if files_of != before:
            _write_small(out, RECORD, dump(record))
        return


def finish(out: Path, record: dict[str, Any], small: Mapping[str, bytes] | None = None) -> None:
    """Write `small` files and the record, and remove the mark of an unfinished output.

    The record lists them with their sha256.
    """
    add(out, record, small or {})
    _write_small(out, RECORD, dump(record))
    (out / MARKER).unlink(missing_ok=True)
    for name in record["shards"]:
        (out / digest_name(name)).unlink(missing_ok=True)
    _sync_folder(out)


# --- the folder -----------------------------------------------------------------------------------


def check_place(out: Path, source: Checkpoint) -> None:
    """Raise SurgeryError where `out` is in the source or in the Hub cache, or a file."""
    resolved = out.resolve()
    for folder, what in ((source.source.folder, "the source"), (_hub_cache(), "the Hub cache")):
        if folder and resolved.is_relative_to(Path(folder).resolve()):
            raise SurgeryError(
                f"the output {out} would be inside {what} {folder}",
                "give another folder with --out",
            )
    if out.is_symlink() and not out.exists():
        raise SurgeryError(
            f"the output {out} is a link to {out.readlink()}, which is not there",
            "make that folder, or give another with --out",
        )
    if out.exists() and not out.is_dir():
        raise SurgeryError(f"the output {out} is a file", "give a folder with --out")


def check_target(plan: Plan | None, out: Path, source: Checkpoint) -> None:
    """Raise SurgeryError unless `out` may be written: it is new, empty or an output of this plan.

    Without a plan any output of surgery will do.
    """
    check_place(out, source)
    # A run that was killed before the marker was written leaves these files at most.
    leftovers = {_partial(out / MARKER).name, LOCK, HELD}
    if not out.exists() or {p.name for p in out.iterdir()} <= leftovers:
        return
    begun = _fingerprint_of(out / MARKER)
    if begun is None and (finished := _fingerprint_of(out / RECORD)) is None:
        raise SurgeryError(
            f"the folder {out} is not empty and is not an output of surgery",
            "give a new folder with --out, or empty this one",
        )
    if plan is not None and (begun or finished) != plan.fingerprint:
        state = "unfinished" if begun else "finished"
        remove = command("rm", "-r", "--", out)
        raise SurgeryError(
            f"{out} holds the {state} output of another command, source or version",
            f"remove it ({remove}) or give another folder with --out",
        )


def is_finished(plan: Plan, out: Path) -> bool:
    """Return whether `out` holds the finished output of exactly this plan."""
    if not all(_has(out / s.name, s.nbytes) for s in plan.shards):
        return False
    if not all(_is_there(out / name) for name in plan.small) or (out / MARKER).exists():
        return False
    return _fingerprint_of(out / RECORD) == plan.fingerprint


def _fingerprint_of(file: Path) -> str | None:
    """Return the fingerprint in a marker or a record, or None where there is none."""
    try:
        data = files.read(file.parent, file.name, files.JSON_LIMIT)
        return str(read_json(data, "a marker", "")["fingerprint"])
    except (OSError, SurgeryError, KeyError, TypeError):
        return None


def _hub_cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or cache_home() / "hub").expanduser()


def check_space(plan: Plan, out: Path, transfer: Transfer) -> None:
    """Raise SurgeryError unless the shards still to be written fit on the disk.

    A shard that is written again stays until the new one is complete, so it needs its space twice.
    What is downloaded must fit as well, on the disk of the Hub cache.
    """
    finished = _finished(plan, out, transfer)
    todo = [s for s in plan.shards if s.name not in finished]
    # What a killed run left of an unfinished shard makes room for that shard.
    partials = [p for s in todo if (p := _partial(out / s.name)).is_file()]
    needed = sum(s.nbytes for s in todo if not (transfer.hardlink and s.verbatim))
    needed -= sum(p.stat().st_size for p in partials)
    fetched = bytes_on_disk(file for s in todo for file in sources(s))
    if not fetched or _disk(out) == _disk(_hub_cache()):
        downloads = f" with {fetched / 1e9:.2f} GB of downloads" if fetched else ""
        _require_space(out, needed + fetched, downloads, "--out")
    else:
        _require_space(out, needed, "", "--out")
        _require_space(_hub_cache(), fetched, " of downloads", "HF_HUB_CACHE")


def _require_space(folder: Path, needed: int, what: str, option: str) -> None:
    free = shutil.disk_usage(_existing(folder)).free
    if needed + SLACK > free:
        raise SurgeryError(
            f"{folder} needs {needed / 1e9:.2f} GB{what} and the disk has {free / 1e9:.2f} GB free",
            f"free some space, or give a folder on another disk with {option}",
        )


def sources(shard: Shard) -> Iterator[SourceFile]:
    """Yield the source files that a shard is made of, in the order in which they are read."""
    if shard.verbatim:
        yield shard.verbatim
    for _, tensor in shard.tensors:
        yield from (extent.file for extent in tensor.sources())


def _existing(folder: Path) -> Path:
    """Return the folder itself or the nearest parent that exists."""
    return next(p for p in (folder, *folder.resolve().parents) if p.exists())


def _disk(folder: Path) -> int:
    return _existing(folder).stat().st_dev


# --- a file ---------------------------------------------------------------------------------------


def _write_small(out: Path, name: str, data: bytes) -> None:
    """Write a file that is either complete or absent, and on the disk when this returns."""
    with _told(out / name):
        files.write(out, name, data)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn an OSError into a SurgeryError that names the file being written."""
    try:
        yield
    except OSError as e:
        other = e.filename and Path(e.filename).name != _partial(path).name
        where = f" ({e.filename})" if other else ""
        hint = "free some space" if e.errno in _FULL else "check the disk and the source"
        raise SurgeryError(
            f"cannot write {path}: {e.strerror or e}{where}",
            f"{hint}, then run the same command again",
        ) from e


def _partial(path: Path) -> Path:
    return path.with_name(files.partial_name(path.name))


def _has(path: Path, size: int) -> bool:
    return _is_there(path) and path.stat().st_size == size


def _is_there(path: Path) -> bool:
    """Return whether there is a file, not a link to one: surgery makes no links."""
    return path.is_file() and not path.is_symlink()


def _appears(path: Path, size: int | None, group: Group) -> bool:
    """Return whether a file is there, with `size` bytes where that is given.

    With several processes this waits up to PATIENCE seconds for it, because another machine may
    have written it.
    """
    until = time.monotonic() + (PATIENCE if group.size > 1 else 0.0)
    while True:
        there = _is_there(path) if size is None else _has(path, size)
        if there or time.monotonic() >= until:
            return there
        time.sleep(1)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        # Not every network file system can sync a folder.
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _write_shard(shard: Shard, out: Path, transfer: Transfer, progress: Progress) -> Digest | None:
    """Write one shard under a temporary name, sync it, rename it, and return its digest.

    The digest is None where it was not asked for, and for a link.
    """
    partial, digest = _partial(out / shard.name), None
    with _told(out / shard.name):
        partial.unlink(missing_ok=True)  # a link would be written through
        if transfer.hardlink and shard.verbatim and _link(shard.verbatim, partial):
            progress(shard.nbytes)
        else:
            digest = stream(shard, partial, transfer.hashed, progress)
            if digest:
                files.write(out, digest_name(shard.name), dump(digest))
        partial.replace(out / shard.name)
    return digest


def _link(source: SourceFile, partial: Path) -> bool:
    """Return whether `partial` could be made a hard link to the source's file.

    It is a link to the file itself, not to a symlink in the Hub cache. On another file system it
    cannot be made.
    """
    try:
        os.link(source.path().resolve(), partial)
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        return False
    return True
