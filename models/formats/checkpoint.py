"""A published head as files: a ``config.json`` and named tensors in safetensors, read and written without pickles."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.utils.errors import UserError, one_line
from drafthead.data.utils.files import read_json, require_space, safe_join, write_json
from drafthead.data.utils.hub import refuse_pickles

CONFIG = "config.json"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class PublishedCheckpoint:
    """The content of a published folder."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    source: str = "the artefact"
    """What to call it in messages."""
    notes: tuple[str, ...] = field(default=())
    """What was repaired while reading, for people."""

    def integer(self, *keys: str) -> int:
        """A positive integer of the config; ``keys`` lead into nested dictionaries.

        Raises:
            UserError: it is missing or something else.
        """
        found: Any = self.config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UserError(
                f"{self.source}: config.json has {found!r} as {'.'.join(keys)}, expected a positive whole number"
            )
        return found

    def with_notes(self, *notes: str, **changes: Any) -> "PublishedCheckpoint":
        """A repaired copy that says what was done."""
        return replace(self, notes=(*self.notes, *notes), **changes)


def write_artefact(artefact: PublishedCheckpoint, folder: Path, weights_file: str) -> None:
    """Write ``config.json`` and the tensors into ``folder``.

    Raises:
        UserError: not enough space.
    """
    size = sum(t.numel() * t.element_size() for t in artefact.tensors.values())
    require_space(folder, size + (1 << 20), "the export")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_separate(artefact.tensors), folder / weights_file, metadata={"format": "pt"})
    write_json(folder / CONFIG, artefact.config)


def read_artefact(folder: Path, weights_file: str) -> PublishedCheckpoint:
    """Read a published folder; weights may be sharded (``WEIGHTS.index.json``).

    Raises:
        UserError: a missing or damaged file; weights that are only there as a pickle.
    """
    config = read_json(safe_join(folder, CONFIG))
    if not isinstance(config, dict):
        raise UserError(f"{folder}/{CONFIG} holds a {type(config).__name__}, expected an object; copy it again")
    return PublishedCheckpoint(config=config, tensors=_read_tensors(folder, weights_file), source=str(folder))


def _read_tensors(folder: Path, weights_file: str) -> dict[str, Tensor]:
    index = safe_join(folder, f"{weights_file}.index.json")
    if (folder / weights_file).is_file():
        files = [weights_file]
    elif index.is_file():
        files = _shards(index)
    else:
        refuse_pickles(folder, [path.name for path in folder.iterdir()])
        raise UserError(
            f"{folder} has no {weights_file} ({contents(folder)}); copy the weights there, or say which format this is "
            "with format=NAME"
        )
    tensors: dict[str, Tensor] = {}
    for name in files:
        try:
            tensors |= load_file(safe_join(folder, name))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({one_line(error)}); copy it again") from None
    return tensors


def _shards(index: Path) -> list[str]:
    content = read_json(index)
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    names = sorted(set(mapping.values())) if isinstance(mapping, dict) else []
    # A downloaded index must not lead out of its folder.
    if not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise UserError(f"{index} lists no shards beside it; copy the folder again")
    return names


def contents(folder: Path) -> str:
    """What a folder holds, for messages."""
    names = sorted(path.name for path in folder.iterdir())
    return f"it holds {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" if names else "it is empty"


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU that share no memory, which safetensors refuses to write."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Floating-point tensors in another dtype; None keeps them."""
    return {k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in tensors.items()}
