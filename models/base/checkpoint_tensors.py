"""Tensors of a checkpoint under the names of a stock model's state dict, read one by one or by rows when asked for.

transformers' own rules rename the tensors, and convert those that the model stores in another way, such as stacked
experts.
"""

import os
from collections.abc import Container, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from drafthead.errors import UserError, one_line
from drafthead.files.hub import refuse_pickles
from drafthead.files.local import check_header

UNCLOSED_BYTES = 2**26
"""Number of bytes to read before files are closed and opened again, which frees the memory of their pages."""
FLOATS = ("F16", "BF16", "F32", "F64")


def weight_files(folder: str, revision: str | None = None, gguf_file: str | None = None) -> list[Path]:
    """Return the safetensors or GGUF files of ``folder`` or a downloaded Hub id; reject other weights."""
    try:
        files = [cached_file(folder, gguf_file or SAFE_WEIGHTS_NAME, revision=revision)]
    except OSError:
        if Path(folder).is_dir() and not (Path(folder) / SAFE_WEIGHTS_INDEX_NAME).exists():
            refuse_pickles(folder, os.listdir(folder))
        index = cached_file(folder, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        files, _ = get_checkpoint_shard_files(folder, index, revision=revision)
    paths = [Path(file) for file in files]
    for path in paths if gguf_file is None else ():
        check_header(path)
    return paths


@dataclass
class _Sources:
    """The stored tensors that make up one or several tensors of a model."""

    converter: WeightConverter | None = None  # rule that computes the model's tensors; None: as stored
    stored: list[tuple[str, str]] = field(default_factory=list)  # (name in the checkpoint, rule's pattern)


class CheckpointTensors:
    """The tensors of a checkpoint's files by the names of a model's state dict."""

    def __init__(
        self,
        files: Iterable[Path],
        model: Any,
        key_mapping: dict[str, str] | None = None,
        only: Container[str] | None = None,
    ) -> None:
        """Find the tensors of the stock ``model`` in safetensors ``files``, of which only headers are read.
        ``key_mapping`` has the renamings that ``from_pretrained`` would get for this checkpoint (see ``inner_names`` in
        ``text_model.py``). ``only`` names the stored tensors to use (None: all)."""
        self._model, self._state = model, model.state_dict(keep_vars=True)
        self._files: dict[str, Path] = {}  # name in the checkpoint -> file
        self._open: dict[Path, Any] = {}
        for path in files:
            file: Any = safe_open(path, "pt")
            self._files |= {name: path for name in file.keys() if only is None or name in only}
        rules = get_model_conversion_mapping(model, key_mapping)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        self._sources: dict[str, _Sources] = {}
        self.unused: list[str] = []
        """Stored names that are no tensors of the model, such as those of another part of a composite checkpoint."""
        # In the order in which transformers stacks tensors: expert 2 before expert 10.
        for stored in sorted(self._files, key=dot_natural_key):
            prefix = model.base_model_prefix
            name, pattern = rename_source_key(stored, renamings, converters, prefix, self._state)
            if name not in self._state and stored in self._state:
                name, pattern = rename_source_key(stored, [], [], prefix, self._state)
            if name not in self._state:
                self.unused.append(stored)
                continue
            if pattern is None:
                self._sources[name] = _Sources(stored=[(stored, stored)])
                continue
            converter = by_pattern[pattern]
            sources = self._sources.setdefault(name, _Sources(converter))
            sources.stored.append((stored, pattern))
            first, *others = converter.target_patterns
            self._sources |= {name.replace(first, other): sources for other in others}

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return ``rows`` of the tensor ``name`` of the model, in the stored dtype, on the CPU. Only these rows are
        read, unless the tensor is converted. Missing, quantised, misshapen and inconvertible tensors are refused."""
        sources, expected = self._sources.get(name), self._state[name]
        if sources is None:
            tied = (other for other, tensor in self._state.items() if tensor is expected and other in self._sources)
            sources = self._sources.get(next(tied, ""))
        if sources is None:
            raise UserError(f"the checkpoint lacks the weight {name}; copy or download it again")
        for stored, _ in sources.stored:
            dtype = self._slice(stored).get_dtype()
            if expected.is_floating_point() and dtype not in FLOATS:
                raise UserError(f"the checkpoint stores {stored} as {dtype}; use one without quantised weights")
        if sources.converter is not None:
            return self._converted(name, sources)[rows]
        found = self._slice(sources.stored[0][0])
        self._check_shape(name, found.get_shape())
        tensor: Tensor = found[...] if rows == slice(None) else found[rows]
        return tensor

    def _converted(self, name: str, sources: _Sources) -> Tensor:
        """Convert the tensors of ``sources`` as transformers does; return the tensor ``name``."""
        converter = deepcopy(sources.converter)
        assert converter is not None
        for stored, pattern in sources.stored:
            converter.add_tensor(name, stored, pattern, partial(self._slice(stored).__getitem__, ...))
        try:
            made = converter.convert(name, model=self._model, config=self._model.config)[name]
        except Exception as error:
            what = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"the weight {name} cannot be converted from the checkpoint ({what})") from None
        tensor: Tensor = made[0] if isinstance(made, list) else made
        self._check_shape(name, list(tensor.shape))
        return tensor

    def _slice(self, stored: str) -> Any:
        path = self._files[stored]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path].get_slice(stored)

    def close(self) -> None:
        """Close the files until the next read, because pages that were read count as this process's memory."""
        self._open.clear()

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        if shape != (expected := list(self._state[name].shape)):
            raise UserError(f"the checkpoint has {name}: {shape} instead of {expected}; copy or download it again")


@torch.no_grad()
def read_shards(model: Any, tensors: CheckpointTensors) -> None:
    """Fill the tensors of ``model``, of which some may be sharded; of these read only the rows of this process."""
    unclosed = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        own, rows = tensor, slice(None)
        if isinstance(tensor, DTensor):
            # ``fully_shard`` splits rows as torch.chunk does, over the last dimension of its mesh.
            mesh, dim = tensor.device_mesh, tensor.device_mesh.ndim - 1
            first = mesh.get_local_rank(dim) * -(-len(tensor) // mesh.size(dim))
            own = tensor.to_local()
            rows = slice(first, first + len(own))
        if own.numel():
            own.copy_(tensors.read(name, rows))
        unclosed += own.nbytes
        if unclosed > UNCLOSED_BYTES:
            tensors.close()
            unclosed = 0
    tensors.close()
