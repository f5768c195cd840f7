"""The cost of tuning a base: its perplexity and greedy match rate compared with the original base, and their limits.
Both models read the same held-out tokens (teacher forcing). The greedy match rate is the share of positions with the
same top-1 token.
Shape legend: n tokens, V vocabulary."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.losses import chunk_rows
from drafthead.settings.schema import PositiveFloat, Share, settings
from drafthead.system.devices import wide


@settings(kw_only=True)
class QualityLimits:
    """Limits that a tuned base must keep on every kind of held-out tokens; null turns a limit off."""

    max_perplexity_ratio: PositiveFloat | None = None
    """Largest perplexity of the tuned base, divided by that of the original base. The run fails above it. Null turns
    the limit off."""
    min_greedy_match_rate: Share | None = None
    """Smallest share of tokens at which tuned and original base have the same top-1. The run fails below it. Null turns
    the limit off."""


@dataclass(frozen=True, kw_only=True)
class BaseComparison:
    """A tuned base compared with the original base, on one kind of held-out tokens."""

    tokens: int
    original_perplexity: float
    tuned_perplexity: float
    greedy_match_rate: float
    kl: float  # KL(original || tuned), in nats per token

    @property
    def perplexity_ratio(self) -> float:
        return self.tuned_perplexity / self.original_perplexity


@torch.no_grad()
def compare_bases(original: BaseModel, tuned: BaseModel, batches: Iterable[TrainBatch]) -> BaseComparison:
    """Compare both bases' predictions of the tokens that ``loss_mask`` marks in ``batches`` of packed rows."""
    total = torch.zeros(5, dtype=torch.float64)
    for batch in batches:
        ids, valid = (chunk.to(tuned.device) for chunk in batch.next_tokens(0))
        before, after = (base.hidden_states(batch, HiddenStatesSpec()).final[valid] for base in (original, tuned))
        targets = ids[valid]
        rows = chunk_rows(tuned.vocab_size, tuned.device.type)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            total += _sums(original.logits(before[chunk]), tuned.logits(after[chunk]), targets[chunk]).cpu()
    tokens, before_nll, after_nll, matches, kl = total.tolist()
    if not tokens:
        raise UserError("there are no held-out tokens to compare the tuned base on; use longer texts or more prompts")
    return BaseComparison(
        tokens=int(tokens),
        original_perplexity=exp(before_nll / tokens),
        tuned_perplexity=exp(after_nll / tokens),
        greedy_match_rate=matches / tokens,
        kl=kl / tokens,
    )


def _sums(original_nV: Tensor, tuned_nV: Tensor, targets_n: Tensor) -> Tensor:
    """Return sums over n tokens, [5] float64: their number, both negative log-likelihoods, greedy matches, KL."""
    before, after = original_nV.float().log_softmax(-1), tuned_nV.float().log_softmax(-1)
    nll = [-wide(dist.gather(1, targets_n[:, None])).sum() for dist in (before, after)]
    matches = wide(before.argmax(-1) == after.argmax(-1)).sum()
    kl = wide(before.exp() * (before - after)).sum()
    return torch.stack([matches.new_tensor(len(targets_n)), *nll, matches, kl])


def check_quality(comparisons: dict[str, BaseComparison], limits: QualityLimits) -> dict[str, Any]:
    """Check comparisons by kind of held-out tokens, such as "text", against ``limits``; return ``quality.json``."""
    failures = []
    for kind, row in comparisons.items():
        ratio, least = limits.max_perplexity_ratio, limits.min_greedy_match_rate
        # Written so that NaN fails.
        if ratio is not None and not row.perplexity_ratio <= ratio:
            failures.append(
                f"perplexity on {kind} went from {row.original_perplexity:.3f} to "
                f"{row.tuned_perplexity:.3f}, a ratio of {row.perplexity_ratio:.4f} (limit {ratio:g})"
            )
        if least is not None and not row.greedy_match_rate >= least:
            failures.append(f"greedy match rate on {kind} is {row.greedy_match_rate:.4f} (limit {least:g})")
    held_out = {kind: {**asdict(row), "perplexity_ratio": row.perplexity_ratio} for kind, row in comparisons.items()}
    return {"passed": not failures, "failures": failures, "limits": asdict(limits), "held_out": held_out}


def quality_line(quality: dict[str, Any]) -> str:
    """Return a line about ``quality``, the result of ``check_quality``: the exceeded limits, or else all limits."""
    if quality["failures"]:
        return f"quality limits exceeded: {'; '.join(quality['failures'])}"
    ratio, match_rate = quality["limits"]["max_perplexity_ratio"], quality["limits"]["min_greedy_match_rate"]
    limits = [] if ratio is None else [f"ratio at most {ratio:g}"]
    limits += [] if match_rate is None else [f"same top-1 at least {100 * match_rate:g} %"]
    return f"within the quality limits ({', '.join(limits)})" if limits else "the recipe sets no quality limits"
