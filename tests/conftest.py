"""Shared fixtures: random tiny bases, benchmarks as modules, and a completions server that can fail."""

import importlib
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

# Tests must not depend on the user's settings. huggingface_hub reads its environment once, when it is imported.
os.environ.pop("HF_HUB_OFFLINE", None)
os.environ.pop("TRANSFORMERS_OFFLINE", None)
os.environ.pop("HF_ENDPOINT", None)
os.environ.pop("HF_TOKEN", None)
os.environ["HF_TOKEN_PATH"] = os.devnull
os.environ["HF_HUB_DISABLE_XET"] = "1"
# For child processes too. With more threads than free cores they wait for each other, and seconds become minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_DATASETS_CACHE"] = mkdtemp(prefix="datasets-")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # child processes share cached bytecode

import hypothesis
import pytest
import torch

from drafthead.models.base.base_model import BaseModel
from support import TINY, random_base

ARCHITECTURES = {"mistral": {"sliding_window": None}}
"""Settings of an architecture, besides ``TINY``."""


hypothesis.settings.register_profile("any_machine", deadline=None)
hypothesis.settings.load_profile("any_machine")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a benchmark as `python benchmarks/NAME.py` does, with its folder first on the path."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    shadowed = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(shadowed)


@pytest.fixture(autouse=True)
def skip_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip figures, which take a second per report, except in tests of reports, slow tests and child processes."""
    if "report" not in request.path.parts and request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("drafthead.eval.report.report.draw_figures", lambda *_: ())


@cache
def _tiny_base(model_type: str, seed: int, **settings: Any) -> BaseModel:
    return random_base({**TINY, "model_type": model_type, **ARCHITECTURES.get(model_type, {}), **settings}, seed=seed)


@pytest.fixture(scope="session")
def tiny_base() -> Callable[..., BaseModel]:
    """Return a function that makes a random base of an architecture, whose greedy answers vary."""

    def make(model_type: str = "llama", seed: int = 0, **settings: Any) -> BaseModel:
        torch.manual_seed(seed)
        return _tiny_base(model_type, seed, **settings)

    return make


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the Hub's client, which reads its environment only at import, from the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the drafters' caches start with room for few tokens, so that they grow in short texts, and let layers with a
    window drop tokens early."""
    monkeypatch.setattr("drafthead.models.decoding.node_cache.INITIAL_CAPACITY", 8)
    for name, size in {"CHAIN": 6, "PENDING": 48, "PIECE": 16}.items():
        monkeypatch.setattr(f"drafthead.models.heads.parts.head_session.{name}", size)


@pytest.fixture
def package_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return the embedded packages' files, which tests fill: path -> content. All others are empty."""
    files: dict[str, bytes] = {}
    monkeypatch.setattr("drafthead.data.embedded.packages.read_member", lambda package, path: files.get(path, b""))
    return files


class DatasetHub:
    """A stand-in for datasets of the Hub, which answers while ``up``."""

    def __init__(self) -> None:
        self.commit, self.up = "a" * 40, True
        self.rows: Callable[[str], Any] = lambda revision: []
        """Returns the rows of a commit."""
        self.asked: list[tuple[str, str | None]] = []
        self.opened: dict[str, Any] = {}

    def info(self, name: str, *, revision: str | None, timeout: float) -> Any:
        """Return the commit, as ``HfApi.dataset_info`` does."""
        self.asked.append((name, revision))
        if not self.up:
            raise ConnectionError("no route\nto host")
        return SimpleNamespace(sha=self.commit)

    def load(self, name: str, subset: str | None = None, *, revision: str = "", **options: Any) -> Any:
        """Return the rows, as ``datasets.load_dataset`` does."""
        self.opened = {"name": name, "subset": subset, "revision": revision, **options}
        return self.rows(revision)


@pytest.fixture
def dataset_hub(monkeypatch: pytest.MonkeyPatch) -> DatasetHub:
    hub = DatasetHub()
    monkeypatch.setattr("datasets.load_dataset", hub.load)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda api, name, **options: hub.info(name, **options))
    return hub


