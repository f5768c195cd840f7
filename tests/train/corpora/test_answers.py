"""The corpus of answers is the same whoever makes it: one process or several, built in or a server, killed or not."""

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafthead.data.answers.answer_config import SamplerConfig, ServerConfig
from drafthead.data.answers.store import Answer, AnswerStore, ProcessGroup
from drafthead.data.text.sources import SourceConfig
from drafthead.errors import UserError
from drafthead.files.local import read_manifest, write_checksummed_json, write_json, write_manifest
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.corpus import generate_answers
from drafthead.train.corpora.answers import FOLDERS, TURN_STRIDE, AnswerGenerator, copy_precomputed
from drafthead.train.corpora.built_in import self_prompted_prompts
from drafthead.train.corpora.corpora import is_held_out
from drafthead.train.corpora.corpus_config import COMPLETE, AnswersConfig
from drafthead.train.original_base import OriginalBase
from support import Said, TinyBase, composed, refuses

CONFIG = AnswersConfig(
    sources=[SourceConfig(kind="builtin", name="tiny")],
    prompts=24,
    self_prompted=3,
    max_prompt_tokens=400,
    sampler=SamplerConfig(max_new_tokens=8),
    batch_size=2,
)
Row = tuple[int, list[int], int, bool, bytes]


ALONE = ProcessGroup()


def make(
    base: BaseModel, config: AnswersConfig, folder: Path, group: ProcessGroup = ALONE, states: bool = True
) -> AnswerStore:
    return AnswerGenerator(OriginalBase.of(base), config, 0, folder, group, Said(), store_states=states).complete()


def rows_of(store: AnswerStore) -> list[Row]:
    answers = [(g, b"" if g.hidden_states is None else g.hidden_states.tobytes()) for g in store.read()]
    return [(g.prompt_number, g.input_ids.tolist(), g.boundary, g.finished, states) for g, states in answers]


@pytest.fixture
def base(tiny_base: TinyBase) -> BaseModel:
    return tiny_base()


def served(base: BaseModel, server: Callable[..., Any], **options: Any) -> Any:
    """A server whose answers the base gives."""
    lock = threading.Lock()

    def answer(prompt: list[int], body: dict[str, Any]) -> list[int]:
        sampler = SamplerConfig(max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
        with lock:
            (results,) = generate_answers(base, [(0, prompt)], sampler, batch_size=1, max_prompt_tokens=len(prompt))
        return results.input_ids[results.boundary :].tolist()

    return server(answer, base.tokenizer, base.eos_ids, **options)


def with_server(server: Any, **settings: Any) -> AnswersConfig:
    return replace(CONFIG, server=ServerConfig(url=server.url, concurrency=4, **settings))


def together(base: BaseModel, folder: Path, waits: list[Callable[[], None]]) -> list[list[Row]]:
    """Return the final rows of each of several processes, which are threads here."""
    results = dict[int, list[Row]]()

    def work(rank: int, wait: Callable[[], None]) -> None:
        results[rank] = rows_of(make(base, CONFIG, folder, ProcessGroup(rank, len(waits), wait)))

    threads = [threading.Thread(target=work, args=entry) for entry in enumerate(waits)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(waits))]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_make_what_one_makes(base: BaseModel, tmp_path: Path, size: int) -> None:
    """To the bit, hidden states too."""
    barrier = threading.Barrier(size)
    expected = rows_of(make(base, CONFIG, tmp_path / "one"))
    assert [row[0] for row in expected] == list(range(27))
    assert together(base, tmp_path / "several", [lambda: barrier.wait(60) and None] * size) == [expected] * size


