"""What is asked of a completions server, and which answers are believed."""

from email.utils import formatdate
from time import time
from typing import Any

import pytest

from drafthead.data.answers.server import (
    Completions,
    ServerCapabilities,
    ServerConfig,
    TemporaryError,
    said_by,
    seconds_to_wait,
    served_models,
)
from drafthead.data.answers.store import SamplerConfig
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.utils.errors import UserError

TOKENIZER = tiny_tokenizer()
EOS, OTHER_EOS = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
IDS, TEXT = ServerCapabilities("ids", "ids"), ServerCapabilities("text", "text")
PROMPT = (7, [65, 66, 67])


def completions(**sampler: Any) -> Completions:
    return Completions(TOKENIZER, frozenset({EOS, OTHER_EOS}), 259, SamplerConfig(**{"max_new_tokens": 4, **sampler}))


def read(
    choice: dict[str, Any], dialect: ServerCapabilities = IDS, usage: Any = None, **sampler: Any
) -> tuple[list[int], bool]:
    payload = {"choices": [choice], "usage": usage}
    found = completions(**sampler).read(payload, PROMPT, dialect)
    assert found.prompt_number == 7 and found.boundary == 3 and found.input_ids[:3].tolist() == [65, 66, 67]
    return found.input_ids[3:].tolist(), found.finished


@pytest.mark.parametrize(
    ("choice", "answer", "finished"),
    [
        ({"token_ids": [70, 71, 72, 73], "finish_reason": "length"}, [70, 71, 72, 73], False),
        ({"token_ids": [70, EOS], "finish_reason": "stop"}, [70, EOS], True),
        # The token that ended it was left out: the one that is named, or else the tokenizer's.
        ({"token_ids": [70], "finish_reason": "stop"}, [70, EOS], True),
        ({"token_ids": [70], "finish_reason": "stop", "stop_reason": OTHER_EOS}, [70, OTHER_EOS], True),
        ({"token_ids": [70], "finish_reason": "stop", "matched_stop": OTHER_EOS}, [70, OTHER_EOS], True),
        ({"token_ids": [70], "finish_reason": "stop", "stop_reason": "\n"}, [70, EOS], True),
        # A server that does not know all the tokens that end an answer of this base.
        ({"token_ids": [70, OTHER_EOS, 71, 72], "finish_reason": "length"}, [70, OTHER_EOS], True),
        ({"token_ids": [70, 71, 72, EOS], "finish_reason": "length"}, [70, 71, 72, EOS], True),
    ],
)
def test_answers_end_as_the_built_in_ones_do(choice: dict[str, Any], answer: list[int], finished: bool) -> None:
    assert read(choice) == (answer, finished)


def test_text_is_encoded_and_never_longer_than_asked_for() -> None:
    assert read({"text": "hi", "finish_reason": "stop"}, TEXT) == ([*b"hi", EOS], True)
    assert read({"text": "hello", "finish_reason": "stop"}, TEXT) == (list(b"hell"), False)
    assert read({"text": "hi<|im_end|>more", "finish_reason": "length"}, TEXT) == ([*b"hi", EOS], True)


def test_an_empty_answer_is_believed_if_one_token_was_generated() -> None:
    """The base ended its turn at once."""
    for choice, dialect in (({"token_ids": []}, IDS), ({"text": ""}, TEXT)):
        choice["finish_reason"] = "stop"
        assert read(choice, dialect, {"completion_tokens": 1}) == ([EOS], True)
        for usage in (None, {"completion_tokens": 0}):
            with pytest.raises(TemporaryError, match="an empty answer"):
                read(choice, dialect, usage)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ([], "without an answer"),
        ({"choices": [{}, {}]}, "without an answer"),
        ({"choices": ["hi"]}, "without an answer"),
        ({"choices": [{"finish_reason": "abort", "token_ids": [70]}]}, "ended by 'abort'"),
        ({"choices": [{"finish_reason": "stop"}]}, "no token ids below 259"),
        ({"choices": [{"finish_reason": "stop", "token_ids": [259]}]}, "no token ids below 259"),
        ({"choices": [{"finish_reason": "stop", "token_ids": [-1]}]}, "no token ids below 259"),
        ({"choices": [{"finish_reason": "stop", "token_ids": [True]}]}, "no token ids below 259"),
        ({"choices": [{"finish_reason": "length", "token_ids": [70] * 5}]}, "5 tokens where 4 were allowed"),
    ],
)
def test_what_is_no_answer_is_asked_for_again(payload: Any, says: str) -> None:
    with pytest.raises(TemporaryError, match=says):
        completions().read(payload, PROMPT, IDS)
    with pytest.raises(TemporaryError, match="no text"):
        completions().read({"choices": [{"finish_reason": "stop", "text": None}]}, PROMPT, TEXT)


