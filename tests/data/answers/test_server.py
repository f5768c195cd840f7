"""Answers from a real HTTP server on loopback: every prompt once, whatever goes wrong on the way."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types import Completion

from drafthead.data.answers import server as client
from drafthead.data.answers.answer_config import SamplerConfig, ServerConfig
from drafthead.data.answers.http_client import masked
from drafthead.data.answers.server import BadAnswerError, Completions, ServerBackend, check_server
from drafthead.data.answers.store import Answer, ProcessGroup
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.errors import UserError
from support import cases, refuses

TOKENIZER = tiny_tokenizer()
EOS, OTHER_EOS = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
PROMPTS = [(n, list(f"What is {n}?".encode())) for n in range(70)]
SAMPLER = SamplerConfig(temperature=0.7, top_p=0.9, max_new_tokens=12, seed=3)
TRANSIENT = ("429", "500", "503", "dropped", "cut", "malformed", "empty", "no choices", "bad ids", "aborted")
PROMPT = (7, [65, 66, 67])


def answer(prompt: list[int], body: dict[str, Any]) -> list[int]:
    """Letters that the prompt and the seed decide, some answers shorter than others."""
    digest = hashlib.sha256(f"{prompt} {body.get('seed')}".encode()).digest()
    ids = [97 + byte % 26 for byte in digest[: body["max_tokens"]]]
    length = 1 + digest[-1] % 16
    return ids if length >= len(ids) else [*ids[:length], EOS]


@pytest.fixture
def server(completions_server: Callable[..., Any]) -> Any:
    return completions_server(answer, TOKENIZER, frozenset({EOS}))


def backend(
    server: Any, sampler: SamplerConfig = SAMPLER, greedy_match_rate: float = 1.0, **settings: Any
) -> ServerBackend:
    return ServerBackend(
        ServerConfig(url=server.url, **{"concurrency": 16, **settings}),
        Completions(TOKENIZER, frozenset({EOS}), 259, sampler),
        base="tiny",
        max_prompt_tokens=40,
        greedy_match_rate=lambda answers: greedy_match_rate,
    )


def collect(made: ServerBackend, done: frozenset[int] = frozenset()) -> list[Answer]:
    shards = list(made.shards(PROMPTS, done, ProcessGroup(), lambda: None))
    assert [index for index, _ in shards] == list(range(len(shards)))
    assert all(len(rows) == client.SHARD_ROWS for _, rows in shards[:-1])
    return [row for _, rows in shards for row in rows]


def assert_once(rows: list[Answer], sampler: SamplerConfig = SAMPLER) -> None:
    assert Counter(row.prompt_number for row in rows) == Counter(range(len(PROMPTS)))
    for row in rows:
        prompt = PROMPTS[row.prompt_number][1]
        body = {"seed": sampler.seed * 1_000_003 + row.prompt_number, "max_tokens": sampler.max_new_tokens}
        expected = answer(prompt, body)
        assert row.input_ids.tolist() == prompt + expected and row.boundary == len(prompt)
        assert row.finished == (expected[-1] == EOS)


def test_every_prompt_is_answered_once(server: Any) -> None:
    made = backend(server)
    assert made.identity({}) == {"server": {"model": "base", "prompts": "ids", "answers": "ids"}}
    together = threading.Barrier(16)  # the first 16 requests must be under way at the same time
    server.fault = lambda number, body: None if number > 16 or together.wait(10) >= 0 else None
    assert_once(collect(made))
    assert server.most_at_once == 16
    sent = server.bodies[-1]
    assert sent["temperature"] == 0.7 and sent["top_p"] == 0.9 and sent["top_k"] == -1
    # What is left out would come from the served model's generation_config.json.
    assert sent["repetition_penalty"] == 1.0 and sent["min_p"] == 0.0 and sent["stop_token_ids"] == [EOS]
    assert len({body["seed"] for body in server.bodies[1:]}) == len(PROMPTS)
    before = len(server.bodies)
    rows = collect(made, done=frozenset(range(0, 70, 2)))
    assert sorted(row.prompt_number for row in rows) == list(range(1, 70, 2))
    assert len(server.bodies) - before == 35, "what is answered was requested again"
    assert not list(made.shards(PROMPTS, frozenset(), ProcessGroup(1, 2), lambda: None)), "one process asks"


def test_transient_errors(server: Any) -> None:
    """Every third request fails, in each way in turn; so do the first two, which find out what it understands."""
    server.fault = lambda number, body: TRANSIENT[number % 10] if number < 2 or number % 3 == 0 else None
    lines: list[str] = []
    made = backend(server)
    made.log = lines.append
    assert_once(collect(made))
    assert len(server.bodies) > 1.3 * len(PROMPTS)
    assert all(line.endswith("; retried (logged once)") for line in lines)
    assert 8 <= len(lines) <= 10, "each way once, but for cut connections; those of the first two requests twice"


def test_slow_answers_are_given_up_and_requested_again(server: Any) -> None:
    server.fault = lambda number, body: "slow" if number % 40 == 7 else None
    started = time.monotonic()
    assert_once(collect(backend(server, timeout=0.5)))
    assert time.monotonic() - started < 15


@cases(
    "fault, says",
    ("400", r"refuses prompt \d+ \(400: injected.*answers are kept"),
    ("401", r"refuses prompt \d+ \(401: injected.*OPENAI_API_KEY is not set"),
    ("404", r"refuses prompt \d+ \(404.*does not serve completions of this model.*server.url"),
)
def test_final_errors_end_the_run_at_once_and_lose_nothing(server: Any, fault: str, says: str) -> None:
    server.fault = lambda number, body: fault if number == 30 else None
    rows: list[Answer] = []
    with pytest.raises(UserError, match=says):
        for _, shard in backend(server).shards(PROMPTS, frozenset(), ProcessGroup(), lambda: None):
            rows += shard
    # The first request is a probe; up to 16 requests under way may have been dropped.
    assert 30 - 1 - 16 <= len({row.prompt_number for row in rows}) == len(rows)
    assert len(server.bodies) < 70, "the rest was requested all the same"
    server.fault = lambda number, body: None
    rows += collect(backend(server), done=frozenset(row.prompt_number for row in rows))
    assert_once(rows)


@pytest.mark.parametrize(("fault", "last"), [("503", "503: injected"), ("dropped", "Remote"), ("empty", "an empty")])
def test_too_many_tries(server: Any, fault: str, last: str) -> None:
    server.fault = lambda number, body: fault if body["prompt"] == PROMPTS[5][1] else None
    refuses(rf"gave no answer to prompt 5 in 3 tries, lastly: {last}", collect, backend(server, tries=3))
    assert sum(body["prompt"] == PROMPTS[5][1] for body in server.bodies) == 3


@pytest.mark.parametrize(
    ("fault", "last"), [("drips", "no whole response within 2 s"), ("endless", "more than 1 MiB"), ("brackets", "JSON")]
)
def test_a_response_without_end(server: Any, fault: str, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is cut off and requested again."""
    monkeypatch.setattr("drafthead.data.answers.http_client.MAX_RESPONSE", 1 << 20)
    server.fault = lambda number, body: fault if body["prompt"] == PROMPTS[5][1] else None
    with pytest.raises(UserError, match=f"gave no answer to prompt 5 in 2 tries, lastly: .*{last}"):
        collect(backend(server, tries=2, timeout=2 if fault == "drips" else 60))
    assert sum(body["prompt"] == PROMPTS[5][1] for body in server.bodies) == 2