@pytest.mark.slow
def test_a_late_process_does_not_take_the_blocks_of_another(base: BaseModel, tmp_path: Path) -> None:
    """The second process continues after the first meeting only if the first one has written, or waits for it."""
    barrier, expected = threading.Barrier(2), rows_of(make(base, CONFIG, tmp_path / "one"))
    folder, meetings = tmp_path / "two", [0, 0]

    def first() -> None:
        meetings[0] += 1
        barrier.wait(60)

    def late() -> None:
        barrier.wait(60)
        meetings[1] += 1
        while meetings[1] == 1 and meetings[0] == 1 and not list(folder.glob("shard-*.parquet")):
            time.sleep(0.001)

    assert together(base, folder, [first, late]) == [expected] * 2


def test_processes_without_a_common_folder(base: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="process 1 does not see .*prompts.json; .*file system that the nodes share"):
        make(base, CONFIG, tmp_path / "of another node", ProcessGroup(1, 2))
    with pytest.raises(UserError, match=r"of the prompts have no answer in .*, 3 for one; all processes must see"):
        make(base, CONFIG, tmp_path / "of the first", ProcessGroup(0, 2))


@pytest.mark.slow
def test_a_corpus_begun_by_two_is_ended_by_one(base: BaseModel, tmp_path: Path) -> None:
    """The second process of two never answers; its blocks are what a later start makes."""
    expected = rows_of(make(base, CONFIG, tmp_path / "whole"))

    class LeftAloneError(Exception):
        pass

    calls = []

    def wait() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise LeftAloneError

    with pytest.raises(LeftAloneError):
        make(base, CONFIG, tmp_path / "part", ProcessGroup(0, 2, wait))
    assert 0 < len(AnswerStore(tmp_path / "part").done) < len(expected)
    assert rows_of(make(base, CONFIG, tmp_path / "part")) == expected


def test_a_server_answers_as_we_do(base: BaseModel, completions_server: Callable[..., Any], tmp_path: Path) -> None:
    """Token for token, greedily; with a manifest that says who answered, and not where."""
    server = served(base, completions_server)
    expected = rows_of(make(base, replace(CONFIG, self_prompted=0), tmp_path / "built in", states=False))
    config = replace(with_server(server), self_prompted=0)
    assert rows_of(make(base, config, tmp_path / "server")) == expected
    manifest = (tmp_path / "server" / "manifest.json").read_text()
    assert '"answers": "ids"' in manifest and server.url not in manifest
    server.close()
    assert rows_of(make(base, config, tmp_path / "server")) == expected, "a finished corpus needs no server"
    without_url = replace(CONFIG, self_prompted=0)
    assert rows_of(make(base, without_url, tmp_path / "server")) == expected, "nor its address"
    (tmp_path / "server" / COMPLETE).unlink()
    with pytest.raises(UserError, match=r"was started with a server; set data.answers.server.url"):
        make(base, without_url, tmp_path / "server")


@pytest.mark.parametrize("dialect", ["ids", pytest.param("text", marks=pytest.mark.slow)])
def test_server_prompts(base: BaseModel, completions_server: Callable[..., Any], tmp_path: Path, dialect: str) -> None:
    """The same ones on every try, whatever came back first.

    A random base's answers are no valid UTF-8, so most ids change on their way through text; all are there.
    """
    results = []
    for name in ("a", "b"):
        server = served(base, completions_server, dialect=dialect)
        server.fault = lambda number, body: "503" if random.random() < 0.2 else None
        config = replace(with_server(server, min_greedy_match_rate=0.0), prompts=5, self_prompted=1)
        assert make(base, config, tmp_path / name).done == set(range(6))
        results.append((tmp_path / name / "prompts.json").read_text())
    assert results[0] == results[1]
    assert f'"answers": "{dialect}"' in (tmp_path / "a" / "manifest.json").read_text()


def test_a_server_of_another_model_is_refused(
    base: BaseModel, tiny_base: TinyBase, completions_server: Callable[..., Any], tmp_path: Path
) -> None:
    server = served(tiny_base(seed=1), completions_server)
    with pytest.raises(UserError, match=r"the base would choose \d+ % of the tokens that base at .* expected 80 %"):
        make(base, with_server(server), tmp_path)
    assert not (tmp_path / "prompts.json").exists(), "the other model wrote prompts"


