"""Continued training of a head (``init_from``): its start, its measurements, and rejected settings."""

import json
import re
from pathlib import Path

import pytest

from drafthead.errors import UserError
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.heads.parts.loading import load_head
from drafthead.train.pipeline import run_pipeline
from support import TinyBase, composed, losses_of, refuses

TINY = ("debug=tiny", "recipe=medusa_smollm2", "stages=[corpora,train]", "log_every=1", "~phases.pretrain")


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*composed(folder, *TINY, *overrides))
    return folder / "run"


def test_few_answers_have_few_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("data.answers.prompts=20", "data.answers.sampler.max_new_tokens=3", "phases.distill.steps=1")
    train(tmp_path, *few, "max_draft_vocab_size=null", "head.draft_vocab_size=300")
    output = capsys.readouterr().out
    assert re.search(r"draft_vocab_size=300, but the answers have only \d+ different tokens", output)


def test_settings_of_the_command_line_are_never_dropped(tmp_path: Path) -> None:
    few = ("data.answers.prompts=20", "data.answers.sampler.max_new_tokens=3", "phases.distill.steps=1")
    first = train(tmp_path, *few, "head.induction_rank=4", "head.context_vocabulary=false")
    init = (*few, f"init_from={first / 'head'}")
    deeper = load_head(first / "head").depth + 1
    second = train(tmp_path / "second", *init, "head.context_vocabulary=true", f"head.num_draft_tokens={deeper}")
    continued = load_head(second / "head")
    assert continued.config.drafts_context and continued.depth == deeper
    other = load_head(train(tmp_path / "third", *init) / "head").config
    assert not other.context_vocabulary and other.induction_rank == 4, "the recipe's settings give way to the head's"
    refuses("head.induction_rank=8.*trained with 4", composed, tmp_path, *TINY, *init, "head.induction_rank=8")
    refuses("head.num_draft_tokens=1.*at least", composed, tmp_path, *TINY, *init, "head.num_draft_tokens=1")
    refuses("head.num_draft_tokens", composed, tmp_path, *TINY, *init, "head.num_draft_tokens=null")
    refuses("head.induction_rank=8", composed, tmp_path, *TINY, *init, "++head={induction_rank: 8}")


def test_the_positions_of_an_mlp_speculator_stay(tiny_base: TinyBase, tmp_path: Path) -> None:
    MLPSpeculatorConfig(num_draft_tokens=2, inner_dim=32).build(tiny_base()).save_pretrained(tmp_path / "head")
    more = ("recipe=mlp_speculator_smollm2", "debug=tiny", f"init_from={tmp_path / 'head'}", "head.num_draft_tokens=3")
    refuses("can have 2: its weights are scaled", composed, tmp_path, *more)


@pytest.mark.slow
def test_training_continues(with_medusa_corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(with_medusa_corpora)
    init = (f"init_from={first / 'head'}", f"init_data={with_medusa_corpora / 'corpora'}")
    other = "data.answers.prompts=20"
    second = train(tmp_path / "second", *init, other, "phases.distill.optim.lr=1e-4")
    assert losses_of(second)[0] < losses_of(first)[0], "training must start where the first run ended"
    lengths = json.loads((second / "init_from.json").read_text())
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    best = max(row["held_out_mean_accepted_length"] for row in rows if "held_out_mean_accepted_length" in row)
    assert lengths["before"]["old"] == pytest.approx(best, abs=0.02)
    assert {when: set(lengths[when]) for when in lengths} == {"before": {"new", "old"}, "after": {"new", "old"}}
    output = capsys.readouterr().out
    for name in ("new", "old"):
        shown = f"{lengths['before'][name]:.2f} before, {lengths['after'][name]:.2f} after"
        assert re.search(rf"{name} data, \d+ held-out answers: mean accepted length {shown}", output)
        assert lengths["before"][name] >= 1
    assert re.search(r"each answer is read \d\.\d times", output) and "different tokens" not in output
    (second / "init_from.json").write_text(json.dumps({"before": {"new": lengths["before"]["new"]}}))
    train(tmp_path / "second", *init, other, "phases.distill.optim.lr=1e-4")
    assert json.loads((second / "init_from.json").read_text()) == lengths, "init_data may be set when a run resumes"
    refuses("init_from=", train, tmp_path / "second", other, "phases.distill.optim.lr=1e-4")
    with pytest.raises(UserError, match="init_from.*medusa.*eagle3"):
        run_pipeline(*composed(tmp_path / "x", "debug=tiny", "recipe=eagle3_smollm2", f"init_from={first / 'head'}"))
    refuses("init_data.*answers", train, tmp_path / "x", f"init_from={first / 'head'}", f"init_data={tmp_path}")
    refuses("init_data", train, tmp_path / "x", f"init_data={tmp_path}")
    refuses("init_from", composed, tmp_path / "x", "debug=tiny", "recipe=medusa2_smollm2", "init_from=x")
