"""Export check: a written checkpoint is read back and must draft like the original head. The original and the reloaded
head draft along the same answers of the base. Their logits must be equal up to the rounding of the checkpoint's dtype,
and so must be their simulated mean accepted length. If the log of the training run is there, the checkpoint's top-1
accuracy must not be much lower than the logged one on held-out answers. The most common complaint about draft heads is
98 % accuracy in training and 10 % in use."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafthead.data.answers.store import Answer
from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.eval.trees import simulate
from drafthead.files.local import read_json_lines
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.simulation.ranks import WIDTH, answer_ranks
from drafthead.models.token_tree import TokenTree

LOGIT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted difference between logits, as a share of the largest logit. Rounding to bfloat16 changes a weight by
up to 2^-9 of its value, and these errors add up in matrix products and over layers."""
LENGTH_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest accepted difference of the mean accepted length: rounding may swap two almost equally likely candidates."""
POSITIONS = 16  # of the first answer at which logits are compared


@dataclass(frozen=True)
class DraftQuality:
    """Measurements of one head along the answers."""

    logits: Tensor  # [positions, K, draft vocabulary] float32, of one answer
    mean_accepted_length: float  # greedy, with the original head's tree, or a chain if it has none
    accuracy: float  # of the first draft; training logs it as `held_out_accept_1`
    error: float = 0.0  # standard error of `accuracy`, from the number of positions


@dataclass(frozen=True)
class ExportCheck:
    """Comparison of the original head with the exported one."""

    dtype: torch.dtype  # of the exported weights
    before: DraftQuality
    after: DraftQuality
    same_vocabulary: bool
    estimate: float | None  # of `accuracy`, on held-out answers at the end of training
    estimate_tolerance: float  # share of `estimate` by which the exported head's accuracy may be lower

    @property
    def logit_error(self) -> float:
        """Largest difference of the logits as a share of the largest logit; inf if shapes differ or logits are NaN."""
        before, after = self.before.logits, self.after.logits
        if before.shape != after.shape:
            return math.inf
        error = float((before - after).abs().max() / before.abs().max().clamp(min=1e-9))
        return error if math.isfinite(error) else math.inf

    def failures(self) -> list[str]:
        failures = [] if self.same_vocabulary else ["the draft vocabulary changed"]
        if self.logit_error > (limit := LOGIT_TOLERANCE[self.dtype]):
            failures.append(f"its logits differ by {self.logit_error:.2g} of the largest logit; the limit is {limit:g}")
        before, after = self.before.mean_accepted_length, self.after.mean_accepted_length
        # Written so that NaN fails.
        if not abs(before - after) <= (limit := LENGTH_TOLERANCE[self.dtype]):
            failures.append(
                f"its mean accepted length is {after:.3f}, the head's {before:.3f}; they may differ by {limit:g}"
            )
        lowest = (self.estimate or 0.0) * (1 - self.estimate_tolerance)
        if self.estimate is not None and not self.after.accuracy + 2 * self.after.error >= lowest:
            failures.append(
                f"its first draft position is right at {self.after.accuracy:.0%} of the positions; in training it was "
                f"right at {self.estimate:.0%} of held-out positions, and at least {lowest:.0%} is expected "
                f"(estimate_tolerance={self.estimate_tolerance:g}). Check it on texts like its training data "
                "(suite=..., texts=...) to see if the prompts are the cause"
            )
        return failures

    def record(self) -> dict[str, Any]:
        before, after = self.before, self.after
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "mean_accepted_length": {"head": before.mean_accepted_length, "exported": after.mean_accepted_length},
            "logit_error": self.logit_error,
            "first_position_accuracy": {"head": before.accuracy, "exported": after.accuracy, "training": self.estimate},
        }


def as_exported(head: DraftHead) -> DraftHead:
    """Return a head that drafts with ``head``'s exported weights, not with their bfloat16 or int8 copies."""
    if head.config.inference_dtype(head.base) is None:
        return head
    d2t = None if len(head.d2t) == head.base.vocab_size else head.d2t
    copy = replace(head.config, draft_dtype=None).build(head.base, d2t, start=False)
    copy.load_state_dict(head.state_dict())
    return copy.eval()


def check_export(
    original: DraftHead,
    reloaded: DraftHead,
    texts: Sequence[Answer],
    dtype: torch.dtype,
    estimate: float | None = None,
    estimate_tolerance: float = 0.5,
    states: Sequence[HiddenStates] | None = None,
) -> ExportCheck:
    """Draft with both heads along ``texts``, which must be greedy answers of their base, and compare the heads. Their
    hidden ``states`` are computed if they are None, for which the base needs its layers."""
    tree = original.tree or TokenTree.chain(original.depth)
    before, after = (_quality(as_exported(head), texts, states, tree) for head in (original, reloaded))
    same_vocabulary = torch.equal(original.d2t, reloaded.d2t)
    return ExportCheck(dtype, before, after, same_vocabulary, estimate, estimate_tolerance)


def training_estimate(head: str | Path) -> float | None:
    """Return the first draft position's last held-out accuracy in the log next to the head's folder."""
    rows = read_json_lines(Path(head).parent / "metrics.jsonl") if Path(head).is_dir() else []
    accuracies = [row["held_out_accept_1"] for row in rows if row.get("held_out_accept_1") is not None]
    return float(accuracies[-1]) if accuracies else None


@torch.inference_mode()
def _quality(
    head: DraftHead, texts: Sequence[Answer], states: Sequence[HiddenStates] | None, tree: TokenTree
) -> DraftQuality:
    device = head.base.device
    number, text = next((n, text) for n, text in enumerate(texts) if text.positions)
    if states is None:
        base, greedy = head.base_model, Sampler(temperature=0.0)
        probs = simulate.text_accept_probs(base, head, texts, greedy, simulate.AcceptProbsConfig())
        first = simulate.read_hidden_states(base, head, text)
    else:
        batches = [TrainBatch.of([text.ids], text.boundary).to(device) for text in texts]
        ranks = [r for batch, given in zip(batches, states, strict=True) for r in answer_ranks(head, batch, given)]
        probs, first = [accept_probs_of_ranks(each, WIDTH) for each in ranks], states[number]
    steps = islice(simulate.positions(head, [text], [first], device), POSITIONS)
    right = np.concatenate([answer[:, 0, 0] for answer in probs])
    logits = [torch.cat(simulate.forced_logits(session, last, [text], t, head.depth)) for _, session, last, t in steps]
    return DraftQuality(
        logits=torch.stack(logits),
        mean_accepted_length=simulate_acceptance(probs, tree).mean_accepted_length,
        accuracy=float(np.nanmean(right)),
        error=float(np.nanstd(right) / np.sqrt(np.count_nonzero(~np.isnan(right)))),
    )
