"""Random tiny bases for logic; the embedded model (slow tests) for truth. Plain functions stand in ``support.py``."""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from drafthead.models.base import BaseModel
from drafthead.models.base_config import BaseConfig

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
}


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a benchmark as `python benchmarks/NAME.py` does, with its folder first on the path."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    held = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(held)


@cache
def _tiny_base(model_type: str, seed: int) -> BaseModel:
    shape = {"model_type": model_type, **TINY, **ARCHITECTURES[model_type], "initializer_range": 0.2}
    return BaseModel.load(BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype="float32", seed=seed))


@pytest.fixture
def tiny_base() -> Callable[..., BaseModel]:
    """A random base of a given architecture; weights wide enough that greedy answers vary."""

    def make(model_type: str = "llama", seed: int = 0) -> BaseModel:
        torch.manual_seed(seed)
        return _tiny_base(model_type, seed)

    return make
