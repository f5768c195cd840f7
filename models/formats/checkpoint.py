"""Files of a published head: ``config.json`` and tensors in safetensors. Pickled files are neither read nor written."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.errors import UserError, one_line
from drafthead.files.hub import refuse_pickles
from drafthead.files.local import check_header, make_readable, read_json, require_space, safe_join, write_json
from drafthead.models.base.parts import BaseParts
from drafthead.models.heads.parts.head_folder import check_tensors

CONFIG = "config.json"
MAX_INTEGER = 1 << 20  # heads, layers or ids in a config; some are counted up to before the file is compared


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Config and tensors of a published head."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    source: str = "the checkpoint"  # name in messages, usually the folder
    notes: tuple[str, ...] = ()  # sentences about repairs that were made while reading

    @classmethod
    def read(cls, folder: Path, weights_file: str) -> "PublishedCheckpoint":
        """Read a published folder; weights may be split into several files (``WEIGHTS_FILE.index.json``)."""
        config = read_config(folder)
        tensors = _read_tensors(folder, weights_file)
        check_tensors(tensors, folder)
        return cls(config=config, tensors=tensors, source=str(folder))

    def write(self, folder: Path, weights_file: str, dtype: torch.dtype | None) -> None:
        """Write ``config.json`` and copies of the tensors, floating-point ones cast to ``dtype`` (None: unchanged);
        safetensors refuses tensors that share memory."""
        tensors = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True).contiguous()
            for name, tensor in self.tensors.items()
        }
        require_space(folder, sum(t.nbytes for t in tensors.values()) + (1 << 20), "the export")
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / weights_file, metadata={"format": "pt"})
        make_readable(folder / weights_file)  # a server may run as another user
        write_json(folder / CONFIG, self.config)

    def integer(self, key: str) -> int:
        value = self.config.get(key)
        if type(value) is not int or not 1 <= value <= MAX_INTEGER:
            expected = f"a positive whole number up to {MAX_INTEGER:,}; correct it with config.{key}=NUMBER"
            raise UserError(f"{self.source}: config.json has {value!r} as {key}, expected {expected}")
        return value

    def width(self, key: str, name: str) -> int:
        """Return the size under ``key``, if ``name`` has as many rows, so that a wrong config allocates no large
        head."""
        size, tensor = self.integer(key), self.tensors.get(name)
        if tensor is None or len(tensor) != size:
            rows = f"it has no tensor {name}" if tensor is None else f"{name} has {len(tensor)} rows"
            raise UserError(f"{self.source}: config.json says {key} {size}, but {rows}; copy the folder again")
        return size

    def offset_vocabulary(self) -> Tensor | None:
        """Return the target ids [W] int64 of the draft vocabulary, stored as offsets ``d2t``; None: all ids. Reject a
        ``d2t`` that contradicts the sizes, or ``t2d`` ([V], nonzero at ids that can be drafted)."""
        size, total = self.integer("draft_vocab_size"), self.integer("vocab_size")
        if size < total or "d2t" in self.tensors:
            self.width("draft_vocab_size", "d2t")
        ids = from_offsets(self.tensors["d2t"]) if "d2t" in self.tensors else torch.arange(size)
        marked = self.tensors.get("t2d", torch.ones(0)).flatten().nonzero()[:, 0]
        if "t2d" in self.tensors and not torch.equal(ids.sort().values, marked):
            how = "d2t holds target ids, where offsets are expected (subtract 0, 1, 2, ...)"
            same = torch.equal(self.tensors["d2t"].long().sort().values, marked) if "d2t" in self.tensors else False
            advice = how if same else "copy the folder again"
            raise UserError(f"{self.source}: d2t and t2d mark different target ids: {advice}")
        if size < total:
            return ids
        if not torch.equal(ids, torch.arange(total)):
            what = f"its draft vocabulary of {size} ids reorders or exceeds the vocabulary of {total}"
            raise UserError(f"{self.source}: {what}; choose another head")
        return None

    def wrong_base(self, what: str) -> UserError:
        return UserError(f"{self.source} {what}; name the base that it was trained for")

    def require_base_tensor(self, base: BaseParts, name: str, expected: Tensor) -> None:
        """Reject a stored tensor that differs from the base's ``expected`` beyond bfloat16 rounding."""
        stored = self.tensors.get(name)
        if stored is not None and (
            stored.shape != expected.shape or not torch.allclose(stored.to(expected), expected, 2**-7, 1e-6)
        ):
            raise self.wrong_base(f"has a {name} that is not {base.name}'s, but drafthead's heads use the base's")

    def require_scale(self, base: BaseParts) -> None:
        """Reject a stored ``logit_scale`` that differs from the base's."""
        expected = base.lm_head.scale
        if not math.isclose(scale := self.config.get("logit_scale", expected), expected, rel_tol=1e-6):
            raise self.wrong_base(f"scales its logits by {scale}, but {base.name} by {expected}")

    def updated(self, *notes: str, **changes: Any) -> "PublishedCheckpoint":
        return replace(self, notes=(*self.notes, *notes), **changes)


def _read_tensors(folder: Path, weights_file: str) -> dict[str, Tensor]:
    index = safe_join(folder, f"{weights_file}.index.json")
    if (folder / weights_file).is_file():
        files = [weights_file]
    elif index.is_file():
        content = read_json(index)
        mapping = content.get("weight_map") if isinstance(content, dict) else None
        files = sorted(set(mapping.values())) if isinstance(mapping, dict) else []
        # A downloaded index must not lead out of its folder.
        if not files or any(not isinstance(n, str) or Path(n).name != n for n in files):
            raise UserError(f"{index} must list only files of its folder; copy the folder again")
    else:
        refuse_pickles(folder, [path.name for path in folder.iterdir()])
        raise UserError(f"{folder} has no {weights_file} ({contents(folder)}); copy it there, or name the format=NAME")
    tensors: dict[str, Tensor] = {}
    for name in files:
        check_header(path := safe_join(folder, name))
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({one_line(error)}); copy it again") from None
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    config = read_json(safe_join(folder, CONFIG))
    if not isinstance(config, dict):
        raise UserError(f"{folder}/{CONFIG} holds a {type(config).__name__}, expected an object; copy it again")
    return config


def contents(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"it holds {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" if names else "it is empty"


def to_offsets(target_ids: Tensor) -> Tensor:
    """Subtract 0, 1, 2, ... from target ids [W] int64: target ids 0 2 5 have the offsets 0 1 3."""
    return target_ids - torch.arange(len(target_ids), device=target_ids.device)


def from_offsets(offsets: Tensor) -> Tensor:
    return offsets.long() + torch.arange(len(offsets), device=offsets.device)
