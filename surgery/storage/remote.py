"""Checkpoints at a URL that fsspec knows: s3://, gs://, abfs://, sftp://, memory://, … Read by
ranges for headers, fetched file by file for what is converted; an output is put there whole,
config.json near the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.checkpoint import Progress
from surgery.errors import SurgeryError
from surgery.storage.staging import Staging

MARKER, RECORD = "surgery.partial.json", "surgery.json"
LAST = (
    "model.safetensors.index.json",
    "config.json",
    RECORD,
)  # what makes a folder a model comes last
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
    """A file at a URL; its header is read by range requests, `path` stages it on this disk."""

    name: str
    size: int
    identity: str
    url: str
    staging: Staging = field(compare=False)

    def path(self) -> Path:
        return self.staging.path(self.name, self.size, self.identity, self._fetch)

    def _fetch(self, target: Path) -> None:
        with _errors(self.url):
            system, path = _open(self.url)
            system.get_file(path, str(target))

    def read(self, start: int, stop: int) -> bytes:
        with _errors(self.url):
            system, path = _open(self.url)
            return bytes(system.cat_file(path, start=start, end=stop))


def is_url(location: str) -> bool:
    return "://" in location


def list_files(url: str, staging: Staging) -> dict[str, RemoteFile]:
    """The files below a URL, two levels deep, by name. Raises SurgeryError where there are none."""
    with _errors(url):
        system, root = _open(url)
        found = system.find(root, maxdepth=2, detail=True)
    prefix = root.rstrip("/") + "/"
    files: dict[str, RemoteFile] = {}
    for path, info in found.items():
        name, stamp = (
            path.removeprefix(prefix),
            next((str(info[s]) for s in STAMPS if info.get(s)), ""),
        )
        if path.startswith(prefix) and not any(part.startswith(".") for part in name.split("/")):
            identity = f"{url}/{name}@{info['size']}-{stamp}"
            files[name] = RemoteFile(
                name, int(info["size"]), identity, f"{url.rstrip('/')}/{name}", staging
            )
    if not files:
        raise SurgeryError(
            f"no files at {url}",
            "give the URL of the folder that holds config.json and the weights",
        )
    return files


def has_output(url: str, fingerprint: str) -> bool:
    """Whether the finished output of that fingerprint is there. Raises SurgeryError where something
    else is.
    """
    with _errors(url):
        system, root = _open(url)
        if not system.exists(root) or not system.find(root):
            return False
        begun, finished = (_fingerprint(system, f"{root}/{name}") for name in (MARKER, RECORD))
    if fingerprint not in (begun, finished):
        raise SurgeryError(
            f"{url} is not empty and holds no output of this command", "give another URL with --out"
        )
    return begun is None


def upload(folder: Path, url: str, fingerprint: str, progress: Progress = lambda n: None) -> None:
    """Put the files of an output there; shards that an interrupted upload of the same output has
    put are kept.
    """
    files = [
        p
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith(".") and p.name != MARKER
    ]
    files.sort(key=lambda p: (LAST.index(p.name) if p.name in LAST else -1, p.as_posix()))
    with _errors(url):
        system, root = _open(url)
        if _fingerprint(system, f"{root}/{MARKER}") != fingerprint:
            system.makedirs(root, exist_ok=True)
            system.pipe_file(f"{root}/{MARKER}", json.dumps({"fingerprint": fingerprint}).encode())
        for path in files:
            target, size = f"{root}/{path.relative_to(folder).as_posix()}", path.stat().st_size
            there = (
                path.suffix == ".safetensors"
                and system.exists(target)
                and system.info(target)["size"] == size
            )
            if not there:
                system.makedirs(target.rpartition("/")[0], exist_ok=True)
                system.put_file(str(path), target)
            progress(size)
        system.rm_file(f"{root}/{MARKER}")


def _fingerprint(system: Any, path: str) -> str | None:
    try:
        return str(json.loads(system.cat_file(path))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return system, str(path).rstrip("/")


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """What fsspec and its backends raise, as one line."""
    scheme = url.partition("://")[0]
    try:
        yield
    except ImportError as e:  # "Install s3fs to access S3"
        raise SurgeryError(f"{scheme}:// needs a package: {e}", "install it beside surgery") from e
    except FileNotFoundError as e:
        raise SurgeryError(f"nothing at {url}", "check the URL") from e
    except ValueError as e:
        if "Protocol not known" not in str(e):
            raise
        raise SurgeryError(
            f"{scheme}:// is no protocol that fsspec knows",
            "give a folder, a Hub id, or a URL like s3://bucket/name",
        ) from e
    except OSError as e:
        reason = str(e).partition("\n")[0] or type(e).__name__
        raise SurgeryError(
            f"{url} cannot be reached: {reason[:200]}",
            "check the URL, the credentials and the network",
        ) from e
