"""Publish an output on the Hub: only after its verification passed, and never half of it.

Files go to a pull request, which is merged when all of them are there and are what was recorded.
`main` is therefore the model before or the model after. An interrupted push goes on in the same
pull request, and what the Hub has already is not sent again.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from surgery import finetune as training
from surgery.errors import SurgeryError
from surgery.files import read
from surgery.quoting import code, command, printable
from surgery.report import card
from surgery.storage import finish
from surgery.storage.hub import hub_errors
from surgery.storage.lock import HELD, LOCK
from surgery.storage.patience import patiently
from surgery.storage.record import RECORD, changed, listed
from surgery.workflow.observer import Observer, Silent
from surgery.workflow.record import read_record

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SHOWN = 10  # names in a note
# Files of another model by these names must not stay beside ours.
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """What a push did, or would do.

    Args:
        repo: the repository.
        files: all files of the output with their bytes.
        send: those that the Hub lacks.
        delete: files of another model that must not stay.
        url: of the repository, or of the pull request that is open.
        pull_request: its number; None where there was nothing to send.
        merged: whether it was merged.
        compared: whether the files were compared with those of the Hub.
        notes: what the user should know.
    """

    repo: str
    files: Mapping[str, int]
    send: tuple[str, ...]
    delete: tuple[str, ...]
    url: str
    pull_request: int | None = None
    merged: bool = False
    compared: bool = True
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes that are sent."""
        return sum(self.files[name] for name in self.send)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {
            "repo": self.repo,
            "url": self.url,
            "bytes": self.nbytes,
            "pull_request": self.pull_request,
            "merged": self.merged,
            "compared": self.compared,
            "files": [
                {"name": n, "bytes": b, "send": n in self.send} for n, b in self.files.items()
            ],
            "delete": list(self.delete),
            "notes": list(self.notes),
        }


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    pr: bool = False,
    dry_run: bool = False,
    observer: Observer | None = None,
) -> Pushed:
    """Publish the output in `folder` as `repo`.

    Args:
        folder: an output that passed its verification.
        repo: OWNER/NAME.
        private: create a private repository.
        pr: leave the pull request open for somebody to look at.
        dry_run: send nothing. The Hub is only asked what it has where there is a token for it.
        observer: is told of each stage.

    Raises SurgeryError for an output that is not verified, or no longer what was verified.
    """
    from huggingface_hub import HfApi

    observer, api = observer or Silent(), HfApi()
    if dry_run:
        return _planned(api, folder, repo, private)
    require_token(repo)
    record = require_verified(folder)
    finish(folder, record, card.renamed(folder, repo))
    with hub_errors(repo):
        remote = _tree(api, repo, "main")
        plan = _plan(api, folder, record, repo, remote or {})
        _require_private(api, repo, private and remote is not None)
        if remote is not None and not plan.send and not plan.delete:
            return plan
        if remote is None:
            api.create_repo(repo, private=private or None)
        return _through_pull_request(api, folder, record, plan, pr, observer)


def _planned(api: HfApi, folder: Path, repo: str, private: bool) -> Pushed:
    """Return what a push would do; without a token or a network, nothing is compared."""
    from huggingface_hub import get_token

    record = require_verified(folder)
    plan = _plan(api, folder, record, repo, {})
    if get_token() is None:
        return _not_compared(plan, "there is no token")
    try:
        with hub_errors(repo):  # asked first, since a listing is tried for 20 s without a network
            known = patiently(lambda: api.repo_exists(repo))
            remote = _tree(api, repo, "main") if known else None
    except SurgeryError as error:
        return _not_compared(plan, error.message)
    with hub_errors(repo):
        _require_private(api, repo, private and remote is not None)
    return _plan(api, folder, record, repo, remote or {})


def _not_compared(plan: Pushed, why: str) -> Pushed:
    note = f"not compared with the Hub, which may have some of the files: {why}"
    return dataclasses.replace(plan, compared=False, notes=(note, *plan.notes))