def test_no_prompt_follows_a_redirect(server: Any, completions_server: Callable[..., Any]) -> None:
    other = completions_server(answer, TOKENIZER, frozenset({EOS}))
    server.elsewhere = other.url
    server.fault = lambda number, body: "redirect"
    refuses(f"redirects to {other.url}/v1/completions.*: no prompt is sent there", collect, backend(server))
    assert len(server.bodies) == 1 and not other.bodies


def test_parts_of_the_key_are_not_shown() -> None:
    key = "sk-proj-0123456789abcdef"
    said = masked("no\naccess for sk-proj-01234567********cdef, " + key, key)
    assert said == "no access for ...********..., ..."
    assert masked("x" * 5000, key) == "x" * 300 and masked("no key", "") == "no key"


def test_the_key_is_sent_and_never_shown(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "sk-secret"
    refuses("401.*OPENAI_API_KEY is not set", check_server, ServerConfig(url=server.url), "base", 10)
    for key, says in (
        ("sk-wrong", "OPENAI_API_KEY is set, but not accepted"),
        ("sk-\u00e9", "OPENAI_API_KEY holds characters that no key has"),
        ("sk-a\nb", "OPENAI_API_KEY holds characters that no key has"),
    ):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(UserError, match=says) as error:
            check_server(ServerConfig(url=server.url), "base", 10)
        assert "sk-" not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    assert_once(collect(backend(server)))


def test_a_server_without_token_ids(completions_server: Callable[..., Any]) -> None:
    """The answers' ids come from their text."""
    made = backend(completions_server(answer, TOKENIZER, frozenset({EOS}), dialect="text"))
    assert made.identity({}) == {"server": {"model": "base", "prompts": "ids", "answers": "text"}}
    made.check(PROMPTS[:4])
    assert_once(collect(made))


def test_a_server_that_takes_no_token_ids(completions_server: Callable[..., Any]) -> None:
    server = completions_server(answer, TOKENIZER, frozenset({EOS}), dialect="strict")
    with pytest.raises(UserError, match=r"refuses a first prompt \(422: invalid type.*vLLM"):
        backend(server).identity({})


def test_a_corpus_resumes_with_the_kind_of_answers_it_was_started_with(server: Any) -> None:
    recorded = {"server": {"model": "alias", "prompts": "ids", "answers": "text"}}
    made = backend(server)
    assert made.identity(recorded) == recorded and not server.bodies, "a finished corpus needs no server"
    refuses("started with answers as text", collect, made)


def test_another_model_is_noticed(server: Any) -> None:
    backend(server, greedy_match_rate=0.8).check(PROMPTS[:4])
    assert all(body["temperature"] == 0 for body in server.bodies[1:])
    with pytest.raises(UserError, match="would choose 79 % of the tokens that base at .* expected 80 % or more"):
        backend(server, greedy_match_rate=0.79).check(PROMPTS[:4])
    original = server.payload
    server.payload = lambda body: original({**body, "prompt": [1, *body["prompt"]]})  # a server that adds a BOS
    with pytest.raises(UserError, match="read 11 tokens of a prompt of 10"):
        backend(server).check(PROMPTS[:1])


@cases(
    "models, expected, longest, says",
    ([{"id": "a"}, {"id": "b"}], None, 10, "serves a, b; name the one that is 'tiny' with .*server.model"),
    ([{"id": "a"}, {"id": "b"}], "c", 10, "does not serve 'c', but a, b"),
    ([], None, 10, "lists no models; serve 'tiny' there"),
    ([{"id": "a", "max_model_len": 64}], None, 65, "context of 64 tokens, but prompts and answers have up to 65"),
    ([{"id": "a"}, {"id": "b"}, {"no": "id"}, {"id": 5}], "b", 10, None),
    (5, "c", 10, "lists no models"),
)
def test_models_served(server: Any, models: list[Any], expected: str | None, longest: int, says: str | None) -> None:
    server.models = models
    config = ServerConfig(url=server.url, model=expected)
    if says is None:
        assert check_server(config, "tiny", longest) == (expected or "tiny")
    else:
        refuses(says, check_server, config, "tiny", longest)


def test_no_server(server: Any) -> None:
    server.close()
    with pytest.raises(UserError, match=r"no completions server answers at http://127.*/v1 \(ConnectError.*vllm serve"):
        check_server(ServerConfig(url=server.url), "base", 10)


def test_answers_with_another_sampler_come_in_the_order_of_their_numbers(server: Any) -> None:
    sampler = SamplerConfig(temperature=1.0, max_new_tokens=5)
    rows = list(backend(server).answer(PROMPTS[:30], sampler))
    assert [row.prompt_number for row in rows] == list(range(30))
    assert all(body["max_tokens"] == 5 for body in server.bodies[1:])


# What is sent, and which answers are accepted.


def completions(**sampler: Any) -> Completions:
    return Completions(TOKENIZER, frozenset({EOS, OTHER_EOS}), 259, SamplerConfig(**{"max_new_tokens": 4, **sampler}))


def parse(payload: Any, **sampler: Any) -> tuple[list[int], bool]:
    completion = openai.OpenAI(api_key="none")._process_response_data(data=payload, cast_to=Completion, response=None)
    result = completions(**sampler).parse(completion, PROMPT, as_text='"text"' in json.dumps(payload))
    assert result.prompt_number == 7 and result.boundary == 3 and result.input_ids[:3].tolist() == [65, 66, 67]
    return result.input_ids[3:].tolist(), result.finished


def one(choice: dict[str, Any], usage: Any = None) -> dict[str, Any]:
    return {"choices": [choice], "usage": usage}


@cases(
    "choice, answer, finished",
    ({"token_ids": [70, 71, 72, 73], "finish_reason": "length"}, [70, 71, 72, 73], False),
    ({"token_ids": [70, EOS], "finish_reason": "stop"}, [70, EOS], True),
    # Servers may leave out the end-of-turn token: the stated one is added, or else the tokenizer's.
    ({"token_ids": [70], "finish_reason": "stop"}, [70, EOS], True),
    ({"token_ids": [70], "finish_reason": "stop", "stop_reason": OTHER_EOS}, [70, OTHER_EOS], True),
    ({"token_ids": [70], "finish_reason": "stop", "matched_stop": OTHER_EOS}, [70, OTHER_EOS], True),
    ({"token_ids": [70], "finish_reason": "stop", "stop_reason": "\n"}, [70, EOS], True),
    # A server that does not know all the tokens that end an answer of this base.
    ({"token_ids": [70, OTHER_EOS, 71, 72], "finish_reason": "length"}, [70, OTHER_EOS], True),
    ({"token_ids": [70, 71, 72, EOS], "finish_reason": "length"}, [70, 71, 72, EOS], True),
    # Text is encoded, and never longer than requested.
    ({"text": "hi", "finish_reason": "stop"}, [*b"hi", EOS], True),
    ({"text": "hello", "finish_reason": "stop"}, list(b"hell"), False),
    ({"text": "hi<|im_end|>more", "finish_reason": "length"}, [*b"hi", EOS], True),
)
def test_answers_end_as_the_built_in_ones_do(choice: dict[str, Any], answer: list[int], finished: bool) -> None:
    assert parse(one(choice)) == (answer, finished)


BAD = BadAnswerError
STOPPED, CUT = {"finish_reason": "stop"}, {"finish_reason": "length"}


@cases(
    "payload, error, says",
    # Another try may help.
    ([], BAD, "without an answer"),
    ({"choices": [{}, {}]}, BAD, "without an answer"),
    ({"choices": ["hi"]}, BAD, "without an answer"),
    (one({"finish_reason": "abort", "token_ids": [70]}), BAD, "ended by 'abort'"),
    (one(STOPPED), BAD, "no token ids below 259"),
    *((one({**STOPPED, "token_ids": [odd]}), BAD, "no token ids below 259") for odd in (259, True)),
    (one({**CUT, "token_ids": [70] * 5}), BAD, "5 tokens"),
    (one({**STOPPED, "text": None}), BAD, "no text"),
    *((one({**STOPPED, "token_ids": []}, u), BAD, "an empty answer") for u in (None, {"completion_tokens": 0})),
    (one({**STOPPED, "text": ""}), BAD, "an empty answer"),
    # No other try helps.
    (one({**CUT, "token_ids": [70, 71]}), UserError, r"cut .* prompt 7 \(3 tokens\) after 2 of 4 .*longer context"),
)
def test_what_is_no_answer_is_refused(payload: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        parse(payload)


@pytest.mark.parametrize("fields", [{"token_ids": []}, {"text": ""}])
def test_an_empty_answer_is_accepted_if_one_token_was_generated(fields: dict[str, Any]) -> None:
    """The base ended its turn at once."""
    assert parse(one({**fields, **STOPPED}, {"completion_tokens": 1})) == ([EOS], True)


def test_ends_of_turns_may_be_ignored() -> None:
    assert parse(one({**CUT, "token_ids": [70, EOS, 71, 72]}), ignore_eos=True)[0] == [70, EOS, 71, 72]
    refuses("ended answer 7 despite ignore_eos", parse, one({**STOPPED, "token_ids": [70, EOS]}), ignore_eos=True)


def test_requests() -> None:
    request = completions(seed=2, top_k=5).request("m", PROMPT)
    assert request["prompt"] == [65, 66, 67] and request["seed"] == 2_000_013
    assert request["extra_body"]["top_k"] == 5 and request["extra_body"]["return_token_ids"]
    assert "stop_token_ids" not in completions(ignore_eos=True).request("m", PROMPT)["extra_body"]
    assert 0 <= completions(seed=2**31 - 1).request("m", PROMPT)["seed"] < 2**31


@cases(
    "settings, says",
    ({"url": "localhost:8000"}, "url must be like http://host:8000"),
    ({"url": "http://host:80a"}, "url must be like http://host:8000"),
    ({"url": "http://me:sk-1@host"}, "password; .*OPENAI_API_KEY"),
)
def test_limits(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        ServerConfig(**settings)
    assert "sk-1" not in str(error.value)


def test_addresses() -> None:
    roots = [ServerConfig(url=url).root for url in ("http://h:1", "http://h/v1/", "https://h/a/b")]
    assert roots == ["http://h:1/v1", "http://h/v1", "https://h/a/b"]


@pytest.mark.parametrize(("prompt", "expected"), [([5], [4, 3, 5]), ([3], [4, 3, 5]), ([5, 3], [4, 3, 5])])
def test_text_is_tokenised_where_it_stands(prompt: list[int], expected: list[int]) -> None:
    """SentencePiece puts a word mark before a text that stands alone, but not after a prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "▁Hello": 2, "▁world": 3, "Hello": 4, "</s>": 5, "▁worldHello": 1}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    payload = {"id": "1", "created": 0, "model": "m", "object": "text_completion",
               "choices": [{"index": 0, "finish_reason": "stop", "text": "Hello world", "logprobs": None}]}  # fmt: skip
    made = Completions(tokenizer, frozenset({5}), 6, SamplerConfig(max_new_tokens=8))
    answered = made.parse(Completion.model_validate(payload), (0, prompt), as_text=True)
    assert answered.input_ids.tolist() == [*prompt, *expected]
