"""Passes of fixed shapes against passes of the shapes at hand, and the protocol of capture and replay.

On a CPU the very function that a CUDA graph captures runs eagerly; ``FakeBackend`` stands in for the capture itself.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache import static_cache
from drafthead.models.cache.layers import CacheShape, KeyValueShape
from drafthead.models.cache.static_cache import MIN_WINDOW, WINDOW_STEP, StaticKVCache, StaticModel, window_for
from drafthead.models.decoding.drafter import DraftConfig, DynamicTree
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.draft_model import ModelDrafter, early_exit
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.kernels import attention
from drafthead.models.kernels.cuda_graphs import GraphBackend, StaticCall, StaticCalls
from drafthead.models.token_tree import TokenTree
from support import TinyBase, randomised

MakeBase = Callable[..., BaseModel]
TREE = TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
OTHER = TokenTree.from_paths([(0,), (0, 0), (0, 1), (0, 2), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)])  # as many nodes
SMALL = TokenTree.from_paths([(0,), (1,), (1, 0)])
TREES = [TREE, OTHER, TREE, TokenTree.chain(0), SMALL, OTHER, TREE]
PROMPT = [7, 3, 250, 11, 42, 5, 100, 9]


@pytest.fixture
def make(tiny_base: TinyBase) -> MakeBase:
    """Bases of the same weights, whose passes have the shapes at hand or fixed ones."""

    def load(graphs: str, kind: str = "llama", device: str = "cpu", prepack: bool = True) -> BaseModel:
        return BaseModel.load(replace(tiny_base(kind).config, graphs=graphs, prepack=prepack), device)

    return load


@pytest.fixture
def bases(make: MakeBase) -> tuple[BaseModel, BaseModel]:
    return make("never"), make("always")


def medusa(base: BaseModel) -> MedusaHead:
    return randomised(MedusaConfig(num_draft_tokens=3).build(base)).eval()


def test_settings_and_windows(make: MakeBase, bases: tuple[BaseModel, BaseModel]) -> None:
    plain, static = bases
    assert not isinstance(plain.new_cache(8), StaticKVCache)
    assert not make("auto").uses_graphs, "nothing changes on a CPU unless asked for"
    assert isinstance(static.new_cache(8), StaticKVCache) and static.new_cache(8).capacity == 8
    sizes = [window_for(n) for n in range(1, 5 * WINDOW_STEP)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes) and set(sizes) == {256, 512, 1024, 2048, 3072, 4096, 5120}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_bigcode"])
@pytest.mark.parametrize("prepack", [True, False], ids=["fused", "stock"])
def test_passes_equal_those_of_the_shapes_at_hand(make: MakeBase, kind: str, prepack: bool) -> None:
    """Trees that switch, paths that are kept, dropped nodes and single tokens; across the edge of a window."""
    plain, static = make("never", kind, prepack=prepack), make("always", kind, prepack=prepack)
    caches = plain.new_cache(600), static.new_cache(600)
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, 300, (1, count), generator=generator)

    prompt = tokens(MIN_WINDOW - 20)
    compare([base.forward(prompt, cache).final for base, cache in zip((plain, static), caches, strict=True)])
    sizes = set()
    for step in range(14):
        tree = TREES[step % len(TREES)]
        ids = tokens(len(tree))
        shape = replace(tree.shape, tree=None) if step < len(TREES) else tree.shape  # grown in every step, or static
        outputs = [b.verify_logits(ids, shape, c) for b, c in zip((plain, static), caches, strict=True)]
        compare([hidden.final for hidden, _ in outputs])
        compare([logits for _, logits in outputs])
        if step % 5 == 4:
            for cache in caches:
                cache.crop()
        else:
            node = len(tree) - 1 - step % 2 if len(tree) > 1 else 0
            path = tree.shape.ancestors[0, node].nonzero()[:, 0]
            padded = torch.cat([path, torch.zeros(2, dtype=torch.int64)])[None]  # as verification pads
            for cache in caches:
                cache.commit_path(padded, [len(path)])
        some = tokens(3)
        compare([b.forward(some, c, [2]).final for b, c in zip((plain, static), caches, strict=True)])
        sizes.add(max(size for _, size, _ in caches[1]._memory.passes))
        assert caches[0].length == caches[1].length
    assert sizes == {256, 512}
    for cache in caches:
        cache.crop([40])
    compare([b.verify(ids, tree.shape, c).final for b, c in zip((plain, static), caches, strict=True)])


def compare(found: list[Tensor]) -> None:
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def drafters(base: BaseModel) -> dict[str, tuple[Any, DraftConfig | None]]:
    return {
        "plain": (None, None),
        "medusa": (medusa(base), DraftConfig(tree=SMALL)),
        "dynamic": (medusa(base), DraftConfig(tree=DynamicTree(depth=3, width=2, nodes=6))),
        "early exit": (early_exit(base, 1), None),
        "draft model": (ModelDrafter(base, num_tokens=3), DraftConfig(tree=TokenTree.expansion([2, 1]))),
        "prompt lookup": (PromptLookup(), None),
    }


@pytest.mark.parametrize("name", ["plain", "medusa", "dynamic", "early exit", "draft model", "prompt lookup"])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0)], ids=["greedy", "sampled"])
def test_same_tokens(bases: tuple[BaseModel, BaseModel], name: str, sampler: Sampler) -> None:
    answers = []
    for base in bases:
        drafter, draft_config = drafters(base)[name]
        for _ in range(2):  # the second time over memory and passes of the first
            settings = {"draft_config": draft_config, "sampler": sampler, "ignore_eos": True}
            answers.append(decode(base, drafter, PROMPT, max_new_tokens=24, **settings).tokens)
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_stays_on_its_device(tiny_base: TinyBase, kind: str, dtype: torch.dtype) -> None:
    """On tensors without values: reading one, or mixing in a tensor of the CPU, is an error, as in a capture."""
    settings = tiny_base(kind).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings.transformers_config(), dtype=dtype, attn_implementation=attention.register()
        )
    shape = CacheShape(layers=(KeyValueShape((2, 8), (2, 8)),) * 3, dtype=dtype, device=torch.device("meta"))
    cache = StaticKVCache(StaticModel(shape, model.model, model.lm_head), 300)
    cache.crop([9])
    tree = TREE.shape.to(torch.device("meta"))
    with torch.inference_mode():
        hidden, logits = cache.run(torch.zeros(1, len(TREE), dtype=torch.int64, device="meta"), tree, with_logits=True)
        cache.commit_path(torch.zeros(1, 4, dtype=torch.int64, device="meta"), [1])
    assert (hidden.shape, logits.shape, logits.dtype) == ((1, 8, 32), (1, 8, 300), dtype)


def test_a_pass_past_the_end_is_refused(bases: tuple[BaseModel, BaseModel]) -> None:
    for base in bases:
        cache = base.new_cache(len(PROMPT) + 6)
        base.forward(torch.tensor([PROMPT]), cache)
        with pytest.raises(UserError, match="the cache holds 14 positions but 16 are needed"):
            base.verify(torch.arange(len(TREE))[None], TREE.shape, cache)


def test_memory_is_lent_to_one_cache_after_the_other(make: MakeBase) -> None:
    base = make("always")
    first, second = base.new_cache(40), base.new_cache(40)
    assert first._memory is not second._memory
    memory = second._memory
    [stack.fill_(torch.nan) for kind in memory.kinds for stack in kind.stacks]
    base.forward(torch.tensor([PROMPT]), second)
    del second
    third = base.new_cache(40)
    assert third._memory is memory and third.length == 0
    base.forward(torch.tensor([PROMPT]), third)
    assert base.verify(torch.tensor([[4]]), TokenTree.chain(0).shape, third).final.isfinite().all()
    fourth = base.new_cache(400)
    assert fourth._memory.size == 512
    del third, fourth
    assert base.new_cache(30)._memory is memory, "the smallest that fits"


def test_few_shapes_are_kept(make: MakeBase) -> None:
    base = make("always")
    cache = base.new_cache(100)
    base.forward(torch.tensor([PROMPT]), cache)
    most = static_cache.MAX_CAPTURED_PASSES
    for nodes in (*range(1, most + 2), 2):
        base.verify(torch.ones(1, nodes, dtype=torch.int64), TokenTree.chain(nodes - 1).shape, cache)
        cache.crop()
    assert [key[0] for key in cache._memory.passes] == list(range(2, most + 2))


def test_a_cache_with_more_room_stays_static(bases: tuple[BaseModel, BaseModel]) -> None:
    """A drafter's memory grows by enlarging its cache, which must keep what was read, and its passes."""
    _, base = bases
    tokens = torch.tensor([PROMPT])
    grown, expected = base.new_cache(len(PROMPT)), base.new_cache(40)
    for cache in (grown, expected):
        base.forward(tokens, cache)
    grown.grow(40)
    assert isinstance(grown, StaticKVCache) and isinstance(expected, StaticKVCache)
    assert grown.capacity == 40 and grown.length == len(PROMPT)
    torch.testing.assert_close(base.forward(tokens, grown).final, base.forward(tokens, expected).final)
    assert grown._memory.passes


