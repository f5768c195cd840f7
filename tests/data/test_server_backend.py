"""Answers from a real HTTP server on loopback: every prompt once, whatever goes wrong on the way."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from drafthead.data.answers import server as server_client
from drafthead.data.answers.backend import RankGroup
from drafthead.data.answers.server import SHARD_ROWS, ServerBackend, ServerConfig, check_server
from drafthead.data.answers.store import Generation, SamplerConfig
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.utils.errors import UserError

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPTS = [(n, list(f"What is {n}?".encode())) for n in range(70)]
SAMPLER = SamplerConfig(temperature=0.7, top_p=0.9, max_new_tokens=12, seed=3)
TEMPORARY = ("429", "500", "503", "dropped", "cut", "malformed", "empty", "no choices", "bad ids", "aborted")


def answer(prompt: list[int], body: dict[str, Any]) -> list[int]:
    """Letters that the prompt and the seed decide, some answers shorter than others."""
    digest = hashlib.sha256(f"{prompt} {body.get('seed')}".encode()).digest()
    ids = [97 + byte % 26 for byte in digest[: body["max_tokens"]]]
    length = 1 + digest[-1] % 16
    return ids if length >= len(ids) else [*ids[:length], EOS]


@pytest.fixture
def server(completions_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(server_client, "LONGEST_WAIT", 0.01)
    return completions_server(answer, TOKENIZER, frozenset({EOS}))


def backend(
    server: Any, sampler: SamplerConfig = SAMPLER, greedy_match_rate: float = 1.0, **settings: Any
) -> ServerBackend:
    return ServerBackend(
        ServerConfig(url=server.url, **{"concurrency": 16, **settings}),
        sampler,
        tokenizer=TOKENIZER,
        eos_ids=frozenset({EOS}),
        vocab_size=259,
        base="tiny",
        max_prompt_tokens=40,
        greedy_match_rate=lambda answers: greedy_match_rate,
    )


def collect(made: ServerBackend, done: frozenset[int] = frozenset()) -> list[Generation]:
    shards = list(made.shards(PROMPTS, done, RankGroup(), lambda: None))
    assert [place for place, _ in shards] == list(range(len(shards)))
    assert all(len(rows) == SHARD_ROWS for _, rows in shards[:-1])
    return [row for _, rows in shards for row in rows]


def assert_once(rows: list[Generation], sampler: SamplerConfig = SAMPLER) -> None:
    assert Counter(row.prompt_number for row in rows) == Counter(range(len(PROMPTS)))
    for row in rows:
        prompt = PROMPTS[row.prompt_number][1]
        body = {"seed": sampler.seed * 1_000_003 + row.prompt_number, "max_tokens": sampler.max_new_tokens}
        wanted = answer(prompt, body)
        assert row.input_ids.tolist() == prompt + wanted and row.boundary == len(prompt)
        assert row.finished == (wanted[-1] == EOS)


def test_every_prompt_is_answered_once(server: Any) -> None:
    made = backend(server)
    assert made.identity({}) == {"server": {"model": "base", "prompts": "ids", "answers": "ids"}}
    together = threading.Barrier(16)  # the first 16 requests must be under way at the same time
    server.fault = lambda number, body: None if number > 16 or together.wait(10) >= 0 else None
    assert_once(collect(made))
    assert server.most_at_once == 16
    asked = server.bodies[-1]
    assert asked["temperature"] == 0.7 and asked["top_p"] == 0.9 and asked["top_k"] == -1
    # What is left out would come from the served model's generation_config.json.
    assert asked["repetition_penalty"] == 1.0 and asked["min_p"] == 0.0 and asked["stop_token_ids"] == [EOS]
    assert len({body["seed"] for body in server.bodies[1:]}) == len(PROMPTS)


def test_what_is_done_is_not_asked_again(server: Any) -> None:
    made = backend(server)
    made.identity({})
    before = len(server.bodies)
    rows = collect(made, done=frozenset(range(0, 70, 2)))
    assert sorted(row.prompt_number for row in rows) == list(range(1, 70, 2))
    assert len(server.bodies) - before == 35
    assert not list(made.shards(PROMPTS, frozenset(), RankGroup(1, 2), lambda: None)), "one process asks"


@pytest.mark.parametrize("fault", TEMPORARY)
def test_temporary_faults(server: Any, fault: str) -> None:
    """Every third request fails; and the very first ones, which find out what the server understands."""
    server.fault = lambda number, body: fault if number < 2 or number % 3 == 0 else None
    assert_once(collect(backend(server)))
    assert len(server.bodies) > 1.3 * len(PROMPTS)


def test_faults_that_pass_are_told_to_the_caller_once(server: Any, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    made = backend(server)
    made.say = said.append
    server.fault = lambda number, body: "503" if number % 3 == 0 else None
    assert_once(collect(made))
    faults = [line for line in said if line.startswith("warning: prompt ") and "503" in line]
    assert len(faults) == 1, "of a score"
    assert faults[0].endswith("; tried again (said once)") and capfd.readouterr() == ("", "")


def test_all_faults_together(server: Any) -> None:
    server.fault = lambda number, body: TEMPORARY[number // 2 % 10] if number % 2 else None
    assert_once(collect(backend(server, concurrency=50, tries=20)))


def test_slow_answers_are_given_up_and_asked_for_again(server: Any) -> None:
    server.fault = lambda number, body: "slow" if number % 40 == 7 else None
    started = time.monotonic()
    assert_once(collect(backend(server, timeout=0.5)))
    assert time.monotonic() - started < 15


def test_retry_after_holds_all_requests_back(server: Any) -> None:
    """After a 429 that says to wait, nothing is sent that was not under way."""
    times: list[float] = []

    def fault(number: int, body: dict[str, Any]) -> str | None:
        times.append(time.monotonic())
        return "429" if number == 20 else None

    server.fault = fault
    assert_once(collect(backend(server, concurrency=2)))
    assert max(later - earlier for earlier, later in zip(times[20:24], times[21:25], strict=True)) >= 0.04


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("400", r"refuses prompt \d+ \(400: injected.*what is answered is kept, and the same command goes on"),
        ("401", r"refuses access \(401: injected.*OPENAI_API_KEY is not set"),
        ("404", r"has no completions, or not of this model \(404.*server.url or .model"),
    ],
)
def test_final_errors_end_the_run_at_once_and_lose_nothing(server: Any, fault: str, says: str) -> None:
    server.fault = lambda number, body: fault if number == 50 else None
    rows: list[Generation] = []
    with pytest.raises(UserError, match=says):
        for _, shard in backend(server).shards(PROMPTS, frozenset(), RankGroup(), lambda: None):
            rows += shard
    # One went to find out what it understands; those under way beside the refused one may have been dropped.
    assert 50 - 1 - 16 <= len({row.prompt_number for row in rows}) == len(rows)
    assert len(server.bodies) < 70, "the rest was asked for all the same"
    server.fault = lambda number, body: None
    rows += collect(backend(server), done=frozenset(row.prompt_number for row in rows))
    assert_once(rows)


def test_too_many_tries(server: Any) -> None:
    server.fault = lambda number, body: "503" if body["prompt"] == PROMPTS[5][1] else None
    with pytest.raises(UserError, match=r"gave no answer to prompt 5 in 3 tries, lastly: 503: injected.*is kept"):
        collect(backend(server, tries=3))
    assert sum(body["prompt"] == PROMPTS[5][1] for body in server.bodies) == 3


def test_the_key_is_sent_and_never_said(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "sk-secret"
    with pytest.raises(UserError, match="401.*OPENAI_API_KEY is not set"):
        check_server(ServerConfig(url=server.url), "base", 10)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with pytest.raises(UserError, match="OPENAI_API_KEY is set, but not what it takes") as error:
        check_server(ServerConfig(url=server.url), "base", 10)
    assert "sk-wrong" not in str(error.value)
    for broken in ("sk-\u00e9", "sk-a\nb"):
        monkeypatch.setenv("OPENAI_API_KEY", broken)
        with pytest.raises(UserError, match="OPENAI_API_KEY holds characters that no key has") as error:
            check_server(ServerConfig(url=server.url), "base", 10)
        assert "sk-" not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    assert check_server(ServerConfig(url=server.url), "base", 10) == "base"
    assert_once(collect(backend(server)))


def test_a_server_that_takes_text_only(completions_server: Callable[..., Any]) -> None:
    """As TGI: token ids and a top_p of 1 are refused, and the answer's ids come from its text."""
    server = completions_server(answer, TOKENIZER, frozenset({EOS}), dialect="text")
    sampler = SamplerConfig(temperature=0.7, max_new_tokens=12, seed=3)
    made = backend(server, sampler)
    assert made.identity({}) == {"server": {"model": "base", "prompts": "text", "answers": "text"}}
    made.check(PROMPTS[:4])
    assert_once(collect(made), sampler)
    with pytest.raises(UserError, match=r"top_k and .ignore_eos cannot be asked for: .*422: invalid type.*use vLLM"):
        backend(server, SamplerConfig(top_k=5)).identity({})


