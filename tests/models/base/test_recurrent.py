"""Trees of drafts through recurrent layers, compared with the stock model that reads every path alone."""

import math
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.models.base import parity
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lora import LoraBase
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.mtp import MtpConfig
from drafthead.models.kernels.recurrence import TreeState, paths_to_inputs
from drafthead.models.token_tree import TokenTree, TreeShape, causal_mask
from support import cases, random_ids, randomised, refuses, row_of

Script = Callable[[str], ModuleType]
FAMILIES = (
    "lfm2 lfm2_moe lfm3 qwen3_5_text qwen3_next olmo_hybrid bamba granitemoehybrid nemotron_h falcon_h1 falcon_h1_norm "
    "zamba2 kimi_linear bailing_hybrid jamba mamba mamba2 falcon_mamba"
).split()
KINDS = ("lfm2", "qwen3_5_text", "bamba", "bailing_hybrid", "jamba")  # one family of each
TOLERANCE = 1e-4  # of the largest logit; stock read by tokens differs from stock read whole by up to 1.4e-5
TREE = (-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 6, 8)
"""Parents of 12 nodes; the longest path has 5."""


@cache
def built(name: str, faster_decay: float = 1.0) -> tuple[BaseModel, Any]:
    """Return a tiny random base whose decays, time steps and convolutions matter, and its stock model."""
    from base_shapes import SHAPES  # on the path by the fixture ``script``

    settings = dict(SHAPES[name])
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("A_log"):
                weight.copy_(torch.empty_like(weight).uniform_(-2.0, 2.0) + math.log(faster_decay))
            elif weight.ndim == 1 or "conv" in key:
                weight.add_(0.3 * torch.randn_like(weight))
    base = BaseModel.wrap(model, tiny_tokenizer())
    return base, base.stock()


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name == "zamba2" else name for name in FAMILIES])
def pair(request: pytest.FixtureRequest, script: Script) -> tuple[BaseModel, Any]:
    return built(request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, script: Script) -> tuple[BaseModel, Any]:
    return built(request.param)


