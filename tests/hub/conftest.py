"""A Hub on loopback with the protocol of huggingface_hub: repositories, uploads, commits, downloads.

Files of up to ``SMALL`` bytes are part of the commit, larger ones are LFS objects. Faults are injected by path.
"""

import base64
import hashlib
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from huggingface_hub.utils.sha import git_hash

SMALL = 4096
TOKEN = "hf_of_a_test"


@dataclass
class Fault:
    """Fault of the next ``times`` requests whose path matches."""

    path: str
    times: int
    status: int | None = 500  # of the response; None cuts the connection
    done: bool = False  # cut the connection after the request was processed


@dataclass
class Repo:
    """Commits, oldest first, map file names to contents."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main" and self.commits:
            return list(self.commits.items())[-1]
        return (revision, self.commits[revision]) if revision in self.commits else None


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.role = "write"
        self.url = ""

    def files(self, repo: str) -> dict[str, bytes]:
        newest = self.repos[repo].at("main")
        return newest[1] if newest else {}

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.requests)

    def fail(self, path: str, times: int, status: int | None = 500, done: bool = False) -> None:
        self.faults.append(Fault(path, times, status, done))

    def left(self) -> int:
        return sum(fault.times for fault in self.faults)

    def publish(self, repo: str, files: dict[str, bytes]) -> str:
        return self.commit(self.repos.setdefault(repo, Repo()), files)

    @staticmethod
    def commit(repo: Repo, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(repr((len(repo.commits), sorted(files.items()))).encode()).hexdigest()
        repo.commits[oid] = files
        return oid


def described(path: str, content: bytes) -> dict[str, Any]:
    entry = {"path": path, "size": len(content), "oid": git_hash(content)}
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry | ({"lfs": lfs} if len(content) > SMALL else {})


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        for fault in self.hub.faults:
            if fault.times and re.search(fault.path, path):
                fault.times -= 1
                if fault.status is not None:
                    self.answer({"error": "an injected fault"}, fault.status)
                    return
                if fault.done:
                    self.wfile = io.BytesIO()
                    self.act(path, body)
                self.close_connection = True
                self.connection.close()
                return
        self.act(path, body)

    def act(self, path: str, body: bytes) -> None:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        for method, pattern, do, needs_token in ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                if needs_token and not known:
                    self.answer({"error": "Invalid username or password."}, 401)
                else:
                    do(self, body, *match.groups())
                return
        self.answer({"error": f"no route for {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def whoami(self, body: bytes) -> None:
        self.answer({"name": "user", "auth": {"type": "access_token", "accessToken": {"role": self.hub.role}}})

    def create(self, body: bytes) -> None:
        request = json.loads(body)
        name = f"{request['organization'] or 'user'}/{request['name']}"
        taken = name in self.hub.repos
        if not taken:
            private = request.get("visibility") == "private" or bool(request.get("private"))
            self.hub.commit(self.hub.repos.setdefault(name, Repo(private=private)), {})
        self.answer({"url": f"{self.hub.url}/{name}", "name": name}, 409 if taken else 200)

    def validate(self, body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        files = self.hub.files(name)

        def mode(file: dict[str, Any]) -> dict[str, Any]:
            known = described(file["path"], files[file["path"]]) if file["path"] in files else {}
            oid = {"oid": known.get("lfs", known)["oid"]} if known else {}
            kind = "lfs" if file["size"] > SMALL else "regular"
            return {"path": file["path"], "uploadMode": kind, "shouldIgnore": False, **oid}

        self.answer({"files": [mode(file) for file in json.loads(body)["files"]]})

    def batch(self, body: bytes, name: str) -> None:
        def upload(item: dict[str, Any]) -> dict[str, Any]:
            known = item["oid"] in self.hub.objects
            return item if known else item | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}}

        self.answer({"transfer": "basic", "objects": [upload(o) for o in json.loads(body)["objects"]]})

    def put_object(self, body: bytes, oid: str) -> None:
        intact = hashlib.sha256(body).hexdigest() == oid
        if intact:
            self.hub.objects[oid] = body
        self.answer({}, 200 if intact else 422)

    def commit_files(self, body: bytes, name: str, revision: str) -> None:
        files = dict(self.hub.files(name))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.hub.commit(self.hub.repos[name], files)
        self.answer({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def revision(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self.hub.repos.get(name)
        commit = repo.at(revision) if repo else None
        if commit is None:
            code = "RepoNotFound" if repo is None else "RevisionNotFound"
            self.answer({"error": code}, 404, {"X-Error-Code": code})
        return commit

    def info(self, body: bytes, name: str, revision: str | None = None) -> None:
        if commit := self.revision(name, revision or "main"):
            oid, files = commit
            siblings = [{"rfilename": path} for path in files]
            self.answer({"id": name, "sha": oid, "private": self.hub.repos[name].private, "siblings": siblings})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        if commit := self.revision(name, revision):
            self.answer([{"type": "file", **described(path, content)} for path, content in commit[1].items()])

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        if not (commit := self.revision(name, revision)):
            return
        oid, files = commit
        if path not in files:
            self.answer({"error": "EntryNotFound"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        entry = described(path, files[path])
        etag = f'"{entry.get("lfs", entry)["oid"]}"'
        self.answer(files[path], headers={"ETag": etag, "X-Repo-Commit": oid, "X-Linked-Size": str(entry["size"])})


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Any, bool]] = [
    ("GET", "/api/whoami-v2", Handler.whoami, True),
    ("POST", "/api/repos/create", Handler.create, True),
    ("POST", "/api/validate-yaml", Handler.validate, False),
    ("POST", f"/api/models/{NAME}/preupload/(.+)", Handler.preupload, True),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch, True),
    ("PUT", "/lfs/([0-9a-f]{64})", Handler.put_object, False),
    ("POST", f"/api/models/{NAME}/commit/(.+)", Handler.commit_files, True),
    ("GET", f"/api/models/{NAME}", Handler.info, False),
    ("GET", f"/api/models/{NAME}/revision/(.+)", Handler.info, False),
    ("GET", f"/api/models/{NAME}/tree/(.+)", Handler.tree, False),
    ("GET HEAD", f"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve, False),
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a Hub, and point the client with an empty cache at it (it reads its environment only at import)."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    template = state.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings = {"ENDPOINT": state.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path / "cache")}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    close_session()
    yield state
    close_session()
    server.shutdown()
    server.server_close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody sleeps; return the seconds that our code and the client would have slept."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds
