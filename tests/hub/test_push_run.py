"""``push=true``: refused before anything is done without a token, and no failed upload costs a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import drafthead
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.train import pipeline
from support import composed, refuses


def train(folder: Path, *overrides: str) -> Path:
    short = ["phases.pretrain.steps=3", "phases.distill.steps=3", "eval.max_new_tokens=8"]
    pipeline.run_pipeline(*composed(folder, "recipe=medusa_smollm2", "debug=tiny", "push=true", *short, *overrides))
    return folder / "run"


def test_without_a_token_nothing_is_begun(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    refuses("push=true.*login.*HF_TOKEN", train, tmp_path)
    assert not (tmp_path / "run").exists() and not (tmp_path / "corpora").exists()


def test_the_next_start_pushes_after_a_hub_was_down(hub: Any, slept: list[float], tmp_path: Path) -> None:
    hub.fail("/commit/", times=4)
    refuses(r"drafthead push head=\S+/run/head", train, tmp_path)
    run = tmp_path / "run"
    weights = (run / "head" / "model.safetensors").read_bytes()
    assert all((run / name).exists() for name in ("eval.json", "report.html", "head/README.md", "head/eval.json"))
    assert (run / "plots" / "training_loss.png").exists()

    measured = (run / "calibration.json").stat().st_mtime_ns
    train(tmp_path, "hub.repo=team/medusa", "hub.private=true")
    assert (run / "calibration.json").stat().st_mtime_ns == measured, "costs are not measured again"
    files = hub.files("team/medusa")
    assert set(files) == {
        "README.md", "config.json", "eval.json", "model.safetensors", "training_loss.png", "tree.json",
        "custom_generate/generate.py", "custom_generate/requirements.txt",
    }  # fmt: skip
    assert files["model.safetensors"] == weights and hub.repos["team/medusa"].private
    head = drafthead.load_head("team/medusa")
    saved = load_file(run / "head" / "model.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in head.state_dict().items())
    check_card(ModelCard(files["README.md"].decode()), head, tmp_path)


def check_card(card: ModelCard, head: DraftHead, folder: Path) -> None:
    data = card.data
    assert data.license == "unknown" and data.library_name == "drafthead"
    assert {"drafthead", "speculative-decoding", "custom_generate", "medusa"} <= set(data.tags)
    assert data.eval_results and all("CPU cores" in result.metric_args["hardware"] for result in data.eval_results)
    for line in (
        'custom_generate="team/medusa", trust_remote_code=True)',
        f"| fingerprint of the base | `{head.base_fingerprint}`; drafthead refuses",
        "| distill | the base's answers | 3 | 1,024 | 0.002, cosine, 20 steps of linear warm-up |",
        "![Loss of each draft position",
        "No current release of an inference engine loads this head",
        "| task | speedup | 95 % | tau |",
    ):
        assert line in card.content, line
    assert str(folder) not in card.content
