"""Does every acceptance rule keep the target's distribution? Enumerated exactly, not sampled (``drafthead certify``).

Each row runs the decoder's own drafting and verification on a small random target and drafter, once for every outcome
of the random choices (``enumerate.py``). What a step commits, completed by the target to one token more than the tree
is deep, must have the target's own distribution: the total variation between the two is rounding, below 1e-9. A lossy
rule is reported with its distance, what would be biased must be refused, and published ways to draft that are biased
must be found to be so, by as much as they are by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from drafthead.data.utils.errors import UserError
from drafthead.eval.lossless.cases import EXACT, RAW, Case, Counterexample, Refusal, cases, counterexamples, refusals
from drafthead.eval.lossless.enumerate import committed, total_variation
from drafthead.eval.lossless.tabular_lm import TableDraft, TabularLM
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
from drafthead.models.token_tree import TokenTree

EXACT_BELOW = 1e-9
"""Total variation that is rounding."""
PAIRS = 64
"""Random targets, each with a drafter near it, that ``rule_total_variation`` is the mean of."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one case."""

    rule: str
    draft_sampling: str
    sampler: str
    shape: str
    result: str
    """``exact``, ``lossy``, ``biased`` (a counterexample), ``refused`` or ``FAILED``."""
    vocabulary: int = 0
    """0 where nothing is enumerated."""
    outcomes: int = 0
    """Sequences of random choices, without the bonus token's."""
    total_variation: float | None = None
    """Of what is committed from the target, over depth + 1 tokens; None where nothing is enumerated."""
    reason: str = ""
    """Of a refusal."""


@lru_cache(maxsize=64)
def rule_total_variation(rule: AcceptanceRule, draft_sampling: DraftSampling = DraftSampling.TOP_K) -> float:
    """How far ``rule`` moves the distribution of a token: the mean over random targets with drafters near them.

    Exact for each of 64 fixed pairs over 8 tokens, with a chain of one draft; 0 for a lossless rule. A synthetic
    figure: it says how lossy a rule is beside others, not how far a certain model's texts are moved.
    """
    if rule.lossless:
        return 0.0
    total = 0.0
    for seed in range(PAIRS):
        target = TabularLM.random(8, 1, seed)
        draft_config = DraftConfig(tree=TokenTree.chain(1), draft_sampling=draft_sampling, sampler=RAW)
        draft = TableDraft(table=target.near(PAIRS + seed, 0.5), draft_config=draft_config)
        total += total_variation(committed(draft, target, RAW, rule, 1), target.probs(RAW), length=1)
    return total / PAIRS


def check(case: Case | Refusal | Counterexample, seed: int = 0) -> Row:
    """Enumerate ``case``, a ``Case`` on the random target and drafter of ``seed``; or try to build a ``Refusal``."""
    if isinstance(case, Refusal):
        reason = ""
        try:
            case.build()
        except (UserError, ValueError) as error:
            reason = str(error)
        return Row(**labels(case), result="refused" if reason else "FAILED", reason=reason)
    if isinstance(case, Counterexample):
        target, sampler = case.target, RAW
        committed_probs = committed(case.draft, target, sampler, EXACT, case.depth)
    else:
        target, draft = case.tables(seed)
        sampler = case.sampler
        committed_probs = committed(draft, target, sampler, case.rule, case.shape.depth, greedy=case.greedy)
    distance = total_variation(committed_probs, target.probs(sampler))
    if isinstance(case, Counterexample):
        result = "biased" if abs(distance - case.expected) < EXACT_BELOW else "FAILED"
    elif case.rule.lossless:
        result = "exact" if distance < EXACT_BELOW else "FAILED"
    else:
        result = "lossy"
    return Row(
        **labels(case),
        result=result,
        vocabulary=target.vocabulary,
        outcomes=committed_probs.outcomes,
        total_variation=distance,
    )


def certify(only: str = "", progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """All rows, or those in whose rule, draft sampling, sampler or shape the words ``only`` occur.

    Args:
        only: as in a row, such as ``block`` or ``chain 2 + chain 2``.
        progress: called with the rows done and their number.
    """
    every: list[Case | Refusal | Counterexample] = [*cases(), *refusals(), *counterexamples()]
    chosen = [(n, case) for n, case in enumerate(every) if any(only in label for label in labels(case).values())]
    if not chosen:
        raise UserError(f"no enumerated case has {only!r}; run drafthead certify to see them all")
    rows = []
    for done, (number, case) in enumerate(chosen, start=1):
        rows.append(check(case, seed=10 * number))
        if progress:
            progress(done, len(chosen))
    return rows


def labels(case: Case | Refusal | Counterexample) -> dict[str, Any]:
    """What a row is about."""
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
    """Settings that differ from their defaults, the one called ``always`` in any case: ``temperature 0, top_k 3``."""
    first = getattr(settings, always)
    shown = [first if isinstance(first, str) else f"{always} {first:g}"]
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name != always and value != item.default:
            shown.append(f"{item.name} {value:g}")
    return ", ".join(shown)
