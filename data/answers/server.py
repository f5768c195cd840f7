"""Answers by an OpenAI-compatible completions server (vLLM, SGLang), many requests at a time. The ``openai`` client
retries transient errors (429, 5xx, cut connections, timeouts). Malformed answers are retried here. All other errors end
the run with one line."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, TypeVar

import numpy as np
import openai
from openai.types import Completion, CompletionChoice

from drafthead.data.answers.answer_config import SamplerConfig, ServerConfig
from drafthead.data.answers.http_client import API_KEY, LimitedClient, api_key, error_text, through_end
from drafthead.data.answers.store import Answer, ProcessGroup, Prompt
from drafthead.data.text.chat import Tokenizer, encode, encode_after
from drafthead.errors import UserError

Log = Callable[[str], None]  # prints a line for the user
T = TypeVar("T")
Item = TypeVar("Item")
TRANSIENT = (408, 409, 429)  # HTTP statuses below 500 that the ``openai`` client retries, as it does all from 500 on
PROBE_TOKENS = 32
ALIVE_S = 2.0  # seconds without an answer after which the server is checked
SHARD_ROWS = 64  # answers per shard; a killed run loses fewer finished answers than this, and all unfinished ones
RESUMES = "finished answers are kept, and the same command resumes there"


class BadAnswerError(Exception):
    """A malformed response. Another try may succeed."""


@dataclass(frozen=True)
class Completions:
    """Conversion of prompts to requests and of responses to answers, for one base and sampler."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    vocab_size: int
    sampler: SamplerConfig

    def request(self, model: str, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments of ``completions.create``, with token ids as the prompt. Every sampling parameter is
        sent: servers take missing ones from the model's ``generation_config.json``."""
        number, ids = prompt
        sampler = self.sampler
        return {
            "model": model,
            "prompt": ids,
            "max_tokens": sampler.max_new_tokens,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "n": 1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": (sampler.seed * 1_000_003 + number) % 2**31,
            "extra_body": {
                "top_k": sampler.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": sampler.ignore_eos,
                "skip_special_tokens": False,
                "return_token_ids": True,
                **({} if sampler.ignore_eos else {"stop_token_ids": sorted(self.eos_ids)}),
            },
        }

    def parse(self, completion: Completion, prompt: Prompt, as_text: bool = False) -> Answer:
        """Return the answer in the server's response: its token ids or, with ``as_text``, its text, tokenised here. A
        fault that another try may not have is a ``BadAnswerError``."""
        choice = _only_choice(completion)
        number, ids = prompt
        reason = getattr(choice, "finish_reason", None)
        if reason not in ("stop", "length"):
            raise BadAnswerError(f"an answer that ended by {reason!r}, expected 'stop' or 'length'")
        answer = self._ids(choice, ids, as_text)
        if not answer and getattr(completion.usage, "completion_tokens", None) != 1:
            raise BadAnswerError("an empty answer")
        answer, finished = self._with_eos(answer, reason == "stop", choice, number)
        if not finished and len(answer) < self.sampler.max_new_tokens and not as_text:
            what = f"the server cut the answer to prompt {number} ({len(ids)} tokens) after {len(answer)}"
            raise UserError(f"{what} of {self.sampler.max_new_tokens} tokens; give the server a longer context")
        return Answer(number, np.array([*ids, *answer], dtype=np.int32), len(ids), finished)

    def _ids(self, choice: CompletionChoice, prompt_ids: list[int], as_text: bool) -> list[int]:
        """Return the token ids of a response's answer: the server's ids or, with ``as_text``, those of its text. The
        text is tokenised after the prompt. Tokens beyond the requested number are cut off."""
        most = self.sampler.max_new_tokens
        if as_text:
            text = getattr(choice, "text", None)
            if not isinstance(text, str):
                raise BadAnswerError("no text")
            prompt = str(self.tokenizer.decode(prompt_ids))
            return encode_after(self.tokenizer, prompt, encode(self.tokenizer, prompt), text)[:most]
        ids = getattr(choice, "token_ids", None)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < self.vocab_size for i in ids):
            raise BadAnswerError(f"no token ids below {self.vocab_size} in token_ids")
        if len(ids) > most:
            raise BadAnswerError(f"{len(ids)} tokens, but at most {most} were requested")
        return ids

    def _with_eos(
        self, answer: list[int], finished: bool, choice: CompletionChoice, number: int
    ) -> tuple[list[int], bool]:
        """Return the answer up to and including its end-of-turn token, and True if it has one. Servers may leave this
        token out of a finished answer. It is then their ``stop_reason``, or the tokenizer's."""
        if self.sampler.ignore_eos:
            if finished:
                raise UserError(f"the server ended answer {number} despite ignore_eos; set sampler.ignore_eos=false")
            return answer, False
        if (ended := through_end(answer, self.eos_ids)) is not None:
            return ended, True
        if not finished or len(answer) == self.sampler.max_new_tokens:
            return answer, False
        stated = getattr(choice, "stop_reason", getattr(choice, "matched_stop", None))
        candidates = (stated, self.tokenizer.eos_token_id, *sorted(self.eos_ids))
        eos = next((token for token in candidates if token in self.eos_ids), None)
        if eos is None:
            what = f"the server ended answer {number}"
            raise UserError(f"{what}, but the base's generation_config.json has no eos_token_id; set it")
        return [*answer, eos], True


