"""The export gate: a written artefact is read back and must draft like the head that it came from.

Two heads, the original and the reloaded one, are led along the same plain answers of the base. Their logits must be
equal up to the rounding of the artefact's dtype, and replayed decoding must accept as many tokens a step. Where the
head's run left an estimate from training (top-1 accuracy on held-out answers), the artefact must come near that, too:
a head that scores 98 % in training and 10 % in use is the commonest complaint about draft heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafthead.data.utils.files import read_json_lines
from drafthead.eval.trees.simulate import replay
from drafthead.eval.trees.simulate_texts import ChancePlan, text_chances
from drafthead.eval.trees.texts import Text, positions, read_features
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import DraftConfig
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.token_tree import TokenTree

LOGIT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of two logits, as a share of the largest logit. Rounding a weight to bfloat16 moves it by up to
2^-9 of itself; products and several layers add up."""
ACCEPTANCE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest difference of the mean accepted tokens a step: rounding may swap two candidates that are nearly as likely."""
POSITIONS = 16
"""Places of the first text at which logits are compared."""


@dataclass(frozen=True)
class Drafting:
    """What one head does along the texts."""

    logits: Tensor
    """[n, K, W] float32."""
    mean_accepted_tokens: float
    """Tokens a step, bonus included, with the head's own tree (a chain without one), greedily."""
    accuracy: float
    """Share of positions whose next-but-one token is the first head's likeliest: ``held_out_accept_1`` of training."""


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """Original against artefact."""

    dtype: torch.dtype
    before: Drafting
    after: Drafting
    same_vocabulary: bool
    estimate: float | None
    """The first head's accuracy on held-out answers at the end of training; None when the head's run has no log."""
    estimate_tolerance: float

    @property
    def logit_error(self) -> float:
        """Largest difference of the logits as a share of the largest; infinite where they are not comparable."""
        before, after = self.before.logits, self.after.logits
        if before.shape != after.shape:
            return math.inf
        found = float((before - after).abs().max() / before.abs().max().clamp(min=1e-9))
        return found if math.isfinite(found) else math.inf

    def failures(self) -> list[str]:
        """Why the artefact must not be used; empty when it may."""
        found = []
        if not self.same_vocabulary:
            found.append("the draft vocabulary changed")
        if self.logit_error > (limit := LOGIT_TOLERANCE[self.dtype]):
            found.append(f"its logits differ by {self.logit_error:.2g} of the largest one, the limit is {limit:g}")
        before, after = self.before.mean_accepted_tokens, self.after.mean_accepted_tokens
        # Written so that NaN fails.
        if not abs(before - after) <= (limit := ACCEPTANCE_TOLERANCE[self.dtype]):
            found.append(f"it accepts {after:.3f} tokens a step, the head {before:.3f}; the limit is {limit:g}")
        if self.estimate is not None and not self.after.accuracy >= self.estimate - self.estimate_tolerance:
            found.append(
                f"its first draft position is right at {self.after.accuracy:.0%} of the positions, in training "
                f"{self.estimate:.0%} of held-out ones; the limit is {self.estimate_tolerance:.0%} less. Texts of the "
                "kind that it was trained on (suite=..., texts=...) tell whether the head or the prompts are to blame"
            )
        return found


def run_gate(
    base: BaseModel,
    original: DraftHead,
    reloaded: DraftHead,
    texts: Sequence[Text],
    dtype: torch.dtype,
    estimate: float | None = None,
    estimate_tolerance: float = 0.2,
) -> GateResult:
    """Lead both heads along ``texts`` (plain greedy answers of ``base``).

    Raises:
        UserError: the texts are no greedy answers of the base, or hold no step.
    """
    return GateResult(
        dtype=dtype,
        before=drafting(base, original, texts, original.tree),
        after=drafting(base, reloaded, texts, original.tree),
        same_vocabulary=torch.equal(original.d2t, reloaded.d2t),
        estimate=estimate,
        estimate_tolerance=estimate_tolerance,
    )


def drafting(base: BaseModel, head: DraftHead, texts: Sequence[Text], tree: TokenTree | None) -> Drafting:
    """What ``head`` does along the texts, with ``tree`` or a chain of all its positions."""
    tree = tree or TokenTree.chain(head.depth)
    chances = text_chances(base, head, texts, Sampler(temperature=0.0), ChancePlan())
    first = np.concatenate([answer[:, 0, 0] for answer in chances])
    return Drafting(
        logits=_logits_along(base, head, next(text for text in texts if text.positions)),
        mean_accepted_tokens=replay(chances, tree).mean_accepted_tokens,
        accuracy=float(np.nanmean(first)),
    )


def training_estimate(head: str | Path) -> float | None:
    """The first head's accuracy on held-out answers, from the log of the run that holds the head's folder."""
    log = Path(head).parent / "metrics.jsonl"
    rows = read_json_lines(log) if Path(head).is_dir() else []
    found = [row["held_out_accept_1"] for row in rows if row.get("held_out_accept_1") is not None]
    return float(found[-1]) if found else None


@torch.inference_mode()
def _logits_along(base: BaseModel, head: DraftHead, text: Text) -> Tensor:
    """The draft logits [n, K, W] at the first places of a text, after the text's own tokens."""
    draft_config = DraftConfig(tree=TokenTree.chain(head.depth))
    found = []
    for _, state, last, t in positions(head, [text], read_features(base, head, [text]), base.device):
        if t == POSITIONS:
            break
        draft_pass = head.start(state, last, draft_config)
        levels = [draft_pass.root()[0, 0]]
        for k in range(1, head.depth):
            token = text.ids[min(text.boundary + t + k, len(text.ids) - 1)]
            tokens = torch.full((1, 1), token, device=base.device)
            levels.append(draft_pass.step(tokens, torch.zeros_like(tokens))[0, 0])
        found.append(torch.stack(levels).float())
    return torch.stack(found)
