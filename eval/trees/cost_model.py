"""What one step costs on this machine: verification of n tokens, drafting, and the loop around them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, median
from time import perf_counter
from typing import Any, Self, cast

import numpy as np
import torch

from drafthead.data.utils.machine import OtherProcesses
from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.growth import EarlyExit, StepwiseDrafter
from drafthead.models.decoding.loop import EXACT, GREEDY, decode_batch
from drafthead.models.decoding.step import DecodeConfig, DecodeState
from drafthead.models.decoding.step_log import StepRecord
from drafthead.models.token_tree import TokenTree

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Tree sizes measured, root included; others are interpolated."""
ANSWERS = 3
"""Prompts that are answered without drafts, too."""
DEEPEST = 8
"""Levels of drafting that are timed; deeper ones are extrapolated."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of the parts of a step. Medians of interleaved repeats."""

    verify: dict[int, float]
    """v(n): one verification pass over n tokens, logits and argmax included."""
    draft: float
    """c: drafting a tree over all positions."""
    overhead: float
    """o: everything else in a step that drafts."""
    context: int
    """Tokens already in the cache."""
    prefill: float = 0.0
    """Reading so many tokens of a prompt; 0: not measured."""
    draft_by_depth: list[float] | None = None
    """Seconds to draft a chain d deep, at index d; None: ``draft`` whatever the depth, as for heads that draft all
    positions in one pass."""
    plain_overhead: float | None = None
    """The same of a step of autoregressive decoding; None: as ``overhead``."""
    draft_prefill: float = 0.0
    """What the drafter adds to ``prefill``."""
    other_processes_cores: float | None = None
    """Cores that other processes used during the measurement; None where that is unknown."""

    def verify_at(self, nodes: float) -> float:
        """v(n), linear between measured sizes and in proportion after the last; ``nodes`` may be a mean."""
        sizes = sorted(self.verify)
        seconds = float(np.interp(nodes, sizes, [self.verify[n] for n in sizes]))
        return seconds * max(1.0, nodes / sizes[-1])

    def draft_at(self, depth: int) -> float:
        """Seconds to draft a tree of that depth; after the table, a level costs what the last one did."""
        table = self.draft_by_depth
        if depth == 0:
            return 0.0
        if table is None:
            return self.draft
        last = len(table) - 1
        if depth <= last:
            return table[depth]
        return table[last] + (depth - last) * (table[last] - table[last - 1])

    def step(self, nodes: float, depth: int) -> float:
        """Seconds of a whole step with a tree of that size (root included) and depth; depth 0 drafts nothing."""
        plain = depth == 0 and self.plain_overhead is not None
        overhead = self.plain_overhead if plain else self.overhead
        return self.verify_at(nodes) + cast(float, overhead) + self.draft_at(depth)

    def speedup(self, tokens: float, nodes: float, depth: int) -> float:
        """Expected speedup over autoregressive decoding of steps that commit ``tokens`` with such a tree."""
        return tokens * self.step(1, 0) / self.step(nodes, depth)

    def answer_speedup(
        self, tokens: float, nodes: Mapping[int, float], depth: int, length: float, prompt: float
    ) -> float:
        """The same of whole answers of ``length`` tokens to prompts of ``prompt``, which no draft reads faster.

        ``nodes``: the share of the steps with trees of so many. v(n) is no line, so their mean would not do.
        """
        step = sum(share * self.step(n, depth) for n, share in nodes.items())
        autoregressive, speculative = (length * seconds for seconds in (self.step(1, 0), step / tokens))
        share = prompt / self.context
        prefill, drafter = self.prefill * share, self.draft_prefill * share
        return (prefill + autoregressive) / (prefill + drafter + speculative)

    def to_json(self) -> dict[str, object]:
        """Plain values, for ``eval.json`` and ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """What ``to_json`` wrote; JSON turned the sizes into text."""
        return cls(**{**content, "verify": {int(n): float(seconds) for n, seconds in content["verify"].items()}})


def measure_costs(
    base: BaseModel,
    drafter: Drafter,
    context: int = 200,
    repeats: int = 9,
    sizes: Sequence[int] = SIZES,
    rows: int = 1,
    prompts: Sequence[list[int]] = (),
) -> CostModel:
    """Time every part of a step on random tokens after ``context`` tokens (timing does not depend on the ids).

    Of a batch of ``rows`` all with trees of one size: v(n, b), and c and o of the whole batch. What a combined or
    nested drafter spends depends on the text: with ``prompts`` (token ids) it is timed while they are answered.

    Repeats are interleaved, and a smaller tree is never dearer than a larger one: what the medians say against that is
    noise, which isotonic regression averages out.
    A base that reads less than twice ``context`` is timed after half of what it reads, and only trees that fit into
    the other half are: larger ones are extrapolated.
    """
    generator = torch.Generator().manual_seed(0)
    context = min(context, base.max_context // 2)
    sizes = [n for n in sizes if n <= context]
    ids = torch.randint(0, base.vocab_size, (1, context), generator=generator).to(base.device)
    # Depth by depth only for drafters that grow trees level by level; a combined or nested drafter drafts its own tree.
    depths = range(1, min(drafter.depth, DEEPEST) + 1) if isinstance(drafter, StepwiseDrafter) else ()
    plans = {d: DraftConfig(tree=TokenTree.chain(d)) for d in depths}
    tree = TokenTree.from_paths([(r,) for r in range(4)] + [(0,) * d for d in depths]) if depths else drafter.tree
    whole = DraftConfig(tree=tree or TokenTree.chain(drafter.depth))
    decode_config = DecodeConfig(draft_config=whole, sampler=GREEDY, rule=EXACT)
    decoding = DecodeState(base, drafter, decode_config, rows, context + max(sizes) + 1, max(sizes))
    decoding.read_prompts([ids[0].tolist()] * rows, first=ids[0, -1:].expand(rows))
    drafted = partial(drafter.draft, decoding.state, decoding.last_token)
    parts: dict[tuple[str, int], Callable[[], object]] = {
        **{("verify", n): partial(_verify, ids[:, :n].expand(rows, -1), decoding) for n in sizes},
        **{("draft", d): partial(drafted, config) for d, config in plans.items()},
        ("tree", 0): partial(drafted, whole),
        ("prefill", 0): partial(_prefill, base, ids),
    }
    times: dict[tuple[str, int], list[float]] = {name: [] for name in parts}
    new = min(24, base.max_context - max([context, *map(len, prompts)]))
    answer = partial(decode_batch, base, max_new_tokens=new, ignore_eos=True)
    batches = [[prompt] * rows for prompt in prompts or [ids[0].tolist()] * ANSWERS]
    answers, plain = [], []
    with OtherProcesses() as others:
        for repeat in range(repeats + 2):
            for name, work in parts.items():
                if name[0] in ("draft", "tree"):
                    parts["verify", 1]()  # as in a step, which leaves no weights of the drafter in the CPU's caches
                seconds = _timed(base, work)
                if repeat >= 2:
                    times[name].append(seconds)
        for number, batch in enumerate(batches):
            answers.append(answer(drafter, batch, draft_config=whole)[0])
            if number < ANSWERS:
                plain.append(answer(None, batch)[0])
    steps = [step for answer in answers for step in answer.steps[:-1] or answer.steps]  # the last may have no drafts
    on_text = bool(prompts) and not depths
    read_more = [
        (with_drafts.prefill_s - without.prefill_s) * context / len(batch[0])
        for with_drafts, without, batch in zip(answers, plain, batches, strict=False)
    ]
    return CostModel(
        verify=dict(zip(sizes, _increasing([median(times["verify", n]) for n in sizes]), strict=True)),
        draft=mean(step.draft_s for step in steps) if on_text else median(times["tree", 0]),
        overhead=_overhead(steps),
        plain_overhead=_overhead([step for answer in plain for step in answer.steps]),
        context=context,
        prefill=median(times["prefill", 0]),
        draft_prefill=max(0.0, median(read_more)),
        draft_by_depth=[0.0, *(median(times["draft", d]) for d in depths)] if depths else None,
        other_processes_cores=others.cores,
    )


def _overhead(steps: Sequence[StepRecord]) -> float:
    return median(step.total_s - step.draft_s - step.verify_s for step in steps)


def _increasing(values: Sequence[float]) -> list[float]:
    """The closest sequence, by squares, that never falls: neighbours that do are pooled to their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (above, m), (below, n) = pools[-2:]
            pools[-2:] = [((above * m + below * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


def _prefill(base: BaseModel, ids: torch.Tensor) -> torch.Tensor:
    return base.logits(base.forward(ids, base.new_cache(ids.shape[1])).final[:, -1])


def _verify(ids: torch.Tensor, decoding: DecodeState) -> torch.Tensor:
    base, drafter, cache = decoding.base, decoding.drafter, decoding.cache
    # A star: every drafted token a child of the root. Cost depends on the number of nodes, not on the shape.
    tree = TokenTree.from_paths([(r,) for r in range(ids.shape[1] - 1)])
    partial_forward = None
    if isinstance(drafter, EarlyExit):
        states = torch.zeros(*ids.shape, base.hidden_size, dtype=base.dtype, device=base.device)
        partial_forward = PartialForward(layers=drafter.early_exit_layers, hidden=states)
    shape = tree.shape_on(base.device)
    tokens: torch.Tensor = base.verify_logits(ids, shape, cache, decoding.spec, partial_forward)[1].argmax(-1)
    cache.crop()
    return tokens


def _timed(base: BaseModel, work: Callable[[], object]) -> float:
    synchronise = base.synchronise
    synchronise()
    started = perf_counter()
    work()
    synchronise()
    return perf_counter() - started
