"""Measurement of a step's costs on this machine: verification of n tokens, drafting, and the loop around them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul
from statistics import mean, median
from time import perf_counter
from typing import TypeVar

import torch

from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import LARGEST, AcceptanceModel, TreeCosts
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.growth import StepwiseDrafter
from drafthead.models.decoding.loop import EXACT, GREEDY, decode_batch
from drafthead.models.decoding.step import DecodeConfig, DecodeState, StepRecord
from drafthead.models.kernels.huge_pages import wait_for_huge_pages
from drafthead.models.token_tree import TokenTree
from drafthead.system.machine import OtherProcesses

SIZES = (*range(1, 13), 14, 16, 20, 24, 28, 32, 48, 64)  # measured tree sizes, root included; interpolated between
CONTEXT = 200  # committed tokens when steps of one row are timed
BATCH_NODES = 256  # nodes of a batch that are timed at most, but always two per row; more would take minutes
ANSWERS = 3  # prompts that `measure_costs` answers without drafts, and with drafts if it is given no prompts
DEEPEST = 8  # largest depth of drafting that is timed; greater depths are extrapolated
T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # label, number of finished items, total


def measure_costs(
    base: BaseModel,
    drafter: Drafter,
    context: int = CONTEXT,
    repeats: int = 9,
    sizes: Sequence[int] = SIZES,
    rows: int = 1,
    prompts: Sequence[list[int]] = (),
    progress: Progress = lambda label, done, total: None,
) -> CostModel:
    """Time every part of a step (verifying, drafting, the loop, the prefill) on this machine, in turn. ``context``
    random tokens are in the cache, at most half of the base's positions. The median of ``repeats`` counts. ``sizes``
    are numbers of nodes of a row to verify, root included; sizes above the context, and more than ``BATCH_NODES`` in
    all, are extrapolated. All times are those of a whole batch of ``rows``. ``prompts`` are answered while a combined
    or nested drafter is timed, because its drafting time depends on the text. ``progress`` is called between rounds and
    answers, never while one is timed. Isotonic regression averages out noise by which a smaller tree seems slower than
    a larger one."""
    wait_for_huge_pages()
    generator = torch.Generator().manual_seed(0)
    context = min(context, base.max_context // 2)
    sizes = [n for n in sizes if n <= context and (n <= 2 or n * rows <= BATCH_NODES)]
    ids = torch.randint(0, base.vocab_size, (1, context), generator=generator).to(base.device)
    # Depth by depth only for drafters that grow trees level by level; a combined or nested drafter drafts its own tree.
    depths = range(1, min(drafter.depth, DEEPEST) + 1) if isinstance(drafter, StepwiseDrafter) else range(0)
    tree = TokenTree.from_paths([(r,) for r in range(4)] + [(0,) * d for d in depths]) if depths else drafter.tree
    whole = DraftConfig(tree=tree or TokenTree.chain(drafter.depth))
    texts = prompts or [ids[0].tolist()] * ANSWERS
    # Rotated, because decoding without drafts reads equal prompts of a batch once.
    batches = [[prompt[row:] + prompt[:row] for row in range(rows)] for prompt in texts]
    answer = partial(
        decode_batch, base, timed=True, max_new_tokens=min(24, base.max_context - max([context, *map(len, prompts)]))
    )
    with OtherProcesses() as others:
        seconds = _median_seconds(base, _probes(base, drafter, whole, ids, sizes, depths, rows), repeats, progress)
        answers = [
            answer(drafter, batch, draft_config=whole, ignore_eos=True)[0]
            for batch in _counted("timing answers with drafts", batches, progress)
        ]
        plain = [
            answer(None, batch, ignore_eos=True)[0]
            for batch in _counted("timing answers without drafts", batches[:ANSWERS], progress)
        ]
    steps = [step for answer in answers for step in answer.steps[:-1] or answer.steps]  # the last may have no drafts
    on_text = bool(prompts) and not depths
    read_more = [
        (with_drafts.prefill_s - without.prefill_s) * context / len(batch[0])
        for with_drafts, without, batch in zip(answers, plain, batches, strict=False)
    ]
    return CostModel(
        verify=dict(zip(sizes, _increasing([seconds["verify", n] for n in sizes]), strict=True)),
        draft=mean(step.draft_s for step in steps) if on_text else seconds["tree", 0],
        overhead=_overhead(steps),
        plain_overhead=_overhead([step for answer in plain for step in answer.steps]),
        context=context,
        prefill=seconds["prefill", 0],
        draft_prefill=max(0.0, median(read_more)),
        draft_by_depth=[0.0, *(seconds["draft", d] for d in depths)] if depths else None,
        other_processes_cores=others.cores,
    )


def batch_context(lengths: Sequence[int], rows: int) -> int:
    """Return the ``context`` of batches of ``rows`` texts, for ``measure_costs``: the mean of the longest of the
    batches' ``lengths``, in order, because shorter rows are padded to it. One row has the usual context."""
    if rows == 1 or not lengths:
        return CONTEXT
    return round(mean(max(lengths[first : first + rows]) for first in range(0, len(lengths), rows)))