@pytest.mark.parametrize("odd", [{}, [1], [[]], [[1]], [[{"role": "user"}]], [[{"role": "user", "content": 1}]]])
@pytest.mark.parametrize("write", [write_json, write_checksummed_json])
def test_odd_prompts_are_refused(base: BaseModel, tmp_path: Path, odd: Any, write: Callable[..., None]) -> None:
    write(tmp_path / "prompts.json", odd)
    refuses(r"prompts.json (holds no list of prompts|is damaged)", make, base, CONFIG, tmp_path)


def conversations(folder: Path) -> SourceConfig:
    """Nine conversations of two user's turns, three of them with a third; the answers in them are not used."""
    folder.mkdir(parents=True, exist_ok=True)
    turns = [("hello there", "no"), ("and then", "no"), ("why so", "no")]
    rows = []
    for number in range(9):
        said = turns if number % 3 == 0 else turns[:2]
        messages = [
            m for u, a in said for m in ({"from": "human", "value": f"{u} {number}"}, {"from": "gpt", "value": a})
        ]
        rows.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(rows))
    return SourceConfig(kind="jsonl", name=str(folder / "chats.jsonl"), column="messages", turns=2)


def test_every_turn_is_answered_by_the_base(base: BaseModel, tmp_path: Path) -> None:
    """A later turn's prompt holds the base's own answers; killed between two turns or not, the corpus is the same."""
    config = replace(
        CONFIG, sources=[conversations(tmp_path)], self_prompted=0, sampler=SamplerConfig(max_new_tokens=4)
    )
    store = make(base, config, tmp_path / "whole")
    numbers = [g.prompt_number for g in store.read()]
    assert numbers == [*range(9), *(TURN_STRIDE + n for n in range(9))]
    for number in range(9):
        answer = base.tokenizer.decode(store.answer(number), skip_special_tokens=True).strip()
        (later,) = [g for g in store.read() if g.prompt_number == TURN_STRIDE + number]
        prompt = base.tokenizer.decode(later.input_ids[: later.boundary])
        assert answer in prompt and "and then" in prompt and "why so" not in prompt
        assert is_held_out(number) == is_held_out(TURN_STRIDE + number)
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    for shard in sorted(killed.glob("shard-*"))[4:]:  # two blocks of the first turn are left
        shard.unlink()
    (killed / COMPLETE).unlink()
    assert rows_of(make(base, config, killed)) == rows_of(store)


def test_prompts_near_those_of_a_suite_are_left_out(base: BaseModel, tmp_path: Path) -> None:
    (tmp_path / "suite.jsonl").write_text('{"prompt": "Explain to a small child why the sky is so blue, please."}\n')
    excluding = replace(CONFIG, self_prompted=0, exclude_suites=[str(tmp_path / "suite.jsonl")])
    texts = [
        {base.tokenizer.decode(g.input_ids[: g.boundary]) for g in make(base, config, tmp_path / name).read()}
        for name, config in (("all", replace(CONFIG, self_prompted=0)), ("remaining", excluding))
    ]
    (left_out,) = texts[0] - texts[1]
    assert "Explain to a child why the sky is blue." in left_out and len(texts[1]) == 23


def precomputed(
    base: BaseModel, source: Path, folder: Path, log: list[str] | None = None, **settings: Any
) -> AnswerStore:
    config = replace(CONFIG, precomputed=str(source), **settings)
    copy_precomputed(OriginalBase.of(base), config, folder, Said(log))
    return AnswerStore(folder)


