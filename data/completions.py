"""The OpenAI completions protocol as vLLM, SGLang and TGI speak it: what is asked, and what an answer must hold."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from drafthead.data.backends import Prompt
from drafthead.data.errors import UserError
from drafthead.data.generations import Generation, SamplerConfig

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
class Dialect:
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

    def request(self, model: str, prompt: Prompt, dialect: Dialect) -> dict[str, Any]:
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

    def read(self, payload: Any, prompt: Prompt, dialect: Dialect) -> Generation:
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
