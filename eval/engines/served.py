"""A head in serving engines: exported in each engine's format, served, and timed as a method of an evaluation. In vLLM,
drafthead's own code drafts with heads that it does not load (``drafthead/engines/in_vllm/proposer.py``). Every engine
runs twice, with the head (``vllm``) and without it (``vllm_plain``). Our decoder drafts a chain of the same
length (method ``chain:3``), and the engine's acceptance must equal the chain's. The chain uses the original head,
because a head read back from the export would hide faults that writing and reading share. It drafts without bfloat16 or
int8 copies of the weights."""

import hashlib
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drafthead.engines.process import EngineError, EngineProcess
from drafthead.engines.vllm import proposer_arguments, vllm_python, vllm_variables
from drafthead.errors import UserError
from drafthead.eval.config import METHOD, EngineConfig, EnginesConfig, EvalConfig
from drafthead.eval.lossless.export_check import as_exported
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.drafters.expression import parse_drafter
from drafthead.models.formats import all_formats
from drafthead.models.formats.format import MOST_CONTEXT, Format, cpu_memory, dtype_name, unsupported_adapter
from drafthead.models.formats.gguf.gguf_files import BASE_FILE, FILE, write_base
from drafthead.models.heads.dspark import DSparkHead
from drafthead.models.heads.mtp import MtpHead
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.token_tree import TokenTree

if TYPE_CHECKING:
    from drafthead.eval.engines.clients import EngineServer

READS = {  # formats that each engine loads; the first that supports the head is used
    "vllm": ("eagle3", "vllm_medusa", "dflash", "dspark", "mtp"),
    "llamacpp": ("gguf", "gguf_dspark"),
    "sglang": ("eagle3",),
}
PROPOSER = "proposer"  # drafthead's own code, instead of a format
MTP = "mtp"  # the method of a head in the checkpoint of its base
# vLLM's own methods, without a head, and their settings. `suffix` has vLLM's default length. It must not remember
# finished answers, because a server gets each prompt several times.
OWN_METHODS: dict[str, dict[str, int]] = {
    "ngram": {},
    "suffix": {"num_speculative_tokens": 24, "suffix_decoding_max_cached_requests": 0},
}
PLAIN = "_plain"  # ends the name of an engine's method without the head
VLLM_OPTIONS = ("--enforce-eager", "--max-num-seqs")  # no CUDA graphs; one request at a time, like our loop
Log = Callable[[str], None]


