"""Leviathan's closed form (2211.17192): what a chain of k drafts buys when each is accepted with probability alpha.

Symbols as in the paper: alpha, the acceptance rate; c, a draft position's time in plain steps; k (its gamma), the
chain's length. Verifying k + 1 tokens counts as one plain step; ``eval/explain.py`` measures instead.
"""

import math

MOST_DRAFTS = 64


def expected_tokens(alpha: float, drafts: int) -> float:
    """Tokens a step commits: (1 - alpha^(k+1)) / (1 - alpha); k + 1 at alpha = 1."""
    _check(alpha, drafts)
    return drafts + 1.0 if alpha == 1 else (1 - alpha ** (drafts + 1)) / (1 - alpha)


def expected_speedup(alpha: float, draft_cost: float, drafts: int) -> float:
    """The walltime improvement (1 - alpha^(k+1)) / ((1 - alpha) (c k + 1))."""
    if not draft_cost >= 0 or math.isinf(draft_cost):
        raise ValueError(f"a draft's cost in plain steps must be >= 0, got {draft_cost}")
    return expected_tokens(alpha, drafts) / (draft_cost * drafts + 1)


def improves(alpha: float, draft_cost: float) -> bool:
    """Whether some chain is faster than plain decoding: alpha > c."""
    return alpha > draft_cost


def optimal_lookahead(alpha: float, draft_cost: float, most: int = MOST_DRAFTS) -> int:
    """The chain length of 1 to ``most`` with the highest expected speedup, the shortest of equals.

    Where :func:`improves` says no, that is 1, and still slower than plain decoding.
    """
    return max(range(1, most + 1), key=lambda drafts: expected_speedup(alpha, draft_cost, drafts))


def _check(alpha: float, drafts: int) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"an acceptance rate lies in [0, 1], got {alpha}")
    if drafts < 0:
        raise ValueError(f"a chain has 0 or more drafts, got {drafts}")