# Capture and replay ------------------------------------------------------------------------------------------------


class FakeBackend(GraphBackend):
    """A graph as the caller sees it: outputs at fixed addresses, which every replay overwrites."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.enabled = True
        self.replays = 0

    def _record(self, run: Callable[[], tuple[Tensor, ...]]) -> Any:
        outputs = tuple(out.clone() for out in run())

        def replay() -> None:
            self.replays += 1
            for output, new in zip(outputs, run(), strict=True):
                output.copy_(new)

        return replay, outputs


def graphs_of(head: MedusaHead) -> StaticCalls:
    """Return the graphs of the head's sessions."""
    return head.packed.get("graphs", lambda: StaticCalls(head.base.device))


def replaying(base: BaseModel, head: MedusaHead) -> FakeBackend:
    """Make them replay instead of running eagerly."""
    backend = FakeBackend()
    base.new_cache(8)
    base._static.backend = graphs_of(head)._backend = backend
    return backend


def test_outputs_are_the_callers_to_keep() -> None:
    backend = FakeBackend()
    call = StaticCall(backend, lambda x: (x + 1,), (torch.zeros(2),))
    eager, first, second = (call(torch.full((2,), value))[0] for value in (1.0, 2.0, 3.0))
    assert (eager.tolist(), first.tolist(), second.tolist()) == ([2.0, 2.0], [3.0, 3.0], [4.0, 4.0])
    assert backend.replays == 2
    assert call(None)[0].tolist() == [4.0, 4.0], "an input that is not given stays"


