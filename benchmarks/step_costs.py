"""What the passes of a decoding step cost, next to a token of transformers' ``generate``; and what part of a pass
only moves keys, values and masks about.

Shape legend: B rows, N tree nodes, P nodes of a path, H key/value heads, E head width, D width.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.eval.trees.cost_model import CostModel, measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.decoding.contract import Drafter
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step_log import DecodeResult
from drafthead.models.token_tree import TokenTree, TreeShape

SIZES = range(1, 33)
ROUND = 3
"""Repeats of ``measure_costs`` between two looks at the other ways to a token."""
TOKENS = 8
"""Autoregressive tokens of each way in a round."""
WARM = 2
"""First steps of an answer, and first repeats, that do not count."""
BATCH = 4
"""Rows of the ragged cache that is timed."""

Progress = Callable[[int, int], None]


def load_stock(base: BaseModel) -> BaseModel:
    """The same model as transformers makes it, for ``generate`` only: its own linear layers and attention."""
    stock = BaseModel.load(replace(base.config, prepack=False), base.device)
    stock.model.set_attn_implementation("sdpa")
    return stock


def measure_steps(
    base: BaseModel, stock: BaseModel, drafter: Drafter, *, context: int, repeats: int, on_progress: Progress
) -> dict[str, Any]:
    """v(n), c and o of ``measure_costs`` and the autoregressive ways to a token, in rounds that take turns.

    Returns:
        "costs", which ``CostModel.from_json`` reads; "one_token", medians of seconds: of v(1) ("verify_s", logits and
        argmax included, without the loop), a whole step of our autoregressive loop ("autoregressive_s"), a token of
        ``generate`` over our modules ("transformers_s") and over stock ones ("stock_s"), and which of them is the
        fastest, but for our loop ("denominator"); "verify_ratio": v(n) over that one.
    """
    rounds = -(-repeats // ROUND)
    found: list[CostModel] = []
    times: dict[str, list[float]] = {"autoregressive_s": [], "transformers_s": [], "stock_s": []}
    for number in range(rounds):
        found.append(measure_costs(base, drafter, context, ROUND, SIZES))
        # Timing does not depend on the ids.
        ids = torch.randint(0, base.vocab_size, (found[0].context,), generator=torch.Generator().manual_seed(0))
        never = base.vocab_size  # as EOS, an id that is never drawn
        ways: dict[str, Callable[[], DecodeResult]] = {
            "autoregressive_s": partial(decode, base, None, ids.tolist(), max_new_tokens=TOKENS + 1, ignore_eos=True),
            "transformers_s": partial(transformers_generate, base, ids.tolist(), TOKENS + 1, eos_token_id=never),
            "stock_s": partial(transformers_generate, stock, ids.tolist(), TOKENS + 1, eos_token_id=never),
        }
        for name, way in ways.items():
            times[name] += [step.total_s for step in way().steps[WARM:]]
        on_progress(number + 1, rounds)
    tables = [costs.draft_by_depth or [] for costs in found]
    costs = CostModel(
        verify={n: median(costs.verify[n] for costs in found) for n in found[0].verify},
        draft=median(costs.draft for costs in found),
        overhead=median(costs.overhead for costs in found),
        context=found[0].context,
        draft_by_depth=[median(depth) for depth in zip(*tables, strict=True)] or None,
    )
    one = {"verify_s": costs.verify[1]} | {name: median(seconds) for name, seconds in times.items()}
    fastest = min(("verify_s", "transformers_s", "stock_s"), key=lambda way: one[way])
    return {
        "costs": costs.to_json(),
        "one_token": one | {"denominator": fastest},
        "verify_ratio": {str(n): seconds / one[fastest] for n, seconds in costs.verify.items()},
    }


# Keys, values and masks ----------------------------------------------------------------------------------------


class _OnlyCache(nn.Module):
    """Stands for the decoder's layers: hands new states to the cache, as attention does, and computes nothing."""

    def __init__(self, cache: KVCache | RaggedCache, nodes: int, width: int) -> None:
        super().__init__()
        self.layers, rows, heads, _, head_dim = cache.keys.shape
        self.new_BHNE = cache.keys.new_zeros(rows, heads, nodes, head_dim)
        self.hidden_BND = cache.keys.new_zeros(rows, nodes, width)

    def forward(self, *, past_key_values: KVCache | RaggedCache, **_: object) -> SimpleNamespace:
        for layer in range(self.layers):
            past_key_values.update(self.new_BHNE, self.new_BHNE, layer)
        return SimpleNamespace(last_hidden_state=self.hidden_BND)


