"""Speculative greedy decoding commits exactly what plain greedy decoding does."""

from collections.abc import Callable

import pytest
import torch

from drafthead.data.batch import TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.eval.metrics import acceptance as metrics
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.eval.trees.calibrate import answer_ranks
from drafthead.eval.trees.simulate import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig
from drafthead.models.decoding.loop import EXACT, GREEDY, decode
from drafthead.models.decoding.step import DecodeConfig, DecodeState
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.token_tree import TokenTree

TinyBase = Callable[..., BaseModel]
PROMPT = [5, 17, 99, 42, 7]
TREES = {
    "chain": TokenTree.chain(3),
    "wide": TokenTree.from_paths([(r,) for r in range(8)]),
    "tree": TokenTree.from_paths(
        [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 3), (0, 0, 0), (0, 1, 0), (0, 1, 2), (1, 0, 0), (2, 3, 1)]
    ),
}


def trained_head(base: BaseModel, plain: list[int]) -> MedusaHead:
    """A head that is often right: its blocks are perturbed and its projections fitted to the answer's own tokens."""
    head = MedusaConfig(num_draft_tokens=3).build(base).eval()
    ids = torch.tensor([PROMPT + plain])
    hidden = base.forward(ids, base.new_cache(ids.shape[1])).final[0]
    with torch.no_grad():
        for k in range(3):
            for t in range(len(PROMPT) - 1, ids.shape[1] - 2 - k, 2):
                h = hidden[t]
                head.projections.weights[k][ids[0, t + 2 + k]] += 30 * h / (h @ h)
    return head


@pytest.mark.parametrize("tree", TREES, ids=list(TREES))
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_greedy_equality(tiny_base: TinyBase, architecture: str, tree: str) -> None:
    base = tiny_base(architecture)
    plain = decode(base, None, PROMPT, max_new_tokens=60, ignore_eos=True)
    head = trained_head(base, plain.tokens)
    streamed: list[int] = []
    result = decode(
        base,
        head,
        PROMPT,
        max_new_tokens=60,
        draft_config=DraftConfig(tree=TREES[tree]),
        on_tokens=streamed.extend,
        ignore_eos=True,
    )
    assert result.tokens == streamed == plain.tokens
    assert len(set(plain.tokens)) > 3, "an answer of one repeated token proves nothing"
    assert sum(s.accepted for s in result.steps) > 5, "drafts must be accepted for the test to say something"
    assert len(result.steps) < len(plain.steps)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma"])
def test_plain_decoding_is_transformers_generate(tiny_base: TinyBase, architecture: str) -> None:
    base = tiny_base(architecture)
    plain = decode(base, None, PROMPT, max_new_tokens=30, ignore_eos=True)
    ids = torch.tensor([PROMPT])
    out = base.model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert plain.tokens == out[0, len(PROMPT) :].tolist()


def test_the_transformers_baseline_is_greedy_whatever_the_model_asks_for(tiny_base: TinyBase) -> None:
    base = tiny_base()
    plain = decode(base, None, PROMPT, max_new_tokens=30)
    own = base.model.generation_config
    asked = {"repetition_penalty": own.repetition_penalty, "do_sample": own.do_sample, "top_k": own.top_k}
    try:
        own.update(repetition_penalty=5.0, do_sample=True, top_k=3)
        assert transformers_generate(base, PROMPT, 30).tokens == plain.tokens
        assert base.model.generation_config is own
    finally:
        own.update(**asked)


@pytest.mark.parametrize("new", [2, 3, 20, 60])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:2], PROMPT[:1]], ids=["prompt", "two tokens", "one token"])
@pytest.mark.parametrize("tree", TREES, ids=list(TREES))
def test_replay_is_real_decoding(tiny_base: TinyBase, tree: str, prompt: list[int], new: int) -> None:
    """Steps and mean accepted length that calibration expects on an answer, against decoding it."""
    base = tiny_base()
    plain = decode(base, None, prompt, max_new_tokens=new, ignore_eos=True).tokens
    head = trained_head(base, decode(base, None, PROMPT, max_new_tokens=60, ignore_eos=True).tokens)
    real = decode(base, head, prompt, max_new_tokens=new, draft_config=DraftConfig(tree=TREES[tree]), ignore_eos=True)
    length = len(prompt) + new
    batch = TrainBatch(
        input_ids=torch.tensor([prompt + plain]),
        position_ids=torch.arange(length)[None],
        document_ids=torch.zeros(1, length, dtype=torch.int64),
        loss_mask=torch.arange(length)[None] >= len(prompt),
    )
    answers = answer_ranks(head, batch, base.hidden_states(batch, head.spec))
    replayed = simulate_acceptance([accept_probs_of_ranks(a) for a in answers], TREES[tree])
    assert replayed.steps == len(real.steps)
    assert replayed.mean_accepted_length == metrics.mean_accepted_length([real]).value
    assert new < 60 or prompt != PROMPT or sum(s.accepted for s in real.steps) > 5, "nothing accepted proves nothing"


