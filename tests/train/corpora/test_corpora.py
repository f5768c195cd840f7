"""Corpora stay on disk, are made once, and are refused before hours of work when they cannot fit."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import datasets
import pytest
import torch

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.store import ProcessGroup
from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.text.sources import SourceConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.config import PhaseConfig
from drafthead.train.corpora import states as computed_states
from drafthead.train.corpora.corpora import Corpora, is_held_out
from drafthead.train.corpora.corpus_config import AnswersConfig, DataConfig, TextConfig
from drafthead.train.corpora.states import PASS_TOKENS
from drafthead.train.original_base import OriginalBase
from drafthead.train.trainer.batches import open_phase
from support import Said, TinyBase, composed, join_threads, randomised, refuses


def make(base: BaseModel, folder: Path, seed: int = 0) -> tuple[Corpora, Said]:
    config = DataConfig(
        folder=str(folder),
        text=TextConfig(sources=[SourceConfig(kind="builtin", name="stdlib_tiny")], max_tokens=3000),
        answers=AnswersConfig(
            sources=[SourceConfig(kind="builtin", name="tiny")],
            prompts=24,
            max_prompt_tokens=400,
            sampler=SamplerConfig(max_new_tokens=8),
        ),
    )
    display = Said()
    return Corpora(OriginalBase.of(base), config, seed, display, store_states=True), display


@contextmanager
def passes(base: BaseModel, layer: int = 0) -> Iterator[list[int]]:
    """Yield a list that gets the number of tokens of each pass through a layer of the base."""
    tokens: list[int] = []
    hook = base.model.model.layers[layer].register_forward_hook(lambda _, inputs, out: tokens.append(out.shape[1]))
    yield tokens
    hook.remove()


def test_text_is_tokenised_once_for_rows_of_any_length(tiny_base: TinyBase, tmp_path: Path) -> None:
    made, said = make(tiny_base(), tmp_path)
    rows = made.text_rows(64)
    assert said.steps[0] == ("tokenising text", 0, 3000) and said.steps[-1] == ("tokenising text", 3000, 3000)
    other = make(tiny_base(), tmp_path, seed=1)[0].text_rows(64)
    assert other.digest != rows.digest and len(list((tmp_path / "text").iterdir())) == 2
    again, said = make(tiny_base(), tmp_path)
    assert again.text_rows(64).digest == rows.digest
    assert again.text_rows(48).documents.digest == rows.documents.digest and not said.steps, "tokenised again"


def test_interrupted_text_is_tokenised_again(tiny_base: TinyBase, tmp_path: Path) -> None:
    digest = make(tiny_base(), tmp_path / "whole")[0].text_rows(64).digest
    made, said = make(tiny_base(), tmp_path / "killed")

    def interrupt(label: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(said, "progress", interrupt)
        made.text_rows(64)
    assert made.text_rows(64).digest == digest
    (manifest,) = (tmp_path / "killed").glob("text/*/manifest.json")
    manifest.unlink()  # as if killed between documents and manifest
    assert made.text_rows(64).digest == digest and manifest.exists()


def test_held_out_answers_are_bounded() -> None:
    held_out = [n for n in range(100_000) if is_held_out(n)]
    assert held_out == list(range(19, 20 * 512, 20))


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_noticed_before_generating(tiny_base: TinyBase, tmp_path: Path) -> None:
    """There is room for the ids, but not for the hidden states."""
    made, said = make(tiny_base(), tmp_path)
    refuses(r"the answers with their hidden states \(store_hidden_states\) needs about", made.answers)
    assert not said.steps, "generation had started"


@pytest.mark.parametrize("layers", [(), (1,), (0, 2)])
def test_final_states_of_decoding_are_those_of_the_base(
    tiny_base: TinyBase, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    """If a head reads early layers too, the base runs up to the last of these."""
    base, spec = tiny_base(), HiddenStatesSpec(layers=layers)
    made, _ = make(base, tmp_path)
    documents = made.answer_rows(512, held_out=False).documents
    states = made.states("answers", documents, spec)
    with passes(base, 2) as through_last_layer:
        states.prepare(range(len(documents)))
    assert not through_last_layer
    if layers:  # the final states are not stored twice
        (file,) = tmp_path.glob("states/*/states.bin")
        assert file.stat().st_size == 2 * len(documents.tokens) * base.hidden_size * len(layers)
    assert layers or not (tmp_path / "states").exists()
    for number, stored in enumerate(states.read(range(len(documents)))):
        assert stored.dtype == torch.float16 and stored[-1, : base.hidden_size].isnan().all()
        computed = base.hidden_states(TrainBatch.of([documents[number].tolist()]), spec)
        parts = [computed.final] if computed.layers is None else [computed.final, computed.layers]
        torch.testing.assert_close(stored[:-1].float(), torch.cat(parts, -1)[0, :-1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("corpus", ["text", "answers"])
def test_the_loss_of_stored_states_is_that_of_computed_ones(tiny_base: TinyBase, tmp_path: Path, corpus: Any) -> None:
    """In rows of whole documents. A stored state of a later piece of a document has read the pieces before it."""
    base, phase = tiny_base(), PhaseConfig(corpus=corpus, seq_len=300)
    made, _ = make(base, tmp_path)
    head = randomised(Eagle3Config(num_draft_tokens=3, ttt_steps=3, layers=(0, 1, 2)).build(base), 0.02)
    data = open_phase(made, phase, head.spec)
    whole = [n for n in range(len(data)) if not any(piece.start for piece in data.rows.row(n))]
    losses = [head.loss(*data.load(whole), LossConfig(kl=0.5)).loss_sum.item()]
    stored = open_phase(made, replace(phase, store_hidden_states=True), head.spec)
    with passes(base) as computed:
        losses.append(head.loss(*stored.load(whole), LossConfig(kl=0.5)).loss_sum.item())
        rows = {n: stored.load([n])[1].final[0] for n in range(len(data))}
    assert whole and not computed and losses[1] == pytest.approx(losses[0], rel=1e-3)
    later = [(n, piece) for n in rows for piece in data.rows.row(n) if piece.start]
    assert later if corpus == "text" else not later
    for number, (document, start, length, offset) in later:
        alone = base.hidden_states(TrainBatch.of([data.rows.documents[document].tolist()]), head.spec).final[0]
        actual, expected = rows[number][offset : offset + length], alone[start : start + length]
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


def test_two_processes_store_the_bytes_of_one(
    tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the processes are threads; those of test_data_run.py are real."""
    monkeypatch.setattr(computed_states, "PASS_TOKENS", 600)
    base, barrier = tiny_base(), Barrier(2, timeout=60)

    def fill(folder: str, rank: int = 0, size: int = 1) -> tuple[int, bytes]:
        made, said = make(base, tmp_path / folder)
        made.group = ProcessGroup(rank, size, lambda: size > 1 and barrier.wait())
        documents = made.text_rows(64).documents
        made.states("text", documents, HiddenStatesSpec()).prepare(range(len(documents)))
        (file,) = (tmp_path / folder).glob("states/*/states.bin")
        return said.steps[-1][2], file.read_bytes()

    alone = fill("one")
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(fill, ["two"] * 2, range(2), [2] * 2)] == [alone, alone] and alone[0] > 4


