"""The union of trees against a dictionary of paths, trial by trial."""

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.errors import UserError
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.loop import decode
from drafthead.models.drafters.combined import CombinedDrafter, combine, union
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.token_tree import NO_CHILD, TokenTree, TreeShape
from support import Context, TinyBase, drafted_paths, refuses

Path = tuple[int, ...]
Trials = dict[Path, list[tuple[Path, int]]]
"""Per path its trials in order: the path of the child, and the row of the distributions."""
VOCABULARY = 3


@st.composite
def trees(draw: st.DrawFn) -> list[Path]:
    """Paths of a tree of distinct siblings, in the order of its nodes."""
    paths: list[Path] = [()]
    for parent, token in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, VOCABULARY - 1)), max_size=7)):
        path = (*paths[parent % len(paths)], token)
        if path not in paths:
            paths.append(path)
    return paths


def proposal(rows: list[list[Path]], sampled: bool) -> Proposal:
    """A proposal of these trees; the distribution of node n's trials is row n."""
    width = max(map(len, rows))
    tokens, parents = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -1)
    for row, paths in enumerate(rows):
        for node, path in enumerate(paths[1:], start=1):
            tokens[row, node], parents[row, node] = path[-1], paths.index(path[:-1])
    shape = TreeShape.from_parents(parents)
    prob_index = torch.arange(width)[None, :, None].expand(1, -1, shape.children.shape[2])
    return Proposal(
        tokens=tokens,
        shape=shape,
        draft_sampling=DraftSampling.WITH_REPLACEMENT if sampled else DraftSampling.TOP_K,
        probs=torch.rand(len(rows), width, VOCABULARY) if sampled else None,
        prob_index=prob_index if sampled else None,
    )


def trials(found: Proposal, row: int) -> Trials:
    """Return the candidates that a proposal tries in one row, and check that paths are unique."""
    shape, paths = found.shape, drafted_paths(found, row)
    assert len(set(paths.values())) == len(paths)
    children = shape.children.expand(len(found.tokens), -1, -1)[row].tolist()
    probs = torch.full_like(shape.children, -1) if found.prob_index is None else found.prob_index
    dist_rows = probs.expand(len(found.tokens), *shape.children.shape[1:])[row].tolist()
    assert all(NO_CHILD not in tried[: len(tried) - tried.count(NO_CHILD)] for tried in children), "a gap"
    return {
        path: [(paths[c], dist) for c, dist in zip(children[node], dist_rows[node], strict=True) if c != NO_CHILD]
        for node, path in paths.items()
    }


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kinds=st.lists(st.booleans(), min_size=2, max_size=3), rows=st.integers(1, 3))
def test_union_keeps_every_trial_and_its_distribution(data: st.DataObject, kinds: list[bool], rows: int) -> None:
    parts = [proposal([data.draw(trees()) for _ in range(rows)], sampled) for sampled in kinds]
    merged, own = combine(parts)
    for part, numbers in zip(parts, own, strict=True):
        for row in range(rows):
            paths, union = drafted_paths(part, row), drafted_paths(merged, row)
            named = {number: union[n] for n, number in enumerate(numbers[row].tolist()) if number >= 0 and n in union}
            assert named == paths
    parts = [proposed for proposed in parts if len(proposed.shape) > 1] or parts[:1]  # who found nothing has no trials
    for row in range(rows):
        expected: Trials = {}
        offset = 0
        for proposed in parts:
            for path, tried in trials(proposed, row).items():
                shifted = [(child, dist + offset if dist >= 0 else -1) for child, dist in tried]
                expected.setdefault(path, []).extend(shifted)
            offset += 0 if proposed.probs is None else proposed.probs.shape[1]
        assert trials(merged, row) == expected
    probs = [proposed.probs for proposed in parts if proposed.probs is not None]
    assert (merged.probs is None) == (not probs)
    if merged.probs is not None:
        assert torch.equal(merged.probs, torch.cat(probs, 1))


def test_equal_samples_of_one_drafter_stay_apart() -> None:
    """Below them there may be the same samples: tried twice, they would count twice."""
    doubled = proposal([[(), (1,), (2,), (1, 0), (2, 0)]], sampled=True)
    doubled.tokens[0, 2] = 1  # the second sample is token 1 again
    merged, _ = combine([doubled, proposal([[(), (1,), (1, 0), (1, 2)]], sampled=True)])
    assert merged.tokens.tolist() == [[0, 1, 1, 0, 0, 2]]
    assert merged.shape.parents.tolist() == [[-1, 0, 0, 1, 2, 1]]
    assert merged.shape.children[0, :3].tolist() == [[1, 2, 1], [3, 3, 5], [4, NO_CHILD, NO_CHILD]]


@pytest.mark.parametrize("room", [2, 4, 6])
def test_a_small_union_gives_the_likeliest_nodes_of_the_first(tiny_base: TinyBase, room: int) -> None:
    base = tiny_base()
    model, look_up, tree = early_exit(base, 2, num_tokens=2), PromptLookup(3), TokenTree.expansion([3, 2])
    merged = CombinedDrafter([model, look_up], [tree, TokenTree.chain(3)], nodes=room)
    draft_config = DraftConfig(tree=cast(TokenTree, merged.tree))
    committed, last = torch.tensor([[1, 2, 3, 4, 5, 2]]), torch.tensor([3])
    drafted = Context.of(merged).read(committed).draft(last, draft_config)  # 2, 3 came before, and 4, 5, 2 behind it
    copied = {(4,), (4, 5), (4, 5, 2)}
    paths = set(trials(drafted, 0)) - {()}
    assert copied <= paths and len(drafted.shape) <= max(room, 4)
    alone = CombinedDrafter([model, PromptLookup(3)], [tree.first(max(1, room - 3)), TokenTree.chain(3)])
    assert paths == set(trials(Context.of(alone).read(committed).draft(last, draft_config), 0)) - {()}
    nothing_found = Context.of(merged).read(committed).draft(torch.tensor([9]), draft_config)
    assert len(nothing_found.shape) == min(room, len(tree))


def test_a_head_of_another_base_is_refused(tiny_base: TinyBase) -> None:
    base, other = tiny_base(), tiny_base("qwen2")
    combined = CombinedDrafter([PromptLookup(3), MedusaConfig(num_draft_tokens=2).build(base)])
    assert combined.base_fingerprint == base.fingerprint
    refuses("loaded for another base", decode, other, combined, [1, 2], max_new_tokens=8)
    heads = [MedusaConfig(num_draft_tokens=2).build(each) for each in (base, other)]
    refuses("loaded for different bases", CombinedDrafter, heads)
    assert CombinedDrafter([PromptLookup(3), PromptLookup(2)]).base_fingerprint is None


def test_refusals(tiny_base: TinyBase) -> None:
    merged = CombinedDrafter([PromptLookup(3), PromptLookup(2)])
    assert merged.tree == union([TokenTree.chain(3), TokenTree.chain(2)]) and len(merged.tree) == 6
    with pytest.raises(UserError, match="4 nodes, .* have 6"):
        decode(tiny_base(), merged, [1, 2], max_new_tokens=8, draft_config=DraftConfig(tree=TokenTree.chain(3)))
    refuses("at least 2 nodes", CombinedDrafter, [PromptLookup(), PromptLookup()], nodes=1)
