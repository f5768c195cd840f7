"""HTTP clients of engines: they send and receive token ids, and read counts of drafted and accepted tokens."""

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast
from uuid import uuid4

import openai

from drafthead.data.answers.http_client import LimitedClient, api_key, error_text, through_end
from drafthead.engines.process import EngineError, EngineProcess
from drafthead.engines.server import counters
from drafthead.models.decoding.step import DecodeResult, StepRecord

METRICS_WAIT_S = 2.0  # longest wait until an engine has updated its counters after an answer


def engine_result(
    tokens: list[int], steps: int | None, accepted: Sequence[int] = (), prefill_s: float = 0.0, total_s: float = 0.0
) -> DecodeResult:
    """Return an engine's answer as a ``DecodeResult``, with a record per step. Engines count only how many steps
    accepted each draft position (``accepted``, empty if they count only ``steps``). The steps with most accepted drafts
    come first, and all get the same time. Example: ``accepted`` [2, 1] in 3 steps becomes steps with 2, 1 and 0
    accepted drafts. Without ``accepted``, the tokens are spread evenly over the steps."""
    left = max(0, len(tokens) - 1)  # the first token comes with the prompt
    counts, drafted = [*accepted, 0], steps or 0
    lengths = [k for k in range(len(accepted), 0, -1) for _ in range(max(0, counts[k - 1] - counts[k]))]
    if accepted:
        lengths += [0] * (drafted - len(lengths))
    else:
        lengths = [left // drafted - 1 + (n < left % drafted) for n in range(drafted)]
    depths = [len(accepted)] * len(lengths)
    plain = left - sum(k + 1 for k in lengths)  # steps that drafted nothing
    lengths, depths = lengths + [0] * max(0, plain), depths + [0] * max(0, plain)
    each = max(0.0, total_s - prefill_s) / max(1, len(lengths))
    records, position = [], 1
    for length, depth in zip(lengths, depths, strict=True):
        committed = min(length + 1, max(0, left + 1 - position))
        counts_of = {"proposed": depth, "depth": depth, "accepted": length, "committed": committed}
        records.append(StepRecord(position=position, **counts_of, draft_s=0.0, verify_s=each, total_s=each))
        position += committed
    return DecodeResult(tokens=tokens, steps=records, prefill_s=prefill_s, total_s=total_s)


@dataclass(frozen=True)
class AtOnce:
    """Answers to several prompts, some of them at the same time."""

    wall_s: float
    seconds: list[float]  # of each request
    answers: list[list[int]]
    steps: int  # with drafts
    accepted: list[int]  # drafts, by position
    step_s: float | None  # mean time between two steps of a request; None if the server does not count it


Method = TypeVar("Method", bound=Callable[..., Any])


def in_known_form(method: Method) -> Method:
    """Make ``method`` raise an ``EngineError`` where a response lacks what the engine's API promises."""

    @wraps(method)
    def checked(self: "EngineServer", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise EngineError(f"{self.url} does not answer as {self.name} does ({cause}); check the address") from None

    return cast(Method, checked)


class EngineServer(ABC):
    """Base class of clients of one engine at one address; a subclass defines ``name``, ``answer`` and ``version``."""

    name: ClassVar[str]

    def __init__(
        self, url: str, eos_ids: frozenset[int], timeout_s: float, process: EngineProcess | None = None, drafts: int = 0
    ) -> None:
        """Connect to the server at ``url``, which drafts ``drafts`` tokens per step; ``process``: if it is ours."""
        self.url, self.eos_ids, self._timeout_s, self._process = url.rstrip("/"), eos_ids, timeout_s, process
        self._drafts = drafts
        self._key = api_key()
        self._runner = asyncio.Runner()
        # A proxy of the environment is for other machines.
        is_local = re.match(r"https?://(127\.|localhost)", url) is not None
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self._key or "none",
            timeout=timeout_s,
            max_retries=0,  # a repeated request would be counted twice
            http_client=LimitedClient(trust_env=not is_local),
        )

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    @abstractmethod
    def answer(self, ids: Sequence[int], max_new_tokens: int) -> DecodeResult:
        """Answer the prompt ``ids`` greedily; raise an ``EngineError`` if the server fails."""

    @abstractmethod
    def version(self) -> str:
        """Return the version that the server reports."""

    def run_id(self) -> str:
        """Return what tells this run of the server from others: when its process started. If the server does not say,
        every call returns another text."""
        try:
            started = self._counters().get("process_start_time_seconds")
        except EngineError:
            started = None
        return uuid4().hex if started is None else str(started)

    def is_ready(self) -> bool:
        try:
            self._runner.run(self._client.with_options(timeout=2).get("/health", cast_to=str))
        except openai.OpenAIError:
            return False
        return True

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._runner.run(self._request(path, body))

    async def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a POST request, or GET without ``body``; return the response's JSON, or its text if that is not JSON."""
        try:
            get, post = self._client.get, self._client.post
            text = await (get(path, cast_to=str) if body is None else post(path, cast_to=str, body=body))
        except openai.APIStatusError as error:
            raise EngineError(f"{self.name} at {self.url} refused {path} ({error_text(error, self._key)})") from None
        except openai.APIConnectionError as error:
            if self._process is not None:
                time.sleep(0.2)  # its exit may not be visible yet
                self._process.check()
            if isinstance(error, openai.APITimeoutError):
                limit = f"{self._timeout_s:g} s (engine.answer_timeout_s)"
                raise EngineError(f"{self.name} gave no answer within {limit}; raise this limit") from None
            raise EngineError(f"{self.name} at {self.url} does not answer ({error.__cause__ or error})") from None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text

    def _timed(self, path: str, body: dict[str, Any]) -> tuple[Any, float]:
        started = time.perf_counter()
        return self._send(path, body), time.perf_counter() - started

    def _counters(self) -> dict[str, float]:
        """Return the server's Prometheus counters."""
        return counters(str(self._send("/metrics")))

    def _complete(self, tokens: list[int], stopped: bool, token: object = None) -> list[int]:
        """Return the tokens up to and including the end-of-turn token, which is appended if the server omitted it.
        ``stopped``: the answer ended with this token, not at its length limit. ``token``: its id, if known."""
        if (ended := through_end(tokens, self.eos_ids)) is not None:
            return ended
        if not stopped or not self.eos_ids:
            return tokens
        return [*tokens, token if isinstance(token, int) and token in self.eos_ids else min(self.eos_ids)]

    def _result(
        self, tokens: list[int], counted: dict[str, float], prefix: str, prefill_s: float, total_s: float
    ) -> DecodeResult:
        """Return an answer with the steps and accepted drafts that the server's counters ``prefix``... counted."""
        accepted = [counted.get(f"{prefix}accepted_tokens_per_pos[{n}]", 0) for n in range(self._drafts)]
        steps = round(counted.get(f"{prefix}drafts", 0))
        return engine_result(tokens, steps, [round(count) for count in accepted], prefill_s, total_s)


class VllmServer(EngineServer):
    """Client of vLLM: ``/v1/completions`` with token ids, counters ``vllm:spec_decode_*``."""

    name = "vLLM"
    _model: str | None = None

    @in_known_form
    def version(self) -> str:
        return str(self._send("/version")["version"])

    @in_known_form
    def answer(self, ids: Sequence[int], max_new_tokens: int) -> DecodeResult:
        body, before = self._body(ids, max_new_tokens), self._counters()
        response, total_s = self._timed("/v1/completions", body)
        tokens = self._tokens(response)
        counted = self._counted(before, len(tokens))
        prefill_s = min(counted.get("vllm:time_to_first_token_seconds_sum", 0.0), total_s)
        return self._result(tokens, counted, "vllm:spec_decode_num_", prefill_s, total_s)

    @in_known_form
    def answer_at_once(
        self, prompts: Sequence[list[int]], max_new_tokens: int, requests: int, temperature: float = 0.0
    ) -> AtOnce:
        """Answer all ``prompts``, up to ``requests`` of them at once. Their seeds are their numbers."""
        free, before = asyncio.Semaphore(requests), self._counters()

        async def answer(number: int, ids: list[int]) -> tuple[list[int], float]:
            body = self._body(ids, max_new_tokens, temperature, number)
            async with free:
                started = time.perf_counter()
                response = await self._request("/v1/completions", body)
                return self._tokens(response), time.perf_counter() - started

        async def all_answers() -> list[tuple[list[int], float]]:
            return await asyncio.gather(*(answer(number, ids) for number, ids in enumerate(prompts)))

        started = time.perf_counter()
        answers, seconds = zip(*self._runner.run(all_answers()), strict=True)
        wall_s = time.perf_counter() - started
        counted = self._counted(before, sum(len(tokens) for tokens in answers))
        prefix = "vllm:spec_decode_num_"
        accepted = [round(counted.get(f"{prefix}accepted_tokens_per_pos[{n}]", 0)) for n in range(self._drafts)]
        between, count = (counted.get(f"vllm:inter_token_latency_seconds_{key}", 0.0) for key in ("sum", "count"))
        steps = round(counted.get(f"{prefix}drafts", 0))
        return AtOnce(wall_s, list(seconds), list(answers), steps, accepted, between / count if count else None)

    def _body(self, ids: Sequence[int], most: int, temperature: float = 0.0, seed: int = 0) -> dict[str, Any]:
        if self._model is None:
            self._model = str(self._send("/v1/models")["data"][0]["id"])
        body = {"model": self._model, "prompt": list(ids), "max_tokens": most, "temperature": temperature, "seed": seed}
        body |= {"stop_token_ids": sorted(self.eos_ids), "return_token_ids": True, "top_p": 1.0, "top_k": -1}
        return body | {"repetition_penalty": 1.0, "min_p": 0.0}

    def _tokens(self, response: Any) -> list[int]:
        choice = response["choices"][0]
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise EngineError("vLLM gave no token ids; use version 0.10.2 or newer")
        return self._complete(tokens, choice.get("finish_reason") == "stop", choice.get("stop_reason"))

    def _counted(self, before: dict[str, float], tokens: int) -> dict[str, float]:
        """Return what the counters have counted since ``before``, when they include ``tokens`` tokens of answers."""
        deadline = time.monotonic() + METRICS_WAIT_S
        while True:
            counted = {name: value - before.get(name, 0.0) for name, value in self._counters().items()}
            if counted.get("vllm:generation_tokens", 0) >= tokens or time.monotonic() > deadline:
                return counted
            time.sleep(0.02)


class LlamaCppServer(EngineServer):
    """Client of llama.cpp: ``/completion`` with token ids, counters ``llamacpp:spec_decode_*`` (``--metrics``)."""

    name = "llama.cpp"

    @in_known_form
    def version(self) -> str:
        return str(self._send("/props").get("build_info", "unknown"))

    @in_known_form
    def answer(self, ids: Sequence[int], max_new_tokens: int) -> DecodeResult:
        body = {"prompt": list(ids), "n_predict": max_new_tokens, "temperature": 0.0, "seed": 0}
        body |= {"cache_prompt": False, "return_tokens": True, "repeat_penalty": 1.0}
        before = self._counters()
        response, total_s = self._timed("/completion", body)
        if not response.get("tokens") and response.get("content"):
            raise EngineError("llama.cpp gave no token ids; use a newer version, which supports return_tokens")
        counted = {name: value - before.get(name, 0.0) for name, value in self._counters().items()}
        tokens = self._complete(response["tokens"], response.get("stop_type") in ("eos", "word"))
        prefill_s = response["timings"]["prompt_ms"] / 1e3
        return self._result(tokens, counted, "llamacpp:spec_decode_num_", prefill_s, total_s)

    @in_known_form
    def read(self, ids: Sequence[int]) -> tuple[int, float]:
        """Read the prompt ``ids`` without answering; return the number of ids that were not cached, and the seconds."""
        timings = self._send("/completion", {"prompt": list(ids), "n_predict": 0, "cache_prompt": True})["timings"]
        return int(timings["prompt_n"]), timings["prompt_ms"] / 1e3


class SglangServer(EngineServer):
    """Client of SGLang: ``/generate`` with token ids. Written from its sources; never tested with a real server."""

    name = "SGLang"

    @in_known_form
    def version(self) -> str:
        return str(self._send("/get_server_info").get("version", "unknown"))

    @in_known_form
    def answer(self, ids: Sequence[int], max_new_tokens: int) -> DecodeResult:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "stop_token_ids": sorted(self.eos_ids)}
        response, total_s = self._timed("/generate", {"input_ids": list(ids), "sampling_params": sampling})
        meta = response.get("meta_info", {})
        stopped = (meta.get("finish_reason") or {}).get("type") == "stop"
        if "output_ids" not in response:
            raise EngineError("SGLang gave no token ids (output_ids); use a newer version")
        tokens = self._complete(response["output_ids"], stopped, (meta.get("finish_reason") or {}).get("matched"))
        return engine_result(tokens=tokens, steps=meta.get("spec_verify_ct"), total_s=total_s)


SERVERS: dict[str, type[EngineServer]] = {"vllm": VllmServer, "llamacpp": LlamaCppServer, "sglang": SglangServer}