def test_precomputed_answers_are_compared_and_copied(base: BaseModel, tiny_base: TinyBase, tmp_path: Path) -> None:
    made = make(base, CONFIG, tmp_path / "made", states=False)
    copied = precomputed(base, tmp_path / "made", tmp_path / "copy", prompts=10, self_prompted=0)
    assert rows_of(copied) == rows_of(made)[:10]
    again = precomputed(base, tmp_path / "made", tmp_path / "copy", prompts=10, self_prompted=0)
    assert rows_of(again) == rows_of(copied)
    with pytest.raises(UserError, match="prompts = 10, expected 11"):
        precomputed(base, tmp_path / "made", tmp_path / "copy", prompts=11, self_prompted=0)
    with pytest.raises(UserError, match="temperature=0.0.*data.answers.fresh=true"):
        warm = SamplerConfig(temperature=1.0, max_new_tokens=8)
        precomputed(base, tmp_path / "made", tmp_path / "warm", sampler=warm)
    write_manifest(tmp_path / "text", {"base": base.identity()})
    refuses("is not a folder of answers", precomputed, base, tmp_path / "text", tmp_path / "none")
    other = tiny_base("qwen3")
    write_manifest(tmp_path / "text", {"base": {**base.identity(), "name": "org/other", "fingerprint": "other"}})
    with pytest.raises(UserError, match="data.answers.precomputed=.*org/other.*data.answers.fresh=true"):
        precomputed(base, tmp_path / "text", tmp_path / "none")
    refuses("data.answers.fresh=true", precomputed, other, tmp_path / "made", tmp_path / "other")


def test_precomputed_answers_to_long_prompts_are_left_out(base: BaseModel, tmp_path: Path) -> None:
    made = make(base, CONFIG, tmp_path / "made", states=False)
    longest = max(g.boundary for g in made.read())
    remaining = precomputed(base, tmp_path / "made", tmp_path / "short", max_prompt_tokens=longest - 1)
    assert 0 < len(remaining.done) < len(made.done) and max(g.boundary for g in remaining.read()) < longest
    log: list[str] = []
    precomputed(base, tmp_path / "made", tmp_path / "few", log, prompts=3, self_prompted=0)
    assert log[0].startswith("   3 answers from ") and log[0].endswith("tokens of 3")
    with pytest.raises(UserError, match="data.answers.max_prompt_tokens=8"):
        precomputed(base, tmp_path / "made", tmp_path / "none", max_prompt_tokens=8)


def test_precomputed_answers_of_other_weights_are_refused(base: BaseModel, tmp_path: Path) -> None:
    """The manifest names this base, but the tokens are not its own."""
    made = make(base, CONFIG, tmp_path / "made", states=False)
    wrong = [replace(g, input_ids=g.input_ids[::-1].copy()) for g in made.read()]
    AnswerStore(tmp_path / "wrong", read_manifest(tmp_path / "made")).append_shard(wrong)
    refuses("chooses only .* % of the tokens", precomputed, base, tmp_path / "wrong", tmp_path / "copy")


