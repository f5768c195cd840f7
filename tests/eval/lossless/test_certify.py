"""The certificate passes what is exact, finds what is biased by as much as by hand, and enumerates Python functions."""

import json
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafthead.eval.lossless import callables, certify
from drafthead.eval.lossless.callables import constant, distances, sampler_distribution
from drafthead.eval.lossless.cases import Case, counterexamples, grammar_cases
from drafthead.eval.lossless.cases import cases as all_cases
from drafthead.eval.lossless.enumerate import committed
from drafthead.eval.lossless.tabular_lm import Draft, TableDraft, TabularLM
from drafthead.models.decoding import acceptance as verify
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.token_tree import TokenTree
from support import call, call_fails, cases, refuses

RAW = Sampler(temperature=1.0)
EXACT = AcceptanceRule()
WITH, WITHOUT = DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT
EXACT_CASES = [case for case in all_cases() if case.rule.lossless and case.shape.name == "chain 2"]
ONE_PER_RULE = {(case.rule.name, case.greedy, case.draft_sampling): case for case in reversed(EXACT_CASES)}


@pytest.mark.parametrize("case", ONE_PER_RULE.values(), ids=lambda case: " | ".join(certify.labels(case).values()))
def test_exact_rules_keep_the_distribution(case: Case) -> None:
    row = certify.check(case)
    assert row.result == "exact" and row.outcomes > 0


@pytest.mark.slow
def test_the_whole_certificate() -> None:
    rows = certify.certify()
    counts = Counter(row.result for row in rows)
    assert counts["FAILED"] == 0 and counts["exact"] >= 1138
    assert (counts["lossy"], counts["biased"], counts["local"], counts["refused"]) == (18, 4, 1, 7)
    assert sum(row.outcomes for row in rows) >= 1_242_450


def tampered(draft: Draft, change: Callable[[Proposal], Proposal]) -> Draft:
    return lambda last, rng: change(draft(last, rng))


def static(widths: list[int], draft_sampling: DraftSampling, seed: int) -> tuple[TabularLM, TableDraft]:
    tree = TokenTree.expansion(widths)
    target = TabularLM.random(5, tree.depth, seed)
    draft_config = DraftConfig(tree=tree, draft_sampling=draft_sampling, sampler=RAW)
    return target, TableDraft(table=target.near(seed + 1, 1.5), draft_config=draft_config)


def candidates_by_hand(p: np.ndarray, candidates: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """Distribution of the first token when these (token, q) are tried in turn: multi-step sampling in a few lines."""
    out, left, dist = np.zeros(len(p)), 1.0, p
    for token, q in candidates:
        prob = min(1.0, dist[token] / q[token])
        out[token] += left * prob
        left *= 1 - prob
        rest = np.clip(dist - q, 0, None)
        dist = rest / rest.sum() if rest.sum() > 0 else dist
    return out + left * dist


@pytest.mark.parametrize("renormalised", [True, False])
def test_enumeration_equals_sums_by_hand(renormalised: bool) -> None:
    target, draft = static([3], WITHOUT, 11)
    p = target.probs(RAW)[0].numpy()
    q = draft.table.logits[0].softmax(-1).numpy()
    expected = np.zeros(len(p))
    for tokens in permutations(range(len(p)), 3):
        prob, left, candidates = 1.0, q.copy(), []
        for token in tokens:
            dist = left / left.sum()
            prob *= dist[token]
            candidates.append((token, dist if renormalised else q))
            left[token] = 0
        expected += prob * candidates_by_hand(p, candidates)
    kind = WITHOUT if renormalised else WITH
    masses = committed(tampered(draft, lambda x: replace(x, draft_sampling=kind)), target, RAW, EXACT, 1)
    assert masses.outcomes <= 60 * 4, "60 ordered samples, of which the first, second, third or none is accepted"
    ours = masses.completed(target.probs(RAW)).view(len(p), -1).sum(1).numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-14)
    assert (np.abs(ours - p).sum() / 2 < 1e-12) == renormalised


