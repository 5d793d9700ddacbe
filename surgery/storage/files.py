"""Where a source's files are: a folder on this disk, a Hub repository pinned to a commit, or a
URL.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.checkpoint.tensors import SourceFile
from surgery.errors import SurgeryError, UsageError
from surgery.storage.remote import RemoteFile, is_url, list_files
from surgery.storage.staging import KEEP, Staging


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this disk. The identity of a file of a pinned commit is the commit, elsewhere size
    and change time.
    """

    name: str
    size: int
    identity: str
    location: Path

    def path(self) -> Path:
        return self.location

    def read(self, start: int, stop: int) -> bytes:
        with self.location.open("rb") as f:
            f.seek(start)
            return f.read(stop - start)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a Hub repository at a commit. Its header is read by range requests; `path`
    downloads it once.

    `blob` is the name of its content in the hub cache, which every commit that has the same content
    shares. With `staging` it is fetched there, unless the cache has it, and does not stay.
    """

    name: str
    size: int
    identity: str
    repo: str
    commit: str
    blob: str = ""
    staging: Staging | None = field(default=None, compare=False)

    @property
    def missing(self) -> int:
        """The bytes that `path` would fetch: all or none."""
        blob = _cache_folder() / f"models--{self.repo.replace('/', '--')}" / "blobs" / self.blob
        return 0 if blob.is_file() else self.size

    def path(self) -> Path:
        from huggingface_hub import hf_hub_download

        if self.staging and self.missing:
            return self.staging.path(self.name, self.size, self.identity, self._fetch)
        with hub_errors(self.repo):
            return Path(hf_hub_download(self.repo, self.name, revision=self.commit))

    def _fetch(self, target: Path) -> None:
        from huggingface_hub import hf_hub_download

        with hub_errors(self.repo):
            folder = target.with_name(f".{target.name}.folder")  # the client names the file itself
            Path(
                hf_hub_download(self.repo, self.name, revision=self.commit, local_dir=folder)
            ).replace(target)

    def read(self, start: int, stop: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        # One request of just these bytes: HfFileSystem makes three, and reads 5 MB ahead.
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
        with hub_errors(self.repo):
            answer = http_backoff(
                "GET", hf_hub_url(self.repo, self.name, revision=self.commit), headers=headers
            )
            hf_raise_for_status(answer)
            return bytes(answer.content)


File = LocalFile | HubFile | RemoteFile


@dataclass(frozen=True, slots=True)
class Store:
    """The files of one checkpoint, by name. `folder` is what no output may touch: its own, or the
    hub cache.
    """

    location: str
    revision: str | None
    folder: Path | None
    files: dict[str, File]


def open_folder(
    path: Path, *, location: str = "", revision: str | None = None, only: str | None = None
) -> Store:
    """The files below `path`, hidden ones left out; `only` names the one weight file where the user
    named a file.
    """
    files: dict[str, File] = {}
    for p in sorted(
        (*path.glob("*"), *path.glob("*/*"))
    ):  # no deeper: MODEL may be a home folder by mistake
        name = p.relative_to(path).as_posix()
        if (
            name.startswith(".")
            or "/." in name
            or not p.is_file()
            or (only and _is_weights(name) and name != only)
        ):
            continue
        stat = p.stat()
        identity = f"{location}@{revision}" if revision else f"{stat.st_size}-{stat.st_mtime_ns}"
        files[name] = LocalFile(name, stat.st_size, identity, p)
    return Store(location or str(path), revision, path, files)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".index.json"))


def open_store(location: str, revision: str | None = None, stream: bool = False) -> Store:
    """The files of a folder, of the folder of a single weight file, of a Hub id with an optional
    `@revision`, or of a URL.

    `stream`: shards that are elsewhere are fetched when they are read and do not stay.
    """
    if is_url(location):
        if revision:
            raise SurgeryError(
                f"{location} is a URL: it has no revision {revision!r}", "leave --revision out"
            )
        return Store(
            location,
            None,
            None,
            {**list_files(location, Staging(location, KEEP if stream else None))},
        )
    path = Path(location).expanduser()
    if path.is_dir():
        if revision:
            raise SurgeryError(
                f"{location} is a folder: it has no revision {revision!r}", "leave --revision out"
            )
        return open_folder(path)
    if path.is_file():
        return open_folder(path.parent, location=str(path), only=path.name)
    repo, _, tail = location.partition("@")
    if (
        location.startswith((".", "/", "~"))
        or repo.count("/") > 1
        or path.suffix in (".safetensors", ".bin", ".gguf")
    ):
        raise SurgeryError(
            f"no file or folder {location}",
            "give a folder, a weight file or a Hub id such as Qwen/Qwen3-8B",
        )
    if tail and revision and tail != revision:
        raise UsageError(
            f"{location} and --revision {revision} name two revisions", "give one of them"
        )
    return open_hub(repo, tail or revision, stream)


def open_hub(repo: str, revision: str | None, stream: bool = False) -> Store:
    """The files of a Hub repository, pinned to the commit that `revision` (default: main) now
    names.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    if constants.HF_HUB_OFFLINE:
        return _open_cached(repo, revision)
    with hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        commit = str(info.sha)
        staging = Staging(f"{repo}@{commit}", KEEP) if stream else None
        files: dict[str, File] = {}
        for s in info.siblings or ():
            staged = staging if s.rfilename.endswith(".safetensors") else None
            files[s.rfilename] = HubFile(
                s.rfilename, s.size or 0, f"{repo}@{commit}", repo, commit, _blob(s), staged
            )
        if (
            "config.json" in files
        ):  # by the branch's name, so that the cache knows the branch when the Hub is off
            hf_hub_download(repo, "config.json", revision=revision)
    return Store(repo, commit, _cache_folder(), files)


