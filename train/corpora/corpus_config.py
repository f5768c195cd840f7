"""Settings of a run's corpora: text, the base's own answers, and their folder."""

from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from drafthead.data.answers.answer_config import SamplerConfig, ServerConfig
from drafthead.data.text.chat import template_variables
from drafthead.data.text.sources import SourceConfig, expand_sources, num_entries
from drafthead.errors import UserError
from drafthead.settings.schema import NonNegative, Positive, PositiveFloat, Temperature, require, settings

Sources = Annotated[list[SourceConfig], BeforeValidator(expand_sources)]
HELD_OUT_EVERY = 20  # every 20th conversation is not trained on, to measure acceptance and to calibrate the tree
PORT = 8000  # of the server that a run or `drafthead serve` starts
COMPLETE = "complete.json"  # written when every prompt is answered; from then on no server is needed


@settings(kw_only=True)
class TextConfig:
    """Settings of the text for pretraining phases."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Sources of text: a list of ``{kind, name, ...}``. Keys: see "Sources of text and prompts" in
    docs/reference/settings.md."""
    max_tokens: Annotated[int, Field(ge=64)] = 100_000
    """Largest number of tokens of text. With ``stream=true`` there is no limit."""
    stream: bool = False
    """Read and tokenise text during training instead of storing it on disk. Use it for text larger than the disk. The
    sources are repeated as needed, and near-duplicates are not removed."""
    stream_shards: Positive = 8
    """Number of shards into which a stream's sources are divided. Use a multiple of the process count, so that each
    process reads its own shards."""
    workers: Positive = 2
    """Threads per process that pack a stream's rows ahead of their use."""

    def manifest(self) -> dict[str, Any]:  # settings that determine the packed rows
        sources = {"sources": [source.manifest() for source in self.sources]}
        return sources | ({"stream_shards": self.stream_shards} if self.stream else {"max_tokens": self.max_tokens})


@settings(kw_only=True)
class AnswersConfig:
    """Settings of the base's own answers, for distillation phases."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Sources of prompts: a list of ``{kind, name, ...}``. Keys: see "Sources of text and prompts" in
    docs/reference/settings.md."""
    prompts: NonNegative = 1000
    """Largest number of prompts to take from the sources."""
    self_prompted: NonNegative = 0
    """Number of additional prompts that the base writes itself. It continues its chat template at the user's turn."""
    exclude_suites: list[str] = field(default_factory=list)
    """Evaluation suites whose prompts must not be trained on. Training prompts that nearly repeat one are removed."""
    max_prompt_tokens: Annotated[int, Field(ge=8)] = 128
    """Largest number of tokens of a prompt. Longer prompts are removed."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    temperatures: list[Temperature] = field(default_factory=list)
    """Temperatures from which one is drawn for each prompt. List a value twice to use it twice as often. Empty:
    ``sampler.temperature`` for all prompts."""
    chat_template_kwargs: list[dict[str, Any]] = field(default_factory=list)
    """Sets of chat template variables from which one is drawn for each prompt. They replace those of
    ``base.chat_template_kwargs``. For example ``[{enable_thinking: true}, {enable_thinking: false}]``,
    ``[{reasoning_effort: low}, {reasoning_effort: high}]`` or ``[{tools: tools.json}, {}]``. Empty:
    ``base.chat_template_kwargs`` for all prompts."""
    precomputed: str | None = None
    """Existing answers to use instead of generating them. Give ``embedded:smollm2``, ``embedded:smollm2_large``, or the
    folder ``answers`` of another corpus. If these answers are greedy, the run first checks on a few of them that its
    base would answer the same. At most ``prompts`` plus ``self_prompted`` conversations are used."""
    fresh: bool | None = None
    """Generate the answers even if ``precomputed`` names existing ones. With null, this is done only if ``precomputed``
    names packaged answers (``embedded:...``) and the base is not the embedded SmolLM2, or has an adapter."""
    batch_size: Positive = 64
    """Number of answers that each process generates at once with the built-in decoding."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Server that generates the answers instead of the built-in decoding (vLLM, SGLang)."""

    def __post_init__(self) -> None:
        self.chat_template_kwargs = [template_variables(entry) for entry in self.chat_template_kwargs]
        if self.copied and (self.temperatures or self.chat_template_kwargs):
            raise UserError("temperatures and chat_template_kwargs need new answers; set data.answers.fresh=true")

    @property
    def copied(self) -> bool:  # from precomputed answers
        return self.precomputed is not None and not self.fresh

    @property
    def decoded_here(self) -> bool:
        """Return True if the built-in decoding generates the answers; it can also store their final hidden states."""
        return not self.copied and self.server.url is None

    def manifest(self) -> dict[str, Any]:
        """Return the settings that determine the answers, not those that only decide how fast or where."""
        without = ("batch_size", "server", "precomputed", "fresh")
        manifest = {key: value for key, value in asdict(self).items() if key not in without}
        for key in ("exclude_suites", "temperatures", "chat_template_kwargs"):
            if not manifest[key]:
                del manifest[key]  # manifests of older corpora lack it
        return manifest | {"sources": [source.manifest() for source in self.sources]}


@settings(kw_only=True)
class StatesServerConfig(ServerConfig):
    """Settings of requests for hidden states."""

    SETTING: ClassVar[str] = "data.states"


