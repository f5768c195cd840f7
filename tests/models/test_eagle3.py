"""EAGLE-3 against an independent reference, its drafting against its training, and its decoding against plain text."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import Tensor

from drafthead.data.contracts import Features, Siblings, TrainBatch
from drafthead.data.errors import UserError
from drafthead.data.token_tree import TokenTree
from drafthead.eval.decode import decode, decode_batch
from drafthead.models.base import BaseModel
from drafthead.models.base_config import BaseConfig
from drafthead.models.drafter import DraftPlan, DynamicTree
from drafthead.models.eagle3 import Eagle3Config, Eagle3Head, published_layers
from drafthead.models.losses import LossConfig
from drafthead.models.reading import Reading
from drafthead.models.sampling import Sampler
from drafthead.train.config import parse_run
from drafthead.train.pipeline import run_pipeline

TinyBase = Callable[..., BaseModel]
ROOT = Path(__file__).parent.parent.parent
ARCHITECTURES = ["llama", "mistral", "qwen2", "gemma"]
PROMPTS = [[5, 6, 7] * 4, [9], list(range(40, 90))]
PLANS = {
    "chain": DraftPlan(tree=TokenTree.chain(4)),
    "tree": DraftPlan(tree=TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 3)])),
    "dynamic": DraftPlan(tree=DynamicTree(nodes=9, width=4, depth=3)),
}
VARIANTS = {
    "published": {},
    "shared lm_head": {"own_lm_head": False},
    "later norms": {"norm_before_fc": True, "norm_output": True},
    "final state": {"layers": [], "intermediate_size": 40},
}


def batch_of(documents: list[list[int]], trained_from: int = 0) -> TrainBatch:
    """One row, documents one after the other, a little padding."""
    ids = [i for d in documents for i in d] + [0, 0]
    doc = [n for n, d in enumerate(documents) for _ in d] + [-1, -1]
    position = [p for d in documents for p in range(len(d))] + [0, 0]
    mask = [p >= trained_from for d in documents for p in range(len(d))] + [False, False]
    return TrainBatch(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([position]),
        document_ids=torch.tensor([doc]),
        loss_mask=torch.tensor([mask]),
        row_ids=torch.tensor([0]),
    )


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def randomised(base: BaseModel, d2t: Tensor | None = None, **settings: object) -> Eagle3Head:
    torch.manual_seed(0)
    config = Eagle3Config(**{"num_tokens": 4, "ttt_steps": 4, **settings})  # type: ignore[arg-type]
    head = config.build(base, d2t)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter += (0.1 if "norm" in name else 0.03) * torch.randn(parameter.shape)
    return head.eval()


def reference(head: Eagle3Head, base: BaseModel, ids: list[int], steps: int) -> dict[tuple[int, int], Tensor]:
    """Logits of step i at place t of one document, token by token and attention head by attention head."""
    weights, settings, size = head.state_dict(), base.model.config, head.midlayer.self_attn.shape.head_dim
    states = base.model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    read = [states[n][0] for n in head.spec.layers] or [states[-1][0]]

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + settings.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str, position: int | None) -> list[Tensor]:
        found = (weights[f"midlayer.self_attn.{name}.weight"] @ x).split(size)
        if position is None:
            return list(found)
        angle = position / settings.rope_parameters["rope_theta"] ** (torch.arange(size // 2) / (size // 2))
        turns = torch.polar(torch.ones(size // 2), angle)
        halves = [torch.complex(h[: size // 2], h[size // 2 :]) * turns for h in found]
        return [torch.cat([h.real, h.imag]) for h in halves]

    def pair(token: int, feature: Tensor) -> Tensor:
        embedding = base.embedding[token]
        return torch.cat([rms(embedding, "midlayer.input_layernorm"), rms(feature, "midlayer.hidden_norm")])

    features = [torch.cat([layer[t] for layer in read]) for t in range(len(ids))]
    if head.config.norm_before_fc:
        features = [rms(f, "input_norm") for f in features]
    features = [weights["fc.weight"] @ f for f in features]
    text = [pair(token, f) for token, f in zip(ids[1:], features, strict=False)]
    text_states = [(heads(x, "k_proj", s), heads(x, "v_proj", None)) for s, x in enumerate(text)]
    mlp = {n: weights[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")}
    logits = {}
    for t in range(len(ids) - 2):
        feature, seen = features[t], text_states[: t + 1]
        for i in range(min(steps, len(ids) - 2 - t)):
            x = pair(ids[t + 1 + i], feature)
            if i:
                seen = [*seen, (heads(x, "k_proj", t + i), heads(x, "v_proj", None))]
            attended = []
            for number, query in enumerate(heads(x, "q_proj", t + i)):
                group = number * len(seen[0][0]) // (settings.num_attention_heads)
                scores = torch.stack([key[group] @ query for key, _ in seen]) / size**0.5
                attended.append(sum(p * v[group] for p, (_, v) in zip(scores.softmax(0), seen, strict=True)))
            hidden = feature + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
            normed = rms(hidden, "midlayer.post_attention_layernorm")
            out = hidden + mlp["down"] @ (F.silu(mlp["gate"] @ normed) * (mlp["up"] @ normed))
            normed = rms(out, "norm")
            logits[i, t] = weights["lm_head.weight"] @ normed if head.lm_head else head.teacher.weight @ normed
            feature = normed if head.config.norm_output else out
    return logits


def test_published_layers_are_hidden_states(tiny_base: TinyBase) -> None:
    """The reference code keeps what goes into its layers 2, L // 2 and L - 3, counted from 0."""
    assert published_layers(32) == (2, 16, 29)
    base = tiny_base()
    head, data = randomised(base, layers=[2, 1, 0]), batch_of([random_ids(9)])
    assert head.spec.layers == published_layers(3) == (2, 1, 0)
    inputs: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, n=n: inputs.update({n: args[0]}))
        for n, layer in enumerate(base.model.model.layers)
    ]
    features = base.features(data, head.spec)
    for hook in hooks:
        hook.remove()
    assert torch.equal(features.layers, torch.cat([inputs[n] for n in (2, 1, 0)], -1))


