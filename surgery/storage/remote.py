"""Checkpoints at a URL of one of PROTOCOLS: s3://, gs://, abfs://, sftp://, … (by fsspec).

Headers are read by range requests, and the files that are converted are downloaded one by one. An
output is uploaded when it is finished, with config.json near the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.checkpoint import Progress
from surgery.checkpoint.parsing import Unreadable, read_json
from surgery.errors import SurgeryError
from surgery.files import open_below
from surgery.storage.record import RECORD, listed
from surgery.storage.staging import Staging

MARKER = "surgery.partial.json"
# The files that make a folder a model are uploaded last, in this order.
LAST = ("model.safetensors.index.json", "config.json", RECORD)
# Of what fsspec knows, the protocols that only transfer bytes from one place.
PROTOCOLS = (
    "s3",
    "gs",
    "gcs",
    "az",
    "abfs",
    "hf",
    "https",
    "http",
    "sftp",
    "memory",
)
_ALLOWED = f"give a folder, a Hub id, or a URL with {', '.join(p + '://' for p in PROTOCOLS[:-1])}"
# Where the file systems of fsspec say that a file has changed.
STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL.

    Args:
        name: its name relative to the checkpoint.
        size: bytes.
        identity: a text that changes whenever the content may.
        url: where it is.
        staging: where it is downloaded to.
    """

    name: str
    size: int
    identity: str
    url: str
    staging: Staging = field(compare=False)

    def path(self) -> Path:
        """Return the file on this disk, downloading it first where it is not there."""
        return self.staging.path(self.name, self.size, self.identity, self._fetch)

    def _fetch(self, target: Path) -> None:
        with _errors(self.url):
            system, path = _open(self.url)
            system.get_file(path, str(target))

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) by a range request."""
        with _errors(self.url):
            system, path = _open(self.url)
            return bytes(system.cat_file(path, start=start, end=stop))


def require_known(url: str) -> None:
    """Raise SurgeryError unless a URL has one of PROTOCOLS, and nothing but a place behind it.

    fsspec knows protocols that open other URLs, by `::` or by what a file says, and some run code
    that they find there.
    """
    if "::" in url:
        raise chained(url)
    scheme = url.partition("://")[0]
    if scheme not in PROTOCOLS:
        raise SurgeryError(f"{scheme}:// is not supported: {url}", _ALLOWED)


def chained(location: str) -> SurgeryError:
    """Return the error for a location that names one inside another."""
    return SurgeryError(f"{location} is a chain of locations, which is not supported", _ALLOWED)


def list_files(url: str, staging: Staging) -> dict[str, RemoteFile]:
    """Return the files below a URL by name, two levels deep and without hidden ones.

    Raises SurgeryError where there are none.
    """
    with _errors(url):
        system, root = _open(url)
        found = system.find(root, maxdepth=2, detail=True)
    prefix = root.rstrip("/") + "/"
    files: dict[str, RemoteFile] = {}
    for path, info in found.items():
        name = path.removeprefix(prefix)
        if path.startswith(prefix) and not any(part.startswith(".") for part in name.split("/")):
            stamp = next((str(info[s]) for s in STAMPS if info.get(s)), "")
            identity = f"{url}/{name}@{info['size']}-{stamp}"
            where = f"{url.rstrip('/')}/{name}"
            files[name] = RemoteFile(name, int(info["size"]), identity, where, staging)
    if not files:
        raise SurgeryError(
            f"no files at {url}",
            "give the URL of the folder that holds config.json and the weights",
        )
    return files


def has_output(url: str, fingerprint: str) -> bool:
    """Return whether a URL holds the finished output of the plan with this fingerprint.

    Raises SurgeryError where it holds something else.
    """
    with _errors(url):
        system, root = _open(url)
        if not system.exists(root) or not system.find(root):
            return False
        begun, finished = (_fingerprint(system, f"{root}/{name}") for name in (MARKER, RECORD))
    if fingerprint not in (begun, finished):
        raise SurgeryError(
            f"{url} is not empty and does not hold the output of this command",
            "give another URL with --out",
        )
    return begun is None


def upload(
    folder: Path, url: str, record: Mapping[str, Any], progress: Progress = lambda n: None
) -> None:
    """Upload the files of an output, without the shards that are there already.

    Args:
        folder: the output on this disk.
        url: where it goes.
        record: of the output. What it lists is sent and nothing else; its fingerprint tells whether
            an interrupted upload was of the same output.
        progress: told the bytes of each file that is there.

    Raises SurgeryError, before anything is sent, where a file is missing or a link.
    """
    names = sorted(listed(record), key=lambda n: (LAST.index(n) if n in LAST else -1, n))
    sizes, fingerprint = sizes_of(folder, record), record["fingerprint"]
    with _errors(url):
        system, root = _open(url)
        if _fingerprint(system, f"{root}/{MARKER}") != fingerprint:
            system.makedirs(root, exist_ok=True)
            system.pipe_file(f"{root}/{MARKER}", json.dumps({"fingerprint": fingerprint}).encode())
        for name in names:
            target = f"{root}/{name}"
            if name not in record["shards"] or not _has(system, target, sizes[name]):
                system.makedirs(target.rpartition("/")[0], exist_ok=True)
                system.put_file(str(folder / name), target)
            progress(sizes[name])
        system.rm_file(f"{root}/{MARKER}")


def sizes_of(folder: Path, record: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each file of an output.

    Raises SurgeryError where one is missing, and where it is a link.
    """
    return {name: _size(folder, name) for name in listed(record)}


def _size(folder: Path, name: str) -> int:
    try:
        with os.fdopen(open_below(folder, name), "rb") as f:
            return os.fstat(f.fileno()).st_size
    except FileNotFoundError:
        raise SurgeryError(f"{folder / name} is missing", "convert the model again") from None


def _has(system: Any, path: str, size: int) -> bool:
    return bool(system.exists(path) and system.info(path)["size"] == size)


def _fingerprint(system: Any, path: str) -> str | None:
    """Return the fingerprint in a marker or a record, or None where there is none."""
    try:
        return str(read_json(system.cat_file(path), "a marker", "")["fingerprint"])
    except (OSError, Unreadable, KeyError, TypeError):
        return None


def _open(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path on it."""
    import fsspec

    require_known(url)
    system, path = fsspec.core.url_to_fs(url)
    return system, str(path).rstrip("/")


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turn what fsspec and its backends raise into a SurgeryError."""
    scheme = url.partition("://")[0]
    try:
        yield
    except ImportError as e:  # "Install s3fs to access S3"
        raise SurgeryError(
            f"{scheme}:// needs a package: {e}", "install it in the same environment"
        ) from e
    except FileNotFoundError as e:
        raise SurgeryError(f"nothing at {url}", "check the URL") from e
    except ValueError as e:
        if "Protocol not known" not in str(e):
            raise
        raise SurgeryError(f"{scheme}:// is not known to this fsspec: {e}", _ALLOWED) from e
    except OSError as e:
        reason = str(e).partition("\n")[0] or type(e).__name__
        raise SurgeryError(
            f"{url} cannot be reached: {reason[:200]}",
            "check the URL, the credentials and the network",
        ) from e