@pytest.mark.parametrize(
    ("data", "answers", "tokens", "turns"), [("smollm2", 938, 93_708, 3), ("smollm2_large", 10_907, 1_073_512, 3)]
)
def test_packaged_answers_fit_their_recipe(data: str, answers: int, tokens: int, turns: int, tmp_path: Path) -> None:
    run, _ = composed(tmp_path, "recipe=medusa_smollm2", f"data={data}")
    config = run.data.answers
    folder = FOLDERS[config.precomputed or ""]
    store, made_by = AnswerStore(folder), read_manifest(folder)
    assert made_by["sampler"] == asdict(config.sampler) and made_by["exclude_suites"] == config.exclude_suites
    assert (made_by["prompts"], made_by["self_prompted"]) == (config.prompts, config.self_prompted)
    stats = store.stats()
    assert stats.rows == answers and stats.tokens == tokens
    assert max(len(g.input_ids) for g in store.read()) <= 512
    assert len({g.prompt_number // TURN_STRIDE for g in store.read()}) == turns


SWITCHED = (
    "{% if tools %}{{ tools[0]['name'] }}{% endif %}{{ 'thinking' if enable_thinking else 'direct' }}"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize("by", ["built in", "server"])
def test_prompts_are_spread_over_template_switches_and_temperatures(
    base: BaseModel, tmp_path: Path, completions_server: Callable[..., Any], by: str
) -> None:
    write_json(tmp_path / "tools.json", [{"name": "search_"}])
    switches = [{"enable_thinking": True}, {"enable_thinking": False, "tools": str(tmp_path / "tools.json")}]
    base = BaseModel.load(replace(base.config))  # the fixture's is shared with other tests
    base.tokenizer.chat_template = SWITCHED
    config = replace(CONFIG, self_prompted=0, temperatures=[0.0, 0.0, 1.5], chat_template_kwargs=switches)
    if by == "server":
        config = replace(config, server=with_server(served(base, completions_server)).server)
    answers = list(make(base, config, tmp_path / by, states=False).read())
    greedy = make(base, replace(CONFIG, self_prompted=0, chat_template_kwargs=switches), tmp_path / "greedy").read()
    by_prompt = {answer.prompt_number: answer.input_ids.tolist() for answer in greedy}
    texts = [base.tokenizer.decode(answer.input_ids[: answer.boundary]) for answer in answers]
    thinking = sum(text.startswith("thinking") for text in texts)
    assert thinking + sum(text.startswith("search_direct") for text in texts) == 24 and 5 < thinking < 19
    same = sum(by_prompt[answer.prompt_number] == answer.input_ids.tolist() for answer in answers)
    assert 10 < same < 22, "about two thirds are greedy"
    assert read_manifest(tmp_path / by)["chat_template_kwargs"][1]["tools"] == [{"name": "search_"}]


def test_switches_that_the_template_does_not_read(base: BaseModel, tmp_path: Path) -> None:
    base = BaseModel.load(replace(base.config))  # the fixture's is shared with other tests
    base.tokenizer.chat_template = SWITCHED
    config = replace(CONFIG, chat_template_kwargs=[{"reasoning_effort": "low"}, {"enable_thinking": True}])
    with pytest.raises(UserError, match=r"sets reasoning_effort, .* \(it reads enable_thinking, tools\); leave it"):
        make(base, config, tmp_path / "corpus")
    assert not any((tmp_path / "corpus").glob("*.json"))
    base.config.chat_template_kwargs = {"thinking_budget": 8}
    base.model.generation_config.repetition_penalty = 1.2
    display = Said()
    AnswerGenerator(OriginalBase.of(base), CONFIG, 0, tmp_path / "corpus", ALONE, display).complete()
    assert display.lines == [
        "   base.chat_template_kwargs: the chat template does not read thinking_budget; leave it out",
        "   settings of the base's generation_config.json that answers do not use: repetition_penalty=1.2",
    ]
    refuses("data.answers.fresh=true", replace, CONFIG, temperatures=[0.5], precomputed="embedded:smollm2")
    refuses("missing.json does not exist", replace, CONFIG, chat_template_kwargs=[{"tools": "missing.json"}])


def test_a_large_batch_may_write_enough_prompts(base: BaseModel) -> None:
    """The limit on attempts is for unusable prompts, and the first batch may already be larger."""

    def written(finished: bool) -> list[str]:
        def answer(prompts: Sequence[tuple[int, list[int]]], sampler: SamplerConfig) -> Iterator[Answer]:
            for number, ids in prompts:
                text = base.tokenizer(f"question number {number}", add_special_tokens=False).input_ids
                yield Answer(number, np.array([*ids, *text], np.int32), len(ids), finished)

        return self_prompted_prompts(base, answer, 2, 0, 300, Said(), 60)

    assert len(written(finished=True)) == 2
    refuses("only 0 of the 300 prompts that the base wrote are complete", written, finished=False)
