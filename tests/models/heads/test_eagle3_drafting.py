"""EAGLE-3's drafting against its training, its decoding against plain text, and what is saved."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.common.targets import DraftTargets
from drafthead.models.heads.eagle3 import Eagle3Head
from drafthead.models.token_tree import TokenTree
from support import (
    EAGLE3_VARIANTS,
    eagle3_head,
    fitted,
    law_of_answers,
    p_value_of_answers,
    random_ids,
    row_of,
    small_base,
)

TinyBase = Callable[..., BaseModel]
ARCHITECTURES = ["llama", "mistral", "qwen2", "gemma"]
PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 90))]
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(4)),
    "tree": DraftConfig(tree=TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 3)])),
    "dynamic": DraftConfig(tree=DynamicTree(nodes=9, width=4, depth=3)),
}


def text_logits(head: Eagle3Head, base: BaseModel, ids: list[int]) -> Tensor:
    """[K, T, W] draft logits of the training path, every position at the place it drafts from."""
    batch = row_of([ids])
    draft_targets = DraftTargets.of(batch, head.depth)
    hidden = head.position_hidden(batch, base.features(batch, head.spec), draft_targets)
    found = torch.full((head.depth, len(ids), len(head.d2t)), torch.nan)
    for k in range(head.depth):
        valid = draft_targets.valid[k]
        found[k, draft_targets.source_idx[k, valid]] = head.output_head(k).logits(hidden[k, valid]).detach()
    return found


@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafting_along_a_text_is_the_training_path(tiny_base: TinyBase, architecture: str, variant: str) -> None:
    """Rows of lengths of their own, read in pieces, with drafts in between: every level's logits are a step's.

    On each level the text's token is the second of two nodes, so parents matter.
    """
    base = tiny_base(architecture)
    head = eagle3_head(base, torch.arange(0, 300, 2), **EAGLE3_VARIANTS[variant])
    texts = [random_ids(60), random_ids(25, seed=1), random_ids(30, seed=2)]
    wanted = [text_logits(head, base, ids) for ids in texts]
    for rows in ([0], [1], [0, 1, 2], [1, 2]):
        starts, state = torch.zeros(len(rows), dtype=torch.int64), head.init_state(len(rows))
        cache = base.new_slots(len(rows), 128) if len(rows) > 1 else base.new_cache(128)
        for counts in ([[40, 1, 3], [1, 4, 2], [3, 1, 5], [1, 1, 1]][n] for n in range(4)):
            count = torch.tensor([counts[row] for row in rows])
            most = int(count.max())
            taken = [texts[row][s : s + c] for row, s, c in zip(rows, starts.tolist(), count.tolist(), strict=True)]
            tokens = torch.tensor([part + [7] * (most - len(part)) for part in taken])
            read = base.forward(tokens, cache, count, head.spec)
            state = head.update(state, tokens, read, count)
            starts = starts + count
            for _ in range(2):  # the same state drafts the same again
                follow(head, state, [texts[row] for row in rows], [wanted[row] for row in rows], starts)


def follow(head: Eagle3Head, state: object, texts: list[list[int]], wanted: list[Tensor], starts: Tensor) -> None:
    """Expand nodes of the texts' tokens behind what is read; their logits must be those of the training path."""

    def tokens(ahead: int) -> Tensor:
        return torch.tensor([text[start + ahead] for text, start in zip(texts, starts.tolist(), strict=True)])

    with torch.inference_mode():
        draft_pass = head.start(state, tokens(0), PLANS["chain"])  # type: ignore[arg-type]
        found = draft_pass.root()[:, 0]
        for k in range(head.depth):
            steps = torch.stack([w[k, start - 1] for w, start in zip(wanted, starts.tolist(), strict=True)])
            torch.testing.assert_close(found, steps, rtol=1e-3, atol=1e-3)
            if k + 1 < head.depth:
                nodes = torch.stack([tokens(k + 2), tokens(k + 1)], 1)
                parents = torch.full_like(nodes, min(k, 1))
                parents[:, 0] = 0
                found = draft_pass.step(nodes, parents)[:, 1]


