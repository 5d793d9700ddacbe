"""Sources on the Hugging Face Hub: a repository, pinned to a commit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError
from surgery.storage.local import open_folder
from surgery.storage.patience import patiently, status_of
from surgery.storage.staging import KEEP, Staging
from surgery.storage.store import File, Store


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a Hub repository at a commit.

    Args:
        name: its name in the repository.
        size: bytes.
        identity: the repository and the commit.
        repo: the repository's id.
        commit: the commit's hash.
        blob: the name of its content in the Hub cache; all commits with the same content share it.
        staging: where it is downloaded to unless the cache has it, and from where it is removed
            again; None downloads into the cache.
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
        """Return the bytes that `path` would download: all of the file or none."""
        blob = _cache_folder() / f"models--{self.repo.replace('/', '--')}" / "blobs" / self.blob
        return 0 if blob.is_file() else self.size

    def path(self) -> Path:
        """Return the file on this disk, downloading it first where it is not there."""
        from huggingface_hub import hf_hub_download

        if self.staging and self.missing:
            return self.staging.path(self.name, self.size, self.identity, self._fetch)
        with hub_errors(self.repo):
            return Path(hf_hub_download(self.repo, self.name, revision=self.commit))

    def _fetch(self, target: Path) -> None:
        from huggingface_hub import hf_hub_download

        with hub_errors(self.repo):
            # The client chooses the file's name, so it gets a folder of its own.
            folder = target.with_name(f".{target.name}.folder")
            fetched = hf_hub_download(self.repo, self.name, revision=self.commit, local_dir=folder)
            Path(fetched).replace(target)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) by a range request."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        # One request for just these bytes: HfFileSystem makes three and reads 5 MB ahead.
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
        with hub_errors(self.repo):
            url = hf_hub_url(self.repo, self.name, revision=self.commit)
            answer = http_backoff("GET", url, headers=headers)
            hf_raise_for_status(answer)
            return bytes(answer.content)


def open_hub(repo: str, revision: str | None, stream: bool = False) -> Store:
    """Return the files of a Hub repository, pinned to a commit.

    With HF_HUB_OFFLINE set they are those in the cache.

    Args:
        repo: the repository's id.
        revision: a branch, tag or commit; by default main.
        stream: whether shards are downloaded each time they are read, and do not stay.

    Raises SurgeryError where the repository or the revision cannot be had.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    if constants.HF_HUB_OFFLINE:
        return _open_cached(repo, revision)
    with hub_errors(repo, revision):
        api = HfApi()
        info = patiently(lambda: api.model_info(repo, revision=revision, files_metadata=True))
        commit = str(info.sha)
        staging = Staging(f"{repo}@{commit}", KEEP) if stream else None
        files: dict[str, File] = {}
        for s in info.siblings or ():
            staged = staging if s.rfilename.endswith(".safetensors") else None
            files[s.rfilename] = HubFile(
                s.rfilename, s.size or 0, f"{repo}@{commit}", repo, commit, _blob(s), staged
            )
        if config := next((n for n in _CONFIGS if n in files), None):
            # By the branch's name, so that the cache still knows the branch when offline.
            hf_hub_download(repo, config, revision=revision)
    return Store(repo, commit, _cache_folder(), files)


def _open_cached(repo: str, revision: str | None) -> Store:
    path = Path(_cached_config(repo, revision)).parent
    store = open_folder(path, location=repo, revision=path.name)
    return Store(repo, path.name, _cache_folder(), store.files, path)


# The file that every checkpoint has, by its form.
_CONFIGS = ("config.json", "params.json")


def _cached_config(repo: str, revision: str | None) -> str:
    """Return where the cache has the config of a repository."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = (try_to_load_from_cache(repo, name, revision=revision) for name in _CONFIGS)
    if cached := next((f for f in found if isinstance(f, str)), None):
        return cached
    with hub_errors(repo, revision):
        # Not snapshot_download, which also wants the formats that are never downloaded.
        return str(hf_hub_download(repo, _CONFIGS[0], revision=revision, local_files_only=True))


def _blob(sibling: Any) -> str:
    """Return a file's ETag on the Hub: the sha256 of a large file, git's id of a small one."""
    return str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


# --- errors ---------------------------------------------------------------------------------------


class hub_errors:  # noqa: N801
    """A context that turns what `huggingface_hub` raises into a SurgeryError."""

    def __init__(self, repo: str, revision: str | None = None) -> None:
        self.repo, self.revision = repo, revision

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, SurgeryError):
            return
        reasons: tuple[object, ...] = (error,)
        if type(error).__name__ in ("LocalEntryNotFoundError", "RuntimeError"):
            # The cause says why nothing was downloaded or sent: the Hub is busy, or out of reach.
            reasons = (error.__cause__, error)
        for reason, (name, message, hint) in itertools.product(reasons, _HUB_ERRORS):
            if any(c.__name__ == name for c in type(reason).__mro__):
                message, hint = _by_status(reason, name) or (message, hint)
                raise SurgeryError(self._fill(message, reason), self._fill(hint, reason)) from error

    def _fill(self, text: str, reason: object) -> str:
        revision, status = self.revision or "main", status_of(reason)
        return text.format(repo=self.repo, revision=revision, status=status)


def _by_status(error: object, name: str) -> tuple[str, str] | None:
    """Return message and hint for an answer whose status says more than its exception class.

    These are refused writes, and answers that only have the general class.
    """
    request = getattr(getattr(error, "response", None), "request", None)
    if getattr(request, "method", "GET") in ("POST", "PUT") and status_of(error) in _NOT_WRITTEN:
        return _NOT_WRITTEN[status_of(error)]
    return _STATUSES.get(status_of(error)) if name == "HfHubHTTPError" else None


_LOGIN = "run `hf auth login` or set HF_TOKEN, with"
# By status, where something was to be written.
_NOT_WRITTEN = {
    401: (
        "this account may not write to {repo}: there is no valid token",
        f"{_LOGIN} a token that may write",
    ),
    403: (
        "this account may not write to {repo}: its token has no right to",
        f"{_LOGIN} a token of the role write, or of a repository of your own",
    ),
}
# By status, of an exception without a class of its own.
_STATUSES = {
    401: (
        "the Hub does not know the token that {repo} was asked for with",
        f"{_LOGIN} a valid one",
    ),
    403: (
        "this account may not read {repo}",
        "accept its terms on its page on the Hub if it is gated, and give a token that may read "
        "it: one that is fine-grained must name it",
    ),
    404: (
        "the Hub has nothing at the address asked for {repo}",
        "check the name; for a private model run `hf auth login` or set HF_TOKEN",
    ),
    413: (
        "a file for {repo} is too large for the Hub (413)",
        "convert it again with smaller shards, like --max-shard-size 5GB, and push that",
    ),
}
# The exception's class, the message and the hint. The first row that names one of the exception's
# classes is taken, so narrow classes come first: a gated repository is also one that is "not
# found", and a file that is absent from the cache is also an entry that is absent.
_HUB_ERRORS = (
    (
        "GatedRepoError",
        "{repo} is gated and this account has no access",
        "ask for access on its page on the Hub, then run `hf auth login` or set HF_TOKEN",
    ),
    ("DisabledRepoError", "{repo} is disabled on the Hub", "choose another model"),
    (
        "RepositoryNotFoundError",
        "no model {repo} on the Hub, and no such folder",
        "check the name; for a private model run `hf auth login` or set HF_TOKEN",
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
        "it was asked several times; try again later: 429 means too many requests, 5xx a Hub that "
        "is busy; SURGERY_DEBUG=1 shows the answer",
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
