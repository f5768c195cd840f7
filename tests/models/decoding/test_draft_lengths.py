"""Draft lengths by expected gain and measured cost."""

import pytest

from drafthead.models.decoding.draft_lengths import PAUSE, PLAIN, PROBED, DraftLengths
from support import cases


def learnt(cost: dict[int, float], drafting: float = 0.0) -> DraftLengths:
    """``cost``: seconds by tokens of a step; the fewest are those of a step without drafts."""
    lengths = DraftLengths()
    for _ in range(PROBED):
        for tokens, seconds in cost.items():
            lengths.record(min(cost), tokens, seconds)
    lengths.record_drafting(drafting)
    return lengths


@cases(
    "cost, rates, expected",
    ({1: 1.0, 4: 1.0}, [[0.5, 0.1, 0.1]], [3]),  # drafts cost nothing
    ({1: 1.0, 4: 4.0}, [[0.9, 0.9, 0.9]], [0]),  # a draft costs a whole step
    ({1: 1.0, 4: 1.6}, [[0.9, 0.1, 0.9]], [1]),  # 1.9 tokens in 1.2 s; the second adds 0.09 tokens for 0.2 s
    ({2: 1.0, 6: 1.6}, [[0.9, 0.8], [0.3, 0.9]], [2, 0]),
    ({2: 1.0, 6: 1.01}, [[0.9, 0.8], [0.3, 0.9]], [2, 2]),
)
def test_drafts_are_added_while_they_pay(cost: dict[int, float], rates: list[list[float]], expected: list[int]) -> None:
    assert learnt(cost).choose(rates) == expected


def test_times_are_joined_by_lines_and_never_fall() -> None:
    lengths = learnt({1: 1.0, 2: 1.5, 4: 2.5, 6: 2.0})
    assert lengths.seconds(1, 7) == pytest.approx([1.0, 1.5, 2.0, 2.5, 2.5, 2.5, 2.8, 3.1])


def test_steps_without_drafts_are_timed_apart() -> None:
    """Four requests with a draft each read as many tokens as eight without drafts, but take longer."""
    lengths = learnt({4: 1.0, 8: 3.0, 16: 4.0})
    for _ in range(PLAIN):
        assert lengths.choose([[0.9]] * 8) == [0] * 8, "steps without drafts are tried for this many requests"
        lengths.record(8, 8, 1.2)
    assert lengths.choose([[0.9]] * 8) == [0] * 8, "over three times as long for at most twice the tokens"
    assert lengths.seconds(8, 8) == pytest.approx([1.2 + 0.35 * n for n in range(9)])


def test_the_first_steps_try_several_lengths() -> None:
    lengths, tried = DraftLengths(), []
    for _ in range(6):
        tried.append(lengths.choose([[0.9] * 4]))
        lengths.record(1, 1 + tried[-1][0], 1.0)
    assert tried == [[4], [0], [2]] * 2


def test_drafting_that_does_not_pay_pauses_and_is_tried_again() -> None:
    lengths = learnt({1: 1.0, 2: 1.2}, drafting=0.5)
    assert lengths.drafts_now() and lengths.choose([[0.1]]) == [0]
    assert [lengths.drafts_now() for _ in range(PAUSE + 3)] == [False] * (PAUSE - 1) + [True] * 4
    lengths = learnt({1: 1.0, 2: 1.2}, drafting=0.1)
    assert lengths.choose([[0.9]]) == [1] and lengths.drafts_now()
