"""Sampling distributions from logits, for targets and drafters, by transformers' own warpers in transformers' order.

Shape legend: B rows, T tokens, V vocabulary.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from drafthead.settings.schema import BelowOne, NonNegative, PositiveFloat, PositiveShare, Share, Temperature, settings


@dataclass(frozen=True)
class Contexts:
    """The tokens of every row before those that are predicted: prompt and answer so far."""

    tokens: Tensor  # [B, T] int64; shorter rows are padded on the right by repeating one of their tokens
    lengths: Tensor  # [B] int64, without padding
    rows: list[int]  # each row's number in the first batch, which still had the rows that have ended since


class TargetSampler(Protocol):
    """The output's distribution: a ``Sampler``, or logits processors of transformers (``processed.py``)."""

    @property
    def temperature(self) -> float: ...

    @property
    def greedy(self) -> bool:
        """True if nothing is drawn."""

    @property
    def plain_greedy(self) -> bool:
        """True if every token is the argmax of the logits."""

    @property
    def reads_context(self) -> bool:
        """True if the distribution depends on the tokens so far, not only on the logits."""

    @property
    def coupled(self) -> bool:
        """True if tokens are drawn by races, whose random numbers drafters may know (``coupling.py``)."""

    def warp(self, scores: Tensor) -> Tensor:
        """Return scores [N, W] after temperature, top-p and so on, but without what depends on tokens."""

    def probs_after(self, logits: Tensor, contexts: Contexts | None) -> Tensor:
        """Return the distributions [B, V] of the tokens after ``contexts``, computed from ``logits`` [B, V]."""


@settings(frozen=True, kw_only=True)
class Sampler:
    """Sampling of a next token from logits. The defaults are greedy decoding."""

    temperature: Temperature = 0.0
    """Sampling temperature. 0 is greedy decoding."""
    top_k: NonNegative = 0
    """Sample from the k most likely tokens. 0 keeps all."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    min_p: Share = 0.0
    """Drop tokens less likely than this fraction of the most likely token's probability."""
    typical_p: PositiveShare = 1.0
    """Sample from the tokens whose surprise is closest to the entropy, up to this total probability (2202.00666)."""
    eta: BelowOne = 0.0
    """Drop tokens less likely than min(eta, sqrt(eta) exp(-entropy)) (2210.15191). 0 keeps all."""
    repetition_penalty: PositiveFloat | None = None
    """For tokens that already occur, divide positive logits by this number and multiply negative logits by it. 1
    changes nothing. With null, ``drafthead eval`` takes the value of the base's ``generation_config.json``, and other
    commands take 1."""
    coupled: bool = False
    """Let drafts know the random numbers by which the output is drawn, so that more of them are accepted. The
    distribution stays the same, but a seed gives another text. For the exact rule with ``top_k`` drafts;
    temperature 0 has no random numbers."""

    def __repr__(self) -> str:  # stored results are found by it, those of versions without ``coupled`` too
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.coupled:
            del shown["coupled"]
        return f"Sampler({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain_greedy(self) -> bool:
        """True if the token is the argmax of the logits, without a repetition penalty."""
        return self.greedy and not self.reads_context

    @property
    def reads_context(self) -> bool:
        return self.repetition_penalty not in (None, 1)

    def probs_after(self, logits: Tensor, contexts: Contexts | None) -> Tensor:
        return self.probs(logits, None if contexts is None else contexts.tokens)

    def warp(self, scores: Tensor) -> Tensor:
        for warper in _warpers(self):
            scores = warper(None, scores)
        return scores

    def probs(self, logits: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the distributions [B, V] of the next tokens; at temperature 0 one-hot at the first argmax. ``context``
        [B, T] int64 are the tokens so far, for the repetition penalty."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.repetition_penalty is not None and self.reads_context:
            if context is None:
                raise ValueError("a repetition penalty needs the tokens so far; give context")
            scores = logits_process.RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))(context, scores)
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return self.warp(scores).softmax(-1)


WARPERS = {key: key for key in ("temperature", "top_k", "top_p", "min_p", "typical_p")} | {"eta": "eta_cutoff"}
"""Our names -> transformers' names, for the settings that greedy decoding ignores."""


