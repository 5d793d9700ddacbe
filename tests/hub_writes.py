"""The half of the Hub on localhost that is written to: repositories, LFS, commits, pull requests.

The other half is in hub.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from hub import FakeHub

TOKEN = "hf_secret"
ROUTES = (
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", r"/api/models/{name}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", r"/{name}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{{64}})", "lfs_put"),
    ("POST", r"/api/models/{name}/commit/(?P<revision>[^/]+)", "commit"),
    ("GET", r"/api/models/{name}/discussions", "list_pulls"),
    ("POST", r"/api/models/{name}/discussions", "open_pull"),
    ("GET", r"/api/models/{name}/discussions/(?P<number>\d+)", "show_pull"),
    ("POST", r"/api/models/{name}/discussions/(?P<number>\d+)/status", "set_status"),
    ("POST", r"/api/models/{name}/discussions/(?P<number>\d+)/merge", "merge"),
)


class Writes:
    """Handlers of requests that write, mixed into the handler of hub.py."""

    hub: FakeHub
    body: bytes
    headers: Any
    _json: Callable[..., None]
    refuse: Callable[[int, str], None]

    def create(self) -> None:
        self._require_token()
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            self.refuse(409, "")
        self.hub.add(name, {".gitattributes": b""})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[name].private = private
        self._json({"url": f"{self.hub.endpoint}/{name}"})

    def validate_yaml(self) -> None:
        _, head, _ = json.loads(self.body)["content"].split("---\n", 2)
        assert isinstance(yaml.safe_load(head), dict)
        self._json({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        self._require_token()
        _, files = self.hub.find(name, revision)
        answers = []
        for path in (f["path"] for f in json.loads(self.body)["files"]):
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            oid = self.hub.oid(path, files[path]) if path in files else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answers})

    def lfs_batch(self, name: str) -> None:
        self._require_token()
        objects = []
        for o in json.loads(self.body)["objects"]:
            action = {"actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{o['oid']}"}}}
            objects.append(o | ({} if o["oid"] in self.hub.large else action))
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.refuse(400, "")
        self.hub.wait_if_held(oid)
        self.hub.large[oid] = self.body
        self._json({})

    def commit(self, name: str, revision: str) -> None:
        self._require_token()
        _, files = self.hub.find(name, revision)
        files = dict(files)
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.add(name, files, ref=revision)
        url = f"{self.hub.endpoint}/{name}/commit/{commit}"
        self._json({"commitUrl": url, "commitOid": commit})

    def list_pulls(self, name: str) -> None:
        pulls = self.hub.repositories[name].pulls
        self._json({"count": len(pulls), "start": 0, "discussions": pulls})

    def open_pull(self, name: str) -> None:
        self._require_token()
        repository, asked = self.hub.repositories[name], json.loads(self.body)
        assert asked["pullRequest"] is True
        number = len(repository.pulls) + 1
        repository.refs[f"refs/pr/{number}"] = repository.refs["main"]
        pull = {
            "num": number,
            "title": asked["title"],
            "status": "draft",
            "isPullRequest": True,
            "author": {"name": "me"},
            "createdAt": "2026-01-01T00:00:00.000Z",
            "repo": {"name": name, "type": "model"},
            "events": [],
            "changes": {"base": "refs/heads/main"},
            "filesWithConflicts": [],
        }
        repository.pulls.append(pull)
        self._json(pull)

    def show_pull(self, name: str, number: str) -> None:
        self._json(self.hub.repositories[name].pulls[int(number) - 1])

    def set_status(self, name: str, number: str) -> None:
        self._require_token()
        status = json.loads(self.body)["status"]
        self.hub.repositories[name].pulls[int(number) - 1]["status"] = status
        event = {
            "id": "1",
            "type": "status-change",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "author": {"name": "me"},
            "data": {"status": status},
        }
        self._json({"newStatus": event})

    def merge(self, name: str, number: str) -> None:
        self._require_token()
        repository = self.hub.repositories[name]
        pull = repository.pulls[int(number) - 1]
        if pull["status"] != "open":  # The Hub merges no drafts.
            self.refuse(400, "")
        repository.refs["main"] = repository.refs[f"refs/pr/{number}"]
        pull["status"] = "merged"
        self._json({})

    def has_token(self) -> bool:
        return bool(self.headers.get("Authorization") == f"Bearer {TOKEN}")

    def _require_token(self) -> None:
        if not self.has_token():
            self.refuse(401, "")