def test_ranks_are_those_of_drafting(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = eagle3_head(base, torch.arange(0, 300, 2))
    ids = random_ids(20)
    batch, logits = row_of([ids]), text_logits(head, base, ids)
    ranks = head.candidate_ranks(batch, base.features(batch, head.spec), top=40)
    for t, k in product(range(22), range(4)):
        target = t + 2 + k
        if target >= 20:
            assert ranks[0, t, k] == -1
            continue
        listed = head.d2t[logits[k, t].topk(40).indices].tolist()
        assert ranks[0, t, k] == (listed.index(ids[target]) if ids[target] in listed else 40)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_plain_decoding(tiny_base: TinyBase, architecture: str) -> None:
    """Chains, static and dynamic trees, alone and in a ragged batch, with drafts accepted and rejected."""
    base = tiny_base(architecture)
    plain = [decode(base, None, ids, max_new_tokens=16, ignore_eos=True).tokens for ids in PROMPTS]
    batch = row_of([p + a[:8] for p, a in zip(PROMPTS, plain, strict=True)])
    head = fitted(eagle3_head(base), batch, 15, lr=5e-3)
    for draft_config in PLANS.values():
        alone = [
            decode(base, head, ids, max_new_tokens=16, draft_config=draft_config, ignore_eos=True) for ids in PROMPTS
        ]
        together = decode_batch(base, head, PROMPTS, max_new_tokens=16, draft_config=draft_config, ignore_eos=True)
        assert [r.tokens for r in alone] == plain
        assert [r.tokens for r in together] == plain
        accepted = [[s.accepted for s in r.steps[:-1]] for r in alone]
        # The last step of a row may draft further in a batch that goes on.
        assert [[s.accepted for s in r.steps[:-1]] for r in together] == accepted
        assert 3 < sum(map(sum, accepted)) < draft_config.depth * sum(map(len, accepted))


def test_sampled_text_has_the_law_of_plain_sampling() -> None:
    """Chi-square over all answers of three tokens, in ragged batches; siblings drawn without replacement."""
    base, sampler, prompts = small_base(), Sampler(temperature=1.0, top_k=3), [[5, 6, 7], [250]]
    expected = [law_of_answers(base, prompt, sampler, 3) for prompt in prompts]
    likely = [p + list(max(dist, key=dist.__getitem__)) for p, dist in zip(prompts, expected, strict=True)]
    head = fitted(eagle3_head(base, num_draft_tokens=2, ttt_steps=2), row_of(likely), 6, lr=5e-3)
    draft_config = DraftConfig(tree=TokenTree.expansion([2, 2]), draft_sampling=DraftSampling.WITHOUT_REPLACEMENT)
    counts, accepted, steps = [Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()], 0, 0
    for seed in range(0, 480, 8):
        seeds = list(range(seed, seed + 8))
        results = decode_batch(
            base,
            head,
            prompts * 4,
            max_new_tokens=3,
            draft_config=draft_config,
            sampler=sampler,
            seeds=seeds,
            ignore_eos=True,
        )
        for number, result in enumerate(results):
            counts[number % 2][tuple(result.tokens)] += 1
            accepted, steps = accepted + sum(s.accepted for s in result.steps), steps + len(result.steps)
    assert 0.1 * steps < accepted < 0.9 * steps, "drafts must be accepted and rejected"
    for seen, dist in zip(counts, expected, strict=True):
        assert seen.total() == 240 and p_value_of_answers(seen, dist) > 1e-4


@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
def test_save_and_load(tiny_base: TinyBase, tmp_path: Path, variant: str) -> None:
    base = tiny_base()
    head = eagle3_head(base, torch.arange(200), **EAGLE3_VARIANTS[variant])
    head.save_pretrained(tmp_path)
    loaded = Eagle3Head.from_pretrained(tmp_path, base)
    wanted, found = (text_logits(h, base, random_ids(12)) for h in (head, loaded))
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert loaded.spec == head.spec


def test_training_renews_what_drafting_packed(tiny_base: TinyBase) -> None:
    head = eagle3_head(tiny_base())
    before = head.inference()
    assert head.inference() is before
    head.train()
    head.eval()
    assert head.inference() is not before
    before = head.inference()
    assert head.to("cpu").inference() is not before