def test_other_rows_of_the_same_documents_compute_nothing(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, spec = tiny_base(), HiddenStatesSpec(layers=(1,))
    made, _ = make(base, tmp_path)
    for corpus in ("text", "answers"):
        phase = PhaseConfig(corpus=corpus, seq_len=512, store_hidden_states=True)
        with passes(base) as computed:
            first = open_phase(made, phase, spec)
            assert computed and max(computed) <= PASS_TOKENS
            computed.clear()
            other = open_phase(make(base, tmp_path)[0], replace(phase, seq_len=80), spec, seed=1)
            values = other.read([0])[1]
        assert not computed and len(other) > len(first) and values is not None
        made.holds_suite = True  # other answers are held out
    with passes(base) as computed:
        open_phase(Corpora(made.base, made.config, 0, Said(), holds_suite=True), phase, spec)
    assert not computed


def test_states_are_stored_with_answers_only_if_a_phase_reads_them(tiny_base: TinyBase, tmp_path: Path) -> None:
    settings = ["recipe=medusa_smollm2", "debug=tiny"]
    assert composed(tmp_path, *settings)[0].stores_answer_states
    assert not composed(tmp_path, *settings, "phases.distill.store_hidden_states=false")[0].stores_answer_states
    base = tiny_base()
    config = make(base, tmp_path)[0].config
    assert not Corpora(OriginalBase.of(base), config, 0, Said()).answers().has_hidden_states
    assert not list(tmp_path.rglob("*.safetensors"))
    # A later run that stores hidden states has the base compute them once.
    made, _ = make(base, tmp_path)
    phase = PhaseConfig(corpus="answers", seq_len=512, store_hidden_states=True)
    data = open_phase(made, phase, HiddenStatesSpec())
    with passes(base) as computed:
        data.load(list(range(len(data))))
    assert not computed and not made.answers().has_hidden_states


def test_a_short_phase_has_the_base_read_its_own_documents_only(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    made, _ = make(base, tmp_path)
    phase = PhaseConfig(corpus="text", seq_len=64, store_hidden_states=True)
    with passes(base) as computed:
        data = open_phase(made, phase, HiddenStatesSpec(), seed=5, num_rows=4)
    documents = data.rows.documents_of(data.numbers(0, 4))
    assert sum(computed) == sum(data.rows.documents.lengths[documents]) < 3000
    with passes(base) as computed:
        open_phase(made, phase, HiddenStatesSpec(), seed=5, num_rows=3)
        assert not computed
        longer = open_phase(made, phase, HiddenStatesSpec(), seed=5, num_rows=10**6)
        computed.clear()
        longer.load(list(range(len(longer))))
    assert not computed


def test_a_phase_may_train_on_a_random_part_and_a_larger_part_holds_it(tiny_base: TinyBase, tmp_path: Path) -> None:
    made, _ = make(tiny_base(), tmp_path)

    def taken(max_tokens: int | None) -> set[int]:
        phase = PhaseConfig(corpus="text", seq_len=64, max_tokens=max_tokens)
        data = open_phase(made, phase, HiddenStatesSpec(), seed=5)
        return set(data.numbers(0, 3 * len(data)))

    small, large = taken(3 * 64 - 8), taken(5 * 64 - 8)
    assert (len(small), len(large)) == (3, 5) and small < large
    assert small != {0, 1, 2}
    everything = taken(None)
    assert len(everything) > 5 and taken(10**9) == everything


def test_a_stream_stays_at_its_commit(tiny_base: TinyBase, tmp_path: Path, dataset_hub: Any) -> None:
    """A dataset that grows between two starts gives the rows of the first; without stored commits, the run notices."""

    def of_commit(revision: str) -> datasets.IterableDataset:
        texts = [f"{n}: row {n} of {revision[0]}" * 5 for n in range(400)]
        return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()

    dataset_hub.rows = of_commit
    text = TextConfig(sources=[SourceConfig(kind="hf", name="org/set")], stream=True, stream_shards=1, workers=1)

    def rows() -> tuple[torch.Tensor, dict[str, object]]:
        made = Corpora(OriginalBase.of(tiny_base()), DataConfig(folder=str(tmp_path), text=text), 0, Said())
        stream = made.text_stream(64, 1)
        loaded = stream.batch([0, 70]).input_ids
        del stream
        join_threads("rows")
        return loaded, made.manifests

    expected, manifests = rows()
    dataset_hub.up = False
    again, same = rows()
    assert torch.equal(again, expected) and same == manifests
    shutil.rmtree(tmp_path / "stream")
    dataset_hub.up, dataset_hub.commit = True, "b" * 40
    moved, other = rows()
    assert not torch.equal(moved, expected) and other != manifests
