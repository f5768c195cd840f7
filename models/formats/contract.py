"""What a published format is: which head it holds, how it is written and read, and who loads it.

``expected_shapes`` is the contract with the engine: every tensor that its loader asks for, with its shape, from the
config
alone. ``check`` compares a folder with it in both directions, because engines skip what they do not know (a misnamed
tensor would stay at its initial value without a word) and some also skip what they miss.
"""
# What heads do and formats cannot say. An export lists all of it at once, with the settings that avoid it.

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafthead.data.embedded.packages import SMOLLM2_NAME
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import EMBEDDED
from drafthead.models.formats.checkpoint import PublishedCheckpoint, cast, read_artefact, write_artefact
from drafthead.models.heads.common.contract import DraftHead, DraftHeadConfig


@dataclass(frozen=True)
class Unsupported:
    """Something that a head does and a format cannot say."""

    found: str
    """``it reads ...``: with the head as the subject."""
    instead: str
    """Settings that avoid it."""


def unsupported_adapter(head: DraftHead) -> list[Unsupported]:
    """A base with an adapter merged into it: its name, by which engines download it, would find another one."""
    adapter = head.base.config.adapter
    if adapter is None:
        return []
    return [
        Unsupported(
            f"it drafts for {head.base.name} with the adapter {adapter}, which engines would not load",
            "publish the base as a whole model, which head.save_merged=true writes, and name it: base_name=user/repo",
        )
    ]


def unsupported_vocabulary(head: DraftHead, instead: str = "") -> list[Unsupported]:
    """A draft vocabulary where the format has none: rows for the other ids would need values that nobody trained.

    Args:
        head: may draft over the whole vocabulary, which is none.
        instead: another format that has one: ``to=...``.
    """
    if len(head.d2t) == head.base.vocab_size:
        return []
    return [
        Unsupported(
            f"it drafts over {len(head.d2t)} of {head.base.vocab_size} ids, and the format has no draft vocabulary",
            " or ".join(filter(None, ["head.draft_vocab_size=null", instead])),
        )
    ]


Shape = tuple[int, ...]
BASE_NAME = "base_model_name_or_path"
"""Config key by which engines find the base; all formats carry it, where it is none of theirs it does no harm."""


@dataclass(frozen=True)
class Engine:
    """One engine and what is known of its support."""

    name: str
    support: str
    """Which versions load the format, or that none does any more."""
    current: bool = False
    """The newest version looked at loads it."""