def _only_choice(completion: Any) -> CompletionChoice:
    choices = getattr(completion, "choices", None)
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], CompletionChoice):
        raise BadAnswerError("a response without an answer in 'choices'")
    return choices[0]


def _with_choice(completion: Completion) -> Completion:
    _only_choice(completion)
    return completion


class Server:
    """A connection to one server: the ``openai`` client, with errors as ``UserError``. Use as ``async with``."""

    def __init__(self, config: ServerConfig, log: Log = lambda line: None) -> None:
        self.config, self._log = config, log
        self._key = api_key()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(f"{API_KEY} holds characters that no key has; set it again")
        self._logged: set[str] = set()

    async def __aenter__(self) -> "Server":
        self._client = openai.AsyncOpenAI(
            base_url=self.config.root,
            api_key=self._key or "none",
            timeout=openai.Timeout(self.config.timeout, connect=min(30.0, self.config.timeout)),
            max_retries=self.config.tries - 1,
            http_client=LimitedClient(event_hooks={"response": [self._note_status]}),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()

    async def models(self) -> dict[str, int | None]:
        """Return the context length of each served model by name, None if not stated; {} for a malformed response."""
        try:
            rows = (await self._client.with_options(max_retries=0).models.list()).data
        except openai.OpenAIError as error:
            what = f"no completions server answers at {self.config.root} ({error_text(error, self._key)})"
            remedy = f"start it, such as `vllm serve MODEL`, or correct {self.config.SETTING}.url"
            raise self._refusal(error, "the list of models") or UserError(f"{what}; {remedy}") from None
        except (ValueError, RecursionError):
            rows = []
        named = [r for r in rows if isinstance(getattr(r, "id", None), str)] if isinstance(rows, list) else []
        return {row.id: getattr(row, "max_model_len", None) for row in named}

    async def ask(self, request: dict[str, Any], parse: Callable[[Completion], T], request_name: str) -> T:
        """Send ``request`` and return ``parse(response)``; send it again if ``parse`` raises a ``BadAnswerError``.
        Raises a ``UserError`` after ``config.tries`` tries, or at once if the server refuses the request."""
        root, tries = self.config.root, self.config.tries
        for tried in range(1, tries + 1):
            try:
                try:
                    completion = await self._client.completions.create(**request)
                except (ValueError, RecursionError):
                    raise BadAnswerError("a response that is not JSON") from None
                return parse(completion)
            except BadAnswerError as error:
                reason = str(error)
                self._log_once(reason, f"{request_name}: the server gave {reason}")
            except openai.OpenAIError as error:
                if refusal := self._refusal(error, request_name):
                    raise refusal from None
                reason = error_text(error, self._key)
                break
            if tried < tries:
                await asyncio.sleep(0.5)
        what = f"{root} gave no answer to {request_name} in {tries} tries, lastly: {reason}"
        raise UserError(f"{what}; {RESUMES}. Check the server")

    async def _note_status(self, response: Any) -> None:
        status = response.status_code
        if status in TRANSIENT or status >= 500:
            self._log_once(str(status), f"{self.config.root} answered {status}")

    def _log_once(self, kind: str, line: str) -> None:
        if kind[:40] not in self._logged:
            self._logged.add(kind[:40])
            self._log(f"warning: {line}; retried (logged once)")

    def _refusal(self, error: openai.OpenAIError, request_name: str) -> UserError | None:
        """Return the ``UserError`` to raise for the client's ``error``, or None if another try may succeed."""
        status = error.status_code if isinstance(error, openai.APIStatusError) else 500
        if status in TRANSIENT or status >= 500:
            return None
        advice = "requests have token ids as prompts and the fields of vLLM and SGLang; use one of these servers"
        if status in (401, 403):
            advice = f"{API_KEY} is set, but not accepted" if self._key else f"{API_KEY} is not set"
        elif status < 400:
            advice = f"no prompt is sent there; set {self.config.SETTING}.url to the server's own address"
        elif status == 404:
            advice = f"it does not serve completions of this model; correct {self.config.SETTING}.url"
        text = error_text(error, self._key)
        return UserError(f"{self.config.root} refuses {request_name} ({text}): {advice}. {RESUMES.capitalize()}")


def check_server(config: ServerConfig, base: str, longest: int) -> str:
    """Return the name under which the server serves the model ``base``; reject a context below ``longest`` tokens."""

    async def served_models() -> dict[str, int | None]:
        async with Server(config) as server:
            return await server.models()

    served = asyncio.run(served_models())
    model = config.model or (base if base in served else next(iter(served), base))
    names = ", ".join(served)
    if not served:
        raise UserError(f"{config.root} lists no models; serve {base!r} there, or correct {config.SETTING}.url")
    if config.model is not None and model not in served:
        raise UserError(f"{config.root} does not serve {model!r}, but {names}; set data.answers.server.model")
    if config.model is None and model != base and len(served) != 1:
        raise UserError(f"{config.root} serves {names}; name the one that is {base!r} with data.answers.server.model")
    context = served[model]
    if isinstance(context, int) and context < longest:
        what = f"{config.root} serves {model} with a context of {context} tokens, but prompts and answers have up to"
        raise UserError(f"{what} {longest}; lower data.answers.max_prompt_tokens or sampler.max_new_tokens")
    return model


def as_completed(
    config: ServerConfig,
    log: Log,
    items: Iterable[Item],
    ask: Callable[[Server, Item], Coroutine[Any, Any, T]],
    check_alive: Callable[[], None],
) -> Iterator[T]:
    """Yield ``ask(server, item)`` of all items as they are completed, with ``config.concurrency`` at a time. An error
    or an interrupt cancels the open requests, and is raised after all finished ones. ``check_alive`` is called while
    requests wait, and raises if the server has ended."""
    waiting = iter(items)
    running = set[asyncio.Task[T]]()
    with asyncio.Runner() as runner:
        server = runner.run(Server(config, log).__aenter__())
        try:
            while True:
                free = islice(waiting, config.concurrency - len(running))
                running |= {runner.get_loop().create_task(ask(server, item)) for item in free}
                if not running:
                    return
                wait = asyncio.wait(running, timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                done, running = runner.run(wait)
                if not done:
                    check_alive()
                for task in sorted(done, key=lambda t: t.exception() is not None):  # errors last
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            runner.run(server.__aexit__())


@dataclass(eq=False)
class ServerBackend:
    """Generator of answers that requests them from a server; ``BuiltInBackend`` has the same interface."""

    config: ServerConfig
    completions: Completions
    base: str  # its name
    max_prompt_tokens: int
    greedy_match_rate: Callable[[list[Answer]], float]  # share of the answers' tokens that the base would choose
    log: Log = lambda line: None
    more: dict[str, Any] = field(default_factory=dict)  # additional fields of requests for a corpus's answers
    on_answer: Callable[[Completion, Answer | None], None] = lambda completion, answer: None
    """Called in a thread after each request, with None for an answer that is not one of the corpus."""
    check_alive: Callable[[], None] = lambda: None
    """Raises if the server is known to have ended, so that its requests are not repeated."""
    _recorded: dict[str, Any] | None = None
    _model: tuple[str, bool] | None = None

    def identity(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest's entry ``server``, of a resumed corpus or with the base's name and form of answers."""
        self._recorded = recorded.get("server")
        if self._recorded is None:
            model, as_text = self._find_model()
            self._recorded = {"model": model, "prompts": "ids", "answers": "text" if as_text else "ids"}
        return {"server": self._recorded}

    def at(self, temperature: float) -> "ServerBackend":  # with another sampling temperature
        sampler = replace(self.completions.sampler, temperature=temperature)
        return replace(self, completions=replace(self.completions, sampler=sampler))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise a ``UserError`` if the server changes prompts, or if its greedy answers match the base's too rarely."""
        greedy = SamplerConfig(max_new_tokens=min(PROBE_TOKENS, self.completions.sampler.max_new_tokens))
        model, _ = self._find_model()
        share = self.greedy_match_rate(list(self._answers(prompts, greedy, check_prompts=True)))
        if share < self.config.min_greedy_match_rate:
            what = f"the base would choose {100 * share:.0f} % of the tokens that {model} at {self.config.root}"
            expected = f"{100 * self.config.min_greedy_match_rate:.0f} % or more"
            raise UserError(f"{what} answered, expected {expected}; serve the base itself")

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: ProcessGroup, on_done: Callable[[], None]
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yield (shard number from 0, its answers) for every ``SHARD_ROWS`` answers, in the order of their arrival.
        Only the first process of ``group`` requests answers, to prompts not in ``done``. Before an error is raised,
        finished answers are yielded."""
        if group.rank:
            return
        missing = [prompt for prompt in prompts if prompt[0] not in done]
        answers = self._answers(missing, self.completions.sampler, for_corpus=True)
        for index in count():
            shard: list[Answer] = []
            try:
                for answer in islice(answers, SHARD_ROWS):
                    shard.append(answer)
                    on_done()
            finally:  # an error or an interrupt loses no finished answer
                if shard:
                    yield index, shard
            if len(shard) < SHARD_ROWS:
                return

    def answer(self, prompts: Sequence[Prompt], sampler: SamplerConfig) -> Iterator[Answer]:
        """Yield answers sampled by ``sampler``, by ascending prompt number."""
        yield from sorted(self._answers(prompts, sampler), key=lambda g: g.prompt_number)

    def _find_model(self) -> tuple[str, bool]:
        """Return the base's name on the server, and True if answers come as text. The server is asked only once."""
        if self._model is None:
            longest = self.max_prompt_tokens + self.completions.sampler.max_new_tokens
            model = check_server(self.config, self.base, longest)
            as_text = self._gives_text(model)
            if self._recorded and self._recorded["answers"] != ("text" if as_text else "ids"):
                what = f"the corpus was started with answers as {self._recorded['answers']}"
                raise UserError(f"{what}, and {self.config.root} now gives another form; choose another data.folder")
            self._model = model, as_text
        return self._model

    def _gives_text(self, model: str) -> bool:
        """Request one token; return True if the answer is only text, as from servers without ``return_token_ids``."""
        completions = replace(self.completions, sampler=replace(self.completions.sampler, max_new_tokens=1))
        first = 0, list(self.completions.tokenizer("Hello")["input_ids"])

        async def ask(server: Server, prompt: Prompt) -> Completion:
            completion = await server.ask(completions.request(model, prompt), _with_choice, "a first prompt")
            await asyncio.to_thread(self.on_answer, completion, None)
            return completion

        (completion,) = as_completed(self.config, self.log, [first], ask, self.check_alive)
        return not isinstance(getattr(completion.choices[0], "token_ids", None), list)

    def _answers(
        self, prompts: Sequence[Prompt], sampler: SamplerConfig, check_prompts: bool = False, for_corpus: bool = False
    ) -> Iterator[Answer]:
        """Yield answers as they arrive, with ``config.concurrency`` requests at a time. With ``check_prompts``, reject
        a server that reads a prompt as another number of tokens. An error or an interrupt cancels the open requests,
        and is raised after all finished answers."""
        if not prompts:
            return
        model, as_text = self._find_model()
        completions = replace(self.completions, sampler=sampler)

        async def answer(server: Server, prompt: Prompt) -> Answer:
            def parse(completion: Completion) -> tuple[Completion, Answer]:
                ids = getattr(_only_choice(completion), "prompt_token_ids", None)
                length = len(ids) if isinstance(ids, list) else getattr(completion.usage, "prompt_tokens", None)
                if check_prompts and isinstance(length, int) and length != len(prompt[1]):
                    what = f"the server read {length} tokens of a prompt of {len(prompt[1])}"
                    raise UserError(f"{what}; serve the base itself")
                return completion, completions.parse(completion, prompt, as_text)

            request = completions.request(model, prompt)
            if for_corpus:
                request["extra_body"] |= self.more
            completion, parsed = await server.ask(request, parse, f"prompt {prompt[0]}")
            await asyncio.to_thread(self.on_answer, completion, parsed if for_corpus else None)
            return parsed

        yield from as_completed(self.config, self.log, prompts, answer, self.check_alive)
