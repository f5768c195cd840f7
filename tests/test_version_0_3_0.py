"""Folders that version 0.3.0 wrote stay readable, whatever is renamed: a head, a run and its corpora.

``version_0_3_0/`` was written by version 0.3.0 on 26 November 2026, with the settings below on a base of 16 dimensions.
The run's last checkpoint was removed, so that there is something to resume.
"""

import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from drafthead.data.text.documents import Documents
from drafthead.data.text.packing import pack
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.train.pipeline import run_pipeline
from support import composed, refuses

OLD = Path(__file__).parent / "version_0_3_0"
SAME_RUN = """recipe=medusa_smollm2 debug=tiny name=old base.shape.hidden_size=16 base.shape.intermediate_size=24
    base.shape.num_hidden_layers=2 base.shape.num_attention_heads=2 base.shape.num_key_value_heads=1
    base.shape.head_dim=8 base.shape.vocab_size=320 head.draft_vocab_size=64 head.num_layers=1 head.induction_rank=4
    phases.pretrain.steps=2 phases.distill.steps=3 phases.distill.store_hidden_states=true data.text.max_tokens=600
    data.answers.sampler.max_new_tokens=12 validate_every=100 stages=[corpora,train]
    head.context_vocabulary=false""".split()
ADAMW = {"name": "adamw", "momentum": 0.95, "lr": 0.002, "schedule": "cosine"}  # the recipe trains with Muon now
for phase, more in (("pretrain", (10, 0.1)), ("distill", (20, 0.02))):
    optim = ADAMW | dict(zip(("warmup_steps", "final_lr_ratio"), more, strict=True))
    SAME_RUN += [f"phases.{phase}.optim.{key}={value}" for key, value in optim.items()]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def test_its_head_decodes() -> None:
    base, head = load_base_and_head(OLD / "run" / "head")
    answer = decode(base, head, [5, 6, 7, 8], max_new_tokens=16)
    assert answer.tokens == decode(base, None, [5, 6, 7, 8], max_new_tokens=16).tokens == [42] * 16
    weights = load_file(OLD / "run" / "head" / "model.safetensors")
    assert all(torch.equal(weight, head.state_dict()[name]) for name, weight in weights.items())


def test_its_run_resumes_on_its_own_corpora(old: Path) -> None:
    """The second phase ends with the weights of 0.3.0; answers are not made again, and text gives the same rows."""
    before = {path: path.stat().st_mtime_ns for path in old.glob("corpora/answers/shard-*")}
    run_pipeline(*composed(old, *SAME_RUN))
    assert {path: path.stat().st_mtime_ns for path in before} == before and before
    (rows,), (text,) = old.glob("corpora/text/*/rows.arrow"), old.glob("corpora/text/*/tokens.npy")
    new = pack(Documents.open(text.parent), 512, split=True)
    assert new.batch(range(len(new))).input_ids.tolist() == Dataset.from_file(str(rows))["input_ids"][:]
    weights = load_file(old / "run" / "head" / "model.safetensors")
    for name, weight in load_file(OLD / "run" / "head" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


def test_a_setting_that_differs_is_named(old: Path) -> None:
    refuses("seed=0, .* 1", run_pipeline, *composed(old, *SAME_RUN, "seed=1"))
