"""The OpenAI completions protocol as vLLM, SGLang and TGI speak it: what is asked, and what an answer must hold."""
# A client of completions servers: every request is tried until it is answered or cannot be.
# Answers from an OpenAI-compatible completions server, many under way at a time.

import asyncio
import json
import logging
import os
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from itertools import islice
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from drafthead.data.answers.backend import Prompt, RankGroup
from drafthead.data.answers.store import Generation, SamplerConfig
from drafthead.data.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses that another try may turn into an answer; every other one but 200 is final."""
FINISHED = ("stop", "eos_token", "stop_sequence")
_LONGEST_WAIT = 3600.0


@dataclass(kw_only=True)
class ServerConfig:
    """A completions server that answers instead of the built-in decoding."""

    url: str | None = None
    """Where it listens, such as ``http://node7:8000``; its key is read from OPENAI_API_KEY. None: no server."""
    model: str | None = None
    """The name it serves the base under. None: the only one it serves, or the base's own name."""
    concurrency: int = 64
    """Requests under way at a time."""
    timeout: float = 600.0
    """Seconds that an answer may take."""
    tries: int = 10
    """Requests for one answer before the run ends; the waits between them double from half a second to a minute."""
    min_agreement: float = 0.8
    """Share of the server's greedy tokens that the base must choose too: another model behind the name shows."""

    def __post_init__(self) -> None:
        for key, least in (("concurrency", 1), ("tries", 1)):
            if getattr(self, key) < least:
                raise UserError(f"server.{key} must be at least {least}, got {getattr(self, key)}")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"server.timeout must be positive seconds, got {self.timeout}")
        if not 0 <= self.min_agreement <= 1:
            raise UserError(f"server.min_agreement must be in [0, 1], got {self.min_agreement}")
        if self.url is not None:
            self._check_url(self.url)

    def _check_url(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            # The recipe is written to the run folder and to trackers.
            raise UserError("server.url must not hold a name or a password; put the key into OPENAI_API_KEY")
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:  # the port is no number
            known = False
        if not known or parts.query or parts.fragment:
            raise UserError(f"server.url must be like http://host:8000, got {url!r}")

    @property
    def root(self) -> str:
        """The address of the API, ``/v1`` added where no path is given."""
        assert self.url is not None
        return self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")


@dataclass(frozen=True)
class ServerCapabilities:
    """What a server understands."""

    prompts: str
    """``ids``: token ids, with the fields that vLLM and SGLang add. ``text``: text, and OpenAI's own fields only."""
    answers: str
    """``ids``: the server gives token ids. ``text``: they come from encoding its text."""

    def __str__(self) -> str:
        return f"prompts as {self.prompts} and answers as {self.answers}"


class TemporaryError(Exception):
    """An answer that did not come or is no answer; another try may help."""

    def __init__(self, what: str, wait: float | None = None) -> None:
        super().__init__(what)
        self.wait = wait
        """Seconds that the server asked to wait."""


class Completions:
    """Requests and answers for one base and sampler."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", eos_ids: frozenset[int], vocab_size: int, sampler: SamplerConfig
    ) -> None:
        self.tokenizer, self.eos_ids, self.vocab_size, self.sampler = tokenizer, eos_ids, vocab_size, sampler

    def request(self, model: str, prompt: Prompt, dialect: ServerCapabilities) -> dict[str, Any]:
        """The body of a completions request.

        Every sampling parameter is named: what is left out, servers take from the model's ``generation_config.json``.
        """
        number, ids = prompt
        sampler = self.sampler
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": sampler.max_new_tokens,
            "temperature": sampler.temperature,
            "seed": (sampler.seed * 1_000_003 + number) % 2**31,
            "stream": False,
        }
        if dialect.prompts == "text":
            # Servers put the leading special token there themselves. TGI refuses a top_p of 1.
            top_p = {} if sampler.top_p == 1 else {"top_p": sampler.top_p}
            return body | top_p | {"prompt": self.tokenizer.decode(ids[self._leading(ids) :])}
        stops = {} if sampler.ignore_eos else {"stop_token_ids": sorted(self.eos_ids)}
        return body | {
            "prompt": ids,
            "n": 1,
            "top_p": sampler.top_p,
            "top_k": sampler.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": sampler.ignore_eos,
            **stops,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def read(self, payload: Any, prompt: Prompt, dialect: ServerCapabilities) -> Generation:
        """The answer in the body of a response.

        Raises:
            TemporaryError: it holds none, or one that cannot be.
            UserError: the server does not do what it was asked for.
        """
        choice, usage = _only_choice(payload)
        number, ids = prompt
        finished = choice.get("finish_reason") in FINISHED
        if not finished and choice.get("finish_reason") != "length":
            raise TemporaryError(
                f"an answer that ended by {choice.get('finish_reason')!r}, expected 'stop' or 'length'"
            )
        answer = self._ids(choice) if dialect.answers == "ids" else self._encoded(choice)
        if not answer and usage.get("completion_tokens") != 1:
            raise TemporaryError("an empty answer")
        answer, finished = self._ended(answer, finished, choice, number)
        # Every answer is there to its end, or as long as allowed.
        if not finished and len(answer) < self.sampler.max_new_tokens and dialect.answers == "ids":
            raise UserError(
                f"the server cut the answer to prompt {number} ({len(ids)} tokens) after {len(answer)} of "
                f"{self.sampler.max_new_tokens} tokens; give it a longer context, or lower sampler.max_new_tokens"
            )
        return Generation(number, np.array([*ids, *answer], dtype=np.int32), len(ids), finished)

    def _ids(self, choice: dict[str, Any]) -> list[int]:
        found = choice.get("token_ids")
        if not isinstance(found, list) or not all(type(i) is int and 0 <= i < self.vocab_size for i in found):
            raise TemporaryError(f"no token ids below {self.vocab_size} in token_ids")
        if len(found) > self.sampler.max_new_tokens:
            raise TemporaryError(f"{len(found)} tokens where {self.sampler.max_new_tokens} were allowed")
        return found

    def _encoded(self, choice: dict[str, Any]) -> list[int]:
        text = choice.get("text")
        if not isinstance(text, str):
            raise TemporaryError("no text")
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[: self.sampler.max_new_tokens]

    def _ended(self, answer: list[int], finished: bool, choice: dict[str, Any], number: int) -> tuple[list[int], bool]:
        """The answer up to and with the token that ends it, which some servers leave out."""
        if self.sampler.ignore_eos:
            if finished:
                raise UserError(
                    f"the server ended the answer to prompt {number} although ignore_eos was asked for; set "
                    "sampler.ignore_eos=false or use vLLM or SGLang"
                )
            return answer, False
        for place, token in enumerate(answer):
            if token in self.eos_ids:
                return answer[: place + 1], True
        if not finished or len(answer) == self.sampler.max_new_tokens:
            return answer, False
        said = choice.get("stop_reason", choice.get("matched_stop"))
        likely = [
            token for token in (said, self.tokenizer.eos_token_id, *sorted(self.eos_ids)) if token in self.eos_ids
        ]
        if not likely:
            raise UserError(f"the server ended the answer to prompt {number}, but the base has no token that ends one")
        return [*answer, likely[0]], True

    def _leading(self, ids: list[int]) -> int:
        """1 where the tokenizer puts a token before every text and ``ids`` begin with it."""
        added = self.tokenizer("")["input_ids"]
        return 1 if added and added[0] == ids[0] else 0


def _only_choice(payload: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    choices = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise TemporaryError("a response without an answer in 'choices'")
    usage = payload.get("usage")
    return choices[0], usage if isinstance(usage, dict) else {}


def gives_ids(payload: Any) -> bool:
    """Whether a response has the answer's token ids.

    Raises:
        TemporaryError: it has no answer.
    """
    return isinstance(_only_choice(payload)[0].get("token_ids"), list)


def prompt_tokens(payload: Any) -> int | None:
    """How many tokens of the prompt the server read, where it says so."""
    choice, usage = _only_choice(payload)
    read = choice.get("prompt_token_ids")
    count = len(read) if isinstance(read, list) else usage.get("prompt_tokens")
    return count if isinstance(count, int) else None


def served_models(payload: Any) -> dict[str, int | None]:
    """Names a server has models under, each with the tokens of its context where it says so."""
    rows = payload.get("data") if isinstance(payload, dict) else None
    found: dict[str, int | None] = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            length = row.get("max_model_len")
            found[row["id"]] = length if isinstance(length, int) else None
    return found


def said_by(content: bytes) -> str:
    """What an error response says, in one line."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    shown = " ".join((found if isinstance(found, str) else json.dumps(found)).split())
    return shown[:300] or "no message"


def seconds_to_wait(retry_after: str | None) -> float | None:
    """A Retry-After header in seconds, at most an hour: it is a number or a date. None where it says nothing."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), _LONGEST_WAIT) if seconds == seconds else None


def chosen_model(served: Sequence[str], wanted: str | None, base: str, where: str) -> str:
    """The name to ask for.

    Raises:
        UserError: the server does not have it, or has several and none is named.
    """
    names = ", ".join(served) or "none"
    if wanted is not None:
        if wanted not in served:
            raise UserError(f"{where} does not serve {wanted!r}; it serves {names}: set data.generations.server.model")
        return wanted
    if base in served:
        return base
    if len(served) != 1:
        raise UserError(f"{where} serves {names}; name the one that is {base!r} with data.generations.server.model")
    return served[0]


API_KEY = "OPENAI_API_KEY"
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second try, and before the latest ones."""
KEPT = "what is answered is kept, and the same command goes on from there"


class RefusedError(UserError):
    """A server will not take a request as it is."""


class Server:
    """Requests to one server. Use as ``async with``.

    Args:
        config: of the server.
        say: receives a line for every kind of fault that a request is tried again after.

    Raises:
        UserError: the key in the environment cannot be one.
    """

    def __init__(self, config: ServerConfig, say: Callable[[str], None] = lambda line: None) -> None:
        self.config, self._say = config, say
        self._key = os.environ.get(API_KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(f"{API_KEY} holds characters that no key has; set it again")
        self._free_at = 0.0
        self._said: set[str] = set()

    async def __aenter__(self) -> "Server":
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self.config.concurrency)
        # An answer sends nothing until it is whole; `_once` limits the time of all of it.
        timeout = httpx.Timeout(None, connect=min(30.0, self.config.timeout))
        logging.getLogger("httpx").setLevel(
            logging.WARNING
        )  # at INFO, which Hydra sets, it has a line for every answer
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def models(self) -> dict[str, int | None]:
        """Names it serves, with their context where it says so; one try.

        Raises:
            UserError: nothing answers there, or refuses to.
        """
        try:
            return served_models(await self._once("GET", "models", None, ""))
        except TemporaryError as fault:
            raise UserError(
                f"no completions server answers at {self.config.root} ({fault}); start it (such as `vllm serve MODEL`) "
                "or correct data.generations.server.url"
            ) from None

    async def ask(self, body: dict[str, Any], read: Callable[[Any], Any], whose: str) -> Any:
        """``read`` of the response, tried again after whatever may pass.

        Raises:
            UserError: an error that no other try will change, or too many tries.
        """
        for tried in range(1, self.config.tries + 1):
            await self._until_free()
            try:
                return read(await self._once("POST", "completions", body, whose))
            except TemporaryError as fault:
                self._report(fault, whose)
                if tried == self.config.tries:
                    raise UserError(
                        f"{self.config.root} gave no answer to {whose} in {tried} tries, lastly: {fault}; {KEPT}. Look "
                        "after the server, or lower server.concurrency or raise server.timeout or .tries"
                    ) from None
                backoff = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tried - 1)) * random.uniform(0.5, 1.0)
                if fault.wait is not None:  # all requests wait, not this one alone
                    self._free_at = max(self._free_at, asyncio.get_running_loop().time() + fault.wait)
                await asyncio.sleep(backoff)
        raise AssertionError("unreachable")

    async def _until_free(self) -> None:
        while (left := self._free_at - asyncio.get_running_loop().time()) > 0:
            # Not all at the same moment.
            await asyncio.sleep(left + random.uniform(0, 0.1 * left))

    async def _once(self, method: str, path: str, body: dict[str, Any] | None, whose: str) -> Any:
        try:
            async with asyncio.timeout(self.config.timeout):
                response = await self._client.request(method, f"{self.config.root}/{path}", json=body)
        except TimeoutError:
            raise TemporaryError(f"no answer within {self.config.timeout:g} s") from None
        except httpx.RequestError as error:
            raise TemporaryError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
        if response.status_code == 200:
            try:
                return response.json()
            except ValueError:
                raise TemporaryError("a response that is not JSON") from None
        # Some servers repeat the key that they refuse.
        content = response.content.replace(self._key.encode(), b"...") if self._key else response.content
        said = f"{response.status_code}: {said_by(content)}"
        if response.status_code in TEMPORARY:
            raise TemporaryError(said, seconds_to_wait(response.headers.get("retry-after")))
        raise self._final(response.status_code, said, whose)

    def _final(self, status: int, said: str, whose: str) -> UserError:
        root = self.config.root
        if status in (401, 403):
            had = f"{API_KEY} is set, but not what it takes" if self._key else f"{API_KEY} is not set"
            return UserError(f"{root} refuses access ({said}); {had}. {KEPT.capitalize()}")
        if status == 404:
            return UserError(
                f"{root} has no completions, or not of this model ({said}); correct data.generations.server.url or "
                f".model. {KEPT.capitalize()}"
            )
        return RefusedError(f"{root} refuses {whose or 'the request'} ({said}); {KEPT}")

    def _report(self, fault: TemporaryError, whose: str) -> None:
        kind = str(fault)[:40]
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"warning: {whose}: {fault}; tried again (said once)")


