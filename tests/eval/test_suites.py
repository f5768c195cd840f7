"""Evaluation suites: names, spread, and what a broken file is told."""

import json
from collections import Counter
from pathlib import Path

import pytest

from drafthead.data.errors import UserError
from drafthead.eval import suites

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@pytest.fixture(autouse=True)
def mt_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    # U+2028 ends a line for str.splitlines, but not in JSONL.
    rows = [
        {"question_id": 81 + n, "category": CATEGORIES[n // 10], "turns": [f"first\u2028{n}", f"second {n}"]}
        for n in range(80)
    ]
    content = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"

    def read_member(package: str, path: str) -> bytes:
        assert (package, path) == ("flexeval", suites.MT_BENCH_FILE)
        return content.encode()

    monkeypatch.setattr(suites, "read_member", read_member)


def test_mt_bench_is_its_80_first_turns() -> None:
    prompts = suites.load_suite("mt_bench")
    assert [p.number for p in prompts] == list(range(80))
    assert prompts[11] == suites.EvalPrompt("roleplay", 11, [{"role": "user", "content": "first\u202811"}])


def test_smoke_covers_every_category_and_does_not_move_with_the_seed() -> None:
    prompts = suites.load_suite("smoke")
    assert len(prompts) == 12
    assert set(Counter(p.task for p in prompts).values()) == {1, 2}
    assert {p.task for p in prompts} == set(CATEGORIES)
    assert suites.load_suite("smoke", seed=7) == prompts


def test_builtin_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(suites, "read_member")
    prompts = suites.load_suite("builtin")
    assert len(prompts) == 6
    assert all(p.messages[-1]["role"] == "user" for p in prompts)


@pytest.mark.parametrize("limit", [1, 7, 8, 20, 80, 500])
def test_limit_spreads_evenly_and_deterministically(limit: int) -> None:
    prompts = suites.load_suite("mt_bench", limit=limit, seed=3)
    assert len(prompts) == min(limit, 80)
    counts = Counter(p.task for p in prompts)
    assert max(counts.values()) - min(counts[c] for c in CATEGORIES) <= 1
    assert [p.number for p in prompts] == sorted({p.number for p in prompts})
    assert suites.load_suite("mt_bench", limit=limit, seed=3) == prompts


def test_seed_chooses_other_prompts() -> None:
    assert suites.load_suite("mt_bench", limit=8, seed=0) != suites.load_suite("mt_bench", limit=8, seed=1)


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path.write_text(json.dumps({"prompt": "One"}) + "\n\n" + json.dumps({"messages": turns, "task": "chat"}) + "\n")
    assert suites.load_suite(str(path)) == [
        suites.EvalPrompt("mine", 0, [{"role": "user", "content": "One"}]),
        suites.EvalPrompt("chat", 1, turns),
    ]


BROKEN = [
    ("{", "line 2 is not valid JSON"),
    ("[1]", "line 2 holds a list"),
    ('{"text": "x"}', r"line 2 holds the keys \['text'\]"),
    ('{"prompt": "x", "messages": []}', r"line 2 holds the keys \['messages', 'prompt'\]"),
    ('{"prompt": ""}', "line 2 holds no conversation"),
    ('{"prompt": 3}', "line 2 holds no conversation"),
    ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "line 2 holds no conv"),
    ('{"messages": [{"role": "user"}]}', "line 2 holds no conversation"),
    ('{"prompt": "x", "task": 3}', 'line 2: "task" must be a text, got 3'),
]


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=[b[0][:30] for b in BROKEN])
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        suites.load_suite(str(path))


def test_bad_requests_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown suite 'mtbench'; choose one of smoke, mt_bench, builtin"):
        suites.load_suite("mtbench")
    with pytest.raises(UserError, match="suite.limit must be at least 1, got 0"):
        suites.load_suite("builtin", limit=0)
    with pytest.raises(UserError, match="cannot be read"):
        suites.load_suite(str(tmp_path / "absent.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        suites.load_suite(str(tmp_path / "empty.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(UserError, match="is not UTF-8"):
        suites.load_suite(str(tmp_path / "latin.jsonl"))
