"""Answers from an OpenAI-compatible completions server, many under way at a time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from drafthead.data.backends import Group, Prompt
from drafthead.data.completions import Completions, Dialect, ServerConfig, gives_ids, prompt_tokens
from drafthead.data.errors import UserError
from drafthead.data.generations import Generation, SamplerConfig
from drafthead.data.server_client import RefusedError, Server, check_server

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_TOKENS = 32
SHARD_ROWS = 64
"""Answers a shard: a kill loses fewer than these, and those under way."""


class ServerBackend:
    """A :class:`~drafthead.data.backends.Backend` whose answers a server gives.

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
        agreement: Callable[[list[Generation]], float],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config, self.sampler, self.base, self.agreement = config, sampler, base, agreement
        self.tokenizer, self.eos_ids, self.vocab_size = tokenizer, eos_ids, vocab_size
        self.say = say
        self.longest = max_prompt_tokens + sampler.max_new_tokens
        self._recorded: dict[str, Any] | None = None
        self._found: tuple[str, Dialect] | None = None

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
        share = self.agreement(list(self._answers(prompts, greedy, compare_prompts=True)))
        if share < self.config.min_agreement:
            raise UserError(
                f"the base would choose {100 * share:.0f} % of the tokens that {model} at {self.config.root} answered, "
                f"expected {100 * self.config.min_agreement:.0f} % or more: it is another model, or strongly "
                "quantised; serve the base, or lower data.generations.server.min_agreement"
            )

    def shards(
        self, prompts: Sequence[Prompt], done: Collection[int], group: Group, heard: Callable[[], None]
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

    def _known(self) -> tuple[str, Dialect]:
        """The server's name of the base, and what the server understands; asked for once.

        Raises:
            UserError: it is not there, understands nothing of what we speak, or differs from the one before.
        """
        if self._found is None:
            model = check_server(self.config, self.base, self.longest)
            dialect = asyncio.run(self._dialect(model))
            was = self._recorded and Dialect(self._recorded["prompts"], self._recorded["answers"])
            if was and was != dialect:
                raise UserError(
                    f"the corpus was begun with {was}, and {self.config.root} now gives {dialect}; go on with a "
                    "server like the first, or choose another data.folder"
                )
            self._found = model, dialect
        return self._found

    async def _dialect(self, model: str) -> Dialect:
        prompt = (0, list(self.tokenizer("Hello")["input_ids"]))
        completions = self._completions(replace(self.sampler, max_new_tokens=1))
        async with Server(self.config, self.say) as server:

            async def understood(prompts: str) -> Dialect:
                body = completions.request(model, prompt, Dialect(prompts, "ids"))
                given = await server.ask(body, gives_ids, "a first prompt")
                return Dialect(prompts, "ids" if given else "text")

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
        dialect: Dialect,
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


def _check_prompt(read: int | None, sent: int, dialect: Dialect) -> None:
    if read is not None and read != sent:
        raise UserError(
            f"the server read {read} tokens of a prompt that has {sent} (sent as {dialect.prompts}); it has another "
            "tokenizer, or puts special tokens around prompts: serve the base itself"
        )
