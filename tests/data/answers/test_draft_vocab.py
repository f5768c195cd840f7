"""The draft vocabulary: the most frequent ids, and what must never be missing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.answers.draft_vocab import draft_vocabulary
from support import refuses

COUNTS = np.array([5, 0, 9, 1, 5, 0])


def test_frequent_first_then_lower_id() -> None:
    assert draft_vocabulary(COUNTS, 2, []).tolist() == [0, 2]
    assert draft_vocabulary(COUNTS, 3, [5]).tolist() == [0, 2, 5]


def test_unseen_ids_do_not_fill_up() -> None:
    counts = np.concatenate([COUNTS, np.zeros(30, int)])
    counts[20:34] = 2
    assert draft_vocabulary(counts, 36, [1]).tolist() == [0, 1, 2, 3, 4, *range(20, 34)]


def test_a_base_that_repeats_itself_gives_a_vocabulary_that_an_export_can_state() -> None:
    assert draft_vocabulary(np.array([0] * 40 + [7]), 32, []).tolist() == [*range(15), 40]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_no_better_choice(counts: list[int], data: st.DataObject) -> None:
    values = np.array(counts)
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    ids = draft_vocabulary(values, size, always)
    assert ids.dtype == np.int64 and (np.diff(ids) > 0).all() and always <= set(ids.tolist()) and len(ids) <= size
    left = set(range(len(counts))) - set(ids.tolist())
    chosen = [values[i] for i in ids if i not in always]
    if len(ids) < size:
        assert all(values[i] == 0 for i in left)
    elif chosen:
        assert max((values[i] for i in left), default=0) <= min(chosen)


def test_ids_that_must_be_kept_need_room() -> None:
    refuses("cannot hold the 2", draft_vocabulary, COUNTS, 1, [1, 2])
