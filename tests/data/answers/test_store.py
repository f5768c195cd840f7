"""The answer store: every answer exactly once, whenever the writer is killed; and the draft vocabulary of answers."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.answers import store as answers
from drafthead.data.answers.draft_vocab import draft_vocabulary
from drafthead.data.answers.store import Answer, AnswerStore
from drafthead.errors import UserError
from support import refuses

MADE_BY = {"base": "tiny", "sampler": {"temperature": 0.0}}


def make_answer(number: int, with_states: bool = True) -> Answer:
    """Return an answer that its number determines."""
    rng = np.random.default_rng(number)
    ids = rng.integers(0, 50, rng.integers(3, 9)).astype(np.int32)
    matrix = rng.normal(size=(len(ids) - 1, 4)).astype(np.float16) if with_states else None
    if matrix is not None:
        matrix[0] = np.nan
    return Answer(number, ids, 2, bool(number % 2), matrix)


def same(a: Answer, b: Answer) -> bool:
    facts = (a.prompt_number, a.boundary, a.finished) == (b.prompt_number, b.boundary, b.finished)
    x, y = a.hidden_states, b.hidden_states
    equal = x is y if x is None or y is None else np.array_equal(x, y, equal_nan=True)
    return facts and equal and np.array_equal(a.input_ids, b.input_ids)


def assert_holds(store: AnswerStore, numbers: set[int], with_states: bool = True) -> None:
    loaded = list(store.read())
    assert [g.prompt_number for g in loaded] == sorted(numbers) and store.done == numbers
    assert all(same(g, make_answer(g.prompt_number, with_states)) for g in loaded)


@pytest.mark.parametrize("with_states", [True, False])
def test_round_trip_in_prompt_order(tmp_path: Path, with_states: bool) -> None:
    store = AnswerStore(tmp_path, MADE_BY)
    for numbers in ([7, 2], [], [5, 0, 9]):
        store.append_shard([make_answer(n, with_states) for n in numbers])
    for opened in (store, AnswerStore(tmp_path, MADE_BY), AnswerStore(tmp_path)):
        assert_holds(opened, {0, 2, 5, 7, 9}, with_states)
        assert all(same(g, make_answer(g.prompt_number, False)) for g in opened.read(with_hidden_states=False))
        for number in (9, 2):
            expected, loaded = make_answer(number, with_states).hidden_states, opened.hidden_states(number)
            assert (loaded is None) == (expected is None)
            assert loaded is None or expected is None or np.array_equal(loaded, expected, equal_nan=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 * with_states


def test_counts_and_stats(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, MADE_BY)
    store.append_shard([make_answer(n) for n in range(6)])
    answers = np.concatenate([make_answer(n).input_ids[2:] for n in range(6)])
    assert store.token_counts(60).tolist() == np.bincount(answers, minlength=60).tolist()
    stats = store.stats()
    assert (stats.rows, stats.tokens, stats.finished) == (6, len(answers), 3)
    stats = store.stats(leave_out=lambda number: number > 1)
    assert (stats.rows, stats.finished) == (2, 1)
    refuses(r"has token id \d+, but the vocabulary has 2", store.token_counts, 2)


def test_hidden_states_that_would_be_read_at_other_tokens_are_refused(tmp_path: Path) -> None:
    store, complete = AnswerStore(tmp_path, MADE_BY), make_answer(1)
    with pytest.raises(ValueError, match="1 of 2 answers have hidden states"):
        store.append_shard([make_answer(0, with_states=False), complete])
    assert not store.done and not list(tmp_path.glob("*shard*"))
    with pytest.raises(ValueError, match="prompt 1: .* hidden states, got"):
        replace(complete, hidden_states=complete.hidden_states[1:])


class Killed(BaseException):
    """Stands for a kill: nothing may tidy up behind it."""


@pytest.mark.parametrize("place", ["fsync", "replace", "save_file", "write_table"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_killed_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, after: bool, call: int
) -> None:
    owner = {"fsync": os, "replace": Path, "save_file": answers, "write_table": pq}[place]
    original: Any = getattr(owner, place)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after and place in ("fsync", "replace"):
            raise Killed
        result = original(*args, **kwargs)
        if calls == call and not after:
            os.truncate(args[1], os.path.getsize(args[1]) // 2)  # half a file is on disk
        if calls == call:
            raise Killed
        return result

    AnswerStore(tmp_path, MADE_BY).append_shard([make_answer(n) for n in (1, 2)])
    store = AnswerStore(tmp_path, MADE_BY)
    monkeypatch.setattr(owner, place, dying)
    try:
        store.append_shard([make_answer(n) for n in (3, 4)])
    except Killed:
        pass
    monkeypatch.undo()
    again = AnswerStore(tmp_path, MADE_BY)
    assert again.done in ({1, 2}, {1, 2, 3, 4})
    assert_holds(again, again.done)
    again.append_shard([make_answer(n, with_states=True) for n in {3, 4, 5} - again.done])
    assert_holds(AnswerStore(tmp_path, MADE_BY), {1, 2, 3, 4, 5})
    assert not list(tmp_path.glob(".*"))
    assert {p.stem for p in tmp_path.glob("*.safetensors")} == {p.stem for p in tmp_path.glob("*.parquet")}


def test_leftovers_are_ignored_then_removed(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, MADE_BY)
    store.append_shard([make_answer(1)])
    leftovers = [tmp_path / ".shard-00007.parquet.tmp", tmp_path / "shard-00009.safetensors"]
    for path in leftovers:
        path.write_bytes(b"torn")
    again = AnswerStore(tmp_path, MADE_BY)
    assert_holds(again, {1})
    # A reader may open the folder while the writer works, and must not remove the writer's files.
    assert all(path.exists() for path in leftovers)
    again.append_shard([make_answer(2)])
    assert_holds(again, {1, 2})
    assert not any(path.exists() for path in leftovers)


def test_bad_stores(tmp_path: Path) -> None:
    store, other = (AnswerStore(tmp_path / "a", MADE_BY) for _ in range(2))
    store.append_shard([make_answer(1)])
    refuses("stop the other process", other.append_shard, [make_answer(2)])
    with pytest.raises(UserError, match="sampler.temperature = 0.0, expected 1.0; choose another folder"):
        AnswerStore(tmp_path / "a", {**MADE_BY, "sampler": {"temperature": 1.0}})
    refuses(r"prompts \[1\] have two answers", store.append_shard, [make_answer(1)])
    refuses(r"prompts \[3\] have two answers", store.append_shard, [make_answer(3), make_answer(3)])
    refuses("does not exist", AnswerStore, tmp_path / "none")


def test_damage_is_found(tmp_path: Path) -> None:
    AnswerStore(tmp_path, MADE_BY).append_shard([make_answer(1)])
    shard = tmp_path / "shard-00000.parquet"
    (tmp_path / "shard-00001.parquet").write_bytes(shard.read_bytes())
    (tmp_path / "shard-00001.safetensors").write_bytes((tmp_path / "shard-00000.safetensors").read_bytes())
    refuses(r"prompt 1 .* shard-00000.parquet and shard-00001.parquet", AnswerStore, tmp_path, MADE_BY)
    (tmp_path / "shard-00001.parquet").unlink()
    (tmp_path / "shard-00000.safetensors").unlink()
    refuses(r"shard-00000.safetensors is missing", AnswerStore, tmp_path, MADE_BY)
    (tmp_path / "manifest.json").unlink()
    refuses("holds answers but no manifest", AnswerStore, tmp_path, MADE_BY)


# Draft vocabulary -----------------------------------------------------------------------------------------------------


COUNTS = np.array([5, 0, 9, 1, 5, 0])


def test_the_most_frequent_ids_are_kept() -> None:
    """Ties go to the lower id. A size that an export can state is filled up, but not with all unseen ids."""
    assert draft_vocabulary(COUNTS, 2, []).tolist() == [0, 2]
    assert draft_vocabulary(COUNTS, 3, [5]).tolist() == [0, 2, 5]
    counts = np.concatenate([COUNTS, np.zeros(30, int)])
    counts[20:34] = 2
    assert draft_vocabulary(counts, 36, [1]).tolist() == [0, 1, 2, 3, 4, *range(20, 34)]
    assert draft_vocabulary(np.array([0] * 40 + [7]), 32, []).tolist() == [*range(15), 40]
    refuses("cannot hold the 2", draft_vocabulary, COUNTS, 1, [1, 2])


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
