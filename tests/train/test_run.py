"""Whole runs on a random tiny base: bad input is refused in one line, before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

from drafthead.data.utils.errors import UserError
from drafthead.train.config import RunConfig, preflight
from drafthead.train.pipeline import run_pipeline
from support import composed

ROOT = Path(__file__).parent.parent.parent


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*composed(folder, "recipe=medusa_smollm2", "debug=tiny", *overrides))
    return folder / "run"


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    trained = "stages=[corpora,train]"
    train(tmp_path, trained)
    with pytest.raises(UserError, match=r"phases.distill.optim.lr=.*resume=false"):
        train(tmp_path, trained, "phases.distill.optim.lr=0.005")
    train(tmp_path, trained, "phases.distill.optim.lr=0.005", "resume=false")
    with pytest.raises(UserError, match="temperature"):
        train(tmp_path, trained, "data.generations.sampler.temperature=0.5", "resume=false")


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
        ("name=a/b", "name must be letters, digits"),
    ],
)
def test_bad_settings_are_one_clear_error(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=says):
        composed(tmp_path, "recipe=medusa_smollm2", override)


def test_command_line_errors_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train" / "run.py"), "recipe=medusa_smollm2", f"out={tmp_path}/run"]
    done = subprocess.run([*command, "phases.distill.steps=0"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    wanted = "error: config: phases.*.steps must be at least 1, got 0"
    assert done.stderr.strip().splitlines() == [wanted], done.stderr


def stream(folder: Path, *overrides: str) -> tuple[RunConfig, str]:
    common = ["recipe=medusa_smollm2", "debug=tiny", "data.text.stream=true", "data.text.stream_shards=2"]
    return composed(folder, *common, "stages=[corpora,train]", *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["phases.pretrain.hidden_states=cached"],
            "phases.pretrain.hidden_states=cached keeps hidden states of",
        ),
        (["recipe=medusa2_smollm2"], "data.text.stream keeps no text for quality_limits"),
        (["data.text.stream_shards=0"], "data.text.stream_shards must be at least 1, got 0"),
    ],
)
def test_streams_that_are_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        stream(tmp_path, *overrides)


def test_a_streamed_file_is_not_read_to_its_end_before_a_run(tmp_path: Path) -> None:
    """It may be larger than a disk; one that is packed is read, so that a broken line is found before the work."""
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{')
    override = f"data.text.sources=[{{kind: jsonl, name: {tmp_path / 'x.jsonl'}}}]"
    preflight(stream(tmp_path, override)[0])
    with pytest.raises(UserError, match=r"x.jsonl line 2 is not valid JSON"):
        preflight(stream(tmp_path, override, "data.text.stream=false")[0])
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        preflight(stream(tmp_path, override)[0])
    with pytest.raises(UserError, match="has no weight, but others have"):  # not after the answers are generated
        preflight(stream(tmp_path, override.replace("}]", "}, {kind: builtin, name: stdlib_tiny, weight: 2}]"))[0])
