"""Trees chosen by tokens per second on measured costs, and the search for them against all trees of small sizes."""

from copy import copy
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafthead.eval.trees import calibrate
from drafthead.eval.trees.cost_model import CONTEXT, batch_context, measure_costs
from drafthead.eval.trees.search import best_trees, cross_fitted, first_accepted, greedy_tree, sequoia
from drafthead.files.local import write_checksummed_json, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.drafters.prompt_lookup import LookupSession, PromptLookup
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.kernels.linear import KernelTable
from drafthead.models.simulation.acceptance import (
    accept_probs_of_ranks,
    accepted_length_probs,
    simulate_acceptance,
    trials_in_order,
)
from drafthead.models.token_tree import TokenTree
from support import TinyBase, refuses

COSTS = CostModel(verify={1: 0.01, 8: 0.011, 64: 0.05}, draft=0.001, overhead=0.0005, context=200)


@pytest.fixture
def head(tiny_base: TinyBase) -> MedusaHead:
    return MedusaConfig(num_draft_tokens=3).build(tiny_base())


def test_a_kept_calibration_is_found_again_for_the_same_weights_and_machine(head: MedusaHead, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert calibrate.load_calibration(path, head) is None
    calibration = calibrate.calibrate([np.random.default_rng(0).integers(0, 4, size=(300, 3))], COSTS)
    calibrate.save_calibration(path, head, COSTS, calibration)
    assert calibrate.load_calibration(path, head) == (COSTS, calibration)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert calibrate.load_calibration(path, head) is None, "another machine"
    finally:
        torch.set_num_threads(threads)
    base = copy(head.base)
    base.kernels = KernelTable()
    other = head.config.build(base)
    other.load_state_dict(head.state_dict())
    assert calibrate.load_calibration(path, other) is None, "a pass has another cost"
    with torch.no_grad():
        head.projections.weights[0][0, 0] += 1
    assert calibrate.load_calibration(path, head) is None


def test_bad_input(head: MedusaHead, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    machine = calibrate.measured_with(head.base, calibrate.VERSION, head.identity())
    for content in ([], {}, {"measured_with": machine, "costs": {}}):
        write_checksummed_json(path, content)
        refuses(r"calibration .*remove it", calibrate.load_calibration, path, head)
        write_json(path, content)
        refuses("damaged.*checksum", calibrate.load_calibration, path, head)
    refuses("raise data.answers", calibrate.calibrate, [], COSTS)


def test_costs_on_a_short_context(tiny_base: TinyBase) -> None:
    head = MedusaConfig(num_draft_tokens=3).build(tiny_base(max_position_embeddings=16))
    shown: list[tuple[str, int, int]] = []
    costs = measure_costs(head.base, head, repeats=1, progress=lambda *line: shown.append(line))
    for label in ("timing passes, in rounds", "timing answers with drafts", "timing answers without drafts"):
        assert [line[1:] for line in shown if line[0] == label] == [(done, 3) for done in range(4)]
    assert costs.context == 8 and sorted(costs.verify) == [*range(1, 9)]
    assert CostModel.from_json(costs.to_json()) == costs


def test_a_batch_is_as_long_as_its_longest_text() -> None:
    assert batch_context([10, 30, 20, 50, 40], 2) == (30 + 50 + 40) / 3
    assert batch_context([10, 30], 1) == batch_context([], 4) == CONTEXT


def test_rows_of_a_batch_are_read_with_and_without_drafts(head: MedusaHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding without drafts reads equal prompts once, so that drafting seemed to take seconds to read eight."""
    batches: list[tuple[bool, list[list[int]]]] = []

    def recorded(
        base: BaseModel, drafter: Drafter | None, batch: list[list[int]], **options: Any
    ) -> list[DecodeResult]:
        batches.append((drafter is not None, batch))
        return decode_batch(base, drafter, batch, **options)

    monkeypatch.setattr("drafthead.eval.trees.cost_model.decode_batch", recorded)
    measure_costs(head.base, head, context=16, repeats=1, sizes=(1, 2), rows=3)
    assert {drafts for drafts, _ in batches} == {True, False}
    for _, batch in batches:
        assert len(batch) == 3 and len({tuple(prompt) for prompt in batch}) == 3


def independent_ranks(positions: int, seed: int = 0) -> np.ndarray:
    """Ranks whose distribution depends on the draft position only."""
    generator = np.random.default_rng(seed)
    probs = [[0.5, 0.2, 0.1, 0.2], [0.4, 0.2, 0.1, 0.3], [0.3, 0.1, 0.1, 0.5]]
    drawn = np.stack([generator.choice(4, p=dist, size=positions) for dist in probs], 1)
    drawn[drawn == 3] = calibrate.WIDTH
    for k in range(3):
        drawn[positions - k :, k] = -1
    return drawn


@pytest.mark.parametrize("method", ["greedy", "sequoia"])
def test_the_tree_with_most_tokens_a_second_is_chosen(method: str) -> None:
    answers = [independent_ranks(400, seed) for seed in range(5)]
    calibration = calibrate.calibrate(answers, COSTS, method=method)
    assert calibration.method == method and calibration.expected_tokens_largest > calibration.expected_tokens
    tokens = simulate_acceptance([accept_probs_of_ranks(a, 3) for a in answers], calibration.tree).mean_accepted_length
    assert calibration.expected_tokens == pytest.approx(tokens)
    plain = COSTS.verify_at(1) + COSTS.overhead
    step = COSTS.verify_at(len(calibration.tree)) + COSTS.overhead + COSTS.draft
    assert calibration.expected_speedup == pytest.approx(tokens * plain / step)


@pytest.mark.parametrize("method", ["greedy", "sequoia"])
def test_dearer_steps_make_a_smaller_tree(method: str) -> None:
    answers = [independent_ranks(400)]
    dear = replace(COSTS, verify={1: 0.01, 64: 0.64})
    assert len(calibrate.calibrate(answers, dear, method).tree) < len(calibrate.calibrate(answers, COSTS, method).tree)
    cheap = calibrate.calibrate(answers, replace(COSTS, draft_by_depth=[0.0, 0.0, 0.0, 0.0]), method)
    dear = calibrate.calibrate(answers, replace(COSTS, draft_by_depth=[0.0, 0.0, 0.01, 0.02]), method)
    assert dear.tree.depth == 1 < cheap.tree.depth


@pytest.mark.parametrize("method", ["greedy", "sequoia"])
def test_cross_fitting_does_not_flatter(method: str) -> None:
    """On ranks that are noise, a tree searched on the same answers looks better than it is."""
    answers = [accept_probs_of_ranks(np.random.default_rng(s).integers(0, 40, size=(60, 2)), 40) for s in range(4)]
    (fair,) = cross_fitted(answers, [9], method)
    assert fair.mean_accepted_length == pytest.approx(1 + 8 / 40, abs=0.1)
    assert fair.tokens == 240 and fair.interval is not None
    if method == "greedy":
        flattered = simulate_acceptance(answers, best_trees(answers, 9, method)[9])
        assert flattered.mean_accepted_length > fair.mean_accepted_length + 0.05


def test_sequoia_tries_sampled_siblings_in_order() -> None:
    chances = np.random.default_rng(0).dirichlet([3, 2, 1, 2], size=(300, 2))[:, :, :3]
    trees = best_trees([chances], 9, "sequoia")
    assert list(trees) == [*range(2, 10)] and all(trials_in_order(tree) == tree for tree in trees.values())


def test_a_larger_tree_never_costs_less(head: MedusaHead) -> None:
    """Passes that take 30, 2, 3 and 60 ms longer: the first three are pooled."""
    delays = {1: 0.03, 2: 0.002, 4: 0.003, 8: 0.06}
    embedding = head.base.model.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda _, inputs: sleep(delays.get(inputs[0].shape[1], 0.0))):
        costs = measure_costs(head.base, head, context=16, repeats=1, sizes=tuple(delays))
    assert 0.005 < costs.verify[1] == costs.verify[2] == costs.verify[4] < costs.verify[8]


def test_what_depends_on_the_text_is_timed_on_prompts(head: MedusaHead) -> None:
    """A lookup that takes 20 ms after the prompt, and no time after random text."""
    prompt, pause_s = [5, 9, 11, 5, 9], 0.02

    class SlowSession(LookupSession):
        pause_s = 0.0

        def commit(self, tokens: Tensor, *rest: Any) -> None:
            if tokens.shape[1] >= len(prompt):  # a prompt, not the tokens of a step
                self.pause_s = pause_s if tokens[0].tolist() == prompt else 0.0
            super().commit(tokens, *rest)

        def draft(self, *args: Any) -> Any:
            sleep(self.pause_s)
            return super().draft(*args)

    class SlowAfterPrompt(PromptLookup):
        def open(self, rows: int, cache: object = None) -> LookupSession:
            return SlowSession(self, rows)

    measured = partial(measure_costs, head.base, SlowAfterPrompt(num_tokens=2), context=16, repeats=1, sizes=(1, 2))
    assert measured().draft < pause_s <= measured(prompts=[prompt]).draft


def test_prompts_are_read_at_no_gain() -> None:
    costs = CostModel(verify={1: 0.01, 8: 0.01}, draft=0.0, overhead=0.0, context=200, prefill=0.5)
    assert costs.speedup(2.0, 4, 3) == pytest.approx(2.0)
    step = costs.mean_step({4: 1.0}, 3)
    assert costs.answer_speedup(2.0, step, length=50, prompt=200) == pytest.approx((0.5 + 0.5) / (0.5 + 0.25))
    assert costs.answer_speedup(2.0, step, length=50, prompt=100) == pytest.approx((0.25 + 0.5) / (0.25 + 0.25))
    stairs = replace(costs, verify={1: 0.01, 2: 0.01, 8: 0.03})  # half of the steps take 10 ms, half 30: 20 on average
    halves = stairs.answer_speedup(2.0, stairs.mean_step({2: 0.5, 8: 0.5}, 3), length=50, prompt=200)
    assert halves == pytest.approx((0.5 + 0.5) / (0.5 + 50 * 0.02 / 2))
    slow = replace(costs, draft_prefill=0.1)
    assert slow.answer_speedup(2.0, step, length=50, prompt=200) == pytest.approx((0.5 + 0.5) / (0.6 + 0.25))


def test_costs_of_a_step() -> None:
    """Plain steps have an overhead of their own; levels after the measured ones cost what the last of these does."""
    costs = CostModel(verify={1: 0.01, 8: 0.01}, draft=0.0, overhead=0.01, plain_overhead=0.002, context=200)
    assert (costs.step(1, 0), costs.step(4, 3)) == pytest.approx((0.012, 0.02))
    assert costs.speedup(2.0, 4, 3) == pytest.approx(2 * 0.012 / 0.02)
    assert replace(COSTS, draft_by_depth=[0.0, 0.0, 0.004]).draft_at(4) == pytest.approx(0.012)


# Search ---------------------------------------------------------------------------------------------------------------


def accepted(ranks: np.ndarray, tree: TokenTree) -> float:
    """Mean drafts accepted over all positions."""
    table = accepted_length_probs(accept_probs_of_ranks(ranks, 4), tree)
    return float((table @ np.arange(table.shape[1])).mean())


def all_trees(drafts: int, depth: int, width: int) -> list[TokenTree]:
    """Every tree of that many drafts whose nodes' children are their first trials."""
    paths = [()]
    level = [()]
    for _ in range(depth):
        level = [(*p, r) for p in level for r in range(width)]
        paths += level
    return [
        TokenTree.from_paths(list(chosen))
        for chosen in combinations(paths[1:], drafts)
        if all((p[:-1] == () or p[:-1] in chosen) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in chosen) for p in chosen)
    ]


def modelled(tree: TokenTree, acceptance: np.ndarray) -> float:
    """Expected tokens a step when trial b at depth d is the accepted one with probability ``acceptance[d, b]``."""
    return sum(float(np.prod([acceptance[d, b] for d, b in enumerate(path)])) for path in tree.paths)


def test_search_finds_the_best_tree_of_each_size() -> None:
    """Against all trees of up to 4 nodes on skewed ranks, with enough data that the prior is small."""
    generator = np.random.default_rng(0)
    first = generator.choice(4, p=[0.4, 0.3, 0.2, 0.1], size=4000)
    # The second draft is right mostly after the second candidate: a product of marginals cannot see that.
    second = np.where(first == 1, 0, generator.integers(1, 4, size=4000))
    ranks = np.stack([first, second], 1)
    order = greedy_tree([accept_probs_of_ranks(ranks, 3)], 4, rounds=1)
    every = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for size in (1, 2, 3, 4):
        trees = [c for c in combinations(every, size) if all(p[:-1] in c or len(p) == 1 for p in c)]
        best = max(accepted(ranks, TokenTree.from_paths(list(tree))) for tree in trees)
        assert accepted(ranks, order.tree(size)) == pytest.approx(best)
    assert order.paths[:2] == [(0,), (1,)] and order.paths[2] == (1, 0)
    assert order.values == sorted(order.values, reverse=True)


def test_positions_count_where_steps_start() -> None:
    """Rank 0 is right at 4 of 7 positions; a step that accepts one skips the next."""
    answer = accept_probs_of_ranks(np.tile([[1], [1], [1], [0], [0], [0], [0]], (50, 1)), 2)
    assert greedy_tree([answer], 1, rounds=1).paths == [(0,)]
    assert greedy_tree([answer], 1, rounds=2).paths == [(1,)]


acceptances = st.integers(0, 2**32 - 1).map(
    # Rows sum to less than 1, in no order: a later trial may be accepted more often than an earlier one.
    lambda seed: np.random.default_rng(seed).dirichlet([0.7] * 4, size=3)[:, :3]
)


@settings(max_examples=30, deadline=None)
@given(acceptances, st.integers(0, 5), st.integers(0, 3))
def test_sequoia_is_the_best_of_all_trees(acceptance: np.ndarray, drafts: int, depth: int) -> None:
    solution = sequoia(acceptance[:depth], 6)
    trees = all_trees(drafts, depth, 3)
    if not trees:
        assert np.isneginf(solution.expected[drafts + 1])
        return
    tree = solution.tree(drafts + 1)
    assert len(tree) == drafts + 1 and tree.depth <= depth
    assert modelled(tree, acceptance) == pytest.approx(max(modelled(t, acceptance) for t in trees))
    assert solution.expected[drafts + 1] == pytest.approx(modelled(tree, acceptance))


def test_trials_that_are_seldom_reached_or_never_accepted() -> None:
    ranks = np.array([[0, 1], [1, 1], [5, 0], [0, -1]])
    acceptance = first_accepted([accept_probs_of_ranks(ranks, 2)])
    # The third position never gets to the second draft, the fourth has none.
    assert np.allclose(acceptance, [[0.5, 0.25], [0.0, 1.0]])
    shallow, deep = (sequoia(np.zeros((depth, 2)), 8).expected for depth in (1, 2))
    assert not np.isnan(shallow).any() and not np.isnan(deep).any()
    assert np.isneginf(shallow[4:]).all() and (deep[1:8] == 1.0).all() and np.isneginf(deep[8])
