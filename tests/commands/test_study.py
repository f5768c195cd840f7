"""The study of draft shapes: equal sizes, what is predicted, and the command around training."""

import json
from pathlib import Path

import pytest

from drafthead.commands import study
from drafthead.commands.study import StudyConfig, chain_speed, equal_width
from drafthead.errors import UserError
from drafthead.models.base.base_model import meta_base
from drafthead.models.heads.draft_lm import DraftLMConfig
from support import TinyBase, call


def test_shapes_of_equal_size(tiny_base: TinyBase) -> None:
    base = tiny_base()
    layer = meta_base(base.model.config).model.model.layers[0]
    reference = 4 * sum(parameter.numel() for parameter in layer.parameters())
    for depth in (2, 4, 6):
        head = DraftLMConfig(num_layers=depth, intermediate_size=equal_width(base, 4, depth)).build(base)
        parameters = sum(parameter.numel() for parameter in head.layers.parameters())
        assert parameters == pytest.approx(reference, rel=0.12), depth  # widths are multiples of 16, here of 64
    assert equal_width(base, 2, 2) == 64, "the base's own"
    with pytest.raises(UserError, match="9 layers"):
        equal_width(base, 2, 9)


def test_speed_of_a_chain_by_hand() -> None:
    row = {"verify_s": [0.04, 0.04, 0.05], "overhead_s": 0.01}
    assert chain_speed(row, 0.5, 0.02) == pytest.approx(max(1.5 / 0.07, 1.75 / 0.10))
    assert chain_speed(row, 0.9, 0.001) == pytest.approx(max(1.9 / 0.051, 2.71 / 0.062))


def test_the_command(
    tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base()

    def train(config: StudyConfig, depth: int, width: int, folder: Path) -> None:
        DraftLMConfig(num_layers=depth, intermediate_size=width).build(base).save_pretrained(folder / "head")

    monkeypatch.setattr(study, "train", train)
    shape = json.dumps(base.config.shape).replace('"', "")
    named = ["base.name=''", f"base.shape={shape}", "base.random=true", "base.tokenizer=builtin:tiny"]
    named += ["base.dtype=float32", f"out={tmp_path}"]
    call("study", *named, "depths=[1,3]", "suite=builtin", "limit=2", "max_new_tokens=12")
    rows = {row["name"]: row for row in json.loads((tmp_path / "study.json").read_text())["rows"]}
    assert set(rows) == {"depth1-width160", "depth3-width32"}
    whole = rows["depth1-width160"]
    assert whole["tokens_decoded"] == pytest.approx(whole["tokens"], rel=0.2) and whole["measured"] > 0
    assert (tmp_path / "study.png").stat().st_size > 5000 and "fastest: depth" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="one width per depth"):
        call("study", "depths=[1,2]", "widths=[16]")


def test_settings_of_the_training_runs_are_typed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    call("study", "train=[phases.distill.steps=600, head.dropout=0.1]", "--cfg", "job")
    assert "train:\n- phases.distill.steps=600\n- head.dropout=0.1\n" in capsys.readouterr().out
