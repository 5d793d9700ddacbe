"""A Hub on localhost: it answers what `huggingface_hub` asks for, and counts the requests.

with FakeHub() as hub:
    commit = hub.add("owner/name", {"config.json": b"{}"})
    ... HF_ENDPOINT=hub.endpoint HF_HUB_DISABLE_XET=1 HF_HOME=tmp surgery inspect owner/name
    hub.served["owner/name/config.json"]  # bytes of its content that went over the wire
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_writes import ROUTES as WRITES
from hub_writes import Writes

Files = dict[str, bytes]


@dataclass(slots=True)
class Repository:
    """A repository of the Hub.

    Args:
        commits: the files of each commit, by its hash.
        refs: the commit of each branch and tag, by its name.
        gated: whether its files, but not its listing, are refused without a token.
        lost: the name of a file that is listed but not there.
        private: whether it is invisible without a token.
        pulls: its pull requests.
    """

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    lost: str = ""
    private: bool = False
    pulls: list[dict[str, Any]] = field(default_factory=list)


class RefusedError(Exception):
    """An answer other than 200; `code` tells the client which exception to raise."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class FakeHub:
    """The server, with its repositories and its counters.

    `served` counts the bytes of each file's content, and `requests` the requests by method and
    path. `busy` holds the statuses (503, 429, ...) of the first answers to requests whose path
    contains `busy_at`.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.served: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.busy: list[int] = []
        self.busy_at = ""
        self.large: dict[str, bytes] = {}  # the content of LFS, by sha256
        self.held = ""  # the LFS object that hangs while it is sent
        self.hanging, self.release = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        options = {"poll_interval": 0.01}
        threading.Thread(target=self._server.serve_forever, kwargs=options, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: Files | Path, *, ref: str = "main", gated: bool = False) -> str:
        """Commit `files`, or the content of a folder, to the branch `ref`; return the hash."""
        if isinstance(files, Path):
            paths = (p for p in files.rglob("*") if p.is_file())
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in paths}
        repository = self.repositories.setdefault(name, Repository())
        content = [path.encode() + hashlib.sha1(d).digest() for path, d in sorted(files.items())]
        commit = hashlib.sha1(name.encode() + b"".join(content)).hexdigest()
        repository.commits[commit] = files
        repository.refs[ref] = commit
        repository.gated = gated
        return commit

    def forget(self) -> None:
        """Reset the counters."""
        self.served.clear()
        self.requests.clear()

    def count(self, request: str, served: str = "", size: int = 0) -> None:
        with self._lock:
            self.requests[request] += 1
            if served:
                self.served[served] += size

    def refuse_if_busy(self, path: str) -> None:
        with self._lock:
            if self.busy and self.busy_at in path:
                raise RefusedError(self.busy.pop(0), "")

    def wait_if_held(self, oid: str) -> None:
        if oid == self.held:
            self.hanging.set()
            self.release.wait(60)

    @staticmethod
    def oid(path: str, data: bytes) -> str:
        """Return the id of a content: its sha256 if LFS keeps it, else git's hash of the blob."""
        if path.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def find(self, name: str, revision: str) -> tuple[str, Files]:
        """Return the commit that `revision` names, and its files."""
        if name not in self.repositories:
            # The Hub does not tell strangers what is private and what is absent.
            raise RefusedError(401, "RepoNotFound")
        repository = self.repositories[name]
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise RefusedError(404, "RevisionNotFound")
        return commit, repository.commits[commit]


_NAME = r"(?P<name>[^/]+(?:/[^/]+)?)"
_ROUTES = (
    *((method, pattern.format(name=_NAME), name) for method, pattern, name in WRITES),
    (r"(?:GET|HEAD)", rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
    (r"GET", rf"/api/models/{_NAME}/tree/(?P<revision>[^/]+)", "tree"),
    (r"POST", rf"/api/models/{_NAME}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    (r"GET", rf"/api/models/{_NAME}(?:/revision/(?P<revision>[^/]+))?", "info"),
)


class _Handler(Writes, BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        self.body, self.query = self.rfile.read(length), parse_qs(url.query)
        try:
            self.hub.refuse_if_busy(url.path)
            for method, pattern, name in _ROUTES:
                match = re.fullmatch(pattern, url.path)
                if match and re.fullmatch(method, self.command):
                    groups = match.groupdict()
                    self._refuse_strangers(groups.get("name") or "")
                    return getattr(self, name)(**{k: unquote(groups[k] or "main") for k in groups})
            raise RefusedError(404, "")
        except BrokenPipeError:
            self.close_connection = True  # The client was killed.
        except RefusedError as e:
            self.hub.count(f"{self.command} {url.path}")
            headers = {"X-Error-Code": e.code, "X-Error-Message": e.code, "Retry-After": "0"}
            self._answer(e.status, b"{}", headers)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _refuse_strangers(self, name: str) -> None:
        """Answer for a private repository as for an absent one where there is no token."""
        repository = self.hub.repositories.get(name)
        if repository is not None and repository.private and not self.has_token():
            raise RefusedError(401, "RepoNotFound")

    def refuse(self, status: int, code: str) -> None:
        raise RefusedError(status, code)

    def info(self, name: str, revision: str) -> None:
        commit, files = self.hub.find(name, revision)
        sized = "blobs" in self.query
        siblings = [{"rfilename": f, **(_sizes(f, d) if sized else {})} for f, d in files.items()]
        self._json(
            {
                "_id": "0",
                "id": name,
                "modelId": name,
                "sha": commit,
                "private": self.hub.repositories[name].private,
                "tags": [],
                "gated": self.hub.repositories[name].gated and "manual",
                "downloads": 0,
                "likes": 0,
                "siblings": siblings,
            }
        )

    def tree(self, name: str, revision: str) -> None:
        _, files = self.hub.find(name, revision)
        self._json([_entry(f, d) for f, d in files.items()])

    def paths_info(self, name: str, revision: str) -> None:
        _, files = self.hub.find(name, revision)
        form = parse_qs(self.body.decode())
        paths = form.get("paths") or json.loads(self.body)["paths"]
        self._json([_entry(p, files[p]) for p in paths if p in files])

    def resolve(self, name: str, revision: str, file: str) -> None:
        commit, files = self.hub.find(name, revision)
        if self.hub.repositories[name].gated and not self.has_token():
            raise RefusedError(403, "GatedRepo")
        if file not in files or file == self.hub.repositories[name].lost:
            raise RefusedError(404, "EntryNotFound")
        data, status = files[file], 200
        headers = {
            "ETag": f'"{self.hub.oid(file, data)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(match[1]), min(int(match[2] or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        sent = len(data) if self.command == "GET" else 0
        self.hub.count(f"{self.command} {file}", f"{name}/{file}", sent)
        self._answer(status, data, headers)

    def _json(self, value: Any) -> None:
        self.hub.count(f"{self.command} {urlsplit(self.path).path}")
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _entry(path: str, data: bytes) -> dict[str, Any]:
    sizes = _sizes(path, data)
    large = {"lfs": {**sizes["lfs"], "oid": sizes["lfs"]["sha256"]}} if "lfs" in sizes else {}
    return {"type": "file", "path": path, "size": len(data), "oid": sizes["blobId"], **large}


def _sizes(path: str, data: bytes) -> dict[str, Any]:
    oid = FakeHub.oid(path, data)
    sizes: dict[str, Any] = {"size": len(data), "blobId": oid[:40]}
    if len(oid) == 64:
        sizes["lfs"] = {"sha256": oid, "size": len(data), "pointerSize": 134}
    return sizes
