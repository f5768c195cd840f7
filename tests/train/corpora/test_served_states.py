"""Hidden states from a server: those of the base, and every planted fault is named before anything is stored."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_in_vllm import StandIn
from torch import Tensor

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import pack
from drafthead.data.text.sources import SourceConfig
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.corpora import served_base
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.corpora.corpus_config import AnswersConfig, DataConfig, StatesConfig, TextConfig
from drafthead.train.corpora.served_base import ServedBase
from drafthead.train.corpora.served_states import CHECKED
from drafthead.train.original_base import OriginalBase
from drafthead.train.trainer.batches import PhaseData
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


@pytest.fixture
def engine(tiny_base: TinyBase, tmp_path: Path, completions_server: Callable[..., Any]) -> StandIn:
    return StandIn(tiny_base(), tmp_path / "served", completions_server)


def test_a_server_gives_the_states_of_the_base_and_no_layer_is_run_here(engine: StandIn, tmp_path: Path) -> None:
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
def test_planted_faults_are_named(engine: StandIn, tmp_path: Path, fault: str) -> None:
    engine.change, message = FAULTS[fault]
    refuses(message, states_of, corpora(engine.base, tmp_path, engine.server.url))


def test_a_middle_layer_of_another_number_is_noticed(engine: StandIn, tmp_path: Path) -> None:
    engine.layers = (0, 2)
    refuses("layer 1 of the server at .* is not that of", states_of, corpora(engine.base, tmp_path, engine.server.url))
    states_of(corpora(engine.base, tmp_path, engine.server.url, compare_layers=False))
    made = corpora(engine.base, tmp_path, engine.server.url)
    refuses("layer 1 of the server at .* is not that of", answer_states, made)  # whose states arrived with the answers


def test_another_checkpoint_behind_the_name_is_noticed(engine: StandIn, tiny_base: TinyBase, tmp_path: Path) -> None:
    other = tiny_base(seed=1)
    made = corpora(other, tmp_path, engine.server.url)
    engine.server.models = [{"id": other.name, "max_model_len": 2048}]
    refuses("is not the embedding", states_of, made)


def test_damaged_and_missing_files(engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_bad_file_is_asked_for_again(engine: StandIn, tmp_path: Path) -> None:
    harmed = iter([True])
    engine.harm = lambda path: path.write_bytes(b"") if next(harmed, False) else None
    assert len(states_of(corpora(engine.base, tmp_path, engine.server.url))) == 8


def test_only_files_of_the_folder_are_read(engine: StandIn, tmp_path: Path) -> None:
    made = corpora(engine.base, tmp_path, engine.server.url)
    (precious := tmp_path / "precious.safetensors").write_text("mine")
    engine.server.extend = lambda payload, body: payload.update(
        kv_transfer_params={"hidden_states_path": str(precious)}
    )
    refuses("its folder should be", states_of, made)
    engine.server.extend = lambda payload, body: None
    refuses("writes no hidden states", states_of, made)
    assert precious.read_text() == "mine"


def test_what_arrived_is_kept(engine: StandIn, tmp_path: Path) -> None:
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


def test_one_request_gives_an_answer_and_its_states(engine: StandIn, tmp_path: Path) -> None:
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


def test_an_answer_without_its_states_is_read_again(engine: StandIn, tmp_path: Path) -> None:
    """A kill between the two loses a file, and a bad disk damages another."""
    made = corpora(engine.base, tmp_path, engine.server.url)
    made.answers()
    lost, damaged, *_ = engine.folder.rglob("*.safetensors")
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-9])
    asked = len(engine.server.bodies)
    states = answer_states(made)
    assert len(engine.server.bodies) == asked + 2 + 2, "two of them checked and then read"
    for number, values in answer_states(corpora(engine.base, tmp_path / "own")).items():
        torch.testing.assert_close(states[number], values, rtol=1e-3, atol=1e-3)


def test_precomputed_answers_are_compared_through_the_server(
    engine: StandIn, tiny_base: TinyBase, tmp_path: Path
) -> None:
    """A fine-tune behind the base's name has other states, though its embedding may be the same."""
    engine.server.models = [{"id": engine.base.name, "max_model_len": 2048}]
    source = corpora(engine.base, tmp_path / "source")
    source.answers()

    def copied() -> Corpora:
        made = corpora(engine.base, tmp_path, engine.server.url)
        made.config.answers.precomputed, made.config.answers.fresh = str(tmp_path / "source" / "answers"), False
        return made

    engine.change = lambda states: states * torch.tensor([1, 1, -1])[:, None]
    refuses("the base chooses only", lambda: copied().answers())
    engine.change = lambda states: states
    assert len(copied().answers().done) == len(source.answers().done)


class Started:
    """A stand-in for the server's process."""

    command, running = "vllm", False

    def start(self) -> None:
        assert not self.running
        self.running = True

    def close(self) -> None:
        self.running = False

    def check(self) -> None:
        raise UserError("vLLM ended (signal 9, SIGKILL)")


@pytest.mark.parametrize("what", [answer_states, states_of])
def test_requests_to_a_server_that_has_ended_are_not_repeated(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Callable[[Corpora], Any]
) -> None:
    monkeypatch.setattr(served_base, "states_server", lambda *arguments: Started())
    monkeypatch.setattr("drafthead.data.answers.server.ALIVE_S", 0.2)
    engine.server.fault = lambda number, body: "slow" if number > 6 else None
    refuses("SIGKILL.; finished answers are kept", what, corpora(engine.base, tmp_path, engine.server.url, serve=True))


@pytest.mark.parametrize("precomputed", [False, True])
def test_a_run_starts_its_server_once_and_stops_it_when_all_is_stored(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precomputed: bool
) -> None:
    server = Started()
    monkeypatch.setattr(served_base, "states_server", lambda *arguments: server)
    corpora(engine.base, tmp_path / "source").answers()
    made = corpora(engine.base, tmp_path, engine.server.url, serve=True)
    engine.server.fault = lambda number, body: None if server.running else "400"
    if precomputed:
        made.config.answers.precomputed, made.config.answers.fresh = str(tmp_path / "source" / "answers"), False
    assert answer_states(made) and server.running
    made.base.drop_layers()
    assert not server.running and answer_states(made)
    assert not server.running, "everything is stored"


# States that are not stored -------------------------------------------------------------------------------------------


def test_states_are_computed_while_training_and_nothing_is_stored(engine: StandIn, tmp_path: Path) -> None:
    documents = Documents.of([np.array(random_ids(12 + 3 * n, seed=n), np.int32) for n in range(8)])
    rows, order = pack(documents, 64, split=False), [[0], [2], [1], [0]]

    def batches(made: Corpora) -> list[Tensor]:
        data = PhaseData(rows, made.base, SPEC)
        data.store(made.states("text", documents, SPEC, keep=False), range(len(rows)))
        states = [states for _, states in data.stream(order)]
        return [torch.cat([each.final, each.layers], -1) for each in states if each.layers is not None]

    served = corpora(engine.base, tmp_path, engine.server.url, keep=False, ahead=3)
    passing = batches(served)
    for actual, expected in zip(passing, batches(corpora(engine.base, tmp_path / "own")), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(passing[0], passing[3]), "the row is requested a second time"
    assert not (tmp_path / "states").exists() and not [*engine.folder.iterdir()]
    engine.server.fault = lambda number, body: "400"
    refuses("refuses the states", batches, corpora(engine.base, tmp_path, engine.server.url, keep=False))
