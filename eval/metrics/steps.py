"""The table of steps, and every metric as a function of its rows. :func:`step_table` returns a pandas DataFrame with
one row per step, method and answer. Row 0 of an answer is its prefill, which commits the first token. Its ``verify_s``
is the prefill's time, and its ``total_s`` is all time outside the steps. Therefore ``committed`` and ``total_s`` add up
to the tokens and seconds of whole answers. Failed answers have no rows.
Unless noted otherwise, a metric is a ratio of totals over the answers. Long answers therefore weigh more, as in
Spec-Bench and EAGLE. ``committed`` tokens are those that a step added to the answer. ``accepted`` drafts are those that
the rule accepted, before EOS or the length limit truncated the answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from drafthead.data.intervals import bootstrap_interval
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.eval.config import CONTEXTS
from drafthead.models.decoding.step import DecodeResult

if TYPE_CHECKING:
    import pandas as pd

Rows: TypeAlias = "pd.DataFrame"  # rows of the table; of one method, except in `step_table`
COLUMNS = dict.fromkeys(("method", "task", "span"), "str") | dict.fromkeys(
    ("prompt", "turn", "step", "position", "context", "depth", "proposed", "accepted", "committed", "text_tokens"),
    "int",
)
COLUMNS |= dict.fromkeys(("entropy", "draft_s", "verify_s", "total_s"), "float")
"""Columns and their types. ``span`` is the span of the step's first token (``spans.py``). ``context`` counts all tokens
before the step, including the prompt's. ``text_tokens`` (row 0) counts the answer's tokens after decoding and
tokenising it again. The columns from ``position`` on that are not named here are fields of ``StepRecord``."""
QUESTION = ["task", "prompt"]  # columns that identify a question, which is all turns of a conversation
Spans = Callable[[Sequence[int], Sequence[int]], list[str]]  # of prompt and answer ids: the span of each answer token
Retokenised = Callable[[list[int]], int]  # number of tokens after decoding and tokenising again, without BOS


def step_table(
    results: Mapping[str, Sequence[DecodeResult]],
    prompts: Sequence[EvalPrompt] | None = None,
    turns: Sequence[int] | None = None,
    ids: Sequence[Sequence[int]] | None = None,
    retokenised: Retokenised = len,
    spans: Spans = lambda _, tokens: ["answer"] * len(tokens),
) -> Rows:
    """Return the table of steps of all methods: per answer a row 0 for the prefill, then a row per decoding step.
    ``prompts``, ``turns`` and ``ids`` (of the prompt) have an item per answer; without prompts they are numbered."""
    import pandas as pd  # takes half a second, and only summaries need it

    rows: list[dict[str, Any]] = []
    for method, answers in results.items():
        for n, answer in enumerate(answers):
            if not answer.tokens:  # failed
                continue
            task, number = ("", n) if prompts is None else (prompts[n].task, prompts[n].number)
            labels = {"method": method, "task": task, "prompt": number, "turn": turns[n] if turns else 0}
            first = dict.fromkeys(COLUMNS, 0) | {
                "committed": len(answer.tokens) - sum(step.committed for step in answer.steps),
                "text_tokens": retokenised(answer.tokens),
                "entropy": math.nan,
                "verify_s": answer.prefill_s,
                "total_s": answer.total_s - sum(step.total_s for step in answer.steps),
            }
            rows.append(first | labels)
            rows += [
                {"text_tokens": 0, "step": k} | vars(step) | labels for k, step in enumerate(answer.steps, start=1)
            ]
            names = spans(ids[n] if ids else [], answer.tokens)
            for row in rows[-1 - len(answer.steps) :]:
                # An engine can end an answer within its last step.
                row["span"] = names[min(row["position"], len(names) - 1)]
                row["context"] = row["position"] + (len(ids[n]) if ids else 0)
    return pd.DataFrame(rows, columns=[*COLUMNS]).astype(COLUMNS)


def ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else math.nan


def steps(rows: Rows) -> Rows:
    return rows[rows.step > 0]


def drafting(rows: Rows) -> Rows:
    """Return the steps that drafted. Prompt lookup without a match, for example, drafts nothing."""
    return rows[rows.depth > 0]


def mean_accepted_length(rows: Rows) -> float:
    """Return committed tokens / steps, bonus token included, after truncation by EOS or the length limit. Apart from
    the truncation it equals EAGLE's tau, Spec-Bench's "mean accepted tokens", Kangaroo's compression ratio, Medusa's
    acceleration rate, block efficiency, and SGLang's completion_tokens / verify_ct."""
    return float(steps(rows).committed.mean())


