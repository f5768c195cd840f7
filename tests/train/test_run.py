"""Whole runs on a random tiny base: resume, bad input, a base that is killed while it generates."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafthead.data.answers.store import GenerationStore
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.pipeline import run_pipeline
from support import GOLDEN_TEXT, composed, losses_of

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "medusa_tiny_losses.json"


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*composed(folder, "recipe=medusa_smollm2", "debug=tiny", *overrides))
    return folder / "run"


def test_resume_equals_no_interruption_bit_for_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "log_every=1", "checkpoint.every_steps=3", "checkpoint.keep=20")
    for stop in (3, 10, 15):
        part = tmp_path / f"part{stop}"
        shutil.copytree(tmp_path / "whole", part)
        for path in (part / "run" / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > stop:
                shutil.rmtree(path)
        shutil.rmtree(part / "run" / "head")
        resumed = train(part, "log_every=1", "checkpoint.every_steps=3", "checkpoint.keep=20")
        assert losses_of(resumed) == losses_of(whole)
        want, got = (load_file(r / "head" / "model.safetensors") for r in (whole, resumed))
        assert all(torch.equal(want[k], got[k]) for k in want)


def test_golden_losses(tmp_path: Path) -> None:
    """Ten steps a phase; regenerate with ``python tests/golden/regenerate.py`` and give a reason in the changelog."""
    found = losses_of(train(tmp_path, "log_every=1", GOLDEN_TEXT))
    assert found == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-4)


def test_loss_falls(tmp_path: Path) -> None:
    curve = losses_of(train(tmp_path, "log_every=20", "phases.distill.steps=120", "phases.distill.optim.lr=0.01"))
    assert curve[-1] < 0.7 * curve[1]


def test_a_run_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(UserError, match=r"phases.distill.optim.lr=.*resume=false"):
        train(tmp_path, "phases.distill.optim.lr=0.005")
    train(tmp_path, "phases.distill.optim.lr=0.005", "resume=false")


def test_a_corpus_of_other_settings_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(UserError, match="temperature"):
        train(tmp_path, "data.generations.sampler.temperature=0.5", "resume=false")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("recipe=medusa_lama", "medusa_lama"),
        ("optim.lr=1", "optim"),
        ("+phases.distill.stps=3", "stps"),
        ("phases.distill.steps=many", "many"),
        ("phases.distill.steps=0", r"phases.\*.steps must be at least 1, got 0"),
        ("phases.distill.optim.lr=-1", r"optim.lr must be in \(0, 1\), got -1"),
        ("+head.dpeth=3", "dpeth"),
        ("head.head_type=os.system", "head_type must be one of draft_lm, eagle3, .*, got 'os.system'"),
        ("head.head_type=drafthead.models.base.base_model.BaseModel", "head_type must be one of"),
        ("+data._target_=os.system", "'_target_' not in 'DataConfig'"),
        ("+data.text._target_=os.system", "'_target_' not in 'TextConfig'"),
        ("data.text.sources=[{_target_: os.system, kind: text, name: x}]", "Could not override 'data.text.sources'"),
        ("+base._target_=os.system", "'_target_' not in 'BaseConfig'"),
        ("phases.distill.seq_len=64", "rows of up to"),
        ("mode=trian", "mode must be one of"),
        ("name=a/b", "name must consist of"),
    ],
)
def test_bad_settings_are_one_clear_error(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=says):
        composed(tmp_path, "recipe=medusa_smollm2", override)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("phases.distill.steps=0", "error: config: phases.*.steps must be at least 1, got 0"),
        (
            "head.head_type=os.system",
            "error: head_type must be one of draft_lm, eagle3, hydra, kangaroo, medusa, medusa2, mlp_speculator, got "
            "'os.system'",
        ),
        (
            "+data.generations.sampler._target_=os.system",
            "error: config: Key '_target_' not in 'SamplerConfig'",
        ),
    ],
)
def test_command_line_errors_are_one_line(override: str, says: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train" / "run.py"), "recipe=medusa_smollm2", f"out={tmp_path}/run", override]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [says], done.stderr


def test_killed_while_generating_every_prompt_is_answered_once(tmp_path: Path) -> None:
    """kill -9 between shards, twice: finished shards are kept, and the corpus is an uninterrupted one, bit for bit."""
    options = ["recipe=medusa_smollm2", "debug=tiny", "data.generations.prompts=24", "data.generations.batch_size=2"]
    options += ["data.generations.sampler.max_new_tokens=60", "data.generations.max_prompt_tokens=400"]
    places = [f"out={tmp_path / 'run'}", f"data.folder={tmp_path / 'corpora'}"]
    command = [sys.executable, "-m", "drafthead.commands.data", *options, *places]
    folder = tmp_path / "corpora" / "generations"
    for shard in (1, 2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        while process.poll() is None and not (folder / f"shard-{shard:05}.parquet").exists():
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.parquet")}
    assert 3 <= len(kept) < 6, "a kill must leave some work"
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    run, _ = composed(tmp_path / "whole", *options)
    whole = Corpora(BaseModel.load(run.base), run.data, run.seed, lambda *_: None).generations()
    found, wanted = (
        [(g.prompt_number, g.input_ids.tolist(), g.hidden_states.tobytes()) for g in store.read()]
        for store in (GenerationStore(folder), whole)
    )
    assert found == wanted and [number for number, *_ in found] == list(range(24))
