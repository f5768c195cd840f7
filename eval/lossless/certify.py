"""Exact check that every acceptance rule keeps the target's distribution (``drafthead certify``). Each case runs the
decoder's own drafting and verification on a small random target and drafter, once for every outcome of the random
choices (``enumerate.py``). A step commits at most one token more than the tree is deep. If it commits fewer, the target
generates the missing ones. All these tokens together must have the target's own distribution, up to a total variation
of 1e-9 (rounding). A lossy rule is reported with its total variation. Biased combinations must be refused, and
published ways to draft that are biased must be found biased by the amount calculated by hand."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from drafthead.errors import UserError
from drafthead.eval.lossless.cases import (
    EXACT,
    RAW,
    Case,
    Counterexample,
    GrammarCase,
    Refusal,
    cases,
    counterexamples,
    grammar_cases,
    refusals,
)
from drafthead.eval.lossless.enumerate import committed, total_variation
from drafthead.eval.lossless.tabular_lm import TableDraft, TabularLM
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
from drafthead.models.token_tree import TokenTree

AnyCase = Case | Refusal | Counterexample | GrammarCase
EXACT_BELOW = 1e-9  # total variation below this is rounding
PAIRS = 64  # random targets, each with a drafter near it, over which `rule_total_variation` averages


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one case."""

    rule: str
    draft_sampling: str
    sampler: str
    shape: str
    result: str  # exact, lossy, biased (a counterexample), local (under a grammar's masks), refused or FAILED
    vocabulary: int = 0  # the target's tokens; 0 if nothing is enumerated
    outcomes: int = 0  # sequences of random choices; the bonus token's whole distribution is added
    total_variation: float | None = None  # of the next tokens (one more than the tree's depth) from the target's
    reason: str = ""  # of a refusal


@lru_cache(maxsize=64)
def rule_total_variation(rule: AcceptanceRule, draft_sampling: DraftSampling = DraftSampling.TOP_K) -> float:
    """Return the mean total variation between ``rule`` and the target over 64 fixed pairs of random target and near
    drafter over 8 tokens, with a chain of one draft. It compares lossy rules with each other. It does not predict the
    effect on a real model's answers."""
    if rule.lossless:
        return 0.0
    total = 0.0
    for seed in range(PAIRS):
        target = TabularLM.random(8, 1, seed)
        draft_config = DraftConfig(tree=TokenTree.chain(1), draft_sampling=draft_sampling, sampler=RAW)
        draft = TableDraft(table=target.near(PAIRS + seed, 0.5), draft_config=draft_config)
        total += total_variation(committed(draft, target, RAW, rule, 1), target.probs(RAW), length=1)
    return total / PAIRS


def check(case: AnyCase, seed: int = 0) -> Row:
    """Enumerate a case's outcomes, or, for a ``Refusal``, try to build the combination."""
    if isinstance(case, Refusal):
        reason = ""
        try:
            case.build()
        except (UserError, ValueError) as error:
            reason = str(error)
        return Row(**labels(case), result="refused" if reason else "FAILED", reason=reason)
    if isinstance(case, Counterexample):
        target = case.target
        step = committed(case.draft, target, RAW, EXACT, case.depth)
        distance = total_variation(step, target.probs(RAW))
        result = "biased" if abs(distance - case.expected) < EXACT_BELOW else "FAILED"
    elif isinstance(case, GrammarCase):
        target, probs = case.target, case.target.probs(RAW)
        step = committed(case.draft, target, RAW, EXACT, case.depth)
        distance = total_variation(step, probs, law=case.conditional.probs(RAW))
        is_local = total_variation(step, probs) < EXACT_BELOW and abs(distance - case.expected) < EXACT_BELOW
        result = "local" if is_local else "FAILED"
    else:
        target, draft = case.tables(seed)
        step = committed(draft, target, case.sampler, case.rule, case.shape.depth, case.greedy)
        distance = total_variation(step, target.probs(case.sampler))
        result = "lossy" if not case.rule.lossless else "exact" if distance < EXACT_BELOW else "FAILED"
    counts: dict[str, Any] = {"vocabulary": target.vocabulary, "outcomes": step.outcomes}
    return Row(**labels(case), result=result, **counts, total_variation=distance)


def certify(only: str = "", progress: Callable[[int, int], None] | None = None) -> list[Row]:
    every: list[AnyCase] = [*cases(), *refusals(), *counterexamples(), *grammar_cases()]
    chosen = [(n, case) for n, case in enumerate(every) if any(only in label for label in labels(case).values())]
    if not chosen:
        raise UserError(f"no case has {only!r}; run drafthead certify to see them all")
    rows = []
    for done, (number, case) in enumerate(chosen, start=1):
        rows.append(check(case, seed=10 * number))
        if progress:
            progress(done, len(chosen))
    return rows


def labels(case: AnyCase) -> dict[str, Any]:
    if not isinstance(case, Case):
        sampler = "any" if isinstance(case, Refusal) else settings_label(RAW, "temperature")
        return {"rule": case.rule, "draft_sampling": case.draft_sampling, "sampler": sampler, "shape": case.shape}
    sampler = settings_label(case.sampler, "temperature")
    if case.draft_sampler is not None and case.draft_sampler != case.sampler:
        sampler += f"; drafts {settings_label(case.draft_sampler, 'temperature')}"
    return {
        "rule": "greedy" if case.greedy else settings_label(case.rule, "name"),
        "draft_sampling": case.draft_sampling.value.replace("_", " "),
        "sampler": sampler,
        "shape": case.shape.name,
    }


def settings_label(settings: Any, always: str) -> str:
    """Describe a dataclass by its field ``always`` and all fields not at their defaults: ``temperature 0, top_k 3``."""
    first = getattr(settings, always)
    shown = [first if isinstance(first, str) else f"{always} {first:g}"]
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name != always and value != item.default:
            shown.append(f"{item.name} {value:g}")
    return ", ".join(shown)
