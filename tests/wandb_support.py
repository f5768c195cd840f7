"""Reads what wandb wrote, and stands in for its server: as much of it as uploads of rows need."""

import gzip
import json
import os
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from wandb.proto.wandb_internal_pb2 import Record


def records(file: Path) -> list[Record]:
    """A wandb log: LevelDB's log format behind seven bytes of its own."""
    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no record's head crosses a block
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            found.append(Record.FromString(whole))
            whole = b""
    return found


class Read:
    """The parts of a wandb run in a run folder, oldest first."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        assert files
        self.files = files
        found = [record for file in files for record in records(file)]
        self.runs = [r.run for r in found if r.WhichOneof("record_type") == "run"]
        self.config = {u.key: json.loads(u.value_json) for u in self.runs[0].config.update}
        self.artifacts = [r.artifact for r in found if r.WhichOneof("record_type") == "artifact"]
        self.metrics = [r.metric for r in found if r.WhichOneof("record_type") == "metric"]
        self.history = [
            {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
            for r in found
            if r.WhichOneof("record_type") == "history"
        ]

    def curve(self, key: str) -> list[tuple[int, float]]:
        return [(entry["_step"], entry[key]) for entry in self.history if key in entry]


class Server:
    """A wandb server on loopback that keeps the rows of every run, at the offsets that the client sends them to."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._http = _Http(("127.0.0.1", 0), type("Bound", (_Handler,), {"server_state": self}))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.environment = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def sync(self, line: str) -> None:
        """Run the ``wandb sync`` that a line of ours names."""
        arguments = line.partition("wandb sync ")[2].split()
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Finished syncing" in done.stderr + done.stdout, done.stderr + done.stdout

    def answer(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL answer."""
        name = asked.get("name")
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        rows = self.rows.get(str(name), [])
        bucket = {"id": name, "name": name, "displayName": "", "description": "", "config": "{}", "sweepName": None}
        bucket |= {
            "project": project,
            "historyLineCount": len(rows),
            "tags": [],
            "notes": "",
            "wandbConfig": '{"t": {}}',
        }
        if operation == "UpsertBucket":
            self.rows.setdefault(str(name), [])
            return {"upsertBucket": {"bucket": bucket, "inserted": not rows}}
        if operation == "RunResumeStatus":
            tail = json.dumps([json.dumps(rows[-1])]) if rows else "[]"
            bucket |= {"summaryMetrics": "{}", "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]"}
            return {"model": {**project, "bucket": bucket | {"historyTail": tail} if rows else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in asked["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if operation == "Viewer":
            viewer = {"id": "u", "entity": "e", "username": "e", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer}
        return {}


class _Http(ThreadingHTTPServer):
    def handle_error(self, *args: Any) -> None:
        """Clients leave without a word."""


class _Handler(BaseHTTPRequestHandler):
    server_state: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            found = self.server_state.answer(asked["operationName"], asked.get("variables") or {})
            answer = {"data": found} if found else {"errors": [{"message": "not here"}]}
        elif self.path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if sent:
                rows = self.server_state.rows[self.path.split("/")[-2]]
                rows[sent["offset"] : sent["offset"] + len(sent["content"])] = map(json.loads, sent["content"])
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = handle_any  # noqa: N815
