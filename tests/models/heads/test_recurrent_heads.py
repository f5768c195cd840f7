"""What Hydra and MLP speculators share: drafting computes what training did, and the text stays the base's own."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafthead.data.batch import Features
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.decoding.contract import DraftConfig, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.common.contract import DraftHead, DraftHeadConfig
from drafthead.models.heads.common.losses import LossConfig
from drafthead.models.heads.common.multi_position import RecurrentHead
from drafthead.models.heads.common.targets import DraftTargets
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.token_tree import TokenTree
from support import fitted, law_of_answers, p_value_of_answers, randomised, rows_of, small_base

TinyBase = Callable[..., BaseModel]
CONFIGS: dict[str, Callable[..., DraftHeadConfig]] = {
    "hydra": lambda **more: HydraConfig(num_draft_tokens=3, num_layers=2, **more),
    "hydra_pp": lambda **more: HydraConfig(num_draft_tokens=3, prefix_layer=True, own_lm_head=False, **more),
    "mlp": lambda **more: MLPSpeculatorConfig(num_draft_tokens=3, inner_dim=24, **more),
    "lstm": lambda **more: MLPSpeculatorConfig(
        num_draft_tokens=3, cell="lstm", tie_weights=True, scale_input=True, **more
    ),
    "mlp_on_base": lambda **more: MLPSpeculatorConfig(
        num_draft_tokens=3, inner_dim=24, own_embedding=False, own_lm_head=False, **more
    ),
}
PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 70))]
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(3)),
    "tree": DraftConfig(tree=TokenTree.expansion([3, 2, 1])),
    "dynamic": DraftConfig(tree=DynamicTree(width=3, depth=3, nodes=9)),
    "stops": DraftConfig(tree=TokenTree.expansion([2, 2, 1]), confidence_threshold=0.3),
}


@pytest.mark.parametrize("graphs", ["auto", "always"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_drafting_along_a_text_is_what_training_computes(tiny_base: TinyBase, kind: str, graphs: str) -> None:
    """At every place of two rows of lengths of their own, every position's logits, with a sibling that is wrong."""
    base = tiny_base("mistral")
    base = BaseModel.load(BaseConfig(**{**vars(base.config), "graphs": graphs}))
    head = randomised(CONFIGS[kind]().build(base, torch.arange(0, 300, 2))).eval()
    assert isinstance(head, RecurrentHead) and (head._static is None) == (graphs == "auto")
    texts = [torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (12, 9)]
    batch = rows_of(texts)
    features = base.features(batch, head.spec)
    draft_targets = DraftTargets.of(batch, 3)
    hidden = head.position_hidden(batch, features, draft_targets)
    trained = [head.output_head(k).logits(hidden[k]) for k in range(3)]
    seen = 0
    ids = batch.input_ids
    for t in range(9):
        state = head.init_state(2)
        first = max(1, t - 3)  # a prompt, and the rest token by token
        state = head.update(state, ids[:, :first], Features(final=features.final[:, :first]))
        for i in range(first, t + 1):
            state = head.update(state, ids[:, i : i + 1], Features(final=features.final[:, i : i + 1]))
        here = t if t >= first else first - 1
        with torch.inference_mode():
            draft_pass = head.start(state, ids[:, here + 1], PLANS["chain"])
            logits = [draft_pass.root()]
            for k in range(1, 3):
                if here + 1 + k >= ids.shape[1]:
                    break
                right = ids[:, here + 1 + k]
                # The right one stands second; the node beside it descends from it too and must change nothing.
                drafts, parents = torch.stack([right * 0 + 7, right], 1), torch.ones(2, 2, dtype=torch.int64)
                logits.append(draft_pass.step(drafts, parents if k > 1 else 0 * parents))
        for k, found in enumerate(logits):
            for row in range(2):
                flat = row * ids.shape[1] + here
                match = (draft_targets.source_idx[k] == flat) & draft_targets.valid[k]
                if match.any():
                    seen += 1
                    torch.testing.assert_close(found[row, -1], trained[k][match][0], rtol=1e-4, atol=1e-4)
    assert seen > 40


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "gemma"])
def test_greedy_text_is_plain_text(tiny_base: TinyBase, architecture: str, kind: str) -> None:
    """Alone and in a batch, with every kind of tree; a head that is often right, so that states move on."""
    base = tiny_base(architecture)
    plain = [decode(base, None, p, max_new_tokens=16, ignore_eos=True).tokens for p in PROMPTS]
    d2t = torch.tensor(sorted({t for text in plain for t in text} | set(range(0, 300, 2))))
    # One text is left out: drafts must be rejected too.
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)][:2]
    head = fitted(CONFIGS[kind]().build(base, d2t), rows_of(texts), 15)
    for name in PLANS if architecture == "llama" else ["chain", "tree"]:
        draft_config = PLANS[name]
        both = decode_batch(base, head, PROMPTS, max_new_tokens=16, draft_config=draft_config, ignore_eos=True)
        alone = decode(base, head, PROMPTS[0], max_new_tokens=16, draft_config=draft_config, ignore_eos=True)
        assert [r.tokens for r in both] == plain and alone.tokens == plain[0], name
        accepted = [step.accepted for r in both for step in r.steps]
        assert sum(accepted) > 5 and min(accepted) == 0, name
        # At the end a step drafts what is still wanted, in a batch by any row.
        assert [s.accepted for s in alone.steps][:-1] == [s.accepted for s in both[0].steps][:-1], name


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_state_stays_as_it_was(tiny_base: TinyBase, kind: str) -> None:
    """Drafting from a state, from a later one and from the first again; and from some of its rows."""
    base = tiny_base()
    head = randomised(CONFIGS[kind]().build(base)).eval()
    batch = rows_of([list(range(20, 40)), list(range(60, 80))])
    final = base.features(batch, head.spec).final
    state = head.update(head.init_state(2), batch.input_ids[:, :8], Features(final=final[:, :8]))
    state = head.update(state, batch.input_ids[:, 8:12], Features(final=final[:, 8:12]), torch.tensor([3, 1]))
    last = torch.tensor([31, 69])

    def drafted(state: object, rows: list[int]) -> list[list[int]]:
        return head.draft(state, last[rows], PLANS["tree"]).tokens.tolist()  # type: ignore[arg-type]

    first = drafted(state, [0, 1])
    later = head.update(state, batch.input_ids[:, 12:14], Features(final=final[:, 12:14]))
    second = drafted(later, [0, 1])
    assert second != first
    assert drafted(state.select([1]), [1]) == first[1:]
    assert drafted(state, [0, 1]) == first


