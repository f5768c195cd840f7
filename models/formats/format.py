"""What a published format is: which head it holds, how its names map to the head's parameters, and who loads it.

A format states one mapping: :meth:`Format.tensors`, from published names to the head's own parameters (or views of
them). Writing saves those tensors. Reading builds a head from ``config.json``, compares names and shapes in both
directions and copies the values into the same tensors. Both directions matter: engines skip tensors that they do not
know, so a misnamed one would stay at its initial value without a word.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafthead.data.embedded.packages import SMOLLM2_NAME
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig

BASE_NAME = "base_model_name_or_path"
"""Config key by which engines find the base. All formats carry it; engines that do not know it ignore it."""


Unsupported = Iterator[tuple[str, str]]
"""What a head does that a format cannot say (``it reads ...``), each with the settings of a head without it."""


@dataclass(frozen=True)
class Engine:
    """One engine and what is known of its support."""

    name: str
    support: str
    """Which versions load the format, or that none does any more."""
    current: bool = False
    """The newest version looked at loads it."""
    serve: str = ""
    """The command that serves it, with ``{base}``, ``{folder}``, ``{drafts}`` and ``{nodes}`` (a draft more)."""

    def command(self, base: str, folder: str, drafts: int) -> str:
        """How to serve a folder that was exported; empty where no version of the engine loads it."""
        return self.serve.format(base=base, folder=folder, drafts=drafts, nodes=drafts + 1) if self.current else ""


def vllm(method: str) -> Engine:
    """vLLM with a head as what it calls ``method``."""
    serve = "vllm serve {base} --speculative-config "
    serve += f"""'{{{{"method": "{method}", "model": "{{folder}}", "num_speculative_tokens": {{drafts}}}}}}'"""
    support = "0.32.0 serves it, accepting what drafthead's engine accepts (run on a CPU, 22 November 2026)"
    return Engine("vLLM", support, current=True, serve=serve)


class Format(ABC):
    """One published layout of one head."""

    name: ClassVar[str]
    """What the command line calls it."""
    title: ClassVar[str]
    """What people call it."""
    weights_file: ClassVar[str] = "model.safetensors"
    head_config: ClassVar[type[DraftHeadConfig]]
    engines: ClassVar[tuple[Engine, ...]]
    required: ClassVar[Mapping[str, str]] = {}
    """Keys of ``config.json`` with a whole number that must be there -> the head's settings that they say."""
    optional: ClassVar[Mapping[str, str]] = {}
    """Further keys -> settings; where a key is missing the setting keeps its default."""
    sizes: ClassVar[Mapping[str, str]] = {"hidden_size": "hidden_size", "vocab_size": "vocab_size"}
    """Keys that say sizes of the base -> attributes of :class:`BaseModel`."""
    other_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that are read besides. An import may override any key that is read."""

    ignored_tensors: ClassVar[frozenset[str]] = frozenset()
    """Names that a file may have and that are not loaded."""

    # What a format says ----------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self, head: Any) -> dict[str, Tensor]:
        """The head's parameters, or views of them, by their published names."""

    def derived_tensors(self, head: Any) -> dict[str, Tensor]:
        """Tensors of the format that the head does not own: copies of the base's weights, index tables."""
        return {}

    def config(self, head: Any) -> dict[str, Any]:
        """The ``config.json`` of a head."""
        return {key: getattr(head.config, name) for key, name in {**self.required, **self.optional}.items()}

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        """The head's settings, from a normalized checkpoint; the size of its draft vocabulary is set besides."""
        found: dict[str, Any] = {name: checkpoint.integer(key) for key, name in self.required.items()}
        defaults = self.head_config()
        for key, name in self.optional.items():
            if (value := checkpoint.config.get(key)) is not None:
                kind = type(getattr(defaults, name))
                found[name] = checkpoint.integer(key) if kind is int else kind(value)
        return found

    @abstractmethod
    def matches(self, config: dict[str, Any]) -> bool:
        """True for a ``config.json`` that looks like this format (for imports that do not say which it is)."""

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Without the known defects of published files, named as drafthead writes them; notes say what was changed."""
        return checkpoint

    def unsupported(self, head: Any) -> Unsupported:
        """Everything that the head does and the format cannot say."""
        yield from ()

    def require_same(self, checkpoint: PublishedCheckpoint, head: Any) -> None:  # noqa: B027
        """Refuse a checkpoint that, beside this base, would be another head than the one built from its config."""

    def vocabulary(self, checkpoint: PublishedCheckpoint) -> Tensor | None:
        """The draft vocabulary's target ids [W] int64; None for the whole vocabulary."""
        return None

    def fitted(self, head: Any) -> Any:
        """The head in the shape that the format's engine loads, where another than its own drafts the same way."""
        return head

    def engines_for(self, head: Any) -> tuple[Engine, ...]:
        """The engines with what is known of their support of this ``head``."""
        return self.engines

    # What all formats share ------------------------------------------------------------------------------------

    @property
    def config_keys(self) -> frozenset[str]:
        """All keys of a ``config.json`` that are read."""
        return self.other_keys | {*self.required, *self.optional, *self.sizes}

    def loaded_by(self, head: Any) -> list[str]:
        """Engines whose newest version loads ``head`` in this format."""
        return [engine.name for engine in self.engines_for(head) if engine.current]

    def export(
        self, head: DraftHead, folder: Path, dtype: torch.dtype | None = None, base_name: str | None = None
    ) -> None:
        """Write ``head`` into ``folder``, which may not exist yet.

        ``dtype`` None keeps the head's; ``base_name`` is what engines download the base by, None: its name here.
        """
        checkpoint = self.checkpoint(head, dtype, base_name)
        self.write(checkpoint, folder, dtype)

    def checkpoint(self, head: DraftHead, dtype: torch.dtype | None, base_name: str | None) -> PublishedCheckpoint:
        """What is published of ``head``; refused, with all reasons, where the format cannot say it."""
        self.require_type(type(head.config))
        found = [*self.unsupported(head), *(unsupported_adapter(head) if base_name is None else [])]
        if getattr(head.config, "induction_rank", 0):
            found.append(("it has an induction head (ours)", "head.induction_rank=0"))
        if found:
            listed = "; ".join(f"{what} ({instead})" for what, instead in found)
            raise UserError(
                f"the format {self.name} cannot hold this head: {listed}. In brackets: what to set, head.* when "
                "training; recipes called NAME_served set it (docs/serving.md)"
            )
        kind = str(dtype or next(head.parameters()).dtype).removeprefix("torch.")
        config = self.config(head) | {"torch_dtype": kind, BASE_NAME: base_name or published_name(head.base)}
        return PublishedCheckpoint(config, self._all_tensors(head))

    def write(self, checkpoint: PublishedCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
        """The files of a checkpoint; ``dtype`` None keeps the tensors'."""
        checkpoint.write(folder, self.weights_file, dtype)

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        """What :meth:`write` wrote, or others published."""
        return PublishedCheckpoint.read(folder, self.weights_file)

    def read(self, folder: Path, config: dict[str, Any] | None = None) -> PublishedCheckpoint:
        """The normalized content of a published folder; ``config`` overrides keys of its ``config.json``."""
        if unknown := sorted(set(config or {}) - self.config_keys - {BASE_NAME}):
            raise UserError(
                f"the format {self.name} reads no {', '.join(f'config.{key}' for key in unknown)}; it reads "
                f"{', '.join(sorted(self.config_keys))}"
            )
        found = self.read_files(folder)
        return self.normalize(found.updated(config={**found.config, **(config or {})}))

    def attach(self, checkpoint: PublishedCheckpoint, base: BaseModel) -> DraftHead:
        """A normalized checkpoint as a head of ``base``."""
        for key, size in self.sizes.items():
            if (found := checkpoint.integer(key)) != getattr(base, size):
                raise UserError(
                    f"{checkpoint.source} was made for a base with {size} {found}, but {base.name} has "
                    f"{getattr(base, size)}; name the base that it was trained for"
                )
        try:
            settings, ids = self.settings(checkpoint), self.vocabulary(checkpoint)
            config = self.head_config(**settings, draft_vocab_size=None if ids is None else len(ids))
            head = config.build(base, ids)
        except UserError as error:
            raise UserError(f"{'' if checkpoint.source in str(error) else f'{checkpoint.source}: '}{error}") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{checkpoint.source} holds a head that drafthead does not have: {error}") from None
        self.require_same(checkpoint, head)
        self._require_tensors(checkpoint, head)
        with torch.no_grad():
            for name, parameter in self.tensors(head).items():
                parameter.copy_(checkpoint.tensors[name])
        return head.eval()

    def load(self, folder: Path, base: BaseModel) -> DraftHead:
        """The published head in ``folder``, attached to ``base``: :meth:`read` and :meth:`attach`."""
        return self.attach(self.read(folder), base)

    def _all_tensors(self, head: DraftHead) -> dict[str, Tensor]:
        return {**self.derived_tensors(head), **self.tensors(head)}

    def _require_tensors(self, checkpoint: PublishedCheckpoint, head: DraftHead) -> None:
        wanted = {name: tuple(tensor.shape) for name, tensor in self._all_tensors(head).items()}
        found = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
        missing, unknown = sorted(wanted.keys() - found), sorted(found.keys() - wanted - self.ignored_tensors)
        wrong = [f"{k} is {found[k]}, not {s}" for k, s in wanted.items() if k in found and found[k] != s]
        if missing or unknown or wrong:
            raise UserError(
                f"{checkpoint.source} does not fit {head.base.name} in the format {self.name}: missing "
                f"{_some(missing)}, unknown {_some(unknown)}, of another shape {_some(wrong)}; name the base that it "
                "was trained for; or its config.json and weights belong to different heads"
            )

    def require_type(self, config: type[DraftHeadConfig]) -> None:
        """Refuse heads of another type, which their settings tell before anything is loaded."""
        from drafthead.models.formats import FORMATS

        if issubclass(config, self.head_config):
            return
        fitting = " or ".join(f"to={found.name}" for found in FORMATS.values() if issubclass(config, found.head_config))
        wanted, given = (kind.__module__.rpartition(".")[2] for kind in (self.head_config, config))
        raise UserError(
            f"the format {self.name} holds heads of the type {wanted}, this is one of the type {given}: "
            + (f"export it {fitting}" if fitting else "no published format holds it; use the head folder itself")
        )


def unsupported_adapter(head: DraftHead) -> Unsupported:
    """A base with an adapter merged into it: its name, by which engines download it, would find another one."""
    if (adapter := head.base.config.adapter) is not None:
        instead = "publish the base as a whole model, which head.save_merged=true writes, and name it: base_name=user/x"
        yield f"it drafts for {head.base.name} with the adapter {adapter}, which engines would not load", instead


def unsupported_vocabulary(head: DraftHead, instead: str = "") -> Unsupported:
    """A draft vocabulary where the format has none; ``instead``: ``or to=...`` of another format that has one.

    Rows for the other ids would need values that nobody trained.
    """
    if (ids := len(head.d2t)) != head.base.vocab_size:
        what = f"it drafts over {ids} of {head.base.vocab_size} ids, and the format has no draft vocabulary"
        yield what, f"head.draft_vocab_size=null{instead}"


def require_bases_own(checkpoint: PublishedCheckpoint, base: BaseModel, name: str, own: Tensor) -> None:
    """Refuse a tensor, where there is one, that is not the base's ``own``; a copy rounded to bfloat16 still is."""
    found = checkpoint.tensors.get(name)
    if found is None or (found.shape == own.shape and torch.allclose(found.to(own), own, rtol=2**-7, atol=1e-6)):
        return
    raise UserError(
        f"{checkpoint.source} has a {name} that is not {base.name}'s, and heads here read the base's; name the base "
        "that it was trained for"
    )


def published_name(base: BaseModel) -> str:
    """The base's name as others know it: what engines download the base by."""
    return SMOLLM2_NAME if base.name == EMBEDDED else base.name


def _some(names: list[str]) -> str:
    return f"[{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}]"