def ensure_costs(
    base: BaseModel,
    drafter: Drafter,
    rows: int = 1,
    again: bool = False,
    context: int = CONTEXT,
    progress: Progress = lambda label, done, total: None,
) -> None:
    """Set ``drafter.tree_costs``, for trees by cost in batches of ``rows`` with ``context`` tokens in the cache. Costs
    that are there are kept unless they are to be measured ``again``, because they may be those of another machine."""
    known = drafter.tree_costs
    if known is not None and not again:
        return
    sizes = [n for n in SIZES if n <= LARGEST]
    costs = measure_costs(base, drafter, context, 9 if again else 3, sizes, rows, progress=progress)
    speedup = 1.0 if known is None else known.speedup.get(rows, 1.0)
    if rows > 1 and known is not None and known.acceptance != AcceptanceModel():  # fitted on this drafter
        speedup = _chain_speedup(known.acceptance, costs, drafter.depth)
    measured = TreeCosts(costs={rows: costs}, speedup={rows: speedup})
    drafter.tree_costs = measured if known is None else replace(known, costs=measured.costs, speedup=measured.speedup)


def _chain_speedup(acceptance: AcceptanceModel, costs: CostModel, depth: int) -> float:
    """Return the speedup of the chain of up to ``depth`` drafts that pays most."""
    reached = list(accumulate((acceptance.expected(level)[0] for level in range(1, depth + 1)), mul))
    return max(costs.speedup(1 + sum(reached[:n]), n + 1, n) for n in range(1, depth + 1))


Probes = dict[tuple[str, int], Callable[[], object]]  # by part of a step and size, such as ("verify", 8)


def _probes(
    base: BaseModel,
    drafter: Drafter,
    whole: DraftConfig,
    ids: torch.Tensor,
    sizes: Sequence[int],
    depths: Sequence[int],
    rows: int,
) -> Probes:
    """Return functions to time: verify n of ``sizes``, draft each of ``depths``, draft the tree ``whole``, prefill."""
    room = ids.shape[1] + max(sizes) + 1
    decode_config = DecodeConfig(draft_config=whole, sampler=GREEDY, rule=EXACT)
    decoding = DecodeState.empty(base, drafter, decode_config, rows, room, max(sizes))
    decoding.read_prompts([ids[0].tolist()] * rows, first=ids[0, -1:].expand(rows))
    assert decoding.session is not None
    draft = partial(decoding.session.draft, decoding.last_token)
    return {
        **{("verify", n): partial(_verify, ids[:, :n].expand(rows, -1), decoding) for n in sizes},
        **{("draft", d): partial(draft, DraftConfig(tree=TokenTree.chain(d))) for d in depths},
        ("tree", 0): partial(draft, whole),
        ("prefill", 0): lambda: base.logits(base.forward(ids, base.new_cache(ids.shape[1])).final[:, -1]),
    }


def _median_seconds(base: BaseModel, probes: Probes, repeats: int, progress: Progress) -> dict[tuple[str, int], float]:
    """Run all probes in turn, ``repeats`` times after two uncounted rounds; return their median seconds."""
    times: dict[tuple[str, int], list[float]] = {name: [] for name in probes}
    for _ in _counted("timing passes, in rounds", range(repeats + 2), progress):
        for name, work in probes.items():
            if name[0] in ("draft", "tree"):
                probes["verify", 1]()  # as in a step, which leaves no weights of the drafter in the CPU's caches
            base.synchronise()
            started = perf_counter()
            work()
            base.synchronise()
            times[name].append(perf_counter() - started)
    return {name: median(seconds[2:]) for name, seconds in times.items()}


def _counted(label: str, items: Sequence[T], progress: Progress) -> Iterator[T]:
    """Yield ``items``, and report before and after each one how many are done."""
    for done, item in enumerate(items):
        progress(label, done, len(items))
        yield item
    progress(label, len(items), len(items))


def _overhead(steps: Sequence[StepRecord]) -> float:
    return median(step.total_s - step.draft_s - step.verify_s for step in steps)


def _increasing(values: Sequence[float]) -> list[float]:
    """Return the least-squares non-decreasing fit (isotonic regression): [1, 3, 2] -> [1, 2.5, 2.5]."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (above, m), (below, n) = pools[-2:]
            pools[-2:] = [((above * m + below * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


def _verify(ids: torch.Tensor, decoding: DecodeState) -> torch.Tensor:
    """Verify the tokens ``ids`` [B, n] after the cached context, and remove them from the cache again."""
    base, drafter, cache = decoding.base, decoding.drafter, decoding.cache
    # A star: every drafted token a child of the root. Cost depends on the number of nodes, not on the shape.
    tree = TokenTree.from_paths([(r,) for r in range(ids.shape[1] - 1)])
    partial_forward = None
    if drafter is not None and drafter.early_exit_layers:
        states = torch.zeros(*ids.shape, base.hidden_size, dtype=base.dtype, device=base.device)
        partial_forward = PartialForward(layers=drafter.early_exit_layers, hidden=states)
    shape = tree.shape_on(base.device)
    tokens: torch.Tensor = base.verify_logits(ids, shape, cache, decoding.spec, partial_forward)[1].argmax(-1)
    cache.crop()
    return tokens