@torch.inference_mode()
def expected(stock: Any, ids: list[int]) -> Tensor:
    """Return the stock logits [V] after ``ids``, read whole and without a cache."""
    logits: Tensor = stock(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def greedy(stock: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(expected(stock, ids).argmax()))
    return ids[len(prompt) :]


def path_of(parents: tuple[int, ...], node: int) -> list[int]:
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


def shape_of(*rows: tuple[int, ...]) -> TreeShape:
    return TreeShape.from_parents(torch.tensor(rows))


def check(stock: Any, logits: Tensor, prefix: list[int], nodes: list[int], parents: tuple[int, ...]) -> None:
    """Compare the logits [N, V] of the last N nodes with those of their paths after ``prefix``."""
    first = len(nodes) - len(logits)
    paths = [[nodes[n] for n in path_of(parents, node)] for node in range(first, len(nodes))]
    wanted = torch.stack([expected(stock, prefix + path) for path in paths])
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < TOLERANCE


def read(base: BaseModel, cache: TreeCache, ids: list[int], row: int = 0) -> None:
    base.forward(torch.tensor([ids]), cache.row(row))


def verify(base: BaseModel, cache: TreeCache, shape: TreeShape, *rows: list[int]) -> Tensor:
    return base.verify_logits(torch.tensor(rows), shape, cache)[1]


@pytest.mark.parametrize("length", [1, 2, 40])
def test_nodes_equal_their_paths(pair: tuple[BaseModel, Any], length: int) -> None:
    """A tree, a commit at a leaf, a chain, a commit at the root, and a tree that is read in three passes."""
    base, stock = pair
    cache, prefix, nodes = base.new_cache(100), random_ids(length, 1), random_ids(12, 2)
    for part in filter(None, (prefix[: length // 2], prefix[length // 2 :])):
        read(base, cache, part)
    check(stock, verify(base, cache, shape_of(TREE), nodes)[0], prefix, nodes, TREE)
    path = path_of(TREE, 11)
    cache.commit_path(torch.tensor([path]), [len(path)])
    prefix = prefix + [nodes[node] for node in path]

    chain = TokenTree.chain(7)
    check(stock, verify(base, cache, chain.shape, nodes[:8])[0], prefix, nodes[:8], chain.parents)
    cache.commit_path(torch.tensor([[0]]), [1])
    prefix = [*prefix, nodes[0]]

    for start, stop in ((0, 1), (1, 4), (4, 12)):
        logits = verify(base, cache, shape_of(TREE[:stop]), nodes[start:stop])[0]
        check(stock, logits, prefix, nodes[:stop], TREE[:stop])
    cache.crop()
    check(stock, verify(base, cache, shape_of((-1,)), nodes[:1])[0], prefix, nodes[:1], (-1,))


def test_rows_have_states_of_their_own(pair: tuple[BaseModel, Any]) -> None:
    """Two rows with prefixes and trees of their own; then padded chains, a row that is replaced, and copied rows."""
    base, stock = pair
    cache, other = base.new_cache(100, rows=2), (-1, 0, 1, 2, 0, 4, 4, 5, 5, 0, 9, 10)
    prefixes, nodes = [random_ids(2, 1), random_ids(23, 2)], [random_ids(12, 3), random_ids(12, 4)]
    for row, prefix in enumerate(prefixes):
        read(base, cache, prefix, row)
    logits = verify(base, cache, shape_of(TREE, other), *nodes)
    for row, parents in enumerate((TREE, other)):
        check(stock, logits[row], prefixes[row], nodes[row], parents)
    paths = [path_of(TREE, 11), path_of(other, 4)]
    cache.commit_path(torch.tensor([paths[0], paths[1] + [0] * 3]), [5, 2])
    prefixes = [p + [n[node] for node in path] for p, n, path in zip(prefixes, nodes, paths, strict=True)]

    base.forward(torch.tensor([nodes[0][:3], nodes[1][:3]]), cache, [0, 2])
    prefixes[1] += nodes[1][:2]
    base.forward(torch.tensor([nodes[0][:3], nodes[1][:3]]), cache)
    prefixes = [p + n[:3] for p, n in zip(prefixes, nodes, strict=True)]
    cache.crop([0, cache.lengths[1]])
    prefixes[0] = random_ids(7, 5)
    read(base, cache, prefixes[0])
    cache.select([1, 0, 1])
    rows = (TREE, other, TREE)
    logits = verify(base, cache, shape_of(*rows), nodes[0], nodes[1], nodes[1])
    for row, (prefix, drafted) in enumerate(((1, 0), (0, 1), (1, 1))):
        check(stock, logits[row], prefixes[prefix], nodes[drafted], rows[row])


def test_text_equals_stock_generate(pair: tuple[BaseModel, Any], script: Script) -> None:
    """64 tokens with trees that mix the true continuation with wrong tokens, alone, in a batch and without drafts."""
    base, stock = pair
    bases, common = script("bases"), script("common")
    prompts = [random_ids(7, 1), random_ids(40, 2)]
    stock.generation_config.eos_token_id = None
    answers = [common.generated(stock, [prompt], 64)[0] for prompt in prompts]
    if base.model.config.model_type == "zamba2":  # generates with smaller time steps than it reads with
        answers = [greedy(stock, prompt, 64) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle = bases.Oracle(prompt + answer, base.vocab_size)
        tree = DraftConfig(tree=bases.ORACLE_TREE)
        result = decode(base, oracle, prompt, max_new_tokens=64, ignore_eos=True, draft_config=tree)
        assert result.tokens == answer and len(result.steps) < 20
    for drafter in (None, PromptLookup(num_tokens=4, max_ngram=1, matches=3)):
        results = decode_batch(base, drafter, prompts, max_new_tokens=64, ignore_eos=True)
        assert [result.tokens for result in results] == answers


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "kimi_linear"])
def test_strong_decays(name: str, script: Script) -> None:
    """Decays by up to exp(-200) per token, whose inverse is no float32 number."""
    base, stock = built(name, faster_decay=60.0)
    cache, prefix, nodes = base.new_cache(60), random_ids(20, 1), random_ids(12, 2)
    read(base, cache, prefix)
    check(stock, verify(base, cache, shape_of(TREE), nodes)[0], prefix, nodes, TREE)


def test_packed_documents_do_not_share_states(pair: tuple[BaseModel, Any]) -> None:
    """Hidden states of every layer equal those of the documents alone."""
    base, _stock = pair
    documents = [random_ids(length, length) for length in (9, 3, 30, 1, 12)]
    spec = HiddenStatesSpec(layers=tuple(range(base.num_layers)))
    packed, start = base.hidden_states(row_of(documents), spec), 0
    for document in documents:
        alone = base.forward(torch.tensor([document]), base.new_cache(40), spec=spec)
        inside = slice(start, start + len(document))
        for ours, wanted in ((packed.final, alone.final), (packed.layers, alone.layers)):
            assert ours is not None and wanted is not None
            assert float((ours[:, inside] - wanted).abs().max() / wanted.abs().max()) < TOLERANCE
        start += len(document)


def test_shared_prefix_and_drafters_with_recurrent_layers(kind: tuple[BaseModel, Any]) -> None:
    """A prefix that prompts share, Kangaroo in the target's first layer, and two layers with a cache of their own."""
    base, _stock = kind
    prompts = [random_ids(20, 1) + random_ids(n, n) for n in (1, 5, 9)]
    answers = [decode(base, None, prompt, max_new_tokens=20, ignore_eos=True).tokens for prompt in prompts]
    first, tree = early_exit(base, 3, num_tokens=3), DraftConfig(tree=TokenTree.expansion([3, 2, 1]))
    chain = DraftConfig(tree=TokenTree.chain(3))
    drafters: list[tuple[Any, dict[str, Any]]] = [
        (None, {}),
        (first, {"draft_config": chain}),
        (first, {"draft_config": tree}),
    ]
    if base.rotary is not None:  # Jamba has none, and Kangaroo's attention needs it
        head = randomised(KangarooConfig(exit_layer=1, num_draft_tokens=3, confidence_threshold=0.0).build(base)).eval()
        drafters += [(head, {"draft_config": each}) for each in (tree, DraftConfig(tree=DynamicTree(nodes=6, width=3)))]
    for drafter, options in drafters:
        results = decode_batch(base, drafter, prompts, max_new_tokens=20, ignore_eos=True, **options)
        assert [result.tokens for result in results] == answers


def test_drafts_of_early_exit_are_those_of_its_layers(kind: tuple[BaseModel, Any]) -> None:
    """With all layers but the norm's, a drafter that reads the true text must accept what it drafts."""
    base, _stock = kind
    same, prompts = ModelDrafter(base, num_tokens=4), [random_ids(5, 1), random_ids(30, 2)]
    for tree in (TokenTree.chain(4), TokenTree.expansion([2, 2, 1, 1])):
        results = decode_batch(
            base, same, prompts, max_new_tokens=26, ignore_eos=True, draft_config=DraftConfig(tree=tree)
        )
        assert all(step.accepted == 4 for result in results for step in result.steps[:-1])


def causal(state: Tensor, ancestors: Tensor, *rest: Any) -> TreeState:
    return TreeState(state, causal_mask(ancestors.shape[1], ancestors.device)[None], *rest)


def in_order(ancestors: Tensor, depths: Tensor, new: int, taps: int) -> Tensor:
    return paths_to_inputs(
        causal_mask(depths.shape[1], depths.device)[None], torch.arange(depths.shape[1])[None], new, taps
    )


def whole_rows(run: Callable[..., Any], *batch: Tensor) -> Any:
    return run(*batch)


def nothing(*_args: Any) -> None:
    pass


@cases(
    "place, fault, shape, says",
    ("cache.recurrent.paths_to_inputs", in_order, "lfm2", "lfm2 run as a tree differ"),
    ("cache.recurrent.TreeState", causal, "qwen3_5_text", "qwen3_5_text run as a tree differ"),
    ("cache.recurrent.TreeState", causal, "kimi_linear", "kimi_linear run as a tree differ"),
    ("cache.recurrent.TreeState", causal, "bamba", "bamba run as a tree differ"),
    ("kernels.recurrence.Factors.advance", nothing, "bamba", "bamba run as a tree differ"),
    ("base.base_model.read_by_document", whole_rows, "lfm2", "lfm2 run as packed documents differ"),
    ("base.base_model.read_by_document", whole_rows, "olmo_hybrid", "olmo_hybrid run as packed documents differ"),
)
def test_the_check_at_load_finds_wrong_states(
    monkeypatch: pytest.MonkeyPatch, script: Script, place: str, fault: Any, shape: str, says: str
) -> None:
    """Parents ignored, commits left out, states passed from a document to the next."""
    shapes = script("base_shapes").SHAPES
    monkeypatch.setattr(f"drafthead.models.{place}", fault)
    monkeypatch.setattr(parity, "PASSED", set())
    refuses(says, BaseModel.load, BaseConfig(random=True, shape=shapes[shape], tokenizer="builtin:tiny"))


def test_documents_have_gradients_of_their_own(script: Script) -> None:
    """Medusa-2's adapters on a base with recurrent layers: the gradient of two documents is the sum of both."""
    base, _stock = built("qwen3_5_text")
    lora = LoraBase(base, ["in_proj_qkv", "q_proj"], r=2)
    generator = torch.Generator().manual_seed(0)
    for weight in lora.parameters().values():
        weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    documents = [random_ids(11, 1), random_ids(6, 2)]

    def gradients(*chosen: list[int]) -> list[Tensor]:
        loss = lora.hidden_states(row_of(chosen, padding=0)).square().sum()
        return list(torch.autograd.grad(loss, list(lora.parameters().values())))

    both, *alone = gradients(*documents), gradients(documents[0]), gradients(documents[1])
    for ours, first, second in zip(both, *alone, strict=True):
        torch.testing.assert_close(ours, first + second, rtol=1e-3, atol=1e-3)


def test_what_cannot_work_is_refused(script: Script) -> None:
    base, _stock = built("qwen3_5_text")
    cache = base.new_cache(40)
    read(base, cache, random_ids(9))
    refuses("cannot go back from 9 to 4 positions: recurrent layers keep only their latest state", cache.crop, [4])
    refuses(r"layers \[0\] of qwen3_5_text are recurrent", DraftLMConfig(num_layers=1, from_layers=[0]).build, base)
    refuses("the layers of bamba cannot be built one by one", MtpConfig().build, built("bamba")[0])
    refuses("whose state cannot go back", ModelDrafter(base).open(1).context.shared_cache, 1, 0)
    shape = script("base_shapes").SHAPES["lfm2"]
    fixed = BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", graphs="always")
    refuses("recurrent layers of lfm2 have no passes of fixed shapes; set base.graphs=auto", BaseModel.load, fixed)
    model = base.stock()
    model._use_kernels = True
    refuses("use_kernels=True may replace whole recurrent layers of qwen3_5_text", BaseModel.wrap, model, None)
