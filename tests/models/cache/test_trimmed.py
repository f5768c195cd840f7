"""Layers with a window hold what it needs and no more, and nobody notices: logits, texts, and what is refused."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

from drafthead.errors import UserError
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.layers import CacheShape
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DynamicTree
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.token_tree import TokenTree
from support import cases, fitted, random_base, random_ids, refuses, rows_of

Script = Callable[[str], ModuleType]
BaseOf = Callable[..., BaseModel]
WINDOW, CAPACITY, NEW = 8, 160, 40
NAMES = ("gemma3_text", "mistral", "llama4_text_chunk", "gemma4")
"""Windows between full layers, in all layers, chunks, and layers of several sizes."""
LIKE_GEMMA_3 = [*["sliding_attention"] * 5, "full_attention"]
PROMPTS = [random_ids(n, n) for n in (3, 20, 50)]


@pytest.fixture
def base_of(script: Script) -> BaseOf:
    shapes = script("base_shapes").SHAPES
    keys = ("sliding_window", "attention_chunk_size")

    def make(name: str, window: int = WINDOW, **more: Any) -> BaseModel:
        windows = {key: window for key in keys if shapes[name].get(key)}
        return load(json.dumps(shapes[name] | windows | more))

    return make


@cache
def load(shape: str) -> BaseModel:
    return random_base(json.loads(shape))


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


EXPANSION = DraftConfig(tree=TokenTree.expansion([2, 2]))
DYNAMIC = DraftConfig(tree=DynamicTree(nodes=7, width=3, depth=3))
KANGAROO = KangarooConfig(num_draft_tokens=3, exit_layer=2)
DRAFTED: dict[str, tuple[Callable[[BaseModel], Drafter], DraftConfig | None]] = {
    "lookup": (lambda base: PromptLookup(num_tokens=4, max_ngram=1, matches=2), None),
    "the target itself": (ModelDrafter, EXPANSION),
    "medusa": (MedusaConfig(num_draft_tokens=3).build, EXPANSION),
    "kangaroo": (KANGAROO.build, None),
    "kangaroo, dynamic": (KANGAROO.build, DYNAMIC),
}
SAMPLER, SLOW = Sampler(temperature=0.8), pytest.mark.slow


def decoded(
    base: BaseModel, drafter: Drafter | None = None, prompts: Sequence[list[int]] = PROMPTS, **options: Any
) -> Any:
    """The answers of a batch."""
    return decode_batch(base, drafter, prompts, max_new_tokens=NEW, ignore_eos=True, **options)


@cache
def over_whole_caches(base: BaseModel, sampler: Sampler) -> list[list[int]]:
    """Answers of plain decoding row by row, and of a second turn after the second one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheShape, "trimmed", lambda self, *args, **kwargs: self)
        answers = [decoded(base, None, [p], sampler=sampler, seeds=[n])[0].tokens for n, p in enumerate(PROMPTS)]
        return [*answers, decoded(base, None, [second_turn(answers)], sampler=sampler)[0].tokens]


def second_turn(answers: list[list[int]]) -> list[int]:
    return PROMPTS[1] + answers[1] + [5, 6]


@cases(
    "name, kind",
    *(pytest.param(name, kind, marks=SLOW) for name in NAMES for kind in ("the target itself", "lookup")),
    ("gemma3_text", "medusa"),
    pytest.param("gemma3_text", "kangaroo", marks=SLOW),
    pytest.param("mistral", "kangaroo", marks=SLOW),
    pytest.param("gemma3_text", "kangaroo, dynamic", marks=SLOW),
)
def test_texts_are_those_over_whole_caches(name: str, kind: str, base_of: BaseOf) -> None:
    """Without drafts and with them, in a batch, alone, in a second turn; greedy and sampled."""
    base, (make, draft_config) = base_of(name), DRAFTED[kind]
    greedy, seeded = over_whole_caches(base, Sampler()), over_whole_caches(base, SAMPLER)
    drafter = make(base)
    if isinstance(drafter, torch.nn.Module):
        drafter = fitted(drafter, rows_of([PROMPTS[1] + greedy[1], PROMPTS[2] + greedy[2]]), 25)
    turn = second_turn(greedy)
    assert [row.tokens for row in decoded(base)] == greedy[:3]
    assert decoded(base, prompts=[turn])[0].tokens == greedy[3]
    together = decoded(base, drafter, draft_config=draft_config)
    alone = [decoded(base, drafter, [prompt], draft_config=draft_config)[0] for prompt in (PROMPTS[2], turn)]
    assert [row.tokens for row in together] == greedy[:3] and [row.tokens for row in alone] == greedy[2:]
    assert kind == "lookup" or sum(step.accepted for row in (*together, *alone) for step in row.steps) > 0
    sampled = decoded(base, drafter, draft_config=draft_config, sampler=SAMPLER)
    assert [row.tokens for row in sampled] == seeded[:3]


def test_what_was_dropped_cannot_come_back(base_of: BaseOf) -> None:
    base = base_of("gemma3_text")
    cache, tokens = base.new_cache(CAPACITY, nodes=4), torch.tensor([PROMPTS[2]])
    base.forward(tokens, cache)
    refuses(f"cannot go back to 20 positions: .* a window of {WINDOW} have dropped", cache.crop, [20])
    with pytest.raises(UserError, match="hold 20 positions but .* are needed: .* trees of up to 4 nodes"):
        base.verify(tokens[:, :30], TokenTree.chain(29).shape, cache)
    cache.crop([0])
    expected = base.forward(tokens, base.new_cache(CAPACITY)).final
    assert_close(base.forward(tokens, cache).final, expected)
    assert base.new_cache(2 * WINDOW + 4, nodes=4).shape == base.cache_shape
    assert base.new_cache(2 * WINDOW + 5, nodes=4).shape != base.cache_shape
    assert base.new_cache(CAPACITY).shape == base.cache_shape


@cases(
    "name, more, whole, held",
    ("gemma3_text", {"num_hidden_layers": 6, "layer_types": LIKE_GEMMA_3}, 3_096_576, 700_416),
    ("mistral", {}, 2_064_384, 147_456),
)
def test_bytes_of_2000_tokens(name: str, more: dict[str, Any], whole: int, held: int, base_of: BaseOf) -> None:
    """Memory is as small as docs/explanation/bases.md says."""
    base, rows = base_of(name, window=64, max_position_embeddings=4096, **more), 4
    assert base.new_cache(2016).nbytes == whole and base.new_cache(2016, nodes=16).nbytes == held
    assert base.new_cache(2016, 16, rows).nbytes == rows * held


@pytest.mark.parametrize("rows", [1, 2])
def test_costs_of_larger_trees_than_are_drafted(rows: int, base_of: BaseOf) -> None:
    sizes = [1, 8, 48]
    costs = measure_costs(base_of("gemma3_text"), PromptLookup(num_tokens=4), 100, repeats=1, sizes=sizes, rows=rows)
    assert sorted(costs.verify) == sizes
