"""Settings for generating the base's answers: the sampler, and a server as an alternative to built-in decoding."""

from typing import ClassVar
from urllib.parse import urlsplit

from drafthead.errors import UserError
from drafthead.settings import schema
from drafthead.settings.schema import Positive, require, settings


@settings(kw_only=True)
class SamplerConfig:
    """Settings of the sampler for the base's answers."""

    temperature: schema.Temperature = 0.0
    """Sampling temperature. 0 is greedy decoding."""
    top_k: schema.NonNegative = 0
    """Sample from the k most likely tokens. 0: from all tokens."""
    top_p: schema.PositiveShare = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    max_new_tokens: Positive = 128
    """Largest number of tokens of an answer."""
    ignore_eos: bool = False
    """Continue answers after the end-of-turn token."""
    seed: schema.Seed = 0
    """Seed of the sampled answers."""


@settings(kw_only=True)
class ServerConfig:
    """Settings of a completions server that generates the answers instead of the built-in decoding."""

    SETTING: ClassVar[str] = "data.answers.server"

    url: str | None = None
    """Address of a completions server (vLLM, SGLang) that generates the answers. For example ``http://node7:8000``. Its
    key is read from OPENAI_API_KEY. With null, the built-in decoding generates the answers."""
    model: str | None = None
    """Name of the base on the server. With null, the base's name if it is served, else the server's only model."""
    concurrency: Positive = 64
    """Largest number of concurrent requests."""
    timeout: schema.PositiveFloat = 600.0
    """Longest time for one request, in seconds."""
    tries: Positive = 25
    """Largest number of requests for one answer. If all fail, the run ends. The waits between them double from half a
    second to 8 seconds; after malformed answers they stay half a second."""
    min_greedy_match_rate: schema.Share = 0.8
    """Smallest share of the server's greedy tokens that the base must also choose. A lower share means that the server
    runs another model, and ends the run."""

    def __post_init__(self) -> None:
        if self.url is None:
            return
        parts = urlsplit(self.url)
        if parts.username or parts.password:
            # The recipe is written to the run folder and to trackers.
            raise UserError(f"{self.SETTING}.url must not contain a user or password; use OPENAI_API_KEY instead")
        try:
            valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:  # the port is not a number
            valid = False
        require(bool(valid) and not (parts.query or parts.fragment), "url", "like http://host:8000", self.url)

    @property
    def root(self) -> str:  # API address: ``url``, with ``/v1`` added if it has no path
        assert self.url is not None
        return self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")
