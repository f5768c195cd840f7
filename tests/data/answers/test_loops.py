"""Answers that repeat themselves."""

import pytest

from drafthead.data.answers.loops import is_degenerate
from support import random_ids


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([7, 8] * 16, True),
        ([*random_ids(50), *[5] * 32, *random_ids(20, 1)], True),
        ([*random_ids(40), *random_ids(30, 1) * 4], True),
        ([*random_ids(40), *random_ids(30, 1) * 3], False),
        ([5] * 31, False),
        ([7, 8] * 15, False),
        (random_ids(300), False),
        ([], False),
    ],
)
def test_four_repetitions_of_32_tokens(tokens: list[int], looping: bool) -> None:
    assert is_degenerate(tokens) is looping