def test_a_failed_capture_warns_once_and_stays_eager(make: MakeBase, bases: tuple[BaseModel, BaseModel]) -> None:
    base, expected = make("always"), decode(bases[0], None, PROMPT, max_new_tokens=24, ignore_eos=True).tokens
    head = medusa(base)
    backend = replaying(base, head)

    def fail(run: object) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    backend._record = fail  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for drafter in (None, head):
            assert decode(base, drafter, PROMPT, max_new_tokens=24, ignore_eos=True).tokens == expected
    (message,) = [str(w.message) for w in caught]
    assert "graphs are off" in message and message.endswith(": operation not permitted")


def test_a_moved_head_forgets_its_graphs(make: MakeBase) -> None:
    base = make("always")
    head = medusa(base)
    decode(base, head, PROMPT, max_new_tokens=8)
    assert graphs_of(head)._calls
    head.double()
    assert not graphs_of(head)._calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_cuda_graphs_give_the_tokens_of_eager_passes(make: MakeBase, kind: str) -> None:
    plain, static = make("never", kind, "cuda"), make("auto", kind, "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = []
        for base in (plain, static):
            for name in ("plain", "medusa", "dynamic", "early exit", "draft model"):
                drafter, draft_config = drafters(base)[name]
                settings = {"max_new_tokens": 300, "draft_config": draft_config, "ignore_eos": True}
                answers += [decode(base, drafter, PROMPT, **settings).tokens for _ in range(2)]
    assert all(answer == answers[0] for answer in answers)
    assert static._static is not None and static._static.backend.enabled
    memory = static.new_cache(8)._memory
    assert memory.passes and any(captured.call._recording for captured in memory.passes.values())
