"""Parts of a base: the bytes that are read, and what they have in common with the loaded base."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig, checkpoint_tensors, load_weights
from drafthead.models.base.text_model import build
from support import TINY

Script = Callable[[str], ModuleType]


class CountingFile:
    """A safetensors file that counts the bytes of the tensors and rows that are read from it."""

    total = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = safe_open(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self._file.get_slice(name))


class CountingSlice:
    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, rows: Any) -> Any:
        read = self._stored[rows]
        CountingFile.total += read.nbytes
        return read


@pytest.fixture
def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountingFile]]:
    monkeypatch.setattr(CountingFile, "total", 0)
    monkeypatch.setattr("drafthead.models.base.checkpoint_tensors.safe_open", CountingFile)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", CountingFile)
    yield CountingFile


SHAPES: dict[str, dict[str, Any]] = {
    "untied": TINY,
    "tied": {**TINY, "tie_word_embeddings": True},
}


def save(name: str, folder: Path, script: Script, shard_size: str = "5GB") -> BaseConfig:
    """Save a random stock checkpoint of one of ``SHAPES`` or of ``benchmarks/base_shapes.py``; return its settings."""
    bases = script("bases")
    bases.stored(SHAPES.get(name) or bases.SHAPES[name], folder).save_pretrained(folder, max_shard_size=shard_size)
    return BaseConfig(name=str(folder), tokenizer="builtin:tiny", dtype="float32")


@pytest.mark.parametrize("name", ["untied", "tied", "gemma3", "qwen3_moe", "mixtral"])
def test_tensors_of_a_checkpoint_are_those_of_the_stock_model(
    name: str, tmp_path: Path, script: Script, count_bytes: type[CountingFile]
) -> None:
    """Shards, composites, tied heads and experts that transformers stacks."""
    config = save(name, tmp_path, script, "50KB")
    model, _ = load_weights(config, torch.device("cpu"), print)
    with torch.device("meta"):
        bare = build(config.transformers_config())
    count_bytes.total = 0
    tensors = checkpoint_tensors(config, bare)
    assert count_bytes.total == 0
    for key, expected in model.state_dict().items():
        assert torch.equal(tensors.read(key), expected)
        assert torch.equal(tensors.read(key, slice(1, 3)), expected[1:3])
    table = model.get_input_embeddings().weight
    count_bytes.total = 0
    tensors.read("model.embed_tokens.weight", slice(5, 9))
    assert count_bytes.total == 4 * table.shape[1] * table.itemsize


def test_tensors_that_cannot_be_read_are_named(tmp_path: Path, script: Script) -> None:
    config = save("untied", tmp_path, script)
    path, key = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    stored = load_file(path)
    with torch.device("meta"):
        bare = build(config.transformers_config())
    faults = {"lacks the weight": None, "F8_E4M3": stored[key].to(torch.float8_e4m3fn), "instead of": stored[key][:8]}
    for says, fault in faults.items():
        save_file({k: v for k, v in (stored | {key: fault}).items() if v is not None}, path)
        with pytest.raises(UserError, match=f"{key}.*{says}|{says}.*{key}"):
            checkpoint_tensors(config, bare).read(key)
