"""Drafting for an engine's requests: the same drafts as our own chain, whatever the engine does with its requests."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from head_cases import HEADS, MAIN, cases_of

from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.draft_lengths import DraftLengths
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.engine_rows import PADDED, AcceptanceTable, EngineRows, Read, expected_length
from drafthead.models.decoding.loop import decode
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.token_tree import TokenTree
from support import TinyBase, fitted, noisy_head, random_ids, refuses, rows_of

SERVED = [kind for kind in HEADS if not kind.startswith("kangaroo")]
CHAIN = DraftConfig(tree=TokenTree.chain(3))
every_served_head = pytest.mark.parametrize("kind", cases_of((), SERVED, fast=MAIN | {"hydra_pp", "medusa_induction"}))


class Text:
    """A text with the base's states, of which an engine has read the first ``end`` tokens."""

    def __init__(self, base: BaseModel, drafter: Drafter, ids: list[int]) -> None:
        self.ids, self.end = ids, 0
        self.states = base.forward(torch.tensor([ids]), base.new_cache(len(ids)), spec=drafter.spec)

    def read(self, request: str, count: int, start: int | None = None, **more: Any) -> Read:
        """The next ``count`` tokens; with ``start``, the states from there on."""
        start, self.end = self.end if start is None else start, min(self.end + count, len(self.ids) - 1)
        return Read(request, self.ids[: self.end], self.states.span(start, self.end - start), **more)

    @torch.inference_mode()
    def drafts(self, drafter: Drafter, start: int = 0) -> list[int]:
        """The drafts of a fresh session that has read the tokens from ``start`` on."""
        session = drafter.open(1)
        ids = torch.tensor([self.ids[start : self.end]])
        session.commit(ids, [ids.shape[1]], self.states.span(start, ids.shape[1]))
        return session.draft(torch.tensor([self.ids[self.end]]), CHAIN).tokens[0, 1:].tolist()


class Pauses(DraftLengths):
    """Whole chains, and pauses at the test's command."""

    is_paused = False

    def drafts_now(self) -> bool:
        return not self.is_paused

    def choose(self, rates: Sequence[Sequence[float]]) -> list[int]:
        return [len(chain) for chain in rates]


@pytest.mark.parametrize("pauses", [False, True])
@every_served_head
@torch.inference_mode()
def test_requests_come_and_go_in_chunks_and_draft_as_if_alone(tiny_base: TinyBase, kind: str, pauses: bool) -> None:
    base, chance = tiny_base(), random.Random(kind)
    head, lengths = noisy_head(HEADS[kind], base, 0.1), Pauses()
    rows, running, compared = EngineRows([head], 3, lengths), {}, 0
    for step in range(60 if pauses else 30):
        lengths.is_paused = pauses and chance.random() < 0.6
        if len(running) < 4 and chance.random() < 0.5:
            running[f"r{step}"] = Text(base, head, random_ids(90, seed=step))
        if running and chance.random() < 0.2:
            gone = chance.choice([*running])
            rows.drop([gone, "unknown"])
            del running[gone]
        sizes = {request: chance.choice([0, 1, 2, 4, PADDED + 4]) for request in running}
        rows.feed([text.read(request, sizes[request]) for request, text in running.items() if sizes[request]])
        drafted = rows.draft({request: text.ids[text.end] for request, text in running.items()})
        for request, text in running.items():
            if text.end and not lengths.is_paused:
                assert drafted[request] == text.drafts(head)
                compared += 1
            else:
                assert drafted[request] == []
        assert set(rows.requests) == {request for request, text in running.items() if text.end}
    assert compared > 40
    rows.drop([*running])
    assert not rows.requests and rows.draft({"r0": 1}) == {"r0": []}


@cache
def answers(base: BaseModel) -> list[list[int]]:
    return [ids + decode(base, None, ids, max_new_tokens=24).tokens for ids in (random_ids(9, 1), random_ids(14, 2))]


@torch.inference_mode()
def serve(base: BaseModel, rows: EngineRows, prompts: dict[str, list[int]], new: int, drafting: bool = True) -> Any:
    """A serving engine without a cache: it verifies chains greedily. Return the texts, and accepted drafts per step."""
    texts, accepted = {request: list(ids) for request, ids in prompts.items()}, {request: [] for request in prompts}
    proposed: dict[str, list[int]] = dict.fromkeys(prompts, [])
    read = dict.fromkeys(prompts, 0)
    while active := [r for r in texts if len(texts[r]) < len(prompts[r]) + new]:
        reads = []
        for request in active:
            ids = [*texts[request], *proposed[request]]
            states = base.forward(torch.tensor([ids]), base.new_cache(len(ids)), spec=rows.drafters[0].spec)
            best = base.logits(states.final)[0].argmax(-1).tolist()
            length, drafts = len(texts[request]), proposed[request]
            right = next((n for n, draft in enumerate(drafts) if best[length - 1 + n] != draft), len(drafts))
            accepted[request] += [right] if read[request] else []
            texts[request] = [*ids[: length + right], best[length - 1 + right]]
            states = states.span(read[request], length + right - read[request])
            reads.append(Read(request, texts[request][:-1], states, verified=len(drafts)))
            read[request] = length + right
        rows.feed(reads)
        proposed = dict.fromkeys(prompts, [])
        if drafting:
            proposed |= rows.draft({request: texts[request][-1] for request in active})
        rows.drop([request for request in active if len(texts[request]) >= len(prompts[request]) + new])
    return texts, accepted


