"""Windows of a head's layers: bounded memory, and windows that are set for drafting only."""

from typing import Any

import pytest
import torch

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode, default_draft_config
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.windows import WindowConfig, with_window
from drafthead.models.token_tree import TokenTree
from support import Context, TinyBase, cases, random_ids, randomised, refuses

SHAPES: dict[str, DraftHeadConfig] = {
    "eagle3": Eagle3Config(num_draft_tokens=3, ttt_steps=3),
    "p_eagle": Eagle3Config(num_draft_tokens=3, ttt_steps=3, parallel=True, num_layers=2),
    "dspark": DSparkConfig(num_draft_tokens=3, markov_rank=4),
}
WINDOW = 8


def drafts(head: DraftHead, base: BaseModel, ids: list[int]) -> torch.Tensor:
    cache = base.new_cache(len(ids))
    context = Context.of(head).read(torch.tensor([ids]), base.forward(torch.tensor([ids]), cache, spec=head.spec))
    return context.draft(torch.tensor([7]), DraftConfig(tree=TokenTree.expansion([3, 2, 1]))).tokens


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("p_eagle", "dspark"))]
)
def test_the_cache_is_as_small_as_the_window(tiny_base: TinyBase, small_caches: None, kind: str) -> None:
    """However long the answer, and never larger than without a window. The answer is that of decoding without
    drafts."""
    base = tiny_base()
    assert isinstance(config := SHAPES[kind], WindowConfig)
    held = {}
    for window in (None, WINDOW, 10**9):
        head = randomised(type(config)(**{**vars(config), "window": window}).build(base), 0.05).eval()
        session: Any = head.open(1)
        session.commit(torch.tensor([random_ids(200)]), [200], base_states(base, head, random_ids(200)))
        held[window] = session.context.cache.nbytes
        for prompt in (random_ids(150), [5]):
            plain = decode(base, None, prompt, max_new_tokens=30)
            assert decode(base, head, prompt, max_new_tokens=30).tokens == plain.tokens
    assert held[WINDOW] < held[None] / 2 and held[10**9] == held[None]


def base_states(base: BaseModel, head: DraftHead, ids: list[int]) -> Any:
    return base.forward(torch.tensor([ids]), base.new_cache(len(ids)), spec=head.spec)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_window_for_drafting_only(tiny_base: TinyBase, kind: str) -> None:
    """``head:window=N`` drafts as a head with this window and the same weights, and shares them."""
    base, config = tiny_base(), SHAPES[kind]
    full = randomised(config.build(base), 0.3).eval()
    full.tree = TokenTree.expansion([2, 1])
    expected = type(config)(**{**vars(config), "window": WINDOW}).build(base)
    expected.load_state_dict(full.state_dict())
    drafter, draft_config = build_drafter(
        parse_drafter(f"head:window={WINDOW}"), base, full, default_draft_config(full)
    )
    assert isinstance(drafter, DraftHead) and draft_config.tree == drafter.tree == full.tree
    assert next(drafter.parameters()).data_ptr() == next(full.parameters()).data_ptr()
    assert drafter.identity() != full.identity()
    short, long = random_ids(WINDOW - 3), random_ids(60)
    assert torch.equal(drafts(drafter, base, long), drafts(expected.eval(), base, long))
    assert not torch.equal(drafts(drafter, base, long), drafts(full, base, long))
    assert torch.equal(drafts(drafter, base, short), drafts(full, base, short))


@cases(
    "config, window, says",
    (MedusaConfig(num_draft_tokens=3), 8, r"window=8 is for heads whose layers attend \(eagle3, dspark\), not medusa"),
    (Eagle3Config(num_draft_tokens=3, ttt_steps=3, window=9), 8, "this head has head.window=9; leave it out"),
    (Eagle3Config(num_draft_tokens=3, ttt_steps=3), 3, "^window must be above head.num_draft_tokens=3, got 3"),
)
def test_heads_that_get_no_window(tiny_base: TinyBase, config: DraftHeadConfig, window: int, says: str) -> None:
    refuses(says, with_window, config.build(tiny_base()), window)