def _blob(sibling: Any) -> str:
    """What the Hub gives as the file's ETag: sha256 of a large file, git's id of a small one."""
    return str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def bytes_to_fetch(files: Iterable[SourceFile]) -> int:
    """What is downloaded to read these files, each of them once."""
    return sum(_missing(f) for f in set(files))


def bytes_on_disk(files: Iterable[SourceFile]) -> int:
    """What fetching these files occupies at most on the disk of the caches: of streamed shards the
    largest few alone.
    """
    missing: dict[Staging | None, list[int]] = {}
    for f in set(files):
        missing.setdefault(getattr(f, "staging", None), []).append(_missing(f))
    return sum(
        sum(sorted(sizes, reverse=True)[: staging.keep if staging else None])
        for staging, sizes in missing.items()
    )


def bytes_streamed(order: Iterable[SourceFile]) -> int:
    """What is downloaded to read streamed shards in this order, again where one had to leave
    meanwhile.
    """
    total, held = 0, dict[SourceFile, None]()
    for file in order:
        if file not in held:
            total += _missing(file)
            if len(held) == KEEP:
                del held[next(iter(held))]
        held.pop(file, None)
        held[file] = None
    return total


def is_streamed(file: SourceFile) -> bool:
    """Whether it may have to be fetched again each time that the source is read."""
    staging = getattr(file, "staging", None)
    return staging is not None and staging.keep is not None


def _missing(file: SourceFile) -> int:
    return (
        file.missing
        if isinstance(file, HubFile)
        else file.size
        if isinstance(file, RemoteFile)
        else 0
    )


def _open_cached(repo: str, revision: str | None) -> Store:
    from huggingface_hub import hf_hub_download

    with hub_errors(
        repo, revision
    ):  # not snapshot_download, which wants the formats that are never fetched too
        path = Path(
            hf_hub_download(repo, "config.json", revision=revision, local_files_only=True)
        ).parent
    store = open_folder(path, location=repo, revision=path.name)
    return Store(repo, path.name, _cache_folder(), store.files)


class hub_errors:  # noqa: N801
    """Turns what `huggingface_hub` raises into one clear line. Narrow classes first: a gated
    repository is also a "not found" one, a file absent from the cache also an absent entry."""

    def __init__(self, repo: str, revision: str | None = None) -> None:
        self.repo, self.revision = repo, revision

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, SurgeryError):
            return
        reasons: tuple[object, ...] = (error,)
        if type(error).__name__ in ("LocalEntryNotFoundError", "RuntimeError"):
            reasons = (
                error.__cause__,
                error,
            )  # why it was not fetched or sent: the Hub is busy, or out of reach
        for reason, (name, message, hint) in itertools.product(reasons, _HUB_ERRORS):
            if any(c.__name__ == name for c in type(reason).__mro__):
                if _refused(reason):
                    raise SurgeryError(
                        f"this account may not write to {self.repo}",
                        "`hf auth login` or set HF_TOKEN, with a token that may write",
                    ) from error
                status = getattr(getattr(reason, "response", None), "status_code", "")
                text = message.format(
                    repo=self.repo, revision=self.revision or "main", status=status
                )
                raise SurgeryError(text, hint.format(repo=self.repo)) from error


def _refused(error: object) -> bool:
    """Whether the Hub did not let this account write."""
    response = getattr(error, "response", None)
    request = getattr(response, "request", None)
    return getattr(response, "status_code", 0) in (401, 403) and getattr(
        request, "method", "GET"
    ) in ("POST", "PUT")


# exception, message, hint: first match along the exception's classes
_HUB_ERRORS = (
    (
        "GatedRepoError",
        "{repo} is gated and this account has no access",
        "ask for access on its page on the Hub, then `hf auth login` or set HF_TOKEN",
    ),
    ("DisabledRepoError", "{repo} is disabled on the Hub", "choose another model"),
    (
        "RepositoryNotFoundError",
        "no model {repo} on the Hub, and no such folder",
        "check the name; for a private one `hf auth login` or set HF_TOKEN",
    ),
    (
        "RevisionNotFoundError",
        "{repo} has no revision {revision!r}",
        "give a branch, tag or commit of {repo}",
    ),
    (
        "HFValidationError",
        "no folder {repo}, and not a Hub id",
        "give a folder, a weight file or an id such as Qwen/Qwen3-8B",
    ),
    (
        "LocalEntryNotFoundError",
        "{repo} is not in the cache at {revision}, and the Hub is off or out of reach",
        "unset HF_HUB_OFFLINE, or check the network",
    ),
    (
        "EntryNotFoundError",
        "{repo} lacks a file that its listing names",
        "try again; the repository may have just changed",
    ),
    (
        "OfflineModeIsEnabled",
        "HF_HUB_OFFLINE is set and {repo} is not in the cache",
        "unset HF_HUB_OFFLINE",
    ),
    (
        "HfHubHTTPError",
        "the Hub answers with error {status} for {repo}",
        "try again later: 429 is too many requests, 5xx a Hub that is busy; SURGERY_DEBUG=1 shows the answer",
    ),
    (
        "TransportError",
        "cannot reach the Hub for {repo}",
        "check the network, or use a model in a folder on this disk",
    ),
    (
        "ConnectionError",
        "cannot reach the Hub for {repo}",
        "check the network, or use a model in a folder on this disk",
    ),
    (
        "OSError",
        "reading {repo} from the Hub failed",
        "check the network and the disk; SURGERY_DEBUG=1 shows the cause",
    ),
)