def check_server(config: ServerConfig, base: str, longest: int) -> str:
    """The name that a server has the base under.

    Args:
        config: with a URL.
        base: the base's name.
        longest: tokens of the longest prompt and answer together.

    Raises:
        UserError: it cannot be reached, serves something else, or has too short a context.
    """

    async def ask() -> dict[str, int | None]:
        async with Server(config) as server:
            return await server.models()

    served = asyncio.run(ask())
    model = chosen_model(list(served), config.model, base, config.root)
    context = served[model]
    if context is not None and context < longest:
        raise UserError(
            f"{config.root} serves {model} with a context of {context} tokens, but prompts and answers have up to "
            f"{longest} (data.generations.max_prompt_tokens + sampler.max_new_tokens); lower them or raise the server's"
        )
    return model


PROBE_TOKENS = 32
SHARD_ROWS = 64
"""Answers a shard: a kill loses fewer than these, and those under way."""


class ServerBackend:
    """A :class:`~drafthead.data.answers.backend.Backend` whose answers a server gives.

    Args:
        config: of the server, with a URL.
        sampler: of the answers.
        tokenizer: of the base.
        eos_ids: tokens that end an answer.
        vocab_size: of the base.
        base: its name.
        max_prompt_tokens: of the longest prompt.
        agreement: share of the answers' tokens that the base would choose itself, in [0, 1].
        say: receives lines about faults that pass.
    """

    def __init__(
        self,
        config: ServerConfig,
        sampler: SamplerConfig,
        *,
        tokenizer: "PreTrainedTokenizerBase",
        eos_ids: frozenset[int],
        vocab_size: int,
        base: str,
        max_prompt_tokens: int,
        greedy_match_rate: Callable[[list[Generation]], float],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config, self.sampler, self.base, self.greedy_match_rate = config, sampler, base, greedy_match_rate
        self.tokenizer, self.eos_ids, self.vocab_size = tokenizer, eos_ids, vocab_size
        self.say = say
        self.longest = max_prompt_tokens + sampler.max_new_tokens
        self._recorded: dict[str, Any] | None = None
        self._found: tuple[str, ServerCapabilities] | None = None

    def identity(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """The server's name of the base, and whether prompts and answers travel as token ids or as text."""
        self._recorded = recorded.get("server")
        if self._recorded is not None:
            return {"server": self._recorded}
        model, dialect = self._known()
        return {"server": {"model": model, **asdict(dialect)}}

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Greedy answers to the prompts: each prompt must be read as it is, and the base must mostly agree."""
        greedy = SamplerConfig(max_new_tokens=min(PROBE_TOKENS, self.sampler.max_new_tokens))
        model, _ = self._known()
        share = self.greedy_match_rate(list(self._answers(prompts, greedy, compare_prompts=True)))
        if share < self.config.min_agreement:
            raise UserError(
                f"the base would choose {100 * share:.0f} % of the tokens that {model} at {self.config.root} answered, "
                f"expected {100 * self.config.min_agreement:.0f} % or more: it is another model, or strongly "
                "quantised; serve the base, or lower data.generations.server.min_agreement"
            )

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: RankGroup, heard: Callable[[], None]
    ) -> Iterator[tuple[int, list[Generation]]]:
        """All answers on the first process, in the order in which they come: one client keeps a server busy."""
        if group.rank:
            return
        missing = [prompt for prompt in prompts if prompt[0] not in done]
        place, shard = 0, list[Generation]()
        try:
            for generation in self._answers(missing, self.sampler):
                shard.append(generation)
                heard()
                if len(shard) == SHARD_ROWS:
                    full, shard = shard, []
                    yield place, full
                    place += 1
        except (Exception, KeyboardInterrupt, SystemExit):
            if shard:
                yield place, shard
            raise
        if shard:
            yield place, shard

    def answer(self, prompts: Sequence[Prompt], sampler: SamplerConfig) -> Iterator[Generation]:
        """Answers by the number of their prompt: what is made of them must not depend on the server's haste."""
        yield from sorted(self._answers(prompts, sampler), key=lambda g: g.prompt_number)

    def _known(self) -> tuple[str, ServerCapabilities]:
        """The server's name of the base, and what the server understands; asked for once.

        Raises:
            UserError: it is not there, understands nothing of what we speak, or differs from the one before.
        """
        if self._found is None:
            model = check_server(self.config, self.base, self.longest)
            dialect = asyncio.run(self._dialect(model))
            was = self._recorded and ServerCapabilities(self._recorded["prompts"], self._recorded["answers"])
            if was and was != dialect:
                raise UserError(
                    f"the corpus was begun with {was}, and {self.config.root} now gives {dialect}; go on with a "
                    "server like the first, or choose another data.folder"
                )
            self._found = model, dialect
        return self._found

    async def _dialect(self, model: str) -> ServerCapabilities:
        prompt = (0, list(self.tokenizer("Hello")["input_ids"]))
        completions = self._completions(replace(self.sampler, max_new_tokens=1))
        async with Server(self.config, self.say) as server:

            async def understood(prompts: str) -> ServerCapabilities:
                body = completions.request(model, prompt, ServerCapabilities(prompts, "ids"))
                given = await server.ask(body, gives_ids, "a first prompt")
                return ServerCapabilities(prompts, "ids" if given else "text")

            try:
                return await understood("ids")
            except RefusedError as error:
                refused = error
            dialect = await understood("text")
        if self.sampler.top_k or self.sampler.ignore_eos:
            raise UserError(
                f"sampler.top_k and .ignore_eos cannot be asked for: {refused}; with text and OpenAI's own fields it "
                "does answer, so leave them out, or use vLLM or SGLang"
            )
        return dialect

    def _completions(self, sampler: SamplerConfig) -> Completions:
        return Completions(self.tokenizer, self.eos_ids, self.vocab_size, sampler)

    def _answers(
        self, prompts: Sequence[Prompt], sampler: SamplerConfig, compare_prompts: bool = False
    ) -> Iterator[Generation]:
        """The stream of answers, driven step by step: no threads, and an interrupt cancels what is under way."""
        if not prompts:
            return
        stream = self._stream(prompts, self._completions(sampler), *self._known(), compare_prompts)

        async def step() -> Generation | None:
            return await anext(stream, None)

        with asyncio.Runner() as runner:
            try:
                while (generation := runner.run(step())) is not None:
                    yield generation
            finally:
                runner.run(_close(stream))

    async def _stream(
        self,
        prompts: Sequence[Prompt],
        completions: Completions,
        model: str,
        dialect: ServerCapabilities,
        compare_prompts: bool,
    ) -> AsyncGenerator[Generation, None]:
        waiting = iter(prompts)
        running = set[asyncio.Task[Generation]]()
        async with Server(self.config, self.say) as server:

            async def one(prompt: Prompt) -> Generation:
                def read(payload: Any) -> Generation:
                    if compare_prompts:
                        _check_prompt(prompt_tokens(payload), len(prompt[1]), dialect)
                    return completions.read(payload, prompt, dialect)

                found: Generation = await server.ask(
                    completions.request(model, prompt, dialect), read, f"prompt {prompt[0]}"
                )
                return found

            try:
                while True:
                    free = self.config.concurrency - len(running)
                    running |= {asyncio.create_task(one(prompt)) for prompt in islice(waiting, free)}
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=lambda t: t.exception() is not None):  # errors last: answers are kept
                        yield task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)


async def _close(stream: AsyncGenerator[Generation, None]) -> None:
    await stream.aclose()


def _check_prompt(read: int | None, sent: int, dialect: ServerCapabilities) -> None:
    if read is not None and read != sent:
        raise UserError(
            f"the server read {read} tokens of a prompt that has {sent} (sent as {dialect.prompts}); it has another "
            "tokenizer, or puts special tokens around prompts: serve the base itself"
        )