def test_total_variation_orders_the_lossy_rules() -> None:
    lenient = [certify.rule_total_variation(AcceptanceRule(name="lenient", lenience=x)) for x in (1.0, 0.9, 0.5, 0.1)]
    assert lenient[0] == 0 and lenient == sorted(lenient) and lenient[1] > 0.01
    typical = AcceptanceRule(name="typical")
    assert 0.3 < certify.rule_total_variation(typical) < 0.7
    assert certify.rule_total_variation(typical, WITH) < certify.rule_total_variation(typical)
    assert certify.rule_total_variation(EXACT) == certify.rule_total_variation(AcceptanceRule(name="block")) == 0


def test_biased_constructions_are_refused() -> None:
    rows = certify.certify(only="any")
    assert {row.result for row in rows} == {"refused"} and len(rows) == 7
    reasons = [row.reason for row in rows]
    assert all(any(part in reason for reason in reasons) for part in ("block verification", "must all sample with"))
    assert min(map(len, reasons)) > 30


def test_published_ways_to_draft_less_are_found_biased() -> None:
    first, second, *by_cost = counterexamples()
    rows = [certify.check(case) for case in (first, second, *by_cost)]
    assert {row.result for row in rows} == {"biased"}
    assert [round(row.total_variation or 0, 9) for row in rows] == [0.05, 0.15, 0.16, 0.21]
    assert certify.check(replace(first, draft=second.draft)).result == "FAILED"
    in_order = certify.certify(only="<2,2>, stops by its prefix")
    assert {row.result for row in in_order} == {"exact"} and {row.draft_sampling for row in in_order} == {
        "top k",
        "with replacement",
        "without replacement",
    }


@cases("kind", "top k", "with replacement", "without replacement")
def test_trees_by_cost_keep_the_distribution(kind: str) -> None:
    """And enumerate trees of different sizes, which would be biased if they depended on the drawn tokens."""
    chosen = [case for case in all_cases() if case.shape.name.startswith("by cost") and case.sampler == RAW]
    rows = [certify.check(case) for case in chosen if certify.labels(case)["draft_sampling"] == kind]
    assert len(rows) >= 3 and {row.result for row in rows} == {"exact"}


def test_masks_sample_the_local_projection_of_a_grammar() -> None:
    """As plain masked decoding does, and not the model's law of the texts that obey the grammar."""
    (case,) = grammar_cases()
    row = certify.check(case)
    assert row.result == "local" and row.total_variation == pytest.approx(9 / 22)
    assert certify.check(replace(case, target=case.conditional)).result == "FAILED"


@pytest.mark.slow
def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    call("certify", "only=chain 1", f"json={tmp_path / 'rows.json'}")
    shown = capsys.readouterr().out
    assert "13 samplers" in shown and "FAILED" not in shown
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["result"] for row in rows} == {"exact", "lossy", "biased", "local", "refused"}
    assert f"{len(rows)} rows" in shown
    call("certify", "only=top_p 0.9", "each=true")
    assert "temperature 0.8, top_k 4" in capsys.readouterr().out


def test_command_fails_with_a_biased_rule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify, "_residual", lambda left, dist: dist)
    with pytest.raises(SystemExit) as stopped:
        call("certify", "only=<3>")
    assert stopped.value.code == 1 and "FAILED" in capsys.readouterr().out


# Samplers given as Python functions -----------------------------------------------------------------------------------


PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "rules.md"
NextToken = Callable[[Sequence[int]], Tensor]
Choose = Callable[[Sequence[float] | Tensor], int]
TARGET, DRAFT = (0.4, 0.35, 0.25), (0.6, 0.3, 0.1)