@pytest.mark.parametrize("max_new", range(1, 12))
def test_max_new_tokens_inside_a_block(tiny_base: TinyBase, max_new: int) -> None:
    base = tiny_base()
    plain = decode(base, None, PROMPT, max_new_tokens=60, ignore_eos=True).tokens
    head = trained_head(base, plain)
    result = decode(
        base, head, PROMPT, max_new_tokens=max_new, draft_config=DraftConfig(tree=TREES["tree"]), ignore_eos=True
    )
    assert result.tokens == plain[:max_new]
    assert 1 + sum(s.committed for s in result.steps) == max_new


def test_eos_inside_a_block(tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever token of the answer is EOS, decoding stops right after its first occurrence."""
    base = tiny_base()
    plain = decode(base, None, PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    head = trained_head(base, plain)
    for eos in set(plain):
        monkeypatch.setattr(BaseModel, "eos_ids", property(lambda self, eos=eos: frozenset({eos})))
        result = decode(base, head, PROMPT, max_new_tokens=40, draft_config=DraftConfig(tree=TREES["tree"]))
        assert result.tokens == plain[: plain.index(eos) + 1]


def test_verified_states_equal_reading_token_by_token(tiny_base: TinyBase) -> None:
    """The tree mask, the positions and the compaction of the cache, to float32 rounding."""
    base = tiny_base()
    tree = TREES["tree"]
    tokens = torch.tensor([[7, *range(30, 30 + len(tree) - 1)]])
    cache = base.new_cache(40)
    base.forward(torch.tensor([PROMPT]), cache)
    hidden = base.verify(tokens, tree.shape, cache).final
    for node, path in enumerate(tree.paths):
        nodes = [tree.paths.index(path[:d]) for d in range(len(path) + 1)]
        chain = base.forward(torch.tensor([PROMPT + tokens[0, nodes].tolist()]), base.new_cache(40)).final
        torch.testing.assert_close(hidden[0, node], chain[0, -1], rtol=1e-4, atol=1e-5)
    path = torch.tensor([0, *(tree.paths.index((2, 3, 1)[:d]) for d in (1, 2, 3))])
    cache.commit_path(path[None], torch.tensor([4]))
    follow = base.forward(torch.tensor([[11]]), cache).final
    chain = base.forward(torch.tensor([PROMPT + tokens[0, path].tolist() + [11]]), base.new_cache(40)).final
    torch.testing.assert_close(follow[0, -1], chain[0, -1], rtol=1e-4, atol=1e-5)


def test_bad_prompts(tiny_base: TinyBase) -> None:
    base = tiny_base()
    with pytest.raises(UserError, match="the prompt is empty"):
        decode(base, None, [], max_new_tokens=4)
    with pytest.raises(UserError, match="context of 512; shorten the prompt"):
        decode(base, None, [1] * 510, max_new_tokens=4)
    with pytest.raises(UserError, match="token id 300 at place 0, but the base's ids go from 0 to 299"):
        decode(base, None, [300], max_new_tokens=4)
    with pytest.raises(UserError, match="max_new_tokens must be at least 1"):
        decode(base, None, [3], max_new_tokens=0)


def test_nothing_after_eos_or_the_limit_is_committed(tiny_base: TinyBase) -> None:
    """Tokens, caches and the drafter's state end together, at the first EOS or where the room ends."""
    base = tiny_base()
    plain = decode(base, None, PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    head = trained_head(base, plain)
    for eos, room in ((plain[1], 9), (plain[2], 9), (-1, 2), (plain[2], 1)):
        config = DecodeConfig(
            draft_config=DraftConfig(tree=TREES["tree"]), sampler=GREEDY, rule=EXACT, eos_ids=frozenset({eos})
        )
        state = DecodeState(base, head, config, 1, 40)
        state.read_prompts([PROMPT])
        output = state.step([0], [1], room=[room])
        assert int(output.acceptance.accepted) >= 2, "the cut must be inside what was accepted"
        kept = min(room, plain.index(eos) if eos in plain else room)
        assert int(output.counts) == kept and output.tokens[0, :kept].tolist() == plain[1 : 1 + kept]
        assert int(state.cache.positions(torch.zeros(1, 1, dtype=torch.int64))) == len(PROMPT) + kept
        assert state.last_token.tolist() == [plain[kept]]
