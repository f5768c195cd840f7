"""The corpora on two processes: one corpus, or one a node, and what the launcher sets for training."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafthead.data.answers.store import AnswerStore
from drafthead.data.text.documents import Documents
from drafthead.files.local import read_json_lines
from support import TINY, random_base


def answers(corpora: Path) -> list[tuple[int, list[int], bytes]]:
    answers = AnswerStore(corpora / "answers").read()
    return [(g.prompt_number, g.input_ids.tolist(), g.hidden_states.tobytes()) for g in answers]


def text(corpora: Path) -> list[list[int]]:
    (folder,) = (corpora / "text").iterdir()
    return [ids.tolist() for ids in Documents.open(folder)]


def assert_same_corpora(found: Path, wanted: Path) -> None:
    assert answers(found) == answers(wanted) and len(answers(wanted)) == 24
    assert text(found) == text(wanted)


@pytest.mark.slow
def test_every_node_makes_its_own(runs: Any, whole: Path, tmp_path: Path) -> None:
    """Two nodes of one process each: neither sees the other's folder."""
    two = tmp_path / "two"
    options = ("per_node_data=true", f"data.folder={two}/node${{oc.env:RANK}}")
    nodes = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    codes = runs.all(two, *options, "stages=[corpora]", processes=2, environment=nodes)
    assert codes == [0, 0], runs.output(two) + runs.output(two, rank=1)
    for node in range(2):
        assert_same_corpora(two / f"node{node}", whole / "corpora")


@pytest.mark.slow
def test_two_processes_make_the_corpora_of_one(runs: Any, tmp_path: Path) -> None:
    """With a stored base and FSDP: transformers then loads a base differently on all processes but the first."""
    base = random_base(TINY | {"vocab_size": 320, "max_position_embeddings": 2048}, prepack=False)
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    named = (f"base.name={tmp_path}/base", "base.random=false", "base.tokenizer=null", "base.prepack=false")
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"}
    one, two = tmp_path / "one", tmp_path / "two"
    assert runs.all(one, *named, "stages=[corpora]") == [0], runs.output(one)
    codes = runs.all(two, *named, "stages=[corpora]", processes=2, environment=fsdp)
    assert codes == [0, 0], runs.output(two) + runs.output(two, rank=1)
    assert "generating answers (process 1 of 2)" in runs.output(two)
    assert_same_corpora(two / "corpora", one / "corpora")


@pytest.mark.slow
def test_two_processes_store_and_measure_what_one_does_also_after_a_kill(runs: Any, tmp_path: Path) -> None:
    """At a learning rate of almost 0, so that both heads stay equal and so must be their scores."""
    phase = ("store_hidden_states=true", "rows_per_step=4", "grad_accum_steps=null", "seq_len=512", "steps=8")
    phase = (*phase, "micro_batch_size=1", "optim.lr=1e-30")
    options = (
        *(f"phases.pretrain.{setting}" for setting in phase),
        "phases.distill.steps=2",
        "data.text.max_tokens=16000",
        "data.answers.self_prompted=40",
    )
    one, two = tmp_path / "one", tmp_path / "two"
    assert runs.all(one, *options) == [0], runs.output(one)
    kill = {"rank": 1, "call": ["store states", 2], "do": "SIGKILL"}
    codes = runs.all(two, *options, processes=2, at=[kill])
    assert codes[1] == -signal.SIGKILL and codes[0]
    (marks,) = two.glob("corpora/states/*/marks.bin")
    assert 0 < np.count_nonzero(before := np.fromfile(marks, np.uint32)) < len(before)
    assert runs.all(two, *options, processes=2) == [0, 0], runs.output(two)
    scores = [
        [row for row in read_json_lines(f / "run" / "metrics.jsonl") if "held_out_loss" in row] for f in (one, two)
    ]
    assert scores[0][:2] == scores[1][:2] and len(scores[0]) > 2, "before the second phase, which trains"
    files = [sorted((folder / "corpora" / "states").rglob("*.bin")) for folder in (one, two)]
    assert len(files[0]) == 2 and [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    after = np.fromfile(marks, np.uint32)
    assert np.array_equal(after[before > 0], before[before > 0]) and after.all()
