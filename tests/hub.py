"""A Hub on localhost: what `huggingface_hub` asks for when it reads and writes, and a count of what
it asked for.

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
    """Commits by their hash, branches and tags by name. The files of a gated one are refused, its
    listing is not; a lost file is listed and not there."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    lost: str = ""
    private: bool = False
    pulls: list[dict[str, Any]] = field(default_factory=list)


class RefusedError(Exception):
    """An answer other than 200, with the code that tells the client which of its exceptions to
    raise.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class FakeHub:
    """`served` counts the bytes of each file's content, `requests` the requests by method and path.
    The first answers to requests whose path holds `busy_at` are the statuses of `busy`, a number
    each: 503, 429, ..."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.served: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.busy: list[int] = []
        self.busy_at = ""
        self.large: dict[str, bytes] = {}  # what LFS holds, by sha256
        self.held = ""  # the LFS object that hangs while it is sent
        self.hanging, self.release = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: Files | Path, *, ref: str = "main", gated: bool = False) -> str:
        """Commit `files` (or the content of a folder) to the branch `ref`; the commit's hash."""
        if isinstance(files, Path):
            files = {
                p.relative_to(files).as_posix(): p.read_bytes()
                for p in files.rglob("*")
                if p.is_file()
            }
        repository = self.repositories.setdefault(name, Repository())
        content = b"".join(
            path.encode() + hashlib.sha1(data).digest() for path, data in sorted(files.items())
        )
        commit = hashlib.sha1(name.encode() + content).hexdigest()
        repository.commits[commit] = files
        repository.refs[ref] = commit
        repository.gated = gated
        return commit

    def forget(self) -> None:
        """Start counting anew."""
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
        """What names the content: sha256 of what LFS keeps, git's hash of a blob."""
        large = path.endswith(".safetensors")
        return (
            hashlib.sha256(data).hexdigest()
            if large
            else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        )

    def find(self, name: str, revision: str) -> tuple[str, Files]:
        """The commit that `revision` names, and its files."""
        if name not in self.repositories:
            raise RefusedError(
                401, "RepoNotFound"
            )  # the Hub does not tell strangers what is private and what is absent
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
                if re.fullmatch(method, self.command) and (
                    match := re.fullmatch(pattern, url.path)
                ):
                    self._refuse_strangers(match.groupdict().get("name") or "")
                    return getattr(self, name)(
                        **{k: unquote(v or "main") for k, v in match.groupdict().items()}
                    )
            raise RefusedError(404, "")
        except BrokenPipeError:
            self.close_connection = True  # the client was killed
        except RefusedError as e:
            self.hub.count(f"{self.command} {url.path}")
            self._answer(e.status, b"{}", {"X-Error-Code": e.code, "X-Error-Message": e.code})

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _refuse_strangers(self, name: str) -> None:
        """What is private is as good as absent without a token."""
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
        self.hub.count(
            f"{self.command} {file}", f"{name}/{file}", len(data) if self.command == "GET" else 0
        )
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
    large = (
        {"lfs": {"sha256": oid, "size": len(data), "pointerSize": 134}} if len(oid) == 64 else {}
    )
    return {"size": len(data), "blobId": oid[:40], **large}
