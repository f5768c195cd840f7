"""Whole runs that also train the base: quality limits, saved files, rejected settings."""

from pathlib import Path

import pytest
import torch

from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.files.local import read_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.train.config import RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.original_base import OriginalBase
from drafthead.train.pipeline import run_pipeline
from drafthead.train.trainer.batches import open_phase, unseen_text
from support import Said, composed, refuses

SHORT = (
    *("phases.joint.steps=6", "phases.pretrain.steps=2", "phases.distill.steps=4"),
    *("tree_prompts=1", "eval.limit=1", "eval.max_new_tokens=8"),
)
LOOSE = ("quality_limits.max_perplexity_ratio=null", "quality_limits.min_greedy_match_rate=null")


def load(folder: Path, *overrides: str) -> tuple[RunConfig, str]:
    return composed(folder, "recipe=medusa2_smollm2", "debug=tiny", *SHORT, *overrides)


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*load(folder, *overrides))
    return folder / "run"


TOO_FAST = ("phases.joint.optim.lr=0.05", "checkpoint.final=last")  # the best weights may precede the joint phase


@pytest.mark.slow
def test_past_a_limit_the_run_fails_and_all_is_saved(tmp_path: Path) -> None:
    limit, message = "quality_limits.min_greedy_match_rate=1.0", "more than quality_limits allow: .*match rate on text"
    refuses(message, train, tmp_path, limit, *TOO_FAST)
    run = tmp_path / "run"
    quality = read_json(run / "quality.json")
    assert quality == read_json(run / "head" / "quality.json")
    assert not quality["passed"] and quality["limits"]["min_greedy_match_rate"] == 1.0
    for path in ("eval.json", "report.html", "head/tree.json", "head/adapter/adapter_config.json"):
        assert (run / path).stat().st_size > 0
    assert "The base was tuned together with the heads" in (run / "head" / "README.md").read_text()
    base, head = load_base_and_head(run / "head")
    assert base.fingerprint == head.base_fingerprint
    with pytest.raises(UserError, match=message):  # a second start changes nothing
        train(tmp_path, limit, *TOO_FAST, "stages=[quality,card]")
    loose = ("quality_limits.min_greedy_match_rate=0.01", "quality_limits.max_perplexity_ratio=100")
    train(tmp_path, *loose, *TOO_FAST, "stages=[quality,card]")
    assert read_json(run / "quality.json")["passed"]


def test_text_for_measuring_the_base_is_not_trained_on(tmp_path: Path) -> None:
    run, _ = load(tmp_path, *LOOSE, "phases.joint.corpus=text", "phases.joint.store_hidden_states=false")
    corpora = Corpora(OriginalBase.of(BaseModel.load(run.base)), run.data, run.seed, Said())
    unseen = unseen_text(corpora, run.phases)
    assert unseen is not None and len(unseen) >= 1
    trained = open_phase(corpora, run.phases["joint"], HiddenStatesSpec()).rows
    everything = corpora.text_rows(run.phases["joint"].seq_len)
    ids = [rows.batch(range(len(rows))).input_ids for rows in (trained, unseen, everything)]
    assert torch.equal(torch.cat(ids[:2]), ids[2])
    heads_alone = open_phase(corpora, run.phases["pretrain"], HiddenStatesSpec()).rows
    assert len(heads_alone) == len(everything)