@pytest.mark.parametrize("kind", ["medusa_induction", "eagle3_late", "hydra_pp", "draft_lm", "dspark"])
def test_an_engine_accepts_what_our_own_chain_accepts(tiny_base: TinyBase, kind: str) -> None:
    base = tiny_base()
    head = fitted(HEADS[kind].build(base), rows_of(answers(base)), 60, lr=0.01)
    prompts = {"a": answers(base)[0][:9], "b": answers(base)[1][:14]}
    texts, accepted = serve(base, EngineRows([head], 3), prompts, 24)
    for request, ids in prompts.items():
        ours = decode(base, head, ids, max_new_tokens=24, draft_config=CHAIN, ignore_eos=True)
        assert texts[request][len(ids) :][:24] == ours.tokens
        assert accepted[request][:-1] == [step.accepted for step in ours.steps][: len(accepted[request]) - 1]
        assert sum(accepted[request]) > 3


@pytest.mark.parametrize("kind", ["medusa_induction", "draft_lm", "eagle3", "hydra_pp"])
def test_states_that_were_never_computed(tiny_base: TinyBase, kind: str) -> None:
    """A cached prefix: heads that attend see the text after it, others see all of it."""
    base = tiny_base()
    head = noisy_head(HEADS[kind], base, 0.1)
    rows, text, other = EngineRows([head], 3), *(Text(base, head, random_ids(60, seed)) for seed in (1, 2))
    rows.feed([text.read("a", 30, start=20), other.read("b", 9)])
    first = 20 if kind in ("eagle3", "hydra_pp") else 0
    expected = {"a": text.drafts(head, first), "b": other.drafts(head)}
    assert rows.draft({"a": text.ids[30], "b": other.ids[9]}) == expected
    text.end += 3  # the engine skipped a step
    rows.feed([text.read("a", 4)])
    first = 33 if first else 0
    assert rows.draft({"a": text.ids[37]}) == {"a": text.drafts(head, first)}


def test_a_recomputed_prompt_and_another_text_start_again(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = noisy_head(HEADS["eagle3"], base, 0.1)
    rows, text = EngineRows([head], 3), Text(base, head, random_ids(60))
    rows.feed([text.read("a", 20)])
    text.end = 0  # preempted, and read again in chunks
    rows.feed([text.read("a", 12)])
    rows.feed([text.read("a", 20)])
    assert rows.draft({"a": text.ids[32]}) == {"a": text.drafts(head)}
    other = Text(base, head, random_ids(60, seed=5))
    rows.feed([other.read("a", 25)])
    assert rows.draft({"a": other.ids[25]}) == {"a": other.drafts(head)}


def test_the_chain_that_promises_more_is_drafted(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head, lookup = noisy_head(MedusaConfig(num_draft_tokens=3), base, 0.0), PromptLookup(6)
    rows = EngineRows([head, lookup], 6)
    repeated = Text(base, head, [*range(10, 30), *range(10, 20), 20])
    rows.feed([repeated.read("a", 30)])
    assert rows.draft({"a": 20}) == {"a": [21, 22, 23, 24, 25, 26]}
    unlike = Text(base, head, random_ids(30))
    rows.feed([unlike.read("b", 20)])
    assert rows.draft({"b": 299}) == {"b": unlike_drafts(head, unlike, 299)}


def unlike_drafts(head: Drafter, text: Text, last: int) -> list[int]:
    text.ids[text.end] = last
    return text.drafts(head)


def test_shares_of_acceptance_are_learnt_up_to_the_first_rejection() -> None:
    table = AcceptanceTable()
    assert table.rates([0.05, 0.55, 1.0]) == pytest.approx([0.05, 0.55, 0.95])
    for _ in range(200):
        table.count([0.95, 0.55, 0.05], accepted=1)
    high, middle, low = table.rates([0.95, 0.55, 0.05])
    assert high > 0.99 and middle < 0.03 and low == pytest.approx(0.05), "the third draft was never reached"
    assert expected_length([0.5, 0.5]) == pytest.approx(0.75)


def test_an_early_exit_is_refused(tiny_base: TinyBase) -> None:
    base = tiny_base()
    refuses("KangarooHead drafts with the base's first layers", EngineRows, [KangarooConfig().build(base)], 3)
