"""A client of completions servers: every request is tried until it is answered or cannot be."""

import asyncio
import logging
import os
import random
from collections.abc import Callable
from typing import Any

import httpx

from drafthead.data.completions import (
    TEMPORARY,
    ServerConfig,
    TemporaryError,
    chosen_model,
    said_by,
    seconds_to_wait,
    served_models,
)
from drafthead.data.errors import UserError

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