def leviathan(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(length):
        p, q = target(tokens), draft(tokens)
        token = choose(q)
        accepted = min(1.0, float(p[token] / q[token]))
        if not choose([1 - accepted, accepted]):
            residual = (p - q).clamp(min=0)
            return [*tokens, choose(residual / residual.sum())]
        tokens.append(token)
    return [*tokens, choose(target(tokens))]


def without_residual(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
    """Draw from the target, not from the residual, after a rejection."""
    token = choose(draft([]))
    p, q = target([]), draft([])
    accepted = min(1.0, float(p[token] / q[token]))
    return [token] if choose([1 - accepted, accepted]) else [choose(p)]


def test_samplers_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    code = re.search(r"```python\n# stock.py\n(.*?)```", page, re.DOTALL)
    commands = re.findall(r"\$ drafthead (certify callable=.*)\n(.*)", page)
    assert code and len(commands) == 3
    (tmp_path / "stock.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    for command, output in commands:
        try:
            call(*shlex.split(command))
        except SystemExit as exit:
            assert (exit.code == 1) is ("biased" in output)
        assert output in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("length", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rules_without_torch(length: int) -> None:
    assert max(distances(leviathan, length)[0]) < 1e-12
    total, outcomes = distances(without_residual, length, probs=(TARGET, DRAFT))
    # a rejected draft (0.2) is replaced by (0.4, 0.35, 0.25) instead of (0, 0.25, 0.75)
    assert total == [pytest.approx(0.2 * 0.5)] and outcomes == 6


def test_the_distribution_of_a_published_biased_rule() -> None:
    def likeliest(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
        accepted = float(target([])[0] / draft([])[0])
        residual = (target([]) - draft([])).clamp(min=0)
        return [0, choose(target([0]))] if choose([1 - accepted, accepted]) else [choose(residual / residual.sum())]

    result = sampler_distribution(likeliest, constant(TARGET, 1), constant(DRAFT, 1), 1)
    first = result.by_length[0] + result.by_length[1].view(3, 3).sum(1)
    torch.testing.assert_close(first, torch.tensor([2 / 3, 1 / 12, 1 / 4], dtype=torch.float64))


def uniform_number(target: NextToken, draft: NextToken, choose: Choose, length: int) -> list[int]:
    """Draw by comparing one uniform number with all cumulative probabilities, in either direction."""
    number, cumulative = torch.rand(1), target([]).cumsum(0)
    below = (number >= cumulative[:-1]).sum()
    assert below == (cumulative[:-1] <= number[0]).sum()
    return [int(below)]


def test_one_uniform_number_is_compared_several_times() -> None:
    total, outcomes = distances(uniform_number, 1, vocabulary=4)
    assert max(total) < 1e-6 and outcomes == 16 * 4


@cases(
    "sampler, message",
    (lambda t, d, choose, n: [random.getrandbits(20) % 3], "outside torch"),
    (lambda t, d, choose, n: [int(3 * torch.rand(1))], "compare it with a probability"),
    (lambda t, d, choose, n: [int(torch.randint(3, (1,)))], "torch.randint cannot be enumerated"),
    (lambda t, d, choose, n: [0] * 9, "commits 1 to 3 tokens below 3, but the sampler returned"),
    (lambda t, d, choose, n: [choose([0.5, 0.6])], "probabilities that add up to 1, got"),
    (lambda t, d, choose, n: [choose(t([0, 1, 2]))], "reads a prefix of 3 tokens"),
    (lambda t, d, choose, n: [1 // 0], "the sampler failed: ZeroDivisionError"),
    (lambda t, d, choose, n: [choose([1 / 3] * 3) for _ in range(12)][:1], "more than 500 outcomes"),
)
def test_refused_samplers(sampler: Callable[..., list[int]], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callables, "MOST_OUTCOMES", 500)
    refuses(message, distances, sampler, 2, probs=(TARGET, DRAFT))


@cases(
    "arguments, message",
    (["callable=nothing:here"], "callable=nothing:here cannot be loaded (No module named 'nothing')"),
    (["callable=math:exp", "target=[0.5,0.5]"], "draft must be as many probabilities as target"),
    (["callable=math:exp", "target=[0.5,0.6]", "draft=[0.5,0.5]"], "target must be probabilities that add up to 1"),
)
def test_bad_settings(arguments: list[str], message: str) -> None:
    call_fails(re.escape(message), "certify", *arguments)