def _plan(
    api: HfApi, folder: Path, record: Mapping[str, Any], repo: str, remote: Mapping[str, str]
) -> Pushed:
    """Return what is to be sent to a repository that has these files."""
    files = listing(folder, record)
    return Pushed(
        repo=repo,
        files=files,
        send=_differ(folder, files, record, remote),
        delete=_stale(files, remote),
        url=f"{api.endpoint}/{repo}",
        notes=(*_left_out(folder, files), *_notes(folder)),
    )


def _require_private(api: HfApi, repo: str, wanted: bool) -> None:
    """Raise SurgeryError where something private would go to a public repository."""
    if wanted and not patiently(lambda: api.model_info(repo)).private:
        raise SurgeryError(
            f"{repo} is there and public", "make it private in its settings, or leave --private out"
        )


def require_token(repo: str) -> None:
    """Raise SurgeryError where nobody is logged in."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise SurgeryError(
            f"pushing to {repo} needs a token of the Hub", "`hf auth login`, or set HF_TOKEN"
        )


def require_verified(folder: Path) -> dict[str, Any]:
    """Return the record of an output.

    Raises SurgeryError unless its verification passed, its shards have the recorded sizes, and its
    other files the recorded content. The card and the recipe may be edited, which push asks for.
    """
    record = read_record(folder)
    verification = record.get("verification")
    if not (verification or {}).get("passed"):
        state = "has not passed its verification" if verification else "is not verified"
        check = command("surgery", "verify", record["source"]["location"], folder)
        raise SurgeryError(f"{folder} {state}", f"only what is proved is published: {check}")
    for name, shard in record["shards"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            raise SurgeryError(f"{path} is not what was verified", "convert the model again")
    _require_unchanged(folder, record)
    return record


def _require_unchanged(folder: Path, record: Mapping[str, Any]) -> None:
    if not record.get("files"):
        raise SurgeryError(
            f"the {RECORD} of {folder} does not list its files, so that they cannot be checked",
            "it is of an older version of surgery: convert the model again",
        )
    for name in changed(folder, record):
        if not (folder / name).exists():
            raise SurgeryError(f"{folder / name} is missing", "convert the model again")
        if name in card.EDITABLE:
            continue
        again = command("surgery", "finetune-script", folder)
        script = name.startswith(f"{training.FOLDER}/")
        raise SurgeryError(
            f"{folder / name} is not what was written",
            f"write it again: {again}" if script else "restore it, or convert the model again",
        )


def listing(folder: Path, record: Mapping[str, Any]) -> dict[str, int]:
    """Return the files that are published with their bytes: those that the record lists, and it."""
    return {name: (folder / name).lstat().st_size for name in listed(record)}


def strangers(folder: Path, known: Collection[str]) -> list[str]:
    """Return what else lies in an output: files, links, and folders (with a slash) as one."""
    parents = {parent.as_posix() for name in known for parent in PurePosixPath(name).parents}
    found = []
    for place in sorted(parents):
        for path in (folder / place).iterdir():
            name = (PurePosixPath(place) / path.name).as_posix()
            if name not in known and name not in parents and path.name not in (LOCK, HELD):
                found.append(f"{name}/" if path.is_dir() and not path.is_symlink() else name)
    return sorted(found)


# --- what is to be done ---------------------------------------------------------------------------


def _tree(api: HfApi, repo: str, revision: str) -> dict[str, str] | None:
    """Return the hash of each file on the Hub; None where there is no such repository."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        found = patiently(lambda: list(api.list_repo_tree(repo, recursive=True, revision=revision)))
    except RevisionNotFoundError:
        return {}  # a repository without a commit
    except RepositoryNotFoundError as e:
        if type(e) is not RepositoryNotFoundError:  # gated, disabled
            raise
        return None
    return {f.path: (f.lfs.sha256 if f.lfs else f.blob_id) for f in found if hasattr(f, "blob_id")}


