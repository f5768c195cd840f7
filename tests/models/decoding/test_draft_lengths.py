"""Draft lengths by expected gain and measured cost."""

import pytest

from drafthead.models.decoding.draft_lengths import KEPT, PAUSE, PLAIN, PLAIN_EVERY, PROBED, DraftLengths
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


def test_times_lie_on_a_line_corrected_where_they_are_known() -> None:
    lengths = learnt({1: 1.0, 3: 2.0, 5: 3.0})  # 0.5 s a draft
    assert lengths.seconds(1, 6) == pytest.approx([1 + 0.5 * n for n in range(7)])
    for _ in range(KEPT):
        lengths.record(1, 5, 2.0)  # a stair, as many times as are kept
    # A line of 0.5 s a draft, corrected by -8/11 of 1 s at 5 tokens, and by half of it at 4.
    corrected = [1, 1.5, 2, 2.5 - 4 / 11, 3 - 8 / 11, 3.5 - 8 / 11]
    assert lengths.seconds(1, 5) == pytest.approx(corrected)
    assert learnt({1: 1.0, 2: 0.5}).seconds(1, 2) == [1.0, 1.0, 1.0]


def test_one_slow_step_changes_little() -> None:
    lengths = learnt({1: 1.0, 5: 1.4})
    lengths.record(1, 3, 1.8)
    assert lengths.seconds(1, 4) == pytest.approx([1.0, 1.175, 1.35, 1.375, 1.4])


def test_steps_without_drafts_are_timed_apart() -> None:
    """Four requests with a draft each read as many tokens as eight without drafts, but take longer."""
    lengths = learnt({4: 1.0, 8: 3.0, 16: 7.0})
    for _ in range(PLAIN):
        assert lengths.choose([[0.9]] * 8) == [0] * 8, "steps without drafts are tried for this many requests"
        lengths.record(8, 8, 1.2)
    assert lengths.choose([[0.9]] * 8) == [0] * 8, "over three times as long for at most twice the tokens"
    assert lengths.seconds(8, 0) == [pytest.approx(1.2)]


def test_steps_without_drafts_are_timed_again_from_time_to_time() -> None:
    lengths = learnt({1: 1.0, 5: 1.1})
    counts = []
    for _ in range(2 * PLAIN_EVERY + 2):
        (count,) = lengths.choose([[0.9] * 4])
        counts.append(count)
        lengths.record(1, 1 + count, 1.1 if count else 1.0)
    assert counts.count(0) == 2 and counts.count(4) == len(counts) - 2


def test_the_first_steps_try_several_lengths() -> None:
    lengths, tried = DraftLengths(), []
    for _ in range(6):
        tried.append(lengths.choose([[0.9] * 4]))
        lengths.record(1, 1 + tried[-1][0], 1.0)
    assert tried == [[0], [4], [2]] * 2


def test_drafting_that_does_not_pay_pauses_and_is_tried_again_ever_more_rarely() -> None:
    lengths, pauses = learnt({1: 1.0, 2: 1.2}, drafting=0.3), []
    for _ in range(3):
        while lengths.drafts_now():
            tried = lengths.choose([[0.1] * 4])
        assert tried == [0]
        pauses.append(1)
        while lengths.is_paused:
            assert not lengths.drafts_now()
            pauses[-1] += 1
        assert lengths.drafts_now() and lengths.choose([[0.1] * 4]) == [1], "a quarter of the drafts is tried"
    assert pauses == [PAUSE - 1, 2 * PAUSE - 1, 4 * PAUSE - 1]
    lengths = learnt({1: 1.0, 2: 1.2}, drafting=0.1)
    for _ in range(100):
        assert lengths.drafts_now() and lengths.choose([[0.9]]) == [1]
