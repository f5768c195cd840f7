"""Export check: a written checkpoint is read back and must draft like the original head.

Two heads, the original and the reloaded one, draft along the same answers of the base. Their logits must be equal up to
the rounding of the checkpoint's dtype, and simulated decoding must accept as many tokens. If the head's run left an
estimate from training (top-1 accuracy on held-out answers), the checkpoint must come near it too. A head that scores 98
% in training and 10 % in use is the most common complaint about draft heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafthead.data.utils.files import read_json_lines
from drafthead.eval.trees.answers import (
    AcceptProbsConfig,
    FinishedAnswer,
    forced_logits,
    positions,
    read_hidden_states,
    text_accept_probs,
)
from drafthead.eval.trees.simulate import simulate_acceptance
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.token_tree import TokenTree

LOGIT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of two logits, as a share of the largest logit. Rounding a weight to bfloat16 changes it by up to
2^-9 of its value, and the errors of products and layers add up.
"""
LENGTH_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest difference of the mean accepted length: rounding may swap two candidates that are nearly as likely."""
POSITIONS = 16
"""Positions of the first answer at which logits are compared."""


@dataclass(frozen=True)
class DraftQuality:
    """Measurements of one head along the answers."""

    logits: Tensor
    """[n, K, W] float32."""
    mean_accepted_length: float
    """Mean accepted length, bonus token included, greedily with the head's own tree (a chain without one)."""
    accuracy: float
    """Share of positions at which the first draft is right: ``held_out_accept_1`` of training."""


@dataclass(frozen=True)
class ExportCheck:
    """The original head against the exported one."""

    dtype: torch.dtype
    before: DraftQuality
    after: DraftQuality
    same_vocabulary: bool
    estimate: float | None
    """The first head's accuracy on held-out answers at the end of training; None if the head's run has no log."""
    estimate_tolerance: float

    @property
    def logit_error(self) -> float:
        """Largest difference of the logits as a share of the largest logit; infinite if they cannot be compared."""
        before, after = self.before.logits, self.after.logits
        if before.shape != after.shape:
            return math.inf
        error = float((before - after).abs().max() / before.abs().max().clamp(min=1e-9))
        return error if math.isfinite(error) else math.inf

    def failures(self) -> list[str]:
        """Return the reasons why the checkpoint must not be used; empty if it may be."""
        failures = [] if self.same_vocabulary else ["the draft vocabulary changed"]
        if self.logit_error > (limit := LOGIT_TOLERANCE[self.dtype]):
            failures.append(f"its logits differ by {self.logit_error:.2g} of the largest one, the limit is {limit:g}")
        before, after = self.before.mean_accepted_length, self.after.mean_accepted_length
        # Written so that NaN fails.
        if not abs(before - after) <= (limit := LENGTH_TOLERANCE[self.dtype]):
            failures.append(f"its mean accepted length is {after:.3f}, the head's {before:.3f}; the limit is {limit:g}")
        if self.estimate is not None and not self.after.accuracy >= self.estimate - self.estimate_tolerance:
            failures.append(
                f"its first draft position is right at {self.after.accuracy:.0%} of the positions, in training "
                f"{self.estimate:.0%} of held-out ones; the limit is {self.estimate_tolerance:.0%} less. Texts of the "
                "kind that it was trained on (suite=..., texts=...) tell whether the head or the prompts are to blame"
            )
        return failures

    def record(self) -> dict[str, Any]:
        """Return the figures for the checkpoint's folder."""
        before, after = self.before, self.after
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "mean_accepted_length": {"head": before.mean_accepted_length, "exported": after.mean_accepted_length},
            "logit_error": self.logit_error,
            "first_position_accuracy": {"head": before.accuracy, "exported": after.accuracy, "training": self.estimate},
        }


def check_export(
    base: BaseModel,
    original: DraftHead,
    reloaded: DraftHead,
    texts: Sequence[FinishedAnswer],
    dtype: torch.dtype,
    estimate: float | None = None,
    estimate_tolerance: float = 0.2,
) -> ExportCheck:
    """Draft with both heads along ``texts``, greedy answers of ``base``, and compare."""
    tree = original.tree or TokenTree.chain(original.depth)
    before, after = (_quality(base, head, texts, tree) for head in (original, reloaded))
    same_vocabulary = torch.equal(original.d2t, reloaded.d2t)
    return ExportCheck(dtype, before, after, same_vocabulary, estimate, estimate_tolerance)


def training_estimate(head: str | Path) -> float | None:
    """Return the first head's accuracy on held-out answers from the log of the run that contains the head's folder."""
    rows = read_json_lines(Path(head).parent / "metrics.jsonl") if Path(head).is_dir() else []
    accuracies = [row["held_out_accept_1"] for row in rows if row.get("held_out_accept_1") is not None]
    return float(accuracies[-1]) if accuracies else None


@torch.inference_mode()
def _quality(base: BaseModel, head: DraftHead, texts: Sequence[FinishedAnswer], tree: TokenTree) -> DraftQuality:
    probs = text_accept_probs(base, head, texts, Sampler(temperature=0.0), AcceptProbsConfig())
    text = next(text for text in texts if text.positions)
    steps = islice(positions(head, [text], read_hidden_states(base, head, [text]), base.device), POSITIONS)
    logits = [torch.cat(forced_logits(session, last, [text], t, head.depth)) for _, session, last, t in steps]
    return DraftQuality(
        logits=torch.stack(logits),
        mean_accepted_length=simulate_acceptance(probs, tree).mean_accepted_length,
        accuracy=float(np.nanmean(np.concatenate([answer[:, 0, 0] for answer in probs]))),
    )
