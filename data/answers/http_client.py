"""HTTP client for model servers, which may be slow, faulty or hostile, and what all their answers share."""

import asyncio
import json
import os
from collections.abc import Sequence, Set
from typing import Any

import httpx2
import openai

API_KEY = "OPENAI_API_KEY"
MAX_RESPONSE = 16 << 20  # bytes; an answer of 100,000 tokens with its prompt has about 2 MB
SHOWN_KEY = 4  # messages repeat fewer consecutive characters of a key than this
QUOTED = 2000  # characters of a server's message that are searched for the key


class LimitedClient(openai.DefaultAsyncHttpxClient):
    """Client that limits the time of a whole request and the size of its response, and follows no redirect. httpx alone
    limits only the wait for the next bytes, and sends the prompts of a redirected request elsewhere."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; its read timeout is the limit for the time until the end of the response."""
        request.headers["Accept-Encoding"] = "identity"  # a small compressed response can be huge
        seconds = request.extensions["timeout"]["read"]
        try:
            async with asyncio.timeout(seconds):
                response = await super().send(request, **options | {"stream": True, "follow_redirects": False})
                try:
                    content = await _content(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx2.ReadTimeout(f"no whole response within {seconds:g} s", request=request) from None
        return httpx2.Response(response.status_code, headers=response.headers, content=content, request=request)


async def _content(response: httpx2.Response) -> bytes:
    """Return the body of a response; reject one that is compressed or larger than ``MAX_RESPONSE``."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise httpx2.DecodingError(f"a response with content-encoding {encoding!r}, which was not requested")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_RESPONSE:
            raise httpx2.DecodingError(f"a response of more than {MAX_RESPONSE >> 20} MiB")
    return bytes(content)


def masked(text: str, key: str) -> str:
    """Return the beginning of a server's message in one line, without the parts of ``key`` that it repeats."""
    text = " ".join(text[:QUOTED].split())
    for size in range(len(key), SHOWN_KEY - 1, -1):
        for start in range(len(key) - size + 1):
            text = text.replace(key[start : start + size], "...")
    return text[:300]


def api_key() -> str:  # of the environment; empty if there is none
    return os.environ.get(API_KEY, "").strip()


def error_text(error: openai.OpenAIError, key: str) -> str:
    """Return the reason of an error in one line, without the API key, which some servers repeat in messages."""
    if not isinstance(error, openai.APIStatusError):
        cause = error.__cause__
        return masked(f"{type(cause).__name__}: {cause}" if cause else str(error), key)
    if error.status_code < 400:
        address = error.response.headers.get("location", "an address that it does not name")
        return f"{error.status_code}: it redirects to {masked(address, key)}"
    body: Any = error.body
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and name in body:
            body = body[name]
    return f"{error.status_code}: {masked(body if isinstance(body, str) else json.dumps(body), key)}"


def through_end(tokens: Sequence[int], eos_ids: Set[int]) -> list[int] | None:
    """Return the tokens up to and including the first end-of-turn token; None if there is none."""
    end = next((index for index, token in enumerate(tokens) if token in eos_ids), None)
    return None if end is None else list(tokens[: end + 1])
