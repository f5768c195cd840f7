"""A causal LM as drafter, and prompt lookup against a loop over the context."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import AdaptiveLength, DraftConfig, Proposal
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.experimental.max_gram import MaxGram, bigram_table
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.token_tree import TokenTree
from support import Context, TinyBase, drafted_paths, refuses

PROMPTS = [[5, 6, 7, 5, 6, 7], [9], list(range(40, 90))]


@contextmanager
def tokens_of_passes(model: BaseModel) -> Iterator[list[int]]:
    """Record how many tokens of a row a model reads in every pass."""
    passes: list[int] = []
    embedding = model.model.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda module, inputs: passes.append(inputs[0].shape[-1])):
        yield passes


@pytest.mark.parametrize("rows", [1, 2])
def test_accepted_drafts_are_not_read_again(tiny_base: TinyBase, rows: int) -> None:
    """After a full acceptance one pass takes the last draft and the bonus: nothing lags behind."""
    base, drafter = tiny_base(), early_exit(tiny_base(), 2, num_tokens=3)
    session = Context.of(drafter, rows).read(torch.arange(8).expand(rows, -1)).session
    last = torch.full((rows,), 7)
    for tree in (TokenTree.chain(3), TokenTree.expansion([2, 2, 1])):
        drafted = session.draft(last, DraftConfig(tree=tree)).tokens
        path = [0]
        while tree.parents.count(path[-1]):
            path.append(tree.parents.index(path[-1]))
        with tokens_of_passes(drafter.model) as passes:
            session.commit(drafted[:, path], [len(path)] * rows, None, torch.tensor(path).expand(rows, -1))
            last = torch.full((rows,), base.vocab_size - 1)
            session.draft(last, DraftConfig(tree=TokenTree.chain(3)))
        assert passes == [2, 1, 1]


def test_drafts_only_ids_that_the_model_knows(tiny_base: TinyBase) -> None:
    base = tiny_base()
    small = early_exit(base, 2).model
    small.vocab_size = 200  # as if the base's other ids were padding
    small.logits = lambda hidden: base.logits(hidden)[..., :200]  # type: ignore[method-assign]
    drafter = ModelDrafter(small, base)
    context = Context.of(drafter).read(torch.tensor([[5, 250, 7]]))
    proposal = context.draft(torch.tensor([299]), DraftConfig(tree=TokenTree.expansion([2, 1, 2, 1])))
    assert int(proposal.tokens[:, 1:].max()) < 200
    small.vocab_size = 301
    refuses("has 301 ids but the target has 300", ModelDrafter, small, base)


def test_adaptive_length(tiny_base: TinyBase) -> None:
    """+2 after a full acceptance, -1 otherwise, within the tree; one prompt at a time."""
    base = tiny_base()
    draft_config = DraftConfig(tree=TokenTree.chain(6), adaptive=AdaptiveLength(start=2))
    model = ModelDrafter(base, num_tokens=6)
    right = decode(base, model, PROMPTS[0], max_new_tokens=30, draft_config=draft_config, ignore_eos=True)
    assert [step.depth for step in right.steps][:4] == [2, 4, 6, 6]
    plain = decode(base, None, PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    wrong = ModelDrafter(tiny_base(seed=1), num_tokens=6)
    result = decode(base, wrong, PROMPTS[0], max_new_tokens=30, draft_config=draft_config, ignore_eos=True)
    assert [step.depth for step in result.steps][:3] == [2, 1, 1] and result.tokens == plain.tokens
    with pytest.raises(UserError, match="one prompt at a time, got 3"):
        decode_batch(base, wrong, PROMPTS, max_new_tokens=8, draft_config=draft_config)


def test_early_exit_leaves_the_base_as_it_is(tiny_base: TinyBase) -> None:
    base = tiny_base()
    tokens = torch.arange(5)[None]
    before = base.forward(tokens, base.new_cache(8)).final
    small = early_exit(base, 1).model
    small.forward(tokens, small.new_cache(8))
    assert base.num_layers == len(base.model.model.layers) == base.model.config.num_hidden_layers == 3
    assert torch.equal(base.forward(tokens, base.new_cache(8)).final, before)
    assert small.model.model.layers[0] is base.model.model.layers[0]
    refuses("needs 1 to 2 layers, got 3", early_exit, base, 3)


# Prompt lookup --------------------------------------------------------------------------------------------------------


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=3)


def observe(drafter: PromptLookup, texts: list[list[int]]) -> Context:
    """All but the last token of every text, read in two parts."""
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[99] * (longest - len(text))] for text in texts])
    counts = torch.tensor([len(text) - 1 for text in texts])
    halves = (counts // 2, counts - counts // 2)
    rest = torch.stack([row.roll(-int(half)) for row, half in zip(padded, halves[0], strict=True)])
    return Context.of(drafter, len(texts)).read(padded, counts=halves[0]).read(rest, counts=halves[1])


def draft(drafter: PromptLookup, texts: list[list[int]], draft_config: DraftConfig | None = None) -> Proposal:
    last = torch.tensor([text[-1] for text in texts])
    return observe(drafter, texts).draft(last, draft_config or DraftConfig(tree=drafter.tree))


def paths(proposal: Proposal, row: int) -> set[tuple[int, ...]]:
    return set(drafted_paths(proposal, row).values()) - {()}


def by_loop(text: list[int], num_tokens: int, max_ngram: int | None, per_match: int | None) -> tuple[int, ...]:
    """The longest n-gram first, its last occurrence first; with ``per_match`` so many drafts for each of its tokens."""
    for size in range(min(max_ngram or len(text), len(text) - 1), 0, -1):
        starts = [s for s in range(len(text) - size) if text[s : s + size] == text[-size:]]
        if starts:
            start = starts[-1] + size
            return tuple(text[start : start + min(num_tokens, size * (per_match or num_tokens))])
    return ()


def test_several_matches_share_their_prefix_within_the_planned_nodes() -> None:
    """The cache has room for the plan's nodes only; the best match comes first."""
    text, drafter = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2], PromptLookup(2, 2, matches=2)
    proposal = draft(drafter, [text, [7, 8, 9]])
    assert paths(proposal, 0) == {(3,), (3, 4), (3, 5)} and paths(proposal, 1) == set()
    proposal = draft(drafter, [text], DraftConfig(tree=TokenTree.chain(2)))
    assert paths(proposal, 0) == {(3,), (3, 5)} and proposal.tokens.shape == (1, 3)
    assert draft(PromptLookup(), [[1, 2, 3]]).tokens.tolist() == [[3]]