@pytest.mark.parametrize("kind", CONFIGS)
def test_save_and_load(tiny_base: TinyBase, tmp_path: Path, kind: str) -> None:
    base = tiny_base()
    head = randomised(CONFIGS[kind](draft_vocab_size=100).build(base, torch.arange(100, 200))).eval()
    head.save_pretrained(tmp_path)
    loaded = DraftHead.from_pretrained(tmp_path, base)
    batch = rows_of([list(range(90, 120))])
    features = base.features(batch, head.spec)
    assert loaded.config == head.config
    assert torch.equal(loaded.candidate_ranks(batch, features, 9), head.candidate_ranks(batch, features, 9))
    assert torch.equal(
        loaded.loss(batch, features, LossConfig()).loss_sum, head.loss(batch, features, LossConfig()).loss_sum
    )
    # What the base has is not saved again.
    assert not any("base" in name or "rotary" in name for name in head.state_dict())


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_renews_what_drafting_packed(tiny_base: TinyBase, kind: str) -> None:
    """Drafts after a step of training are those of a fresh head with the same weights."""
    base = tiny_base()
    head, fresh = CONFIGS[kind]().build(base).eval(), CONFIGS[kind]().build(base).eval()
    texts = [list(range(30, 60))]
    features = base.features(rows_of(texts), head.spec)

    def drafted(head: DraftHead) -> torch.Tensor:
        state = head.update(head.init_state(1), torch.tensor([texts[0][:5]]), Features(final=features.final[:, :5]))
        with torch.inference_mode():
            return head.start(state, torch.tensor([35]), PLANS["chain"]).root()

    before = drafted(head)
    randomised(fitted(head, rows_of(texts), 1).train()).eval()
    fresh.load_state_dict(head.state_dict())
    assert not torch.allclose(drafted(head), before, atol=1e-3)
    assert torch.equal(drafted(head), drafted(fresh))