def _differ(
    folder: Path, files: Iterable[str], record: Mapping[str, Any], remote: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the files that the Hub lacks, or has with another content.

    Shards are compared by the hash that was verified, and not read again.
    """
    return tuple(n for n in files if remote.get(n) not in _contents(folder, n, record))


def _contents(folder: Path, name: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the hashes that the Hub may give a file: sha256 if large, git's own if small."""
    if name in record["shards"]:
        return (str(record["shards"][name]["sha256"]),)
    data = read(folder, name)
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return (blob, hashlib.sha256(data).hexdigest())


def _stale(files: Mapping[str, int], remote: Mapping[str, str]) -> tuple[str, ...]:
    """Return weights of another model, which would be loaded beside ours or in their place."""
    return tuple(
        n
        for n in remote
        if n not in files and "/" not in n and any(Path(n).match(p) for p in WEIGHTS)
    )


def _left_out(folder: Path, files: Collection[str]) -> tuple[str, ...]:
    """Return a note of what lies in the folder and is not sent."""
    found = strangers(folder, files)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    names = ", ".join(printable(name) for name in found[:SHOWN])
    return (f"not sent, because surgery did not write it: {names}{more}",) if found else ()


def _notes(folder: Path) -> tuple[str, ...]:
    """Return what somebody should add to the card before it is public.

    Raises SurgeryError where the card is not UTF-8.
    """
    found = []
    text = read(folder, card.NAME) if (folder / card.NAME).exists() else b""
    try:
        head = text.decode().partition("\n---\n")[0]
    except UnicodeDecodeError:
        raise SurgeryError(
            f"{folder / card.NAME} is not UTF-8", "save it in UTF-8, which the Hub needs"
        ) from None
    if "\nbase_model:" not in head:
        found.append(
            "the source was a folder: add its Hub id as base_model to README.md, and as source to "
            "recipe.yaml"
        )
    if "\nlicense:" not in head:
        found.append("the source names no licence: add one to README.md")
    return tuple(found)


# --- doing it -------------------------------------------------------------------------------------


def _through_pull_request(
    api: HfApi,
    folder: Path,
    record: Mapping[str, Any],
    plan: Pushed,
    keep_open: bool,
    observer: Observer,
) -> Pushed:
    """Send the files to a pull request, check them there, and merge it."""
    title = f"surgery {record['fingerprint'][:12]}"
    number = _open_pull_request(api, plan.repo, title)
    if number is None:
        number = api.create_pull_request(plan.repo, title, description=code(record["command"])).num
    revision = f"refs/pr/{number}"
    there = _tree(api, plan.repo, revision) or {}
    with observer.stage("pushing", 0, "file") as progress:
        if _differ(folder, plan.files, record, there) or _stale(plan.files, there):
            stale = [glob.escape(n) for n in _stale(plan.files, there)] or None
            # What was sent before is not sent again.
            patiently(
                lambda: api.upload_folder(
                    repo_id=plan.repo,
                    folder_path=folder,
                    revision=revision,
                    commit_message=title,
                    allow_patterns=[glob.escape(n) for n in plan.files],
                    delete_patterns=stale,
                )
            )
        progress(len(plan.files))
    if wrong := _differ(folder, plan.files, record, _tree(api, plan.repo, revision) or {}):
        raise SurgeryError(
            f"the Hub has another {wrong[0]} than was verified ({len(wrong)} such); nothing was "
            "merged",
            f"run `surgery verify`, then push again: pull request {number} of {plan.repo} is still "
            "open",
        )
    pull = patiently(lambda: api.get_discussion_details(plan.repo, number))
    if pull.status == "draft":
        api.change_discussion_status(plan.repo, number, "open")
    if not keep_open:
        api.merge_pull_request(plan.repo, number)
    return dataclasses.replace(
        plan,
        pull_request=number,
        merged=not keep_open,
        url=f"{plan.url}/discussions/{number}" if keep_open else plan.url,
    )


def _open_pull_request(api: HfApi, repo: str, title: str) -> int | None:
    """Return the pull request that an interrupted push of the same output has left, if any."""
    found = patiently(lambda: list(api.get_repo_discussions(repo, discussion_type="pull_request")))
    return next((d.num for d in found if d.title == title and d.status in ("draft", "open")), None)
