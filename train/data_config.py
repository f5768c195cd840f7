"""Settings of a run's corpora."""

from dataclasses import asdict, dataclass, field
from typing import Any

from drafthead.data.completions import ServerConfig
from drafthead.data.generations import SamplerConfig
from drafthead.data.sources import SourceConfig


@dataclass(kw_only=True)
class TextConfig:
    """Text of the pretraining phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    max_tokens: int = 100_000
    """Tokens packed on disk; a stream has no limit."""
    stream: bool = False
    """Read and pack the text while training, over and over, instead of keeping rows on disk: for what is larger than
    the disk. Near copies are not left out."""
    lanes: int = 8
    """Parts that a stream's sources are dealt into; a multiple of the processes lets each read a part of its own."""
    workers: int = 2
    """Threads of a process that pack a stream's rows ahead of their use."""

    def __post_init__(self) -> None:
        for key, least in (("max_tokens", 64), ("lanes", 1), ("workers", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"data.text.{key} must be at least {least}, got {getattr(self, key)}")

    def manifest(self) -> dict[str, Any]:
        """What decides on the rows."""
        sources = {"sources": [source.manifest() for source in self.sources]}
        return sources | ({"lanes": self.lanes} if self.stream else {"max_tokens": self.max_tokens})


@dataclass(kw_only=True)
class GenerationsConfig:
    """The base's own answers, for the distillation phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Prompts."""
    prompts: int = 1000
    """Prompts taken from the sources."""
    synthesised: int = 0
    """Prompts that the base writes itself, besides (it continues its chat template up to the user's turn)."""
    max_prompt_tokens: int = 128
    """Longer prompts are left out."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    slots: int = 64
    """Answers generated at a time by the built-in decoding, on each process."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """A server that generates the answers instead (vLLM, SGLang, TGI)."""
    keep_features: bool = True
    """Keep the hidden states that generation computes anyway; the distillation phase then needs no pass of the base.
    A server gives none."""

    def __post_init__(self) -> None:
        for key, least in (("prompts", 0), ("synthesised", 0), ("max_prompt_tokens", 8), ("slots", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"data.generations.{key} must be at least {least}, got {getattr(self, key)}")
        if self.server.url is not None and self.keep_features:
            raise ValueError(
                "data.generations.keep_features must be false with a server, which gives no hidden states; the "
                "distillation phase then computes them"
            )

    def manifest(self) -> dict[str, Any]:
        """What decides on the answers; not how many are made at a time, and where."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("slots", "server")}
        return kept | {"sources": [source.manifest() for source in self.sources]}


@dataclass(kw_only=True)
class DataConfig:
    """Corpora of a run."""

    folder: str = "outputs/corpora"
    """Where corpora are kept; runs with equal settings share them."""
    text: TextConfig = field(default_factory=TextConfig)
    generations: GenerationsConfig = field(default_factory=GenerationsConfig)