@pytest.mark.parametrize("kind", CONFIGS)
def test_unread_features_carry_nothing(tiny_base: TinyBase, kind: str) -> None:
    """NaN where nobody read (the last token of a document, padding) reaches neither the loss nor a gradient."""
    base = tiny_base()
    head = randomised(CONFIGS[kind]().build(base))
    batch = rows_of([list(range(20, 30)), list(range(50, 58))])
    final = base.features(batch, head.spec).final.clone()
    clean = head.loss(batch, Features(final=final), LossConfig(kl=1.0))
    final[0, 9:], final[1, 7:] = torch.nan, torch.nan
    out = head.loss(batch, Features(final=final), LossConfig(kl=1.0))
    torch.autograd.backward(out.loss_sum)
    assert float(out.loss_sum.detach()) == pytest.approx(float(clean.loss_sum.detach()), rel=1e-6)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())


@pytest.mark.parametrize("kind", CONFIGS)
def test_heads_learn_a_base_that_counts(tiny_base: TinyBase, kind: str) -> None:
    """Label alignment by construction: where x_{t+1} = x_t + 1, the heads must reach 100 % acceptance."""
    base = tiny_base(seed=3)
    head = CONFIGS[kind]().build(base)
    batch = rows_of([list(range(s, s + 20)) for s in (20, 40, 60)])
    # Features that only tell the token: a direction per id.
    directions = torch.randn(base.vocab_size, base.hidden_size, generator=torch.Generator().manual_seed(0))
    features = Features(final=directions[batch.input_ids])
    head = fitted(head, batch, 100, features=features)
    ratios = head.loss(batch, features, LossConfig()).ratios()
    assert [ratios[f"accept_{k}"].value for k in (1, 2, 3)] == [1.0, 1.0, 1.0]
    text = torch.arange(20, 31)[None]
    state = head.update(head.init_state(1), text, Features(final=directions[text]))
    assert head.draft(state, torch.tensor([31]), PLANS["chain"]).tokens.tolist() == [[31, 32, 33, 34]]


# Sampling ---------------------------------------------------------------------------------------------------

SAMPLER, LENGTH = Sampler(temperature=1.0, top_k=3), 3


@pytest.mark.parametrize("kind", CONFIGS)
def test_law_of_sampled_answers(kind: str) -> None:
    """Trees of siblings sampled without replacement, in a batch of two prompts: the law of plain sampling."""
    base = small_base()
    prompts = [[9, 10, 11, 12, 13, 14, 15], [250]]
    probs = [law_of_answers(base, prompt, SAMPLER, LENGTH) for prompt in prompts]
    texts = [[*p, *answer] for p, found in zip(prompts, probs, strict=True) for answer in found]
    head = fitted(CONFIGS[kind]().build(base), rows_of(texts), 12)
    draft_config = DraftConfig(tree=TokenTree.expansion([2, 2]), draft_sampling=DraftSampling.WITHOUT_REPLACEMENT)
    results = decode_batch(
        base,
        head,
        prompts * 150,
        max_new_tokens=LENGTH,
        draft_config=draft_config,
        sampler=SAMPLER,
        seeds=list(range(300)),
        ignore_eos=True,
    )
    steps = [step for result in results for step in result.steps]
    accepted = sum(step.accepted for step in steps) / sum(step.depth for step in steps)
    assert 0.1 < accepted < 0.9, "drafts must be accepted and rejected"
    for row, expected in enumerate(probs):
        assert p_value_of_answers(Counter(tuple(r.tokens) for r in results[row::2]), expected) > 1e-4