def mean_accepted_length_untruncated(rows: Rows) -> float:
    """Return (accepted drafts + the bonus token) / steps, before truncation: Spec-Bench's list of accept lengths."""
    return float(1 + steps(rows).accepted.mean())


def acceptance_per_depth(rows: Rows) -> list[float]:
    """Return P(draft i accepted | draft i-1 accepted, the tree is at least i deep), i = 1, 2, ..., as NeMo Automodel.
    In a sparse tree, a branch that ends before the deepest one counts as a rejection."""
    drafted = drafting(rows)
    reached = [drafted[(drafted.depth >= i) & (drafted.accepted >= i - 1)] for i in _depths(drafted)]
    return [float((group.accepted >= i).mean()) for i, group in enumerate(reached, start=1)]


def _depths(rows: Rows) -> range:
    return range(1, 1 + (rows.depth.max() if len(rows) else 0))


def accepted_by_depth(rows: Rows) -> list[int]:
    """Return the number of steps that accepted at least i drafts, for i = 1, 2, ... up to the deepest draft."""
    return [int((drafting(rows).accepted >= i).sum()) for i in _depths(rows)]


def alpha(rows: Rows) -> float | None:
    """Return Leviathan's alpha = E[sum_x min(p, q)] from chains: accepted drafts / drafts tried; None for trees. A
    draft is tried if the draft before it was accepted; untried drafts are not counted. For trees alpha is unknown,
    because their log does not record which sibling was accepted."""
    drafted = drafting(rows)
    if (drafted.proposed != drafted.depth).any():
        return None
    return ratio(drafted.accepted.sum(), np.minimum(drafted.accepted + 1, drafted.depth).sum())


def ctar(rows: Rows, widths: range) -> list[float]:
    """Return Kangaroo's consistent token acceptance rates: P(a step commits more than w tokens) by width w. The bonus
    token counts. Summed over all widths from 0, the rates are the mean accepted length."""
    return [float((steps(rows).committed > width).mean()) for width in widths]


def tokens_per_second(rows: Rows) -> float:
    return ratio(rows.committed.sum(), rows.total_s.sum())


def decode_tokens_per_second(rows: Rows) -> float:
    """Return the tokens that decoding steps committed, divided by the seconds after the prefill."""
    return ratio(steps(rows).committed.sum(), rows.total_s.sum() - rows.verify_s[rows.step == 0].sum())


def speedup(rows: Rows, baseline: Rows) -> float:
    return ratio(tokens_per_second(rows), tokens_per_second(baseline))


def by_question(rows: Rows, baseline: Rows) -> Rows:
    """Return tokens and seconds per question (all turns together), and the baseline's in columns named "base_..."."""
    totals = [
        each.groupby(QUESTION, sort=False)[["committed", "text_tokens", "total_s"]].sum() for each in (rows, baseline)
    ]
    return totals[0].join(totals[1].add_prefix("base_"), how="inner")


