"""Answers that repeat themselves, on which acceptance is higher than on others."""

from collections.abc import Sequence

LONGEST_PERIOD = 32  # tokens of a repeated pattern
REPEATS, LEAST_TOKENS = 4, 32
"""A loop repeats its pattern at least REPEATS times and has at least LEAST_TOKENS tokens."""


def is_degenerate(tokens: Sequence[int]) -> bool:
    """Return True if an answer has a loop, such as "a b a b a b ..."."""
    for period in range(1, LONGEST_PERIOD + 1):
        # A run of r tokens that equal the one a period before ends a repetition of r + period tokens.
        run, needed = 0, max(REPEATS * period, LEAST_TOKENS) - period
        for position in range(period, len(tokens)):
            run = run + 1 if tokens[position] == tokens[position - period] else 0
            if run >= needed:
                return True
    return False
