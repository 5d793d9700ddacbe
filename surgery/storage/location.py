"""What a user may call a source: a folder, a weight file, a Hub id or a URL."""

from __future__ import annotations

from surgery.errors import SurgeryError, UsageError
from surgery.files import expanded, is_url
from surgery.storage.hub import open_hub
from surgery.storage.local import open_folder
from surgery.storage.remote import chained, list_files
from surgery.storage.staging import KEEP, Staging
from surgery.storage.store import Store


def open_store(location: str, revision: str | None = None, stream: bool = False) -> Store:
    """Return the files of a source.

    Args:
        location: a folder, a single weight file, a Hub id with an optional `@revision`, or a URL.
        revision: a branch, tag or commit of a Hub id.
        stream: whether shards that are not on this disk are downloaded each time they are read,
            and do not stay.

    Raises SurgeryError where there is no such source, UsageError where two revisions are named.
    """
    if is_url(location):
        _refuse_revision(location, "a URL", revision)
        return _open_url(location, stream)
    path = expanded(location)
    if path.is_dir():
        _refuse_revision(location, "a folder", revision)
        return open_folder(path)
    if path.is_file():
        return open_folder(path.parent, location=str(path), only=path.name)
    if "::" in location:
        raise chained(location)
    repo, _, tail = location.partition("@")
    weights = path.suffix in (".safetensors", ".bin", ".pth", ".gguf")
    if location.startswith((".", "/", "~")) or repo.count("/") > 1 or weights:
        raise SurgeryError(
            f"no file or folder {location}",
            "give a folder, a weight file or a Hub id such as Qwen/Qwen3-8B",
        )
    if tail and revision and tail != revision:
        raise UsageError(
            f"{location} and --revision {revision} name two revisions", "give one of them"
        )
    return open_hub(repo, tail or revision, stream)


def _refuse_revision(location: str, kind: str, revision: str | None) -> None:
    if revision:
        raise SurgeryError(
            f"{location} is {kind}: it has no revision {revision!r}", "leave --revision out"
        )


def _open_url(url: str, stream: bool) -> Store:
    staging = Staging(url, KEEP if stream else None)
    return Store(url, None, None, {**list_files(url, staging)})