def speedup_interval(rows: Rows, baseline: Rows, seed: int = 0) -> tuple[float, float]:
    """Return the bounds of the 95 % bootstrap interval of :func:`speedup`; NaN with fewer than two questions. Both
    methods' answers to a question are drawn as a pair, because a slow prompt is slow for both. All turns of a
    conversation are drawn together."""

    def statistic(totals: np.ndarray) -> np.ndarray:  # of sums [..., 4] over questions
        tokens, seconds, base_tokens, base_s = np.moveaxis(totals, -1, 0)
        return np.asarray((tokens / seconds) / (base_tokens / base_s))

    columns = ["committed", "total_s", "base_committed", "base_total_s"]
    return bootstrap_interval(by_question(rows, baseline)[columns].to_numpy(), statistic, seed)


def spec_bench(rows: Rows, baseline: Rows) -> dict[str, float]:
    """Return the numbers that Spec-Bench's ``speed.py`` prints: ratios of means over questions, prefill included. Its
    scripts (2401.07851) count the method's committed tokens, but the baseline's by tokenising the decoded text again,
    without special tokens. Two of its faults are not imitated. It counts tokens after EOS, and gives a failed answer
    the time of the previous one."""
    questions = by_question(rows, baseline)
    rate = float((questions.committed / questions.total_s).mean())
    base_rate = float((questions.base_text_tokens / questions.base_total_s).mean())
    return {
        "mean_accepted_length": mean_accepted_length_untruncated(rows),
        "tokens_per_second": rate,
        "autoregressive_tokens_per_second": base_rate,
        "speedup": ratio(rate, base_rate),
    }


METRICS: dict[str, Callable[[Rows, Rows], float | list[float] | None]] = {
    "mean_accepted_length": lambda rows, _: mean_accepted_length(rows),
    "mean_accepted_length_untruncated": lambda rows, _: mean_accepted_length_untruncated(rows),
    # vLLM: steps without a draft do not count, which favours prompt lookup.
    "mean_accepted_length_if_drafted": lambda rows, _: mean_accepted_length_untruncated(drafting(rows)),
    # Without the bonus token: TriForce's avg_tokens, economize's mean_accepted.
    "mean_accepted_drafts": lambda rows, _: float(steps(rows).accepted.mean()),
    # SpecForge's offline simulated_acc_len, a_1 + a_1 a_2 + ...; the line above if all steps draft equally deep.
    "simulated_accepted_drafts": lambda rows, _: ratio(
        np.cumprod(np.nan_to_num(acceptance_per_depth(rows))).sum(), len(steps(rows)) > 0
    ),
    # flashspec, vLLM, TriForce: accepted drafts / drafted depth. A rejection leaves later drafts untried, yet they
    # count as drafted, so the rate falls with the depth at equal quality. It is not alpha.
    "acceptance_rate": lambda rows, _: ratio(rows.accepted.sum(), rows.depth.sum()),
    # vLLM's rate for trees: the useful share of the verified nodes.
    "node_efficiency": lambda rows, _: ratio(rows.accepted.sum(), rows.proposed.sum()),
    "alpha": lambda rows, _: alpha(rows),
    # EAGLE: acceptance when n features of the draft's input are predicted ones, which is depth n + 1 of a chain.
    "n_alpha": lambda rows, _: None if alpha(rows) is None else acceptance_per_depth(rows),
    "acceptance_per_depth": lambda rows, _: acceptance_per_depth(rows),
    # vLLM's unconditional rate, whose sum is the number of accepted drafts per drafting step.
    "acceptance_per_depth_of_all": lambda rows, _: [n / len(drafting(rows)) for n in accepted_by_depth(rows)],
    # Kangaroo's script counts the prefill as a step of one token, which dilutes the ratio.
    "compression_ratio_as_released": lambda rows, _: float(rows.committed.where(rows.step > 0, 1).mean()),
    # DSD's analyze_output.py averages per answer, without its first step, and then over the answers.
    "tar_as_analysed": lambda rows, _: float(
        1 + rows[rows.step > 1].groupby([*QUESTION, "turn"]).accepted.mean().mean()
    ),
    "ctar": lambda rows, _: ctar(rows, range(steps(rows).committed.max() if len(steps(rows)) else 0)),
    "tokens_per_second": lambda rows, _: tokens_per_second(rows),
    "decode_tokens_per_second": lambda rows, _: decode_tokens_per_second(rows),
    # Share of the steps' wall time spent neither drafting nor in the base.
    "loop_overhead": lambda rows, _: (
        1 - ratio(steps(rows)[["draft_s", "verify_s"]].sum().sum(), steps(rows).total_s.sum())
    ),
    # Medusa's overhead: the mean accepted length divided by it is the speedup of the steps.
    "step_overhead": lambda rows, base: ratio(steps(rows).total_s.mean(), steps(base).total_s.mean()),
    "speedup": lambda rows, base: speedup(rows, base),
    # Without the prefill, which drafts cannot speed up.
    "decode_speedup": lambda rows, base: ratio(decode_tokens_per_second(rows), decode_tokens_per_second(base)),
    "spec_bench_tokens_per_second": lambda rows, base: spec_bench(rows, base)["tokens_per_second"],
    "spec_bench_speedup": lambda rows, base: spec_bench(rows, base)["speedup"],
}
"""Metrics by their name in ``eval.json``, each in the convention of the papers or engines that report it: a function of
a method's rows and the baseline's rows."""
SYNONYMS = {
    "compression_ratio": "mean_accepted_length",  # Kangaroo's paper
    "acceleration_rate": "mean_accepted_length",  # Medusa
    "tar": "mean_accepted_length_untruncated",  # DSD, as its spec_decoding_demo.py counts
}
METRICS |= {name: METRICS[metric] for name, metric in SYNONYMS.items()}


