"""Whole runs whose base a server runs: equal to runs with the base itself, whatever is killed or fails under way."""

import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in_vllm import StandIn

from drafthead.data.answers.store import Answer, AnswerStore
from drafthead.files.local import read_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.loading import load_head
from drafthead.train.corpora.served_base import served_layers
from drafthead.train.pipeline import run_pipeline
from support import assert_same_run, call, call_fails, composed, losses_of, refuses

SETTINGS = (
    "recipe=eagle3_smollm2_vllm",
    "debug=tiny",
    "base.shape.max_position_embeddings=8192",  # so that both cut texts at the same tokens
    "log_every=1",
    "checkpoint.every_steps=2",
    "phases.pretrain.steps=3",
    "phases.pretrain.store_hidden_states=true",  # so that every token has its whole document as context
    "phases.distill.steps=6",
    "data.states.tries=2",
    "phases.distill.optim.name=adamw",
)
TRAINED = "stages=[corpora,train]"
KILLED = -signal.SIGKILL
MOMENTS = {
    "while answers are written": ("write shard", 1),
    "before the states of a text are stored": ("store states", 3),
    "before the states of an answer are stored": ("store states", 12),
    "in training": ("step", 7),
}


@pytest.fixture
def engine(tmp_path: Path, completions_server: Callable[..., Any]) -> StandIn:
    run, _ = composed(tmp_path, *SETTINGS)
    base = BaseModel.load(run.base)
    served = StandIn(base, tmp_path / "served", completions_server)
    served.layers = tuple(served_layers(run.head_config().read_layers(base.num_layers), base.num_layers)[:-1])
    return served


def at(engine: StandIn) -> tuple[str, ...]:
    return (*SETTINGS, TRAINED, f"data.states.url={engine.server.url}", f"data.states.folder={engine.folder}")


@pytest.mark.slow
def test_a_run_from_a_server_equals_a_run_with_the_base(engine: StandIn, tmp_path: Path) -> None:
    """Stored states are rounded to 16 bits in both; those that are not stored are not."""
    run_pipeline(*composed(tmp_path / "own", *SETTINGS, TRAINED))
    run_pipeline(*composed(tmp_path / "kept", *at(engine)))
    run_pipeline(*composed(tmp_path / "passing", *at(engine), "data.states.keep=false"))
    expected = losses_of(tmp_path / "own" / "run")
    assert len(expected) == 9
    for name in ("kept", "passing"):
        assert losses_of(tmp_path / name / "run") == pytest.approx(expected, rel=2e-3)
    states = [*(tmp_path / "passing" / "corpora" / "states").iterdir()]
    assert len(states) == 1, "only of the held-out answers"
    assert not [*engine.folder.rglob("*.safetensors")]


@pytest.mark.slow
def test_text_that_is_streamed(engine: StandIn, tmp_path: Path) -> None:
    streamed = ("data.text.stream=true", "phases.pretrain.store_hidden_states=false")
    run_pipeline(*composed(tmp_path / "own", *SETTINGS, TRAINED, *streamed))
    run_pipeline(*composed(tmp_path / "served", *at(engine), *streamed))
    expected = losses_of(tmp_path / "own" / "run")
    assert losses_of(tmp_path / "served" / "run")[:3] == pytest.approx(expected[:3], rel=1e-5)
    assert losses_of(tmp_path / "served" / "run") == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_killed_and_failing_every_answer_is_there_once(runs: Any, engine: StandIn, tmp_path: Path) -> None:
    """The server drops some requests at random; the run is killed at delicate moments, and then is what it would be."""
    draw = random.Random(0)
    assert runs.command(tmp_path / "whole", "train", *at(engine), *folders(tmp_path / "whole")) == 0
    engine.server.fault = lambda number, body: draw.choice(["dropped", "503", None, None, None, None, None, None])
    for moment, event in MOMENTS.items():
        killed = [{"call": event, "do": "SIGKILL"}]
        code = runs.command(tmp_path, "train", *at(engine), "data.states.tries=9", *folders(tmp_path), at=killed)
        assert code == KILLED, f"{moment}: {runs.output(tmp_path)[-2000:]}"
    assert runs.command(tmp_path, "train", *at(engine), "data.states.tries=9", *folders(tmp_path)) == 0
    # States of an answer that were lost are read with its tokens as a prompt, which rounds in another order.
    assert_same_run(tmp_path / "run", tmp_path / "whole" / "run", atol=1e-5)
    answers = [answer.ids for answer in AnswerStore(tmp_path / "corpora" / "answers").read()]
    assert answers == [answer.ids for answer in AnswerStore(tmp_path / "whole" / "corpora" / "answers").read()]


