"""Whole runs that stream their text: resumed to the bit, and refused where rows on disk are needed."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafthead.data.utils.errors import UserError
from drafthead.train.config import RunConfig, preflight
from drafthead.train.pipeline import run_pipeline
from support import composed, losses_of


def load(folder: Path, *overrides: str) -> tuple[RunConfig, str]:
    common = ["recipe=medusa_smollm2", "debug=tiny", "data.text.stream=true", "data.text.stream_shards=2"]
    return composed(folder, *common, "stages=[corpora,train]", *overrides)


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*load(folder, "log_every=1", "checkpoint.every_steps=4", "checkpoint.keep=20", *overrides))
    return folder / "run"


def test_resume_equals_no_interruption_bit_for_bit(tmp_path: Path) -> None:
    """Also without the positions that are kept on disk: they only save time."""
    whole = train(tmp_path / "whole")
    assert not (tmp_path / "whole" / "corpora" / "text").exists()
    assert len(list((tmp_path / "whole" / "corpora" / "stream").glob("*/lane-*.json"))) == 2
    for positions in (True, False):
        part = tmp_path / f"part{positions}"
        shutil.copytree(tmp_path / "whole", part)
        for path in (part / "run" / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > 4:
                shutil.rmtree(path)
        shutil.rmtree(part / "run" / "head")
        if not positions:
            shutil.rmtree(part / "corpora" / "stream")
        resumed = train(part)
        assert losses_of(resumed) == losses_of(whole)
        want, got = (load_file(r / "head" / "model.safetensors") for r in (whole, resumed))
        assert all(torch.equal(want[k], got[k]) for k in want)


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
def test_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(tmp_path, *overrides)


def test_a_streamed_file_is_not_read_to_its_end_before_a_run(tmp_path: Path) -> None:
    """It may be larger than a disk; one that is packed is read, so that a broken line is found before the work."""
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{')
    override = f"data.text.sources=[{{kind: jsonl, name: {tmp_path / 'x.jsonl'}}}]"
    preflight(load(tmp_path, override)[0])
    with pytest.raises(UserError, match=r"x.jsonl line 2 is not valid JSON"):
        preflight(load(tmp_path, override, "data.text.stream=false")[0])
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        preflight(load(tmp_path, override)[0])