@dataclass
class ServedEngines:
    """Engines that are ready to answer."""

    chain: str = ""
    """Method in which our decoder drafts a chain, such as ``chain:3``; METHOD if the evaluated drafter drafts it."""
    head: DraftHead | None = None  # with which our decoder drafts that chain
    drafts: int = 0  # length of the chain that the engines and our decoder draft
    methods: dict[str, tuple[Callable[[list[int]], DecodeResult], str]] = field(default_factory=dict)
    """By method: the function that answers prompt ids, and a hash of everything that determines its answers. Stored
    results with another hash are not used."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by engine: name, version, dtype, format, options

    @property
    def chain_config(self) -> DraftConfig:
        return DraftConfig(tree=TokenTree.chain(self.drafts))


@contextmanager
def serve(base: BaseParts, drafter: Drafter, config: EvalConfig, folder: Path, log: Log) -> Iterator[ServedEngines]:
    """Export the head below ``folder`` and start the engines of ``config``; stop them when the context ends."""
    served = ServedEngines()
    if not config.engines:
        yield served
        return
    head, formats = check_engines(drafter, config)
    settings = config.engine
    served.drafts = _chain(head, config)
    with ExitStack() as stack:
        try:
            for name, target in formats.items():
                fitted = head if target is None else target.fitted(head)
                method, published = publish(head, target, getattr(settings, name), folder)
                served.head = served.head or as_exported(fitted)
                is_evaluated = served.head is head and config.draft_config(head) == served.chain_config
                served.chain = METHOD if is_evaluated else f"chain:{served.drafts}"
                start = EngineStart(stack, name, settings, base, published, method, served.drafts)
                for variant in variants(start.own) if not settings.load.requests else ("", PLAIN):
                    how = {"": "with the head", PLAIN: "without the head"}.get(variant, f"drafting with {variant[1:]}")
                    if not start.own.url:
                        log(f"starting {name} {how}; on a CPU this takes minutes")
                    if (server := start.server(variant)) is None:
                        continue
                    log(f"{server.name} answers {how} at {server.url}")
                    options = " ".join([*VLLM_OPTIONS, "1"]) if name == "vllm" and not start.own.url else ""
                    fact = {"engine": server.name, "version": server.version(), "dtype": start.dtype}
                    fact |= {"format": published.name, "options": options}
                    served.facts.setdefault(name, fact)
                    mark = repr((fact, start.own.base_type, fitted.identity(), base.fingerprint, settings.threads))
                    if start.own.url:  # nothing else tells which head a server that we did not start has loaded
                        mark += server.run_id()
                    answer = partial(server.answer, max_new_tokens=config.max_new_tokens)
                    served.methods[name + variant] = answer, hashlib.sha256(mark.encode()).hexdigest()[:8]
            yield served
        except EngineError as error:
            hint = "; finished answers are kept, and the same command resumes there" if served.methods else ""
            if "No module named" in str(error):
                hint = f"; `drafthead engines install={name}` installs it, or name a server with engine.{name}.url="
            raise UserError(f"{error}{hint}") from None


def publish(head: DraftHead, target: Format | None, own: EngineConfig, folder: Path) -> tuple[str, Path]:
    """Write ``head`` below ``folder`` as an engine loads it, in the format ``target`` or for drafthead's own code
    (None). Return the engine's name for its drafting method, and the folder that the engine loads."""
    served = folder / "served"
    if target is not None:
        shutil.rmtree(served / target.name, ignore_errors=True)
        dtype = None if target.name == MTP else torch.float32  # None: that of the base's checkpoint
        target.export(target.fitted(head), served / target.name, dtype)
    if target is None or own.compare:
        shutil.rmtree(served / PROPOSER, ignore_errors=True)
        head.save_pretrained(served / PROPOSER)
    return (PROPOSER, served / PROPOSER) if target is None else (method_of(target, head), served / target.name)


def variants(own: EngineConfig) -> list[str]:
    """Return the servers of an engine: with the head, without drafts, and with other ways to draft."""
    return ["", PLAIN, *(f":{spec}" for spec in own.compare)]


def format_for(engine: str, head: DraftHead) -> Format:
    """Return the first format that ``engine`` loads and that can hold ``head``; reject the head with the reasons."""
    read = (all_formats()[name] for name in READS[engine])
    fitting = [target for target in read if isinstance(head.config, target.head_config)]
    if not fitting:
        raise UserError(f"{engine} cannot serve a {type(head).__name__}, only heads in {', '.join(READS[engine])}")
    refused = {}
    for target in fitting:
        if not (reasons := list(target.unsupported(target.fitted(head)))):
            return target
        refused[target.name] = "; ".join(f"{what} ({instead})" for what, instead in reasons)
    listed = ". In the format ".join(f"{name}: {reasons}" for name, reasons in refused.items())
    raise UserError(f"{engine} cannot serve this head. In the format {listed}")


def method_of(target: Format, head: DraftHead) -> str:
    """Return the name by which engines call the drafting method of ``head``, exported in the format ``target``."""
    if isinstance(head, DSparkHead):  # without a Markov head it is DFlash
        return "dspark" if head.config.markov_rank else "dflash"
    if isinstance(head, MtpHead):
        return MTP
    return "medusa" if target.name == "vllm_medusa" else "eagle3"


def format_in_vllm(head: DraftHead, config: EngineConfig) -> Format | None:
    """Return the format in which vLLM serves ``head``; None for drafthead's own code, which drafts with heads that vLLM
    does not load on this device, or if ``config`` asks for it."""
    runs_layers = head.config.needs_layers
    if config.proposer and runs_layers:
        what = f"a {type(head).__name__} runs the base's layers, which drafthead's code inside vLLM does not have"
        raise UserError(f"{what}; drop engine.vllm.proposer")
    try:
        return None if config.proposer else _own_format(head, config)
    except UserError:
        if config.proposer is None and not runs_layers:
            return None
        raise