@settings(kw_only=True)
class StatesConfig:
    """Settings of a vLLM server that runs the base: it answers, and computes hidden states. No layer of the base is
    loaded."""

    url: str | None = None
    """Address of a vLLM server that `drafthead serve` started for this recipe. For example ``http://node7:8000``. With
    null, the base is run here, unless ``serve`` is true."""
    serve: bool = False
    """Start this server for the run, at the port of ``url`` or at 8000, and stop it when all states are stored. This
    needs `drafthead engines install=vllm`."""
    arguments: list[str] = field(default_factory=list)
    """More arguments for the vLLM that `drafthead serve` or ``serve`` starts. For example
    ``[--tensor-parallel-size, "8"]``."""
    folder: str | None = None
    """Folder into which the server writes its files, as seen from here. With null, ``served`` in ``data.folder``."""
    keep: bool = True
    """Store all hidden states before a phase begins. With false, the server computes the states of each row again
    whenever it is trained on, and nothing is stored: for corpora larger than the disk. It then runs during training."""
    ahead: Positive = 4
    """Largest number of micro-batches that are requested before their use, with ``keep=false``."""
    compare_layers: bool = True
    """Compare every layer that the server writes for the first texts with the base's, one layer in memory at a time.
    This reads the base's checkpoint once. Set it to false for a base that the server quantises."""
    concurrency: Positive = 8
    """Largest number of concurrent requests."""
    timeout: PositiveFloat = 600.0
    """Longest time for one request, in seconds."""
    tries: Positive = 5
    """Largest number of requests for one document. If all fail, the run ends."""

    def __post_init__(self) -> None:
        if self.serve and self.url is None:
            self.url = f"http://127.0.0.1:{PORT}"
        self.requests()  # checks the address

    @property
    def is_used(self) -> bool:
        return self.url is not None

    def requests(self) -> ServerConfig:
        """Return how the server is asked for states."""
        return StatesServerConfig(url=self.url, concurrency=self.concurrency, timeout=self.timeout, tries=self.tries)


@settings(kw_only=True)
class OfflineConfig:
    """Settings of texts and hidden states that speculators wrote, with which a run needs neither answers nor layers of
    the base."""

    folder: str | None = None
    """Output of `speculators prepare-data`, whose folder ``hidden_states`` `generate-offline-data` has filled. Phases
    on answers train on its texts, where the loss mask says so, from these states."""
    layers: list[NonNegative] | None = None
    """Layers in the files, in their order; 0 is the embedding. The last one is the base's last. With null, 2, L // 2,
    L - 3 and L of L layers, as speculators takes them."""
    missing: Literal["reject", "skip"] = "reject"
    """Treatment of texts without states. ``reject`` ends the run before training; ``skip`` trains on the others."""

    def __post_init__(self) -> None:
        layers = self.layers or []
        require(layers == sorted({*layers}), "data.offline.layers", "ascending", layers)


@settings(kw_only=True)
class DataConfig:
    """Settings of a run's corpora."""

    folder: str = "outputs/corpora"
    """Folder of the corpora. Runs with equal data settings share them."""
    prompts: Sources = field(default_factory=list)
    """Your own prompts for the base to answer, instead of the recipe's prompts. For example ``prompts.jsonl``, in the
    format of ``eval suite=prompts.jsonl``. This sets ``answers.sources`` to these prompts, ``answers.prompts`` to their
    number if it is known, ``answers.self_prompted=0`` and ``answers.fresh=true``."""
    transcripts: Sources = field(default_factory=list)
    """Conversations whose assistant turns are trained on, instead of the base's own answers. For example
    ``chats.jsonl``, with ``{"messages": [...]}`` per line, or ``ultrachat:20000``. Give a path, ``hf:NAME[:SPLIT]``, or
    ``ultrachat``, ``sharegpt``, ``open_perfectblend``, ``magpie``, ``hermes_fc``, each optionally with ``:LIMIT``; or a
    list of these."""
    bad_transcripts: Literal["reject", "skip"] = "reject"
    """Treatment of broken transcripts. ``reject`` ends the run before training; ``skip`` trains on the other
    transcripts."""
    own_answers: bool = False
    """With transcripts, also train on the base's own answers (``answers``)."""
    text: TextConfig = field(default_factory=TextConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)

    def __post_init__(self) -> None:
        require(bool(self.folder.strip()), "folder", "the name of a folder", self.folder)
        if self.prompts:
            count = sum(num_entries(source) or self.answers.prompts for source in self.prompts)
            self.answers = replace(self.answers, sources=self.prompts, prompts=count, self_prompted=0, fresh=True)
        if self.states.is_used and self.answers.server.url is None:
            self.answers = replace(self.answers, server=replace(self.answers.server, url=self.states.url))
        weighted = [source for source in self.transcripts if source.weight is not None]
        require(not weighted, "transcripts", "sources without weight; use limit", [str(source) for source in weighted])
        others = [name for name in ("prompts", "transcripts") if getattr(self, name)]
        require(not (self.offline.folder and others), "offline", f"unset with data.{'/'.join(others)}", self.offline)
        require(bool(self.transcripts) or not self.own_answers, "own_answers", "false without data.transcripts", True)

    @property
    def served_folder(self) -> Path:
        return Path(self.states.folder or Path(self.folder) / "served")

    @property
    def has_own_prompts(self) -> bool:
        return bool(self.prompts) or not self.uses_answers

    @property
    def uses_answers(self) -> bool:
        return self.own_answers or not self.has_given_answers

    @property
    def has_given_answers(self) -> bool:
        """Return True for transcripts and offline texts, whose conversations may have several trained turns."""
        return bool(self.transcripts or self.offline.folder)
