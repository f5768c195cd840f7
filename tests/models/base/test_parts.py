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
from drafthead.models.base.base_config import BaseConfig, checkpoint_tensors, load_weights, meta_model
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts
from support import TINY, refuses

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


SHAPES: dict[str, dict[str, Any]] = {"untied": TINY, "tied": {**TINY, "tie_word_embeddings": True}}


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
    model, _ = load_weights(config, torch.device("cpu"))
    bare, count_bytes.total = meta_model(config, config.transformers_config()), 0
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
    bare = meta_model(config, config.transformers_config())
    faults = {"lacks the weight": None, "F8_E4M3": stored[key].to(torch.float8_e4m3fn), "instead of": stored[key][:8]}
    for says, fault in faults.items():
        save_file({k: v for k, v in (stored | {key: fault}).items() if v is not None}, path)
        with pytest.raises(UserError, match=f"{key}.*{says}|{says}.*{key}"):
            checkpoint_tensors(config, bare).read(key)


@pytest.mark.parametrize("name", ["untied", "tied", "gemma3", "qwen3_moe", "olmo", "cohere"])
def test_parts_made_in_three_ways_are_those_of_the_model(
    name: str, tmp_path: Path, script: Script, count_bytes: type[CountingFile]
) -> None:
    """Shards, composites, experts, a norm without weights, scaled logits; only the parts and eight rows are read."""
    config = save(name, tmp_path, script, "50KB")
    base = BaseModel.load(config, "cpu")
    layers = [m for m in base.stock().model.layers.modules() if isinstance(m, torch.nn.Linear)]
    count_bytes.total = 0
    parts = BaseParts.of_checkpoint(config, "cpu")
    ends = {base.embedding.data_ptr(): base.embedding.nbytes, base.lm_head.weight.data_ptr(): base.embedding.nbytes}
    norm = next(base.final_norm.parameters(), None)
    rows = sum(4 * layer.in_features * min(8, layer.out_features) for layer in layers)
    first = 4 * layers[0].in_features * min(64, layers[0].out_features)
    assert count_bytes.total == sum(ends.values()) + rows + (first if norm is None else norm.nbytes)
    table = torch.cat([base.embedding, torch.zeros(4, base.hidden_size)])  # an engine pads its vocabulary
    head = None if parts.embedding is parts.output_layer.weight else torch.cat([base.lm_head.weight, table[:4]])
    given = BaseParts.of_tensors(config, embedding=table, lm_head=head, norm=norm)
    assert given.embedding.data_ptr() == table.data_ptr()
    assert given.lm_head.weight.data_ptr() == (table if head is None else head).data_ptr()
    states = torch.randn(1, 3, base.hidden_size)
    for other in (parts, given):
        assert other.identity() == base.identity() and other.eos_ids == base.eos_ids
        torch.testing.assert_close(other.embedding, base.embedding, rtol=0, atol=0)
        torch.testing.assert_close(other.final_norm(states), base.final_norm(states), rtol=0, atol=0)
        torch.testing.assert_close(other.lm_head.logits(states), base.lm_head.logits(states), rtol=0, atol=0)
        rotations = [
            each.rotary.state_dict(keep_vars=True) | dict(each.rotary.named_buffers()) for each in (other, base)
        ]
        torch.testing.assert_close(*rotations, rtol=0, atol=0)


def test_parts_tell_a_fine_tune_from_its_original(tmp_path: Path, script: Script) -> None:
    config, path = save("untied", tmp_path, script), tmp_path / "model.safetensors"
    original, key = BaseParts.of_checkpoint(config, "cpu").fingerprint, "model.layers.2.mlp.up_proj.weight"
    save_file(load_file(path) | {key: load_file(path)[key] * 1.1}, path)
    tuned = BaseParts.of_checkpoint(config, "cpu").fingerprint
    assert tuned[:16] == original[:16] and tuned != original
    assert tuned == BaseModel.load(config, "cpu").fingerprint


def test_a_random_base_gives_its_parts_too() -> None:
    config = BaseConfig(random=True, shape=TINY, tokenizer="builtin:tiny", prepack=False)
    parts, base = BaseParts.of_checkpoint(config, "cpu"), BaseModel.load(config, "cpu")
    assert parts.identity() == base.identity() and torch.equal(parts.embedding, base.embedding)
    refuses("engine's tensors for a random", BaseParts.of_tensors, config, embedding=base.embedding)
