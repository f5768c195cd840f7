"""The corpora on two processes: one corpus, or one a node, and what the launcher sets for training."""

from pathlib import Path
from typing import Any

from drafthead.data.answers.store import AnswerStore
from drafthead.data.text.packing import is_packed, open_packed
from support import TINY, random_base


def answers(corpora: Path) -> list[tuple[int, list[int], bytes]]:
    answers = AnswerStore(corpora / "answers").read()
    return [(g.prompt_number, g.input_ids.tolist(), g.hidden_states.tobytes()) for g in answers]


def text(corpora: Path) -> list[list[int]]:
    (folder,) = (path for path in (corpora / "text").iterdir() if is_packed(path))
    return [list(row) for row in open_packed(folder)["input_ids"]]


def assert_same_corpora(found: Path, wanted: Path) -> None:
    assert answers(found) == answers(wanted) and len(answers(wanted)) == 24
    assert text(found) == text(wanted)


def test_every_node_makes_its_own(runs: Any, whole: Path, tmp_path: Path) -> None:
    """Two nodes of one process each: neither sees the other's folder."""
    two = tmp_path / "two"
    options = ("per_node_data=true", f"data.folder={two}/node${{oc.env:RANK}}")
    nodes = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    codes = runs.all(two, *options, "stages=[corpora]", processes=2, environment=nodes)
    assert codes == [0, 0], runs.output(two) + runs.output(two, rank=1)
    for node in range(2):
        assert_same_corpora(two / f"node{node}", whole / "corpora")


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