@settings(frozen=True, kw_only=True)
class OutputSampler:
    """Sampling as in ``generate`` of transformers: unset values are those of the base's ``generation_config.json``."""

    temperature: Temperature | None = None
    """Sampling temperature. 0 is greedy decoding. With null, the base's ``generation_config.json`` decides."""
    top_k: NonNegative | None = None
    """Sample from the k most likely tokens. 0 keeps all. With null, the base's value, else 50 as in transformers."""
    top_p: PositiveShare | None = None
    """Sample from the smallest set of tokens with this total probability. With null, the base's value."""
    min_p: Share | None = None
    """Drop tokens less likely than this fraction of the most likely one. With null, the base's value."""
    typical_p: PositiveShare | None = None
    """Sample from the tokens whose surprise is closest to the entropy, up to this total probability. With null, the
    base's value."""
    eta: BelowOne | None = None
    """Drop tokens less likely than min(eta, sqrt(eta) exp(-entropy)). With null, the base's value."""
    repetition_penalty: PositiveFloat | None = None
    """For tokens that already occur, divide positive logits by this number and multiply negative logits by it. With
    null, the base's value."""
    coupled: bool = False
    """Let drafts know the random numbers by which the output is drawn, so that more of them are accepted. The
    distribution stays the same, but a seed gives another text."""

    def arguments(self) -> dict[str, Any]:
        """Return the set values as arguments of ``generate``; at temperature 0, only ``do_sample`` and the penalty."""
        given = {WARPERS.get(k, k): value for k, value in vars(self).items() if value is not None and k != "coupled"}
        if self.temperature == 0:
            return {"do_sample": False} | {key: value for key, value in given.items() if key == "repetition_penalty"}
        return given | ({} if self.temperature is None else {"do_sample": True})


def with_own_penalty(sampler: Sampler, config: Any) -> Sampler:
    """Return ``sampler`` with the repetition penalty of generation config ``config``, unless ``sampler`` has one."""
    own: float | None = getattr(config, "repetition_penalty", None)
    unchanged = sampler.repetition_penalty is not None or own in (None, 1)
    return sampler if unchanged else replace(sampler, repetition_penalty=own)


HEAD = 1024  # number of likeliest tokens that ``FastTopP`` searches first; they contain nearly every nucleus


class FastTopP(logits_process.TopPLogitsWarper):  # type: ignore[misc]
    """Top-p without sorting a large vocabulary on a CPU, which would cost more than the base's forward pass."""

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        if scores.device.type != "cpu" or scores.shape[-1] <= 8 * HEAD:
            warped: Tensor = super().__call__(input_ids, scores)
            return warped
        values, ids = scores.topk(HEAD)
        probs = (values - scores.logsumexp(-1, keepdim=True)).exp()
        before = probs.cumsum(-1) - probs
        kept = values.masked_fill(before >= self.top_p, -torch.inf)
        nucleus = torch.full_like(scores, -torch.inf).scatter(-1, ids, kept)
        if (wide := before[:, -1] < self.top_p).any():
            nucleus[wide] = super().__call__(input_ids, scores[wide])
        return nucleus


@lru_cache(maxsize=64)
def _warpers(sampler: Sampler) -> LogitsProcessorList:
    """Return the warpers that change the distribution, in the order of transformers' ``generate``."""
    warpers: list[tuple[bool, Any, float]] = [
        (sampler.temperature != 1, logits_process.TemperatureLogitsWarper, float(sampler.temperature)),
        (sampler.top_k > 0, logits_process.TopKLogitsWarper, sampler.top_k),
        (sampler.top_p < 1, FastTopP, sampler.top_p),
        (sampler.min_p > 0, logits_process.MinPLogitsWarper, sampler.min_p),
        (sampler.typical_p < 1, logits_process.TypicalLogitsWarper, sampler.typical_p),
        (sampler.eta > 0, logits_process.EtaLogitsWarper, sampler.eta),
    ]
    with torch.inference_mode(False):  # a warper has a tensor, which must also work outside inference mode
        return LogitsProcessorList(kind(value) for wanted, kind, value in warpers if wanted)