def test_its_bound_is_named_after_its_tokens(tiny_base: TinyBase) -> None:
    lookups = [build_drafter(parse_drafter(spec), tiny_base())[0] for spec in ("prompt_lookup:8:2", "prompt_lookup:8")]
    limits = [(x.depth, x.max_ngram, x.per_match) for x in lookups if isinstance(x, PromptLookup)]
    assert limits == [(8, 4, 2), (8, 3, None)]


@settings(max_examples=100, deadline=None)
@given(
    texts=TEXTS,
    answers=TEXTS,
    max_ngram=st.none() | st.integers(1, 4),
    memory=st.just(0) | st.integers(0, 30),
    per_match=st.none() | st.integers(1, 3),
)
def test_equals_a_loop_over_the_latest_answers_and_the_text(
    texts: list[list[int]], answers: list[list[int]], max_ngram: int | None, memory: int, per_match: int | None
) -> None:
    """The latest answers act as if they came before the context, each after a unique token."""
    drafter = PromptLookup(4, max_ngram, memory=memory, per_match=per_match)
    for answer in answers:
        drafter.remember(answer)
    remembered: list[list[int]] = []
    for answer in reversed(answers):
        answer = answer[-(memory - 1) :] if memory > 1 else []
        if sum(len(each) + 1 for each in remembered) + len(answer) + 1 > memory or not answer:
            break
        remembered.insert(0, answer)
    before = [token for number, answer in enumerate(remembered) for token in (*answer, 10 + number)]
    proposal = draft(drafter, texts)
    for row, text in enumerate(texts):
        chain = by_loop([*before, *text], 4, max_ngram, per_match)
        chain = tuple(chain[: next((n for n, token in enumerate(chain) if token >= 10), len(chain))])
        assert paths(proposal, row) == {chain[: n + 1] for n in range(len(chain))}


def test_bigrams_draft_where_nothing_matches() -> None:
    table = bigram_table([[1, 2, 3, 1, 2, 4], [1, 2, 3], [9, 1], [9, 0]], vocab_size=12)
    assert table.tolist() == [-1, 2, 3, 1, -1, -1, -1, -1, -1, 0, -1, -1]
    drafter = MaxGram(4, table)
    proposal = draft(drafter, [[7, 9], [5, 6, 5], [3, 4], [8, 3]])
    assert paths(proposal, 0) == {(0,)}  # nothing is known to follow 0
    assert paths(proposal, 1) == {(6,), (6, 5)}  # a match is not prolonged
    assert paths(proposal, 2) == set()
    assert paths(proposal, 3) == {(1,), (1, 2), (1, 2, 3), (1, 2, 3, 1)}