def test_a_corpus_goes_on_with_the_dialect_it_was_begun_with(server: Any) -> None:
    recorded = {"server": {"model": "alias", "prompts": "text", "answers": "text"}}
    made = backend(server)
    assert made.identity(recorded) == recorded and not server.bodies, "a finished corpus needs no server"
    with pytest.raises(UserError, match="begun with prompts as text and answers as text, and .* now gives prompts as"):
        collect(made)


def test_another_model_is_noticed(server: Any) -> None:
    backend(server, greedy_match_rate=0.8).check(PROMPTS[:4])
    assert all(body["temperature"] == 0 for body in server.bodies[1:])
    with pytest.raises(UserError, match="would choose 79 % of the tokens that base at .* expected 80 % or more"):
        backend(server, greedy_match_rate=0.79).check(PROMPTS[:4])


def test_prompts_that_are_read_otherwise(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = type(server)._payload

    def with_bos(self: Any, body: dict[str, Any]) -> dict[str, Any]:
        return original(self, {**body, "prompt": [1, *body["prompt"]]})

    monkeypatch.setattr(type(server), "_payload", with_bos)
    with pytest.raises(UserError, match=r"read 11 tokens of a prompt that has 10 \(sent as ids\)"):
        backend(server).check(PROMPTS[:1])


@pytest.mark.parametrize(
    ("models", "wanted", "longest", "says"),
    [
        ([{"id": "a"}, {"id": "b"}], None, 10, "serves a, b; name the one that is 'tiny' with .*server.model"),
        ([{"id": "a"}, {"id": "b"}], "c", 10, "does not serve 'c'; it serves a, b"),
        ([], None, 10, "serves none"),
        ([{"id": "a", "max_model_len": 64}], None, 65, "context of 64 tokens, but prompts and answers have up to 65"),
        ([{"id": "a"}, {"id": "tiny"}], None, 10, None),
        ([{"id": "a"}, {"id": "b"}], "b", 10, None),
    ],
)
def test_models_served(server: Any, models: list[Any], wanted: str | None, longest: int, says: str | None) -> None:
    server.models = models
    config = ServerConfig(url=server.url, model=wanted)
    if says is None:
        assert check_server(config, "tiny", longest) == (wanted or "tiny")
    else:
        with pytest.raises(UserError, match=says):
            check_server(config, "tiny", longest)


def test_no_server(server: Any) -> None:
    server.close()
    with pytest.raises(UserError, match=r"no completions server answers at http://127.*/v1 \(ConnectError.*vllm serve"):
        check_server(ServerConfig(url=server.url), "base", 10)


def test_answers_with_another_sampler_come_in_the_order_of_their_numbers(server: Any) -> None:
    sampler = SamplerConfig(temperature=1.0, max_new_tokens=5)
    rows = list(backend(server).answer(PROMPTS[:30], sampler))
    assert [row.prompt_number for row in rows] == list(range(30))
    assert all(body["max_tokens"] == 5 for body in server.bodies[1:])