class CompletionsServer:
    """An OpenAI-compatible completions server on loopback, which can be made to fail.

    Args:
        answer: (prompt's ids, body of the request) -> the answer's ids.
        tokenizer: for answers that travel as text.
        dialect: ``ids`` as vLLM and SGLang; ``text``: versions without ``return_token_ids``; ``strict``: text prompts.
        eos: ids that end an answer.
    """

    def __init__(self, answer: Callable[..., list[int]], tokenizer: Any, dialect: str, eos: frozenset[int]) -> None:
        self.answer, self.tokenizer, self.dialect, self.eos = answer, tokenizer, dialect, eos
        self.models: list[dict[str, Any]] = [{"id": "base", "max_model_len": 2048}]
        self.key: str | None = None
        self.fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None
        """(number of the request, its body) -> what goes wrong."""
        self.extend: Callable[[dict[str, Any], dict[str, Any]], None] = lambda payload, body: None
        """Adds to a response what a request asks for."""
        self.elsewhere = ""
        """Address that the fault ``redirect`` names."""
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock, self._released = threading.Lock(), threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; requests that are kept waiting end."""
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

    def respond(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self.bodies.append(body)
            number = len(self.bodies) - 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._respond(handler, body, self.fault(number, body))
        finally:
            with self._lock:
                self._at_once -= 1

    def _respond(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], fault: str | None) -> None:
        if fault in ("400", "401", "404", "429", "500", "503"):
            said = {"error": {"message": f"injected, for {handler.headers.get('authorization')}", "code": int(fault)}}
            return _send(handler, int(fault), said, {"Retry-After": "0.05"} if fault == "429" else {})
        if fault == "dropped":
            return handler.connection.shutdown(socket.SHUT_RDWR)
        if fault == "slow":
            self._released.wait(30)
        if fault in ("drips", "endless", "redirect"):
            return self._hostile(handler, fault)
        if fault == "brackets":
            return _send(handler, 200, b"[" * 200_000, {})
        if self.dialect == "strict" and not isinstance(body["prompt"], str):
            return _send(handler, 422, {"error": "invalid type: prompt", "error_type": "validation"}, {})
        payload = self.payload(body)
        self.extend(payload, body)
        if fault == "empty":
            payload["choices"][0] |= {"text": "", "token_ids": []}
            payload["usage"]["completion_tokens"] = 0
        elif fault == "no choices":
            payload = {"choices": []}
        elif fault == "bad ids":
            payload["choices"][0]["token_ids"] = [10**9]
        elif fault == "aborted":
            payload["choices"][0]["finish_reason"] = "abort"
        content = json.dumps(payload).encode()
        if fault == "cut":
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content[: len(content) // 2])
            return handler.connection.shutdown(socket.SHUT_RDWR)
        _send(handler, 200, content[:-5] if fault == "malformed" else payload, {})

    def _hostile(self, handler: BaseHTTPRequestHandler, fault: str) -> None:
        if fault == "redirect":
            return _send(handler, 307, {}, {"Location": f"{self.elsewhere}/v1/completions"})
        handler.send_response(200)
        handler.end_headers()
        part = b" " if fault == "drips" else b" " * (1 << 20)
        try:
            while not self._released.wait(0.05 if fault == "drips" else 0):
                handler.wfile.write(part)
        except OSError:  # the client has hung up
            handler.close_connection = True

    def payload(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        answer = self.answer(ids, body)
        finished = answer[-1] in self.eos and not body.get("ignore_eos")
        text = self.tokenizer.decode(answer[: len(answer) - finished])
        choice = {"index": 0, "text": text, "finish_reason": "stop" if finished else "length"}
        if self.dialect == "ids" and body.get("return_token_ids"):
            choice |= {"token_ids": answer, "prompt_token_ids": ids}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer)}
        return {"object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: CompletionsServer

    def do_GET(self) -> None:
        if self._allowed() and self._found("/v1/models"):
            _send(self, 200, {"object": "list", "data": self.served.models}, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._allowed() and self._found("/v1/completions"):
            self.served.respond(self, body)

    def _allowed(self) -> bool:
        key = self.served.key
        if key is None or self.headers.get("authorization") == f"Bearer {key}":
            return True
        _send(self, 401, {"error": {"message": f"no access with {self.headers.get('authorization')}"}}, {})
        return False

    def _found(self, path: str) -> bool:
        if self.path != path:
            _send(self, 404, {"detail": "Not Found"}, {})
        return self.path == path

    def log_message(self, *args: Any) -> None:
        pass


def _send(handler: BaseHTTPRequestHandler, status: int, payload: Any, headers: dict[str, str]) -> None:
    content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)


@pytest.fixture
def completions_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CompletionsServer]]:
    """Starts completions servers that stop with the test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    started: list[CompletionsServer] = []

    def start(answer: Callable[..., list[int]], tokenizer: Any, eos: frozenset[int], dialect: str = "ids") -> Any:
        started.append(CompletionsServer(answer, tokenizer, dialect, eos))
        return started[-1]

    yield start
    for server in started:
        server.close()