def _own_format(head: DraftHead, config: EngineConfig) -> Format:
    target = format_for("vllm", head)
    if target.name == "dspark" and not (config.url or torch.accelerator.is_available()):
        raise UserError(
            "vLLM drafts with DSpark heads on GPUs only; on a CPU drop engine.vllm.proposer=false, take llamacpp, or "
            "train a DFlash head: head.markov_rank=0 head.confidence=false head.anchor_predicts=false"
        )
    return target


def check_engines(drafter: Drafter, config: EvalConfig) -> tuple[DraftHead, dict[str, Format | None]]:
    """Check ``config.engines`` before anything is started; return the head and each engine's format (None: drafthead's
    own code)."""
    if not isinstance(drafter, DraftHead):
        raise UserError("engines=[...] serves a head: name one with head=FOLDER, without drafter=")
    for what, _ in unsupported_adapter(drafter.base.identity()):
        raise UserError(f"{what}; evaluate the exported head on the merged base instead (docs/guides/serve.md)")
    settings = config.engine
    check_drafts(drafter, _chain(drafter, config))
    formats: dict[str, Format | None] = {name: format_for(name, drafter) for name in config.engines if name != "vllm"}
    if "vllm" in config.engines:
        formats["vllm"] = format_in_vllm(drafter, settings.vllm)
    if "sglang" in formats and not settings.sglang.url:
        raise UserError("start SGLang with the exported head yourself, and set engine.sglang.url=http://...")
    if "vllm" in formats and not settings.vllm.url:
        vllm_python(settings.vllm.python)
    fits = "vllm" in formats and not settings.vllm.url
    if (settings.vllm.compare and not fits) or settings.llamacpp.compare or settings.sglang.compare:
        raise UserError("engine.vllm.compare needs engines=[vllm] without an address; other engines have no compare")
    for spec in settings.vllm.compare:
        if spec not in OWN_METHODS:
            parse_drafter(spec)
    return drafter, formats


def _chain(head: DraftHead, config: EvalConfig) -> int:
    """Return the length of the chain to draft: ``engine.drafts``, or as many positions as the head was trained for."""
    return config.engine.drafts or min(head.config.trained_positions, head.depth)


def check_drafts(head: DraftHead, drafts: int) -> None:
    """Reject a chain longer than the head drafts, or shorter if the head's draft positions attend to each other."""
    if drafts > head.depth:
        raise UserError(f"engine.drafts={drafts}, but the head drafts {head.depth} positions; choose fewer")
    if isinstance(head, DSparkHead) and not head.config.causal and drafts < head.depth:
        raise UserError(f"engine.drafts={drafts}, but draft positions attend to each other; leave it at {head.depth}")