def test_names_of_weights_are_those_of_checkpoints(tiny_base: TinyBase) -> None:
    names = set(randomised(tiny_base()).state_dict())
    attention = {f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"}
    mlp = {f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    norms = {f"midlayer.{n}.weight" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    assert names == {"d2t", "fc.weight", "norm.weight", "lm_head.weight"} | attention | mlp | norms


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_parity_with_a_few_line_reference(tiny_base: TinyBase, architecture: str, variant: str) -> None:
    """The whole training-time test on copied weights; labels and documents by explicit indices."""
    base, d2t = tiny_base(architecture), torch.arange(0, 300, 2)
    head = randomised(base, d2t, **VARIANTS[variant])
    documents = [random_ids(14, seed=3), random_ids(9, seed=1)]
    batch = batch_of(documents, trained_from=4)
    out = head.loss(batch, base.features(batch, head.spec), LossConfig(decay=0.8))
    total, count = 0.0, 0
    for document in documents:
        for (i, t), logits in reference(head, base, document, 4).items():
            token = document[t + 2 + i]
            if t + 2 + i < 4:
                continue
            count += i == 0
            if token % 2 == 0:
                total += 0.8 ** (i + 1) * F.cross_entropy(logits, torch.tensor(token // 2)).item()
    assert int(out.tokens) == count == 15 and total > 40
    assert out.loss_sum.item() == pytest.approx(total, rel=1e-4)
    torch.autograd.backward(out.loss_sum)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert not base.embedding.requires_grad and not base.head.weight.requires_grad


def test_rows_padding_and_other_documents_change_nothing(tiny_base: TinyBase) -> None:
    """Rows with different places to draft from, and a document behind another one, against each document alone."""
    base = tiny_base()
    head = randomised(base)
    documents = [random_ids(9), random_ids(14, seed=1)]
    alone = [batch_of([d], trained_from=5) for d in documents]
    found = [head.loss(b, base.features(b, head.spec), LossConfig(kl=1.0)) for b in alone]
    packed = [batch_of(documents, trained_from=5), batch_of(documents[::-1], trained_from=5)]
    rows = TrainBatch(**{k: torch.cat([getattr(b, k) for b in packed]) for k in vars(packed[0])})
    both = head.loss(rows, base.features(rows, head.spec), LossConfig(kl=1.0))
    assert int(both.tokens) == 2 * sum(int(f.tokens) for f in found)
    assert both.loss_sum.item() == pytest.approx(2 * sum(f.loss_sum.item() for f in found), rel=1e-4)


def test_unread_features_carry_nothing(tiny_base: TinyBase) -> None:
    """NaN where nobody read (the last token of a document, padding) reaches neither the loss nor a gradient."""
    base = tiny_base()
    head = randomised(base, norm_before_fc=True)
    batch = batch_of([random_ids(10), random_ids(8, seed=1)])
    features = base.features(batch, head.spec)
    clean = head.loss(batch, features, LossConfig(kl=1.0))
    assert features.layers is not None
    for values in (features.final, features.layers):
        values[0, [9, 17, 18, 19]] = torch.nan
    out = head.loss(batch, features, LossConfig(kl=1.0))
    torch.autograd.backward(out.loss_sum)
    assert out.loss_sum.item() == clean.loss_sum.item()
    assert all(torch.isfinite(p.grad).all() for p in head.parameters() if p.grad is not None)


def test_nothing_to_train_on(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head, batch = randomised(base), batch_of([[5, 6]])
    out = head.loss(batch, base.features(batch, head.spec), LossConfig())
    assert int(out.tokens) == 0 and float(out.loss_sum.detach()) == 0.0


def test_fewer_steps_are_trained_than_drafted(tiny_base: TinyBase) -> None:
    base, batch = tiny_base(), batch_of([random_ids(12)])
    features = base.features(batch, randomised(base).spec)
    head, short = randomised(base, ttt_steps=2), randomised(base, num_tokens=2, ttt_steps=2)
    out, wanted = (h.loss(batch, features, LossConfig(decay=0.5)) for h in (head, short))
    assert out.loss_sum.item() == wanted.loss_sum.item() and out.names == wanted.names
    with torch.no_grad():
        measured = head.loss(batch, features, LossConfig(decay=0.5))
    assert measured.loss_sum.item() == pytest.approx(wanted.loss_sum.item(), rel=1e-6)
    assert measured.ratios()["accept_4"].den == 12 - 5


def text_logits(head: Eagle3Head, base: BaseModel, ids: list[int]) -> Tensor:
    """[K, T, W] draft logits of the training path, every position at the place it drafts from."""
    batch = batch_of([ids])
    reading = Reading.of(batch, head.depth)
    hidden = head.position_hidden(batch, base.features(batch, head.spec), reading)
    found = torch.full((head.depth, len(ids), len(head.d2t)), torch.nan)
    for k in range(head.depth):
        valid = reading.valid[k]
        found[k, reading.sources[k, valid]] = head.output_head(k).logits(hidden[k, valid]).detach()
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafting_along_a_text_is_the_training_path(tiny_base: TinyBase, architecture: str, variant: str) -> None:
    """Rows of lengths of their own, read in pieces, with drafts in between: every level's logits are a step's.

    On each level the text's token is the second of two nodes, so parents matter.
    """
    base = tiny_base(architecture)
    head = randomised(base, torch.arange(0, 300, 2), **VARIANTS[variant])
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
            read = base.read(tokens, cache, count, head.spec)
            state = head.observe(state, tokens, Features.split(read, base.hidden_size), count)
            starts = starts + count
            for _ in range(2):  # the same state drafts the same again
                follow(head, state, [texts[row] for row in rows], [wanted[row] for row in rows], starts)


def follow(head: Eagle3Head, state: object, texts: list[list[int]], wanted: list[Tensor], starts: Tensor) -> None:
    """Expand nodes of the texts' tokens behind what is read; their logits must be those of the training path."""

    def tokens(ahead: int) -> Tensor:
        return torch.tensor([text[start + ahead] for text, start in zip(texts, starts.tolist(), strict=True)])

    with torch.inference_mode():
        expansion = head.begin(state, tokens(0), PLANS["chain"])  # type: ignore[arg-type]
        found = expansion.root()[:, 0]
        for k in range(head.depth):
            steps = torch.stack([w[k, start - 1] for w, start in zip(wanted, starts.tolist(), strict=True)])
            torch.testing.assert_close(found, steps, rtol=1e-3, atol=1e-3)
            if k + 1 < head.depth:
                nodes = torch.stack([tokens(k + 2), tokens(k + 1)], 1)
                parents = torch.full_like(nodes, min(k, 1))
                parents[:, 0] = 0
                found = expansion.grow(nodes, parents)[:, 1]


def test_ranks_are_those_of_drafting(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = randomised(base, torch.arange(0, 300, 2))
    ids = random_ids(20)
    batch, logits = batch_of([ids]), text_logits(head, base, ids)
    ranks = head.candidate_ranks(batch, base.features(batch, head.spec), top=40)
    for t, k in product(range(22), range(4)):
        target = t + 2 + k
        if target >= 20:
            assert ranks[0, t, k] == -1
            continue
        listed = head.d2t[logits[k, t].topk(40).indices].tolist()
        assert ranks[0, t, k] == (listed.index(ids[target]) if ids[target] in listed else 40)


def fitted(base: BaseModel, answers: list[list[int]], steps: int = 40, **settings: object) -> Eagle3Head:
    """A head trained for a moment on these texts."""
    head = randomised(base, **settings).train()
    batch = batch_of(answers)
    features = base.features(batch, head.spec)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(steps):
        out = head.loss(batch, features, LossConfig())
        optimizer.zero_grad()
        torch.autograd.backward(out.loss_sum / out.tokens)
        optimizer.step()
    return head.eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_plain_decoding(tiny_base: TinyBase, architecture: str) -> None:
    """Chains, static and dynamic trees, alone and in a ragged batch, with drafts accepted and rejected."""
    base = tiny_base(architecture)
    plain = [decode(base, None, ids, max_new_tokens=16, ignore_eos=True).tokens for ids in PROMPTS]
    head = fitted(base, [p + a[:8] for p, a in zip(PROMPTS, plain, strict=True)], 15)
    for plan in PLANS.values():
        alone = [decode(base, head, ids, max_new_tokens=16, plan=plan, ignore_eos=True) for ids in PROMPTS]
        together = decode_batch(base, head, PROMPTS, max_new_tokens=16, plan=plan, ignore_eos=True)
        assert [r.tokens for r in alone] == plain
        assert [r.tokens for r in together] == plain
        accepted = [[s.accepted for s in r.steps[:-1]] for r in alone]
        # The last step of a row may draft further in a batch that goes on.
        assert [[s.accepted for s in r.steps[:-1]] for r in together] == accepted
        assert 3 < sum(map(sum, accepted)) < plan.depth * sum(map(len, accepted))


def test_heads_learn_a_base_that_counts(tiny_base: TinyBase) -> None:
    """Label alignment by construction: where x_{t+1} = x_t + 1, every step must reach 100 % acceptance."""
    base = tiny_base(seed=3)
    head = randomised(base, num_tokens=3, ttt_steps=3).train()
    batch = batch_of([list(range(s, s + 20)) for s in (20, 40, 60)])
    # Features that only tell the token: a direction per id.
    directions = torch.randn(base.vocab_size, 4 * base.hidden_size, generator=torch.Generator().manual_seed(0))
    features = Features.split(directions[batch.input_ids], base.hidden_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(80):
        out = head.loss(batch, features, LossConfig())
        optimizer.zero_grad()
        torch.autograd.backward(out.loss_sum / out.tokens)
        optimizer.step()
    ratios = head.eval().loss(batch, features, LossConfig()).ratios()
    assert [ratios[f"accept_{k}"].value for k in (1, 2, 3)] == [1.0, 1.0, 1.0]
    ids = torch.arange(20, 31)[None]
    state = head.observe(head.init_state(1), ids, Features.split(directions[ids], base.hidden_size))
    proposal = head.draft(state, torch.tensor([31]), DraftPlan(tree=TokenTree.chain(3)))
    assert proposal.tokens.tolist() == [[31, 32, 33, 34]]


def test_sampled_text_has_the_law_of_plain_sampling() -> None:
    """Chi-square over all answers of three tokens, in ragged batches; siblings drawn without replacement."""
    base, sampler, prompts = _small_base(), Sampler(temperature=1.0, top_k=3), [[5, 6, 7], [250]]
    expected = [_law(base, prompt, sampler) for prompt in prompts]
    likely = [p + list(max(law, key=law.__getitem__)) for p, law in zip(prompts, expected, strict=True)]
    head = fitted(base, likely, 6, num_tokens=2, ttt_steps=2)
    plan = DraftPlan(tree=TokenTree.expansion([2, 2]), siblings=Siblings.WITHOUT_REPLACEMENT)
    counts, accepted, steps = [Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()], 0, 0
    for seed in range(0, 480, 8):
        seeds = list(range(seed, seed + 8))
        results = decode_batch(
            base, head, prompts * 4, max_new_tokens=3, plan=plan, sampler=sampler, seeds=seeds, ignore_eos=True
        )
        for number, result in enumerate(results):
            counts[number % 2][tuple(result.tokens)] += 1
            accepted, steps = accepted + sum(s.accepted for s in result.steps), steps + len(result.steps)
    assert 0.1 * steps < accepted < 0.9 * steps, "drafts must be accepted and rejected"
    for seen, law in zip(counts, expected, strict=True):
        assert seen.total() == 240 and set(seen) <= set(law)
        cells = [(seen[a], 240 * p) for a, p in law.items() if 240 * p >= 5]
        cells.append((240 - sum(s for s, _ in cells), 240 - sum(w for _, w in cells)))
        statistic = torch.tensor(sum((s - w) ** 2 / w for s, w in cells if w > 1), dtype=torch.float64)
        freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
        assert float(torch.special.gammaincc(freedom, statistic / 2)) > 1e-4


def _small_base() -> BaseModel:
    shape = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300}
    shape |= {"max_position_embeddings": 128, "initializer_range": 0.3}
    return BaseModel.load(BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype="float32", seed=0))


def _law(base: BaseModel, prompt: list[int], sampler: Sampler) -> dict[tuple[int, ...], float]:
    """Every answer of three tokens and its probability."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for answer, chance in found.items():
            ids = torch.tensor([[*prompt, *answer]])
            law = sampler.laws(base.logits(base.read(ids, base.new_cache(16))[:, -1]))[0].double()
            longer |= {(*answer, int(t)): chance * float(law[t]) for t in law.nonzero()[:, 0]}
        found = longer
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_and_load(tiny_base: TinyBase, tmp_path: Path, variant: str) -> None:
    base = tiny_base()
    head = randomised(base, torch.arange(200), **VARIANTS[variant])
    head.save_pretrained(tmp_path)
    loaded = Eagle3Head.from_pretrained(tmp_path, base)
    wanted, found = (text_logits(h, base, random_ids(12)) for h in (head, loaded))
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert loaded.spec == head.spec


def test_training_renews_what_drafting_packed(tiny_base: TinyBase) -> None:
    head = randomised(tiny_base())
    before = head.packed()
    assert head.packed() is before
    head.train()
    head.eval()
    assert head.packed() is not before
    before = head.packed()
    assert head.to("cpu").packed() is not before


@pytest.mark.parametrize(("key", "value"), [("num_tokens", 0), ("ttt_steps", 8), ("draft_vocab_size", 3)])
def test_limits(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"head.{key} must be"):
        Eagle3Config(**{key: value})  # type: ignore[arg-type]


def test_layers_must_be_the_bases(tiny_base: TinyBase) -> None:
    with pytest.raises(UserError, match=r"head.layers must be in \[0, 3\], got \[1, 4\]"):
        Eagle3Config(layers=[1, 4]).build(tiny_base())


@pytest.mark.slow
def test_golden_losses(tmp_path: Path) -> None:
    """Ten steps a phase; regenerate with ``python tests/golden/regenerate.py`` and give a reason in the changelog."""
    overrides = [f"data.text.sources=[{{kind: text, name: {ROOT / 'LICENSE'}}}]", "log_every=1", "eval.limit=1"]
    overrides += [f"out={tmp_path / 'run'}", f"data.folder={tmp_path / 'corpora'}"]
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        cfg = compose("train", overrides=["recipe=eagle3_smollm2", "debug=tiny", *overrides])
    run_pipeline(parse_run(cfg), OmegaConf.to_yaml(cfg, resolve=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    golden = json.loads((ROOT / "tests" / "golden" / "eagle3_tiny_losses.json").read_text())
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(golden, rel=1e-4)
