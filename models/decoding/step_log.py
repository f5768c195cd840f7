"""The record of a decoding run: one entry per step, and the result."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One draft-and-verify step of one sequence. Times in seconds."""

    position: int
    """Answer tokens committed before the step."""
    proposed: int
    """Drafted nodes, root excluded."""
    depth: int
    """Longest drafted path."""
    accepted: int
    """Drafts accepted by the rule, before truncation."""
    committed: int
    """Tokens committed: accepted + bonus, less what EOS or max_new_tokens cut off."""
    entropy: float = float("nan")
    """Nats: of the target's unwarped distribution of the step's first token."""
    draft_s: float
    verify_s: float
    total_s: float
    """The whole step; ``total_s - draft_s - verify_s`` is the loop's overhead."""


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """One decoded answer with the record of its steps. Times in seconds."""

    tokens: list[int]
    """Committed answer tokens, EOS included when reached."""
    steps: list[StepRecord]
    prefill_s: float
    """Reading the prompt; yields the first token, which belongs to no step."""
    total_s: float