Bin = dict[str, Any]
"""Acceptance of the steps whose binned quantity is in ["low", "high"); the last bin includes its "high".
"first_accepted" is the share of the bin's drafting steps that accepted a draft; NaN: nothing counted."""


def by_position(rows: Rows, width: int = 32) -> list[Bin]:
    """Return acceptance by the number of answer tokens before the step, in bins of ``width`` tokens; no empty bins."""
    last = rows.position.max() if len(rows) else -1
    return _binned(steps(rows), "position", [float(edge) for edge in range(0, last + 1 + width, width)])


def by_context(rows: Rows) -> list[Bin]:
    """Return acceptance by the number of tokens before the step (prompt included), in bins with edges ``CONTEXTS``."""
    return _binned(steps(rows), "context", [float(edge) for edge in CONTEXTS])


def by_span(rows: Rows) -> list[Bin]:
    """Return acceptance of the steps that begin in each "span" (thinking, answer, tool call). "tokens" is the number of
    tokens that these steps committed. There are no "low" and "high"."""
    groups = steps(rows).groupby("span", sort=False)
    return [{"span": name, "tokens": int(group.committed.sum()), **_acceptance(group)} for name, group in groups]


def by_entropy(rows: Rows, bins: int = 5) -> list[Bin]:
    """Return acceptance by the target's entropy (in nats) at a step's first token, in ``bins`` with equally many steps.
    Steps without an entropy (NaN) are left out. If several quantiles are equal, there are fewer bins."""
    known = rows[np.isfinite(rows.entropy)]
    if not len(known):
        return []
    edges = np.unique(np.quantile(known.entropy, np.linspace(0, 1, bins + 1))).tolist()
    return _binned(known, "entropy", edges if len(edges) > 1 else edges * 2)


def _binned(rows: Rows, key: str, edges: list[float]) -> list[Bin]:
    """Return acceptance in bins of the column ``key``, which ascending ``edges`` separate; empty bins are missing."""
    indices = np.minimum(np.searchsorted(edges, rows[key], side="right") - 1, len(edges) - 2)
    bins = rows.groupby(indices)
    return [{"low": edges[n], "high": edges[n + 1], **_acceptance(group)} for n, group in bins]


def _acceptance(group: Rows) -> Bin:
    return {
        "steps": len(group),
        "mean_accepted_length": mean_accepted_length(group),
        "first_accepted": float((drafting(group).accepted > 0).mean()),
    }