@dataclass
class EngineStart:
    """Starter of one engine's servers, with the head (exported to the folder ``published``) and without it."""

    stack: ExitStack  # its end stops the processes that were started
    name: str
    settings: EnginesConfig
    base: BaseParts
    published: Path
    method: str  # the engine's name for the head's drafting method, or PROPOSER
    drafts: int
    requests: int = 1  # that are answered at once
    fit_length: bool = False  # drafthead's code drafts only as far as it pays

    def __post_init__(self) -> None:
        self.head = self.published.parent / PROPOSER  # the head itself, if drafthead's code drafts with it
        self.own: EngineConfig = getattr(self.settings, self.name)
        self._threads = self.settings.threads or torch.get_num_threads()
        self._context = min(self.base.max_context, MOST_CONTEXT)
        started = self.own.base_type if self.name == "llamacpp" else dtype_name(self.base)
        self.dtype = "" if self.own.url else started  # a running server does not tell it

    def server(self, variant: str) -> "EngineServer | None":
        """Start the engine, or check the server at its address. None: only the other server has an address.

        ``variant`` is "" for the head, PLAIN for no drafts, and ``:SPEC`` for an entry of ``engine.vllm.compare``.
        """
        from drafthead.eval.engines.clients import SERVERS  # loads the openai client, which takes half a second

        kind, timeout, config = SERVERS[self.name], self.settings.answer_timeout_s, self.own
        plain, drafts = variant == PLAIN, self.drafts_of(variant)
        if config.url or self.name == "sglang":
            if not (url := config.plain_url if plain else config.url):
                return None
            server = kind(url, self.base.eos_ids, timeout, drafts=drafts)
            self.stack.callback(server.close)
            if not server.is_ready():
                raise EngineError(f"no {kind.name} at {url}; start it, or correct engine.{self.name}.url")
            return server
        port = free_port()
        python, arguments, variables = (self._vllm if self.name == "vllm" else self._llamacpp)(port, variant)
        process = EngineProcess(kind.name, python, arguments, variables)
        self.stack.callback(process.close)
        server = kind(f"http://127.0.0.1:{port}", self.base.eos_ids, timeout, process, drafts)
        self.stack.callback(server.close)
        process.wait_until(server.is_ready, self.settings.start_timeout_s, "engine.start_timeout_s")
        return server

    def drafts_of(self, variant: str) -> int:
        """Return the largest number of tokens that a variant drafts in a step."""
        if variant == PLAIN:
            return 0
        spec = variant.partition(":")[2]
        if spec in OWN_METHODS:
            return OWN_METHODS[spec].get("num_speculative_tokens", self.drafts)
        return max([self.drafts, *(drafter.tokens for drafter in (parse_drafter(spec).walk() if spec else ()))])

    def _vllm(self, port: int, variant: str) -> tuple[str, list[str], dict[str, str]]:
        """Return the interpreter, the arguments of ``runner.py`` and the environment that start vLLM on ``port``."""
        in_base = self.method == MTP and not variant
        folder = str(self.published) if in_base else self.base.config.folder()
        arguments = ["vllm", str(port), "--model", folder, "--dtype", dtype_name(self.base)]
        arguments += [*VLLM_OPTIONS, str(self.requests)]
        arguments += ["--no-enable-prefix-caching", "--seed", "0"]
        if torch.accelerator.is_available():
            arguments += ["--max-model-len", str(self._context), "--gpu-memory-utilization", "0.3"]
        else:
            arguments += cpu_memory(self.base)
        variables = vllm_variables(str(folder), self._threads)
        spec = variant.partition(":")[2]
        if spec in OWN_METHODS:
            speculative = {"method": spec, "num_speculative_tokens": self.drafts} | OWN_METHODS[spec]
            arguments += ["--speculative-config", json.dumps(speculative)]
        elif variant != PLAIN and (spec or self.method == PROPOSER):
            more: dict[str, object] = {"drafter": spec} if spec else {}
            more |= {"fit_length": True} if self.fit_length else {}
            added, of_proposer = proposer_arguments(str(self.head.resolve()), self.drafts_of(variant), **more)
            arguments, variables = arguments + added, variables | of_proposer
        elif variant != PLAIN:
            named = {} if in_base else {"model": str(self.published)}
            spoken = {"method": self.method, **named, "num_speculative_tokens": self.drafts}
            arguments += ["--speculative-config", json.dumps(spoken)]
        return vllm_python(self.own.python), arguments, variables

    def _llamacpp(self, port: int, variant: str) -> tuple[str, list[str], dict[str, str]]:
        path, kind = self.published / BASE_FILE, self.own.base_type
        if not path.exists():
            assert isinstance(self.base, BaseModel)
            write_base(self.base, path, kind)
        settings = {"port": port, "base": str(path), "context": self._context, "threads": self._threads}
        settings |= {"drafts": self.drafts, "f32_cache": kind == "f32"}
        if variant != PLAIN:
            settings |= {"head": str(self.published / FILE), "method": self.method}
        return self.own.python or sys.executable, ["llamacpp", json.dumps(settings)], {}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