def test_servers_that_do_not_do_as_asked() -> None:
    with pytest.raises(
        UserError, match=r"cut the answer to prompt 7 \(3 tokens\) after 2 of 4 tokens; .*longer context"
    ):
        read({"token_ids": [70, 71], "finish_reason": "length"})
    with pytest.raises(UserError, match="ended the answer to prompt 7 although ignore_eos was asked for"):
        read({"token_ids": [70, EOS], "finish_reason": "stop"}, ignore_eos=True)
    assert read({"token_ids": [70, EOS, 71, 72], "finish_reason": "length"}, ignore_eos=True)[0] == [70, EOS, 71, 72]


def test_requests() -> None:
    ids = completions(seed=2, top_k=5).request("m", PROMPT, IDS)
    assert ids["prompt"] == [65, 66, 67] and ids["seed"] == 2_000_013 and ids["top_k"] == 5 and ids["return_token_ids"]
    assert "stop_token_ids" not in completions(ignore_eos=True).request("m", PROMPT, IDS)
    text = completions(top_p=0.5).request("m", PROMPT, TEXT)
    assert text["prompt"] == "ABC" and text["top_p"] == 0.5
    assert set(completions().request("m", PROMPT, TEXT)) == {
        "model", "prompt", "max_tokens", "temperature", "seed", "stream",
    }  # fmt: skip
    assert 0 <= completions(seed=10**12).request("m", PROMPT, IDS)["seed"] < 2**31


def test_text_prompts_leave_out_the_token_that_servers_add(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithBos:
        eos_token_id = EOS

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1, *text.encode()]}

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    made = Completions(WithBos(), frozenset({EOS}), 259, SamplerConfig())
    assert made.request("m", (0, [1, 65, 66]), TEXT)["prompt"] == "AB"
    assert made.request("m", (0, [65, 66]), TEXT)["prompt"] == "AB"


def test_seconds_to_wait() -> None:
    assert seconds_to_wait(None) is None and seconds_to_wait("soon") is None and seconds_to_wait("nan") is None
    assert seconds_to_wait("2.5") == 2.5 and seconds_to_wait("-3") == 0 and seconds_to_wait("1e9") == 3600
    later = seconds_to_wait(formatdate(time() + 30, usegmt=True))
    assert later is not None and 25 < later <= 30


@pytest.mark.parametrize(
    "content",
    [
        b'{"error": {"message": "too long", "code": 400}}',
        b'{"error": "too long", "error_type": "validation"}',
        b'{"object": "error", "message": "too long"}',
        b'{"detail": "too long"}',
        b"too\n long",
    ],
)
def test_error_messages_of_every_server(content: bytes) -> None:
    assert said_by(content) == "too long"
    assert said_by(b"") == "no message" and len(said_by(b"x" * 1000)) == 300 and said_by(b"\xff") == "\ufffd"


def test_served_models() -> None:
    rows = [{"id": "a", "max_model_len": 5}, {"id": "b", "max_model_len": None}, {"no": "id"}, "c"]
    assert served_models({"data": rows}) == {"a": 5, "b": None}
    assert served_models({}) == served_models([]) == served_models({"data": 3}) == {}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "localhost:8000"}, "server.url must be like http://host:8000, got 'localhost:8000'"),
        ({"url": "http://host:80a"}, "server.url must be like http://host:8000"),
        ({"url": "ftp://host"}, "server.url must be like http://host:8000"),
        ({"url": "http://me:sk-1@host"}, "must not hold a name or a password; put the key into OPENAI_API_KEY"),
        ({"concurrency": 0}, "server.concurrency must be at least 1, got 0"),
        ({"tries": 0}, "server.tries must be at least 1, got 0"),
        ({"timeout": 0.0}, "server.timeout must be positive seconds, got 0.0"),
        ({"min_agreement": 1.5}, r"server.min_agreement must be in \[0, 1\], got 1.5"),
    ],
)
def test_limits(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        ServerConfig(**settings)
    assert "sk-1" not in str(error.value)


def test_addresses() -> None:
    for url, root in (
        ("http://h:1", "http://h:1/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("https://h/a/b", "https://h/a/b"),
    ):
        assert ServerConfig(url=url).root == root
