"""Heads that draft with bfloat16 copies: other bits in the drafts, the same text, the weights as they were trained."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.common.contract import DraftHead, DraftHeadConfig
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.kernels.linear import PlainLinear, inference_linear
from drafthead.models.token_tree import TokenTree
from support import random_ids, randomised

TinyBase = Callable[..., BaseModel]
CONFIGS: dict[str, DraftHeadConfig] = {
    "draft_lm": DraftLMConfig(num_layers=1),
    "eagle3": Eagle3Config(),
    "hydra": HydraConfig(projection_bias=True),
    "hydra_pp": HydraConfig(prefix_layer=True, num_layers=2, own_lm_head=False),
    "kangaroo": KangarooConfig(exit_layer=1),
    "medusa": MedusaConfig(num_draft_tokens=3),
    "mlp_speculator": MLPSpeculatorConfig(),
    "mlp_speculator on the base's projection": MLPSpeculatorConfig(own_lm_head=False),
}


def two_of(config: DraftHeadConfig, base: BaseModel) -> tuple[DraftHead, DraftHead]:
    """The same weights, drafting with copies as they are and with bfloat16 ones."""
    full = randomised(config.build(base))
    rounded = replace(config, draft_dtype="bfloat16").build(base)
    rounded.load_state_dict(full.state_dict())
    return full.eval(), rounded.eval()


@torch.inference_mode()
def first_logits(head: DraftHead) -> Tensor:
    """Of the first two draft positions behind a short text."""
    base, ids = head.base, torch.tensor([random_ids(7)])
    hidden = base.forward(ids, base.new_cache(16), spec=head.spec)
    state = head.update(head.init_state(1), ids, hidden)
    draft_pass = head.start(state, ids[:, -1], DraftConfig(tree=TokenTree.chain(2)))
    first = draft_pass.root()
    return torch.cat([first, draft_pass.step(torch.tensor([[5]]), torch.tensor([[0]]))], 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_rounded_and_nothing_else(name: str, tiny_base: TinyBase) -> None:
    full, rounded = two_of(CONFIGS[name], tiny_base())
    assert all(p.dtype == torch.float32 for p in rounded.parameters())
    wanted, found = first_logits(full), first_logits(rounded)
    assert found.dtype == torch.float32
    assert not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_plain_text(name: str, tiny_base: TinyBase) -> None:
    base = tiny_base()
    _, head = two_of(CONFIGS[name], base)
    plain = decode(base, None, random_ids(9), max_new_tokens=20).tokens
    draft_config = DraftConfig(tree=TokenTree.expansion([3, 2]))
    assert decode(base, head, random_ids(9), max_new_tokens=20, draft_config=draft_config).tokens == plain


def test_setting_is_saved(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    replace(CONFIGS["medusa"], draft_dtype="bfloat16").build(base).save_pretrained(tmp_path)
    assert DraftHead.from_pretrained(tmp_path, base).config.inference_dtype == torch.bfloat16


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="draft_dtype must be bfloat16 or null, got 'float16'"):
        MedusaConfig(draft_dtype="float16")


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_layer_rounds_its_product(rows: int, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthead.models.kernels.linear._packs_bfloat16", lambda: packs)
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in [(24, 16), (24,), (1, rows, 16)])
    layer = inference_linear(weight, bias, torch.bfloat16)
    assert isinstance(layer, PlainLinear) != packs
    exact = x.bfloat16().float() @ weight.bfloat16().float().t() + bias.bfloat16().float()
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), exact, rtol=2**-7, atol=2**-6)
