"""Corpora stay on disk, are made once, and are refused before hours of work when they cannot fit."""

import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.hidden_states import HiddenStateCache
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.text.sources import SourceConfig
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.config import PhaseConfig
from drafthead.train.corpora.corpora import Corpora, is_held_out
from drafthead.train.corpora.corpus_config import AnswersConfig, DataConfig, TextConfig
from drafthead.train.trainer.batches import open_held_out, open_phase
from support import TinyBase, composed, join_threads


def make(base: BaseModel, folder: Path, seed: int = 0) -> tuple[Corpora, list[tuple[str, int, int]]]:
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
    seen: list[tuple[str, int, int]] = []
    return Corpora(base, config, seed, lambda *step: seen.append(step), store_states=True), seen


def test_text_is_packed_once(tiny_base: TinyBase, tmp_path: Path) -> None:
    made, seen = make(tiny_base(), tmp_path)
    rows = made.text_rows(64).to_dict()
    assert seen[0] == ("packing text", 0, 3000) and seen[-1] == ("packing text", 3000, 3000)
    other = make(tiny_base(), tmp_path, seed=1)[0].text_rows(64)
    assert other.to_dict() != rows and len(list((tmp_path / "text").iterdir())) == 2
    again, seen = make(tiny_base(), tmp_path)
    assert again.text_rows(64).to_dict() == rows and not seen, "packed again"