class Format(ABC):
    """One published layout of one head."""

    name: ClassVar[str]
    """What the command line calls it."""
    title: ClassVar[str]
    """What people call it."""
    weights_file: ClassVar[str] = "model.safetensors"
    head: ClassVar[type[DraftHead]]
    engines: ClassVar[tuple[Engine, ...]]
    config_keys: ClassVar[frozenset[str]]
    """What is read of a ``config.json``, so what an import may override."""

    @abstractmethod
    def pack(self, head: Any) -> PublishedCheckpoint:
        """Config and tensors of a trained head of class ``self.head`` without :meth:`unsupported`."""

    def unsupported(self, head: Any) -> list[Unsupported]:
        """Everything that the head does and the format cannot say."""
        return []

    @abstractmethod
    def expected_shapes(self, artefact: PublishedCheckpoint) -> dict[str, Shape]:
        """Names and shapes of all tensors that the engine's loader asks for.

        Raises:
            UserError: a config key that it needs is missing or wrong.
        """

    @abstractmethod
    def matches(self, config: dict[str, Any]) -> bool:
        """True for a ``config.json`` that looks like this format (for imports that do not say which it is)."""

    @abstractmethod
    def settings(self, artefact: PublishedCheckpoint) -> DraftHeadConfig:
        """The head's settings, of a checked artefact.

        Raises:
            UserError: it sets what no head here has.
        """

    @abstractmethod
    def load_weights(self, head: Any, artefact: PublishedCheckpoint) -> None:
        """Copy the tensors into a freshly built head.

        Raises:
            UserError: a tensor of another shape, or one that shows that the head was made for another base.
        """

    def normalize(self, artefact: PublishedCheckpoint) -> PublishedCheckpoint:
        """Without the known defects of published files and with the names of ``expected_shapes``; notes say what was
        changed.

        Raises:
            UserError: a variant that no head here is.
        """
        return artefact

    def sizes(self, artefact: PublishedCheckpoint) -> dict[str, int]:
        """``hidden_size`` and ``vocab_size`` of the base that the artefact was made for."""
        return {key: artefact.integer(key) for key in ("hidden_size", "vocab_size")}

    def vocabulary(self, artefact: PublishedCheckpoint) -> Tensor | None:
        """The draft vocabulary's target ids [W] int64; None for the whole vocabulary."""
        return None

    def engines_for(self, head: Any) -> tuple[Engine, ...]:
        """The engines with what is known of their support of this ``head``."""
        return self.engines

    def loaded_by(self, head: Any) -> list[str]:
        """Engines whose newest version loads ``head`` in this format."""
        return [engine.name for engine in self.engines_for(head) if engine.current]

    # What all formats share ------------------------------------------------------------------------------------

    def export(
        self, head: DraftHead, folder: Path, dtype: torch.dtype | None = None, base_name: str | None = None
    ) -> PublishedCheckpoint:
        """Write ``head`` into ``folder`` and return what was written.

        Args:
            head: a trained head.
            folder: may not exist yet.
            dtype: of the weights; None keeps the head's.
            base_name: what engines download the base by; None: the name that the base has here.

        Raises:
            UserError: another head than the format holds, or one that it cannot express; not enough space.
        """
        self.require_head(head)
        unsupported = [*self.unsupported(head), *(unsupported_adapter(head) if base_name is None else [])]
        if unsupported:
            listed = "; ".join(f"{obstacle.found} ({obstacle.instead})" for obstacle in unsupported)
            raise UserError(f"the format {self.name} cannot hold this head: {listed}")
        packed = self.pack(head)
        tensors = cast(packed.tensors, dtype)
        kind = next(str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point())
        config = {**packed.config, "torch_dtype": kind, BASE_NAME: base_name or published_name(head.base)}
        artefact = replace(packed, config=config, tensors=tensors)
        self.check(artefact)
        write_artefact(artefact, folder, self.weights_file)
        return artefact

    def require_head(self, head: DraftHead) -> None:
        """Refuse heads that other formats hold.

        Raises:
            UserError: the head is of another class.
        """
        if isinstance(head, self.head):
            return
        from drafthead.models.formats import FORMATS

        kind = type(head).__name__
        fitting = [f"to={found.name}" for found in FORMATS.values() if isinstance(head, found.head)]
        raise UserError(
            f"the format {self.name} holds {_an(self.head.__name__)}; {_an(kind)} is exported {' or '.join(fitting)}"
            if fitting
            else f"no published format holds {_an(kind)}, and {self.name} holds {_an(self.head.__name__)}; use the "
            "head folder itself"
        )

    def read(self, folder: Path, config: dict[str, Any] | None = None) -> PublishedCheckpoint:
        """The repaired and checked content of a published folder; ``config`` overrides keys of its ``config.json``.

        Raises:
            UserError: missing, damaged or pickled files; names or shapes that the engine's loader would not find; a key
                to override that nothing reads.
        """
        unknown = sorted(set(config or {}) - self.config_keys - {BASE_NAME})
        if unknown:
            raise UserError(
                f"the format {self.name} reads no {', '.join(f'config.{key}' for key in unknown)}; it reads "
                f"{', '.join(sorted(self.config_keys))}"
            )
        found = read_artefact(folder, self.weights_file)
        artefact = self.normalize(replace(found, config={**found.config, **(config or {})}))
        self.check(artefact)
        return artefact

    def load(self, folder: Path, base: BaseModel) -> DraftHead:
        """The published head, attached to ``base``.

        Raises:
            UserError: as :meth:`read`; or a head for a base of other sizes.
        """
        return self.attach(self.read(folder), base)

    def attach(self, artefact: PublishedCheckpoint, base: BaseModel) -> DraftHead:
        """A checked artefact as a head of ``base``.

        Raises:
            UserError: it was made for a base of other sizes, or has settings that no head here takes.
        """
        for key, size in self.sizes(artefact).items():
            if size != getattr(base, key):
                raise UserError(
                    f"{artefact.source} was made for a base with {key} {size}, but {base.name} has "
                    f"{getattr(base, key)}; name the base that it was trained for"
                )
        try:
            settings = self.settings(artefact)
            head = settings.build(base, self.vocabulary(artefact))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{artefact.source} holds a head that drafthead does not have: {error}") from None
        with torch.no_grad():
            self.load_weights(head, artefact)
        return head.eval()

    def check(self, artefact: PublishedCheckpoint) -> None:
        """Compare names and shapes with ``expected_shapes``.

        Raises:
            UserError: something is missing, unknown or of another shape.
        """
        wanted, found = self.expected_shapes(artefact), {k: tuple(v.shape) for k, v in artefact.tensors.items()}
        missing, unknown = sorted(wanted.keys() - found), sorted(found.keys() - wanted)
        wrong = [f"{k} is {found[k]}, not {s}" for k, s in wanted.items() if k in found and found[k] != s]
        if missing or unknown or wrong:
            raise UserError(
                f"{artefact.source} does not fit the format {self.name}: missing {_some(missing)}, unknown "
                f"{_some(unknown)}, of another shape {_some(wrong)}; its config.json and weights may belong to "
                "different heads"
            )


def assign(parameters: Mapping[str, Tensor], artefact: PublishedCheckpoint) -> None:
    """Copy tensors into a head's parameters of the same names; shapes must be equal, so that nothing is broadcast.

    Raises:
        UserError: a shape differs.
    """
    for name, parameter in parameters.items():
        tensor = artefact.tensors[name]
        if tensor.shape != parameter.shape:
            raise UserError(
                f"{artefact.source}: {name} is {tuple(tensor.shape)}, and beside this base it would be "
                f"{tuple(parameter.shape)}; name the base that it was trained for"
            )
        parameter.copy_(tensor)


def _some(names: list[str]) -> str:
    return f"[{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}]"


def published_name(base: BaseModel) -> str:
    """The base's name as others know it: what engines download the base by.

    The name of a base with an adapter merged into it would find another base: see ``models/formats/unsupported.py``.
    """
    return SMOLLM2_NAME if base.name == EMBEDDED else base.name


def _an(name: str) -> str:
    """A class's name with its article; MLP is spelt out."""
    return f"{'an' if name[0] in 'AEIOU' or name.startswith('MLP') else 'a'} {name}"
