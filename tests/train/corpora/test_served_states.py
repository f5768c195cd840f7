"""Hidden states from a server: those of the base, and every planted fault is named before anything is stored."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.text.documents import Documents
from drafthead.data.text.sources import SourceConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode
from drafthead.train.corpora import served_base
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.corpora.corpus_config import AnswersConfig, DataConfig, StatesConfig, TextConfig
from drafthead.train.corpora.served_base import ServedBase
from drafthead.train.corpora.served_states import CHECKED
from drafthead.train.original_base import OriginalBase
from support import Said, TinyBase, random_ids, refuses

SPEC = HiddenStatesSpec(layers=(1,))


def corpora(base: BaseModel, folder: Path, url: str | None = None, **states: Any) -> Corpora:
    text = TextConfig(sources=[SourceConfig(kind="builtin", name="stdlib_tiny")], max_tokens=800)
    answers = AnswersConfig(
        sources=[SourceConfig(kind="builtin", name="tiny")], sampler=SamplerConfig(max_new_tokens=4)
    )
    served = StatesConfig(url=url, tries=2, **states)
    config = DataConfig(folder=str(folder), text=text, answers=answers, states=served)
    parts, layers = base.parts(), lambda count: SPEC.layers
    of_server = ServedBase(lambda: parts, served, config.served_folder, layers, Said())
    return Corpora(of_server if url else OriginalBase.of(base), config, 0, Said())


def states_of(made: Corpora) -> list[Tensor]:
    documents = Documents.of([np.array(random_ids(12 + 3 * n, seed=n), np.int32) for n in range(8)])
    source = made.states("text", documents, SPEC)
    source.prepare(range(8))
    return source.read(range(8))


class Engine:
    """A stand-in for vLLM with its connector, which can be made to write something else."""

    def __init__(self, base: BaseModel, folder: Path, server: Any) -> None:
        self.base, self.folder, self.server = base, folder, server
        self.change: Callable[[Tensor], Tensor] = lambda states: states
        self.harm: Callable[[Path], None] = lambda path: None
        self.lock = Lock()
        server.models = [{"id": base.name, "max_model_len": 2048}]
        server.extend = self.extend
        folder.mkdir(parents=True, exist_ok=True)

    def states(self, ids: list[int]) -> Tensor:
        """All layers [T, L + 1, D], the last one before the final norm."""
        last: list[Tensor] = []
        hook = self.base.model.model.layers[-1].register_forward_hook(lambda _, inputs, out: last.append(out[0]))
        spec = HiddenStatesSpec(layers=(0, 1))
        early = self.base.hidden_states(TrainBatch.of([ids]), spec).layers
        hook.remove()
        assert early is not None
        return torch.stack([*early[0].chunk(2, -1), last[0]], 1)

    def answer(self, ids: list[int], body: dict[str, Any]) -> list[int]:
        with self.lock:
            return decode(self.base, None, ids, max_new_tokens=body["max_tokens"]).tokens

    def extend(self, payload: dict[str, Any], body: dict[str, Any]) -> None:
        ids = body["prompt"]
        if body.get("kv_transfer_params", {}).get("include_output_tokens"):
            ids = [*ids, *payload["choices"][0]["token_ids"][:-1]]
        with self.lock:  # requests come at the same time, and a hook would see all of them
            states = self.states(ids)
        path = self.folder / f"{len(self.server.bodies)}-{time.monotonic_ns()}.safetensors"
        changed = self.change(states)
        save_file({"hidden_states": changed.contiguous(), "token_ids": torch.tensor(ids[-len(changed) :])}, path)
        self.harm(path)
        payload["kv_transfer_params"] = {"hidden_states_path": str(path)}
        if body.get("prompt_logprobs"):
            logits = self.base.lm_head.logits(self.base.final_norm(states[:, -1]))
            best = [{str(token): {"rank": 1}} for token in logits.argmax(-1).tolist()]
            payload["choices"][0]["prompt_logprobs"] = [None, *best[:-1]]


@pytest.fixture
def engine(tiny_base: TinyBase, tmp_path: Path, completions_server: Callable[..., Any]) -> Engine:
    base = tiny_base()
    server = completions_server(lambda ids, body: engine.answer(ids, body), base.tokenizer, base.eos_ids)
    engine = Engine(base, tmp_path / "served", server)
    return engine


def test_a_server_gives_the_states_of_the_base_and_no_layer_is_run_here(engine: Engine, tmp_path: Path) -> None:
    expected = states_of(corpora(engine.base, tmp_path / "own"))
    made = corpora(engine.base, tmp_path, engine.server.url)
    for actual, own in zip(states_of(made), expected, strict=True):
        torch.testing.assert_close(actual, own, rtol=1e-3, atol=1e-3)
    asked = len(engine.server.bodies)
    states_of(made)
    assert len(engine.server.bodies) == asked and not [*engine.folder.iterdir()], "stored once; its files are removed"


def off_by_one(states: Tensor) -> Tensor:
    return torch.stack([states[:, 1], states[:, 2], states[:, 2] * 2], 1)


def zeros(states: Tensor) -> Tensor:
    states = states.clone()
    states[3, 1] = 0
    return states


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "layers off by one": (off_by_one, "is not the embedding"),
    "a layer twice": (lambda states: states[:, [0, 1, 1]], "equal states in the layers number 1 and 2"),
    "a layer less": (lambda states: states[:, :2], r"states of shape \[\d+, 2, 32\], expected"),
    "prefix caching": (lambda states: states[4:], "prefix caching"),
    "zeros": (zeros, "only zeros at token 3 of layer number 1"),
    "not finite": (lambda states: states / 0, "not finite"),
    "another last layer": (lambda states: states * torch.tensor([1, 1, -1])[:, None], "predicts what it answers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(engine: Engine, tmp_path: Path, fault: str) -> None:
    engine.change, message = FAULTS[fault]
    refuses(message, states_of, corpora(engine.base, tmp_path, engine.server.url))


def test_another_checkpoint_behind_the_name_is_noticed(engine: Engine, tiny_base: TinyBase, tmp_path: Path) -> None:
    other = tiny_base(seed=1)
    made = corpora(other, tmp_path, engine.server.url)
    engine.server.models = [{"id": other.name, "max_model_len": 2048}]
    refuses("is not the embedding", states_of, made)


def test_damaged_and_missing_files(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_base, "LOCK_S", 0.2)
    made = corpora(engine.base, tmp_path, engine.server.url)
    engine.harm = lambda path: path.write_bytes(path.read_bytes()[:-40])
    refuses("is not readable", states_of, made)
    engine.harm = lambda path: path.unlink()
    refuses("does not exist", states_of, made)
    descriptors = []

    def lock(path: Path) -> None:
        descriptors.append(os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY))
        fcntl.flock(descriptors[-1], fcntl.LOCK_EX)

    engine.harm = lock
    refuses("its lock is held", states_of, made)
    for descriptor in descriptors:
        os.close(descriptor)


def test_one_bad_file_is_asked_for_again(engine: Engine, tmp_path: Path) -> None:
    harmed = iter([True])
    engine.harm = lambda path: path.write_bytes(b"") if next(harmed, False) else None
    assert len(states_of(corpora(engine.base, tmp_path, engine.server.url))) == 8


def test_only_files_of_the_folder_are_read(engine: Engine, tmp_path: Path) -> None:
    made = corpora(engine.base, tmp_path, engine.server.url)
    (precious := tmp_path / "precious.safetensors").write_text("mine")
    engine.server.extend = lambda payload, body: payload.update(
        kv_transfer_params={"hidden_states_path": str(precious)}
    )
    refuses("its folder should be", states_of, made)
    engine.server.extend = lambda payload, body: None
    refuses("writes no hidden states", states_of, made)
    assert precious.read_text() == "mine"


def test_what_arrived_is_kept(engine: Engine, tmp_path: Path) -> None:
    engine.server.fault = lambda number, body: "400" if number == 7 else None
    refuses("refuses the states", states_of, corpora(engine.base, tmp_path, engine.server.url, concurrency=1))
    asked = len(engine.server.bodies)
    states_of(corpora(engine.base, tmp_path, engine.server.url))
    assert asked == 8 and len(engine.server.bodies) - asked == CHECKED + 5, "three of eight were stored"


# Answers with their states --------------------------------------------------------------------------------------------


def answer_states(made: Corpora) -> dict[int, Tensor]:
    """The states of every answer but for its last token, by prompt number."""
    store = made.answers()
    answers = [*store.read(with_hidden_states=False)]
    source = made.states("answers", Documents.of([answer.input_ids for answer in answers]), SPEC)
    source.prepare(range(len(answers)))
    states = source.read(range(len(answers)))
    return {answer.prompt_number: each[:-1] for answer, each in zip(answers, states, strict=True)}


def test_one_request_gives_an_answer_and_its_states(engine: Engine, tmp_path: Path) -> None:
    made = corpora(engine.base, tmp_path, engine.server.url)
    answers = made.answers()
    requests = len(engine.server.bodies)
    states = answer_states(made)
    assert len(engine.server.bodies) == requests, "no answer was requested a second time"
    assert len(states) == len(answers.done) > 20 and not [*engine.folder.rglob("*.safetensors")]
    own = corpora(engine.base, tmp_path / "own")
    expected = answer_states(own)
    assert [answer.ids for answer in own.answers().read(False)] == [answer.ids for answer in answers.read(False)]
    for number, values in expected.items():
        torch.testing.assert_close(states[number], values, rtol=1e-3, atol=1e-3)