def test_interrupted_text_is_packed_again(tiny_base: TinyBase, tmp_path: Path) -> None:
    rows = make(tiny_base(), tmp_path / "whole")[0].text_rows(64).to_dict()
    made, _ = make(tiny_base(), tmp_path / "killed")

    def interrupt(label: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    killed = Corpora(made.base, made.config, 0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        killed.text_rows(64)
    assert made.text_rows(64).to_dict() == rows
    (manifest,) = (tmp_path / "killed").glob("text/*/manifest.json")
    manifest.unlink()  # as if killed between rows and manifest
    assert made.text_rows(64).to_dict() == rows and manifest.exists()


def test_held_out_answers_are_bounded() -> None:
    held_out = [n for n in range(100_000) if is_held_out(n)]
    assert held_out == list(range(19, 20 * 512, 20))


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_noticed_before_generating(tiny_base: TinyBase, tmp_path: Path) -> None:
    """There is room for the ids, but not for the hidden states."""
    made, seen = make(tiny_base(), tmp_path)
    with pytest.raises(UserError, match=r"the answers with their hidden states \(store_hidden_states\) needs about"):
        made.answers()
    assert not seen, "generation had started"


@pytest.mark.parametrize("layers", [(), (1,), (0, 2)])
def test_kept_hidden_states_are_those_of_the_base(tiny_base: TinyBase, tmp_path: Path, layers: tuple[int, ...]) -> None:
    """With states of layers behind them, for which the base runs as far as the last of these."""
    base = tiny_base()
    made, _ = make(base, tmp_path)
    rows, prompts = made.answer_rows(512, held_out=False)
    answered = [len(a.input_ids) - a.boundary for a in made.answers().read() if a.prompt_number in prompts]
    assert np.sum(rows["loss_mask"]) == sum(answered), "prompts are not trained"
    runs = []
    hook = base.model.model.layers[2].register_forward_hook(lambda *_: runs.append(1))
    stored = made.stored_hidden_states(rows, "distill", HiddenStatesSpec(layers=layers), prompts)
    hook.remove()
    assert not runs
    if layers:  # the row cache has no second copy of the final states
        (features,) = tmp_path.glob("features/*/features.bin")
        assert features.stat().st_size == 2 * len(rows) * 512 * base.hidden_size * len(layers)
        shutil.rmtree(tmp_path / "features")
    assert not (tmp_path / "features").exists()
    computed = made.stored_hidden_states(rows, "distill", HiddenStatesSpec(layers=layers), None)
    numbers = list(range(len(rows)))
    a, b = stored.read(numbers).numpy(), computed.read(numbers).numpy()
    known = ~np.isnan(a)
    assert known.mean() > 0.5
    np.testing.assert_allclose(a[known], b[known], rtol=0.02, atol=0.02)


def test_states_are_stored_with_answers_only_if_a_phase_reads_them(tiny_base: TinyBase, tmp_path: Path) -> None:
    settings = ["recipe=medusa_smollm2", "debug=tiny"]
    assert composed(tmp_path, *settings)[0].stores_answer_states
    assert not composed(tmp_path, *settings, "phases.distill.store_hidden_states=false")[0].stores_answer_states
    base = tiny_base()
    config = make(base, tmp_path)[0].config
    assert not Corpora(base, config, 0, lambda *_: None).answers().has_hidden_states
    assert not list(tmp_path.rglob("*.safetensors"))
    # A later run that stores hidden states has the base compute them once.
    made, _ = make(base, tmp_path)
    phase = PhaseConfig(corpus="answers", seq_len=512, store_hidden_states=True)
    data = open_phase(made, "distill", phase, HiddenStatesSpec())
    assert isinstance(data.cache, HiddenStateCache) and not data.cache.missing_rows()
    assert not made.answers().has_hidden_states


def test_a_short_phase_has_the_base_read_its_own_rows_only(tiny_base: TinyBase, tmp_path: Path) -> None:
    made, _ = make(tiny_base(), tmp_path)
    phase = PhaseConfig(corpus="text", seq_len=64, store_hidden_states=True)
    data = open_phase(made, "pretrain", phase, HiddenStatesSpec(), seed=5, num_rows=4)
    assert isinstance(data.cache, HiddenStateCache)
    numbers = data.numbers(0, 4)
    assert sorted(set(range(len(data))) - set(data.cache.missing_rows())) == sorted(numbers)
    data.load(numbers)
    longer = open_phase(made, "pretrain", phase, HiddenStatesSpec(), seed=5, num_rows=10**6)
    assert isinstance(longer.cache, HiddenStateCache) and not longer.cache.missing_rows()


def test_a_phase_may_train_on_a_random_part_and_a_larger_part_holds_it(tiny_base: TinyBase, tmp_path: Path) -> None:
    made, _ = make(tiny_base(), tmp_path)

    def taken(max_tokens: int | None) -> set[int]:
        phase = PhaseConfig(corpus="text", seq_len=64, store_hidden_states=True, max_tokens=max_tokens)
        data = open_phase(made, "pretrain", phase, HiddenStatesSpec(), seed=5, num_rows=10**6)
        numbers = data.numbers(0, 3 * len(data))
        if max_tokens is not None:
            assert isinstance(data.cache, HiddenStateCache) and not set(numbers) & set(data.cache.missing_rows())
        return set(numbers)

    small, large = taken(3 * 64 - 8), taken(5 * 64 - 8)
    assert (len(small), len(large)) == (3, 5) and small < large
    assert small != {0, 1, 2}
    everything = taken(None)
    assert len(everything) > 5 and taken(10**9) == everything


def test_held_out_features_are_kept_where_that_is_asked_for(tiny_base: TinyBase, tmp_path: Path) -> None:
    made, _ = make(tiny_base(), tmp_path)
    computed = open_held_out(made, 512, HiddenStatesSpec(layers=(1,)), cached=False)
    expected = computed.load([0])[1]
    assert not (tmp_path / "features").exists()
    loaded = open_held_out(made, 512, HiddenStatesSpec(layers=(1,)), cached=True).load([0])[1]
    assert len(list((tmp_path / "features").iterdir())) == 1
    torch.testing.assert_close(loaded.layer(0), expected.layer(0), rtol=0.02, atol=0.02)
    assert not torch.equal(loaded.layer(0), expected.layer(0)), "float16 on disk"


def test_a_stream_stays_at_its_commit(tiny_base: TinyBase, tmp_path: Path, dataset_hub: Any) -> None:
    """A dataset that grows between two starts gives the rows of the first; without stored commits, the run notices."""

    def of_commit(revision: str) -> datasets.IterableDataset:
        texts = [f"{n}: row {n} of {revision[0]}" * 5 for n in range(400)]
        return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()

    dataset_hub.rows = of_commit
    text = TextConfig(sources=[SourceConfig(kind="hf", name="org/set")], stream=True, stream_shards=1, workers=1)

    def rows() -> tuple[torch.Tensor, dict[str, object]]:
        made = Corpora(tiny_base(), DataConfig(folder=str(tmp_path), text=text), 0, lambda *_: None)
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
