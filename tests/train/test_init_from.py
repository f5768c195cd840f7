"""Training on from a head: where it starts, what is measured, what is refused."""

import json
from pathlib import Path

import pytest

from drafthead.data.utils.errors import UserError
from drafthead.train.pipeline import run_pipeline
from support import composed, losses_of

TINY = ("debug=tiny", "recipe=medusa_smollm2", "stages=[corpora,train]", "log_every=1", "~phases.pretrain")


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*composed(folder, *TINY, *overrides))
    return folder / "run"


def test_trains_on_and_measures_old_and_new_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path / "first")
    init = (f"init_from={first / 'head'}", f"init_data={tmp_path / 'first' / 'corpora'}")
    other = "data.answers.prompts=20"
    second = train(tmp_path / "second", *init, other, "phases.distill.optim.lr=1e-4")
    assert losses_of(second)[0] < losses_of(first)[0], "it begins where the first run ended"
    found = json.loads((second / "init_from.json").read_text())
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    best = max(row["held_out_mean_accepted_length"] for row in rows if "held_out_mean_accepted_length" in row)
    assert found["before"]["old"] == pytest.approx(best, abs=0.02)
    assert {when: set(found[when]) for when in found} == {"before": {"new", "old"}, "after": {"new", "old"}}
    said = capsys.readouterr().out
    for name in ("new", "old"):
        shown = f"{found['before'][name]:.2f} before, {found['after'][name]:.2f} after"
        assert f"{name} data, held out: mean accepted length {shown}" in said
        assert found["before"][name] >= 1
    with pytest.raises(UserError, match="was trained with init_from="):
        train(tmp_path / "second", other, "phases.distill.optim.lr=1e-4")
    # What is refused.
    with pytest.raises(UserError, match="holds a head of type medusa, and this run trains a eagle3"):
        run_pipeline(*composed(tmp_path / "x", "debug=tiny", "recipe=eagle3_smollm2", f"init_from={first / 'head'}"))
    with pytest.raises(UserError, match="has no folder answers"):
        train(tmp_path / "x", f"init_from={first / 'head'}", f"init_data={tmp_path}")
    with pytest.raises(UserError, match="init_data is measured with init_from"):
        train(tmp_path / "x", f"init_data={tmp_path}")
    with pytest.raises(UserError, match="init_from starts heads on the original base"):
        composed(tmp_path / "x", "debug=tiny", "recipe=medusa2_smollm2", "init_from=x")
