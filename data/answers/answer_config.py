"""Settings of answers: how the base samples them, and the server that may generate them."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from drafthead.data.utils.errors import UserError, check_limits


@dataclass(kw_only=True)
class SamplerConfig:
    """How the base answers."""

    temperature: float = 0.0
    """0 is greedy, exactly."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this probability."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    ignore_eos: bool = False
    """Continue after the end of a turn."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_limits(
            self,
            "sampler.",
            temperature="[0, inf)",
            top_k="[0, inf)",
            top_p="(0, 1]",
            max_new_tokens="[1, inf)",
            seed="[0, inf)",
        )


@dataclass(kw_only=True)
class ServerConfig:
    """A completions server that answers instead of the built-in decoding."""

    url: str | None = None
    """Its address, such as ``http://node7:8000``; its key is read from OPENAI_API_KEY. None: no server."""
    model: str | None = None
    """The name it serves the base under. None: the only one it serves, or the base's own name."""
    concurrency: int = 64
    """Requests at a time."""
    timeout: float = 600.0
    """Seconds that an answer may take."""
    tries: int = 25
    """Requests for one answer before the run ends; the waits between them double from half a second to 8 seconds."""
    min_greedy_match_rate: float = 0.8
    """Smallest share of the server's greedy tokens that the base must choose too: reveals another model."""

    def __post_init__(self) -> None:
        check_limits(
            self,
            "server.",
            concurrency="[1, inf)",
            tries="[1, inf)",
            timeout="(0, inf)",
            min_greedy_match_rate="[0, 1]",
        )
        if self.url is not None:
            _check_url(self.url)

    @property
    def root(self) -> str:
        """The address of the API, ``/v1`` added where no path is given."""
        assert self.url is not None
        return self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.username or parts.password:
        # The recipe is written to the run folder and to trackers.
        raise UserError("server.url must not hold a name or a password; put the key into OPENAI_API_KEY")
    try:
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is no number
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UserError(f"server.url must be like http://host:8000, got {url!r}")
