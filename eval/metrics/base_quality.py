"""What tuning a base cost it: perplexity and greedy agreement with the untouched one on held-out tokens, and a gate.

Both models read the same tokens (teacher forcing). Agreement is the share of positions at which their likeliest next
tokens are the same: what of a greedy answer stays as it was, token by token.

Shape legend: n tokens, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import exp
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from drafthead.data.batch import FeatureSpec, TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.common.losses import chunk_rows


@dataclass(kw_only=True)
class GateConfig:
    """Limits that a tuned base must keep on every kind of held-out tokens; None is no limit."""

    max_perplexity_ratio: float | None = None
    """Tuned over untouched."""
    min_agreement: float | None = None
    """Share of tokens with the same top-1, tuned and untouched."""

    def __post_init__(self) -> None:
        if self.max_perplexity_ratio is not None and self.max_perplexity_ratio <= 0:
            raise ValueError(f"quality_limits.max_perplexity_ratio must be above 0, got {self.max_perplexity_ratio}")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise ValueError(f"quality_limits.min_agreement must be in [0, 1], got {self.min_agreement}")


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """A tuned base beside the untouched one, on one kind of tokens."""

    tokens: int
    untouched_perplexity: float
    tuned_perplexity: float
    greedy_match_rate: float
    """Share of tokens at which both have the same top-1."""
    kl: float
    """Nats a token from the untouched law to the tuned one."""

    @property
    def perplexity_ratio(self) -> float:
        """Tuned over untouched; 1 is unchanged."""
        return self.tuned_perplexity / self.untouched_perplexity


@torch.no_grad()
def compare_bases(untouched: BaseModel, tuned: BaseModel, batches: Iterable[TrainBatch]) -> Fidelity:
    """Both models over the trained tokens of packed rows (targets at which ``loss_mask`` is set).

    Raises:
        UserError: there are no such tokens.
    """
    total = torch.zeros(5, dtype=torch.float64)
    for batch in batches:
        ids, valid = batch.draft_targets(0)
        ids, valid = ids.to(tuned.device), valid.to(tuned.device)
        before, after = (base.features(batch, FeatureSpec()).final[valid] for base in (untouched, tuned))
        wanted = ids[valid]
        rows = chunk_rows(tuned.vocab_size, tuned.device.type)
        for start in range(0, len(wanted), rows):
            part = slice(start, start + rows)
            total += _sums(untouched.logits(before[part]), tuned.logits(after[part]), wanted[part]).cpu()
    tokens, before_nll, after_nll, agreed, kl = total.tolist()
    if not tokens:
        raise UserError("there are no held-out tokens to compare the tuned base on; use longer texts or more prompts")
    return Fidelity(
        tokens=int(tokens),
        untouched_perplexity=exp(before_nll / tokens),
        tuned_perplexity=exp(after_nll / tokens),
        greedy_match_rate=agreed / tokens,
        kl=kl / tokens,
    )


def _sums(untouched_nV: Tensor, tuned_nV: Tensor, wanted_n: Tensor) -> Tensor:
    """[5] float64: tokens, both negative log-likelihoods, agreements, KL."""
    before, after = untouched_nV.float().log_softmax(-1), tuned_nV.float().log_softmax(-1)
    nll = [-dist.gather(1, wanted_n[:, None]).double().sum() for dist in (before, after)]
    agreed = (before.argmax(-1) == after.argmax(-1)).double().sum()
    kl = (before.exp() * (before - after)).double().sum()
    return torch.stack([agreed.new_tensor(len(wanted_n)), *nll, agreed, kl])


def judge(found: dict[str, Fidelity], limits: GateConfig) -> dict[str, Any]:
    """The comparison and the gate's verdict as plain values: ``quality.json``.

    Args:
        found: by kind of tokens.
        limits: of the recipe.
    """
    failures = []
    for kind, fidelity in found.items():
        ratio, least = limits.max_perplexity_ratio, limits.min_agreement
        if ratio is not None and not fidelity.perplexity_ratio <= ratio:
            failures.append(
                f"perplexity on {kind} went from {fidelity.untouched_perplexity:.3f} to "
                f"{fidelity.tuned_perplexity:.3f}, a ratio of {fidelity.perplexity_ratio:.4f} (limit {ratio:g})"
            )
        if least is not None and not fidelity.greedy_match_rate >= least:
            failures.append(f"greedy agreement on {kind} is {fidelity.greedy_match_rate:.4f} (limit {least:g})")
    held_out = {kind: {**asdict(f), "perplexity_ratio": f.perplexity_ratio} for kind, f in found.items()}
    return {"passed": not failures, "failures": failures, "limits": asdict(limits), "held_out": held_out}


def verdict(quality: dict[str, Any]) -> str:
    """What the gate says to ``quality.json``: passed and its limits, or which of them failed, or that it has none."""
    if quality["failures"]:
        return f"gate failed: {'; '.join(quality['failures'])}"
    ratio, greedy_match_rate = quality["limits"]["max_perplexity_ratio"], quality["limits"]["min_agreement"]
    limits = [] if ratio is None else [f"ratio at most {ratio:g}"]
    limits += [] if greedy_match_rate is None else [f"same top-1 at least {100 * greedy_match_rate:g} %"]
    return f"gate passed (limits: {', '.join(limits)})" if limits else "no gate: the recipe sets no limit"


def quality_table(quality: dict[str, Any]) -> Table:
    """``quality.json`` for a console, and below it what the gate says."""
    table = Table(
        title="the tuned base beside the untouched one, on held-out tokens",
        title_justify="left",
        caption=verdict(quality),
        caption_justify="left",
        box=None,
    )
    for number, column in enumerate(("", "tokens", "perplexity before", "after", "ratio", "same top-1", "KL")):
        table.add_column(column, justify="right" if number else "left")
    for kind, row in quality["held_out"].items():
        table.add_row(kind, *_cells(row))
    return table


def quality_markdown(quality: dict[str, Any]) -> str:
    """The same for a model card."""
    lines = [
        "The base was tuned along with the heads. Beside the untouched one, on held-out tokens:",
        "",
        "| | tokens | perplexity before | after | ratio | same top-1 | KL |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [f"| {kind} | {' | '.join(_cells(row))} |" for kind, row in quality["held_out"].items()]
    said = verdict(quality)
    lines += ["", f"{said[0].upper()}{said[1:]}."]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['tokens']:,}",
        f"{row['untouched_perplexity']:.3f}",
        f"{row['tuned_perplexity']:.3f}",
        f"{row['perplexity_ratio']:.4f}",
        f"{100 * row['greedy_match_rate']:.2f} %",
        f"{row['kl']:.4f}",
    ]
