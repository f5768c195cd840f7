"""``drafthead certify``: does every acceptance rule keep the target's law? Enumerated exactly, not sampled.

Each row runs the decoder's own drafting and verification on a small random target and drafter, once for every way that
chance can fall (``eval/enumerate_laws.py``). What a step commits, completed by the target to one token more than the
tree is deep, must have the target's own law: the total variation between the two is rounding, below 1e-9. A lossy rule
says so, and by how much. What would be biased is refused.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from drafthead.data.utils.errors import UserError
from drafthead.eval.lossless.cases import RAW, Case, Refusal, cases, refusals
from drafthead.eval.lossless.enumerate import committed, distance
from drafthead.eval.lossless.tabular_lm import TableDraft, TabularLM
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftConfig, DraftSampling
from drafthead.models.token_tree import TokenTree

EXACT_BELOW = 1e-9
"""Total variation that is rounding."""
PAIRS = 64
"""Random targets, each with a drafter near it, behind ``total_variation``."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a line of the certificate is about."""

    rule: str
    draft_sampling: str
    sampler: str
    shape: str


@dataclass(frozen=True, kw_only=True)
class Row(Labels):
    """One line of the certificate."""

    verdict: str
    """``exact``, ``lossy``, ``refused`` or ``FAILED``."""
    vocabulary: int = 0
    """0 where nothing is enumerated."""
    outcomes: int = 0
    """Ways that chance can fall, the bonus apart."""
    total_variation: float | None = None
    """Between what is committed and the target's law, over depth + 1 tokens; None where nothing is enumerated."""
    reason: str = ""
    """Of a refusal."""


@lru_cache(maxsize=64)
def total_variation(rule: AcceptanceRule, draft_sampling: DraftSampling = DraftSampling.TOP_K) -> float:
    """How far ``rule`` moves the law of a token: the mean total variation over random targets with drafters near them.

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
        total += distance(committed(draft, target, RAW, rule, 1), target.probs(RAW), length=1)
    return total / PAIRS


def certified(case: Case, seed: int) -> Row:
    """Enumerate ``case`` on the random target and drafter of ``seed``."""
    target, draft = case.tables(seed)
    found = committed(draft, target, case.sampler, case.rule, case.shape.depth, greedy=case.greedy)
    apart = distance(found, target.probs(case.sampler))
    exact = "exact" if apart < EXACT_BELOW else "FAILED"
    return Row(
        **asdict(_labels(case)),
        vocabulary=case.shape.vocabulary,
        outcomes=found.outcomes,
        total_variation=apart,
        verdict=exact if case.rule.lossless else "lossy",
    )


def refused(refusal: Refusal) -> Row:
    """Try to build what must be refused."""
    reason = ""
    try:
        refusal.build()
    except (UserError, ValueError) as error:
        reason = str(error)
    return Row(**asdict(_labels(refusal)), verdict="refused" if reason else "FAILED", reason=reason)


def certificate(only: str = "", progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """All rows, or those in whose rule, siblings, sampler or shape the words ``only`` occur.

    Args:
        only: as in a row, such as ``block`` or ``chain 2 + chain 2``.
        progress: called with the rows done and their number.

    Raises:
        UserError: no such row.
    """
    every: list[Case | Refusal] = [*cases(), *refusals()]
    wanted = [
        (number, case)
        for number, case in enumerate(every)
        if any(only in label for label in asdict(_labels(case)).values())
    ]
    if not wanted:
        raise UserError(f"no row of the certificate has {only!r}; run drafthead certify to see them all")
    rows = []
    for done, (number, case) in enumerate(wanted, start=1):
        rows.append(certified(case, seed=10 * number) if isinstance(case, Case) else refused(case))
        if progress:
            progress(done, len(wanted))
    return rows


def _labels(case: Case | Refusal) -> Labels:
    if isinstance(case, Refusal):
        return Labels(rule=case.rule, draft_sampling=case.draft_sampling, sampler="any", shape=case.shape)
    sampler = _named(case.sampler, "temperature")
    if case.draft_sampler is not None and case.draft_sampler != case.sampler:
        sampler += f"; drafts {_named(case.draft_sampler, 'temperature')}"
    return Labels(
        rule="greedy" if case.greedy else _named(case.rule, "name"),
        draft_sampling=case.draft_sampling.value.replace("_", " "),
        sampler=sampler,
        shape=case.shape.name,
    )


def _named(settings: Any, always: str) -> str:
    """Settings that differ from their defaults, the one called ``always`` in any case: ``temperature 0, top_k 3``."""
    first = getattr(settings, always)
    shown = [first if isinstance(first, str) else f"{always} {first:g}"]
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name != always and value != item.default:
            shown.append(f"{item.name} {value:g}")
    return ", ".join(shown)