def folders(folder: Path) -> tuple[str, str]:
    return f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}"


def test_what_needs_layers_is_refused_before_any_request(engine: StandIn, tmp_path: Path) -> None:
    asked = len(engine.server.bodies)
    for more, message in {
        "recipe=kangaroo_smollm2": "runs or trains layers of its base",
        "recipe=medusa2_smollm2": "runs or trains layers of its base",
        "recipe=dspark_smollm2 head.copy_layers=true head.reads_state=false": "set it to false",
    }.items():
        settings = ("debug=tiny", f"data.states.url={engine.server.url}", *more.split())
        refuses(message, composed, tmp_path, *settings)
    assert len(engine.server.bodies) == asked


def test_stored_states_replace_the_layers_of_the_base(medusa_run: Path, tmp_path: Path, capsys: Any) -> None:
    head, corpora = f"head={medusa_run / 'run' / 'head'}", f"texts={medusa_run / 'corpora'}"

    def lengths(*settings: str) -> list[float]:
        capsys.readouterr()
        call("replay", head, corpora, "chain=[1,2]", "nodes=[4]", *settings)
        rows = [row.split("│") for row in capsys.readouterr().out.splitlines() if re.match("│ (chain|best tree)", row)]
        return [float(cells[3]) for cells in rows]

    stored = lengths("stored_states=true")
    assert len(stored) == 3 and stored == pytest.approx(lengths("costs=false"), abs=0.03)  # states are in float16
    AnswerStore(tmp_path / "answers", {}).append_shard([Answer(0, np.arange(1, 9, dtype=np.int32), 3, finished=True)])
    call_fails("has no hidden states of random-llama", "replay", head, f"texts={tmp_path}", "stored_states=true")
    call_fails("stored_states needs texts=FOLDER", "replay", head, "stored_states=true")


def test_a_head_is_exported_without_the_layers_of_its_base(
    medusa_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MedusaConfig(num_draft_tokens=3).build(load_head(medusa_run / "run" / "head").base).save_pretrained(
        tmp_path / "head"
    )
    head, states = f"head={tmp_path / 'head'}", (f"texts={medusa_run / 'corpora'}", "stored_states=true")
    call("export", head, "to=medusa", f"out={tmp_path / 'whole'}", f"texts={medusa_run / 'corpora'}", "limit=8")
    monkeypatch.delattr(BaseModel, "load")
    call("export", head, "to=medusa", f"out={tmp_path / 'parts'}", *states, "limit=8")
    whole, parts = (read_json(tmp_path / name / "export_check.json") for name in ("whole", "parts"))
    weights = [tmp_path / name / "medusa_lm_head.safetensors" for name in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for key in ("mean_accepted_length", "first_position_accuracy"):
        assert parts[key]["head"] == pytest.approx(whole[key]["head"], abs=0.05), "states are stored in 16 bits"
    refuses_layers = "stored_states needs texts=FOLDER, and no base_gguf"
    call_fails(refuses_layers, "export", head, "to=medusa", f"out={tmp_path / 'x'}", *states, "base_gguf=f32")
    call_fails(refuses_layers, "export", head, "to=medusa", f"out={tmp_path / 'x'}", "stored_states=true")


@pytest.mark.slow
def test_training_continues_without_the_layers(engine: StandIn, tmp_path: Path) -> None:
    run_pipeline(*composed(tmp_path / "first", *at(engine)))
    init = (f"init_from={tmp_path / 'first/run/head'}", f"init_data={tmp_path / 'first/corpora'}", TRAINED)
    lengths = []
    for name, settings in (("served", at(engine)), ("own", SETTINGS)):
        run_pipeline(*composed(tmp_path / name, *settings, *init, "~phases.pretrain", "data.answers.prompts=20"))
        lengths.append(read_json(tmp_path / name / "run" / "init_from.json"))
    for when in ("before", "after"):
        assert lengths[0][when].keys() == {"new", "old"}
        assert lengths[0][when] == pytest.approx(lengths[1][when], abs=0.05)
