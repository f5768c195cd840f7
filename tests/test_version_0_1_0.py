"""What version 0.1.0 wrote and how it was called: heads, runs, corpora, recipes and command lines stay readable."""

from pathlib import Path

import pytest

from drafthead.data.utils.settings import RENAMED_KEYS, original_names, update_key, update_names, update_overrides
from drafthead.models.heads.parts.draft_head import parse_head
from support import call


def test_its_command_lines_compose(capsys: pytest.CaptureFixture[str]) -> None:
    old = ["phases.distill.row_length=1024", "phases.pretrain.batch_rows=3", "dead_after_s=60", "node_data=true"]
    old += ["data.answers.synthesised=5"]
    call("train", "recipe=medusa_smollm2", *old, "--cfg", "job")
    said = capsys.readouterr()
    for line in ("seq_len: 1024", "micro_batch_size: 3", "heartbeat_timeout_s: 60.0", "per_node_data: true"):
        assert line in said.out
    assert "phases.distill.row_length=1024 is now called phases.distill.seq_len=1024\n" in said.err
    assert len(said.err.splitlines()) == len(old)
    for old_value, new_value in (("with_replacement", "with_replacement"), ("deterministic", "top_k")):
        call("eval", "head=x", f"siblings={old_value}", "--cfg", "job")
        assert f"draft_sampling: {new_value}" in capsys.readouterr().out


def test_its_recipes_compose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe").mkdir()
    old = "# @package _global_\ndefaults: [medusa_smollm2]\nname: mine\n"
    old += "phases: {distill: {row_length: 640}, pretrain: {row_length: '${phases.distill.row_length}'}}\n"
    old += "head: {_target_: drafthead.models.medusa.MedusaConfig}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(old)
    call("train", "--config-dir", str(tmp_path), "recipe=mine", "--cfg", "job")
    said = capsys.readouterr()
    assert "seq_len: 640" in said.out and "seq_len: ${phases.distill.seq_len}" in said.out
    assert "row_length" not in said.out
    assert "recipe/mine: row_length is now called seq_len" in said.err


def test_names_are_found_at_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED_KEYS, "outer.a", "b")
    monkeypatch.setitem(RENAMED_KEYS, "gone", None)
    assert update_names({"outer": {"a": 1, "gone": 2}, "a": [{"outer.a": 3}]}) == {
        "outer": {"b": 1},
        "a": [{"outer.b": 3}],
    }
    assert update_names({"a": 1}, "outer") == {"b": 1}
    assert update_names({"shape": {"siblings": 1}}) == {"shape": {"siblings": 1}}, "transformers' own"
    assert (update_key("x.row_length"), update_key("x.gone")) == ("x.seq_len", None)
    assert update_overrides(["+x.outer.a=1,2", "~gone", "-m", "x y", "row_length=a=b", "outer={ a: 1, c: 2 }"]) == [
        "+x.outer.b=1,2",
        "-m",
        "x y",
        "seq_len=a=b",
        "outer={ b: 1, c: 2 }",
    ]
    assert original_names({"seq_len": [{"draft_sampling": 1}]}) == {"row_length": [{"siblings": 1}]}
    old = {"_target_": "drafthead.models.mlp_speculator.MLPSpeculatorConfig", "n_predict": 2, "own_projection": False}
    new = {"head_type": "mlp_speculator", "num_draft_tokens": 2, "own_lm_head": False}
    assert update_names(old, "head") == new and parse_head(new).depth == 2
