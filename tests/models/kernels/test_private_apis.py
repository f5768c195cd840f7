"""The list of private names against the source, the installed versions, and the fallbacks without them."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode
from drafthead.models.kernels import private_apis
from drafthead.models.kernels.fused import FusedMLP
from drafthead.models.kernels.linear import DtypeLinear, can_prepack, inference_linear, packs_bfloat16
from drafthead.models.kernels.private_apis import PRIVATE_NAMES, look_up
from support import TinyBase

ROOT = Path(__file__).parents[3]
PROMPT = [5, 9, 11]


def private_names(path: Path) -> Iterator[str]:
    """Undocumented names in the source of one module: by import from a submodule, or by attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith(("torch._C.", "torch.ops.")) and name.count(".") == 3:
                yield name


def test_the_source_uses_no_private_name_that_is_not_listed() -> None:
    folders = ("data", "models", "eval", "train", "drafthead/commands")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in modules for name in private_names(path)}
    assert len(modules) > 100 and used <= set(PRIVATE_NAMES), used - set(PRIVATE_NAMES)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_tested_versions_have_every_name(name: str) -> None:
    assert look_up(name) is not None
    assert PRIVATE_NAMES[name].startswith(("fallback: ", "required: "))


def test_stock_layers_replace_private_operators(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = decode(tiny_base(), None, PROMPT, max_new_tokens=16).tokens
    monkeypatch.setattr(private_apis, "look_up", lambda name: None)
    assert not can_prepack(torch.ones(4, 4)) and not packs_bfloat16()
    assert isinstance(inference_linear(torch.ones(4, 4)), DtypeLinear)
    base = BaseModel.load(tiny_base().config)
    assert base.prepacked == 0
    assert decode(base, None, PROMPT, max_new_tokens=16).tokens == tokens


def test_renamed_stock_classes_are_left_as_they_are(tiny_base: TinyBase) -> None:
    stock = BaseModel.load(replace(tiny_base().config, prepack=False))
    renamed = type("LlamaMLP2", (nn.Module,), {"__module__": type(stock.model.model.layers[0].mlp).__module__})
    assert private_apis.stock_part(renamed()) is None
    assert private_apis.stock_part(stock.model.model.layers[0].mlp) == "MLP"
    assert isinstance(BaseModel.load(tiny_base().config).model.model.layers[0].mlp, FusedMLP)