class _Case:
    """One kind of cache and tree after ``context`` tokens: verifies and commits, with and without the layers."""

    def __init__(self, base: BaseModel, shape: TreeShape, rows: int, context: int) -> None:
        self.base, self.shape, self.rows, nodes = base, shape, rows, len(shape)
        capacity = context + nodes
        self.cache: KVCache | RaggedCache = base.new_cache(capacity) if rows == 1 else base.new_slots(rows, capacity)
        for buffer in (self.cache.keys, self.cache.values):
            buffer.normal_()
        self.lengths_B = torch.full((rows,), context, device=base.device)
        self.tokens_BN = torch.zeros(rows, nodes, dtype=torch.int64, device=base.device)
        deepest = int(shape.depths[0].argmax())
        path_P = shape.ancestors[0, deepest].nonzero()[:, 0]
        self.path_BP = path_P.expand(rows, -1)
        self.counts_B = torch.full((rows,), len(path_P), device=base.device)
        self.stand_in = _OnlyCache(self.cache, nodes, base.hidden_size)

    def handling_s(self) -> float:
        """Seconds of positions, mask, appending in every layer, and keeping the deepest path."""
        decoder = self.base.model.model
        self.base.model.model = self.stand_in
        try:
            return self._timed(self._verify_and_keep)
        finally:
            self.base.model.model = decoder

    def pass_s(self) -> float:
        """Seconds of the whole verification with logits, argmax and commit."""
        return self._timed(lambda: self.base.logits(self._verify_and_keep()).argmax(-1))

    def _verify_and_keep(self) -> Tensor:
        hidden_BND = self.base.verify(self.tokens_BN, self.shape, self.cache).final
        self.cache.commit_path(self.path_BP, self.counts_B)
        return hidden_BND

    def _timed(self, work: Callable[[], Tensor]) -> float:
        self.cache.crop(self.lengths_B)
        self.base.synchronise()
        started = perf_counter()
        work()
        self.base.synchronise()
        return perf_counter() - started


@torch.inference_mode()
def measure_handling(
    base: BaseModel, tree: TokenTree, contexts: tuple[int, int], repeats: int, on_progress: Progress
) -> dict[str, Any]:
    """What handling keys and values costs in a step after a short and after a long context.

    Returns:
        "contexts", and per case: "handling_s" and "pass_s" by context, and their growth from the short to the long.
        Cases: a static tree, a tree that changes from step to step, and a static tree in a batch.
    """
    # Smaller contexts in the same proportion where the base reads less.
    long = min(contexts[1], base.max_context - len(tree))
    short = max(1, contexts[0] * long // contexts[1])
    static = tree.shape_on(base.device)
    kinds = {
        "static tree": (static, 1),
        "changing tree": (replace(static, tree=None), 1),
        f"batch of {BATCH}": (static, BATCH),
    }
    cases = {(kind, n): _Case(base, *made, n) for kind, made in kinds.items() for n in (short, long)}
    times: dict[tuple[str, int], tuple[list[float], list[float]]] = {key: ([], []) for key in cases}
    for repeat in range(WARM + repeats):
        for key, case in cases.items():
            found = case.handling_s(), case.pass_s()
            if repeat >= WARM:
                for seconds, measured in zip(found, times[key], strict=True):
                    measured.append(seconds)
        on_progress(repeat + 1, WARM + repeats)
    record: dict[str, Any] = {}
    for kind in kinds:
        handling, whole = ({str(n): median(times[kind, n][part]) for n in (short, long)} for part in (0, 1))
        record[kind] = {
            "handling_s": handling,
            "pass_s": whole,
            "handling_growth": handling[str(long)] / handling[str(short)],
            "pass_growth": whole[str(long)] / whole[str(short)],
        }
    return {"contexts": [short, long], "nodes": len(tree), "cases": record}
