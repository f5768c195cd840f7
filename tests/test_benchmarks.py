"""The benchmarks run: on a random tiny base, for their function and not for their times."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig

from drafthead.data.utils.errors import UserError
from drafthead.eval.trees.answers import FinishedAnswer
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.train.adapt import OnlineConfig, hidden_of
from drafthead.train.config import OptimConfig, PhaseConfig
from support import TinyBase, small_head

Load = Callable[[str], ModuleType]


@pytest.fixture
def head(tiny_base: TinyBase, tmp_path: Path) -> Path:
    return small_head(tiny_base(), tmp_path / "head")


def test_decode_measures_every_part_of_a_step(script: Load, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "now.json"
    script("decode").main(["--head", str(head), "--json", str(out), "--context", "40", "--repeats", "4"])
    record = json.loads(out.read_text())
    assert {"benchmark", "date", "arguments", "hardware", "versions"} <= record.keys()
    assert list(record["costs"]["verify"]) == [str(n) for n in range(1, 33)] == list(record["verify_ratio"])
    ways = record["one_token"]
    fastest = min(ways["verify_s"], ways["transformers_s"], ways["stock_s"])
    assert record["verify_ratio"]["4"] == pytest.approx(record["costs"]["verify"]["4"] / fastest)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("decode", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
        ("train_step", ["--steps", "0", "recipe=medusa_smollm2"], "--steps must be at least 1, got 0"),
        ("train_step", ["--phase", "joint", "recipe=medusa_smollm2"], "the recipe has no phase 'joint'; it has"),
        ("train_step", ["recipe=nowhere"], "recipe=nowhere: "),
        ("heads", ["--heads", "medsua"], "--heads knows .*, got medsua"),
        ("heads", ["--minutes", "0"], "--minutes must be more than 0, got 0"),
        ("heads", ["--shares", "1:2"], "--shares takes three whole numbers"),
        ("heads", ["--only", "table", "--out", "nowhere"], "nowhere has no trained head; run the part train first"),
    ],
)
def test_bad_input_fails_before_anything_loads(script: Load, name: str, given: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        script(name).main([*(["--head", "nowhere"] if name == "decode" else []), *given])


def test_bad_input_ends_a_script_with_one_line(script: Load, capsys: pytest.CaptureFixture[str]) -> None:
    common = script("common")

    def refuse() -> None:
        raise UserError("no such thing")

    with pytest.raises(SystemExit) as ended:
        common.entry_point(refuse)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such thing\n"


# Training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--phase", "distill", "phases.distill.features=cached", "phases.distill.accumulate=2"),  # as 0.1.0 called them
        ("shard=full", "shard.precision=bfloat16"),
    ],
    ids=["computed", "cached", "sharded"],
)
def test_the_parts_make_a_step(settings: tuple[str, ...], script: Load, tmp_path: Path) -> None:
    out = str(tmp_path / "step.json")
    tiny = ("recipe=medusa_smollm2", "debug=tiny", "--steps", "2", "--warm", "1")
    script("train_step").main([*tiny, *settings, "--json", out])
    record = json.loads(Path(out).read_text())
    assert record["tokens_a_step"] == 2 * 512 * (2 if "--phase" in settings else 1)
    assert record["tokens_per_second"] == pytest.approx(record["tokens_a_step"] / record["step_s"])
    assert record["ratio_to_floor"] == pytest.approx(record["tokens_per_second"] / record["floor"]["tokens_per_second"])
    assert list(record["parts_s"]) == ["data", "base", "head", "optimiser"]
    assert all(seconds > 0 for seconds in record["parts_s"].values())
    assert 0 <= record["data_wait"] < 1 and record["mfu"] is None
    memory = record["memory"]  # it may fall during the steps, where other tests left something
    assert memory["planned"] > 0 and memory["peak_to_plan"] == memory["peak_bytes"] / memory["planned"] != 0
    assert not torch.distributed.is_initialized()


def test_peaks_and_operations(script: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """D 4, one layer of 2 heads of 2 and an MLP of 8: 4 * 16 + 3 * 32 products, and 8 weights of norms."""
    step = script("train_step")
    peaks = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A1000 Laptop GPU": None}
    for name, peak in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert step.peak_operations(torch.device("cuda")) == peak
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    settings = LlamaConfig(**sizes, intermediate_size=8, vocab_size=10, tie_word_embeddings=True)
    head = MedusaConfig(num_draft_tokens=3, own_lm_head=False)
    layer = 2 * (4 * 16 + 3 * 32 + 8 + 16 * 4)  # the last: 16 tokens, each over half of them, twice
    blocks, shared = 6 * 3 * (16 + 4), 4 * 3 * 10 * 4
    for hidden_states, base in (("computed", layer), ("cached", 0)):
        phase = PhaseConfig(corpus="text", seq_len=16, hidden_states=hidden_states)
        assert step.operations_per_token(head, phase, settings) == base + blocks + shared


@pytest.mark.slow
def test_both_forms_of_the_loss_agree(script: Load, tmp_path: Path) -> None:
    small = ["--heads", "2", "--vocabulary", "500", "--tokens", "64", "--width", "16"]
    script("loss_memory").main([*small, "--json", str(tmp_path / "memory.json")])
    record = json.loads((tmp_path / "memory.json").read_text())
    assert record["chunked"]["loss"] == pytest.approx(record["whole"]["loss"], rel=1e-4)


# Heads ---------------------------------------------------------------------------------------------------------


def test_steps_fill_the_budget_whatever_a_step_takes(script: Load) -> None:
    text, answers = PhaseConfig(corpus="text", steps=40), PhaseConfig(corpus="answers", steps=300)
    phases = {"pretrain": text, "distill": answers}
    steps = script("heads").choose_steps(phases, {"pretrain": 2.0, "distill": 0.5}, 700, [1, 6, 3])
    assert steps == {"pretrain": 50, "distill": 1200}
    phases["joint"] = PhaseConfig(corpus="answers", steps=30, train_base=True)
    times = {"pretrain": 1.0, "distill": 1.0, "joint": 10.0}
    steps = script("heads").choose_steps(phases, times, 1000, [1, 6, 3])
    assert steps == {"pretrain": 100, "distill": 600, "joint": 30}


@pytest.mark.slow
def test_heads_are_trained_measured_and_tabled(script: Load, tmp_path: Path) -> None:
    out, record = tmp_path / "heads", tmp_path / "heads.json"
    given = ["--heads", "medusa,hydra,medusa2", "--minutes", "0.02", "--suite", "builtin", "--limit", "2"]
    given += ["--max-new-tokens", "8", "--out", str(out), "--json", str(record), "debug=tiny"]
    assert script("heads").main([*given, "--markdown", str(tmp_path / "heads.md")]) == 0
    found = json.loads(record.read_text())
    assert set(found["heads"]) == {"medusa", "hydra", "medusa2"}
    assert len(found["baselines"]) == 3, "prompt lookup beside the heads that share their base"
    for numbers in found["heads"].values():
        assert numbers["identical"] == "2 of 2" and numbers["training_minutes"] > 0 and numbers["draft_ms"] > 0
    assert (tmp_path / "heads.md").read_text().count("\n| ") == 1 + 3 + 3
    trained = (out / "medusa" / "eval.json").stat().st_mtime_ns
    assert script("heads").main([*given, "--only", "train,table"]) == 0
    assert (out / "medusa" / "eval.json").stat().st_mtime_ns == trained, "a finished head is not trained again"
    with pytest.raises(UserError, match="begun with other settings"):
        script("heads").train_head("medusa", script("heads").parse_arguments([*given, "--minutes", "1"]))


@pytest.mark.slow
def test_more_answers_are_trained_on_and_all_are_measured_alike(script: Load, tmp_path: Path) -> None:
    given = ["--heads", "medusa", "--tokens", "99,300", "--steps", "2", "--suite", "builtin", "--limit", "6"]
    given += ["--max-new-tokens", "12", "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "scaling.json")]
    script("scaling").main([*given, "--plot", str(tmp_path / "scaling.png"), "debug=tiny"])
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [(row["head"], row["tokens"]) for row in rows] == [("medusa", 99), ("medusa", 300)]
    assert all(row["tree"] >= 1 and row["seconds"] > 0 for row in rows)
    settings = json.loads((tmp_path / "runs" / "medusa-300" / "training-settings.json").read_text())
    assert settings["phases.distill.max_tokens"] == 300
    with pytest.raises(UserError, match="--tokens needs numbers and --steps one or 1"):
        script("scaling").main([*given, "--steps", "1,2"])


def test_acceptance_against_the_budget(
    script: Load, tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = script("budget")
    monkeypatch.setattr(module, "load_base", lambda name: tiny_base())
    arguments = ["--suite", "builtin", "--prompts", "2", "--tokens", "12", "--budgets", "16,999"]
    module.main([*arguments, "--policies", "recent,retrieval:4/1", "--json", str(tmp_path / "b.json")])
    rows = {(row["policy"], row["budget"]): row for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert rows["recent", 999]["acceptance"] == rows["retrieval:4/1", 999]["acceptance"] == 1
    assert (
        rows["recent", 16]["acceptance"] < 1 and rows["recent", 16]["cache_bytes"] < rows["recent", 999]["cache_bytes"]
    )


def test_a_stream_that_changes_its_topic(script: Load, tiny_base: TinyBase) -> None:
    module = script("online")
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=2).build(base).eval()
    texts = [FinishedAnswer([n, n + 1, *decode(base, None, [n, n + 1], max_new_tokens=20).tokens], 2) for n in range(8)]
    stream = [(text, hidden_of(base, head, text)) for text in texts] * 3
    frozen, _ = module.follow(head, stream, None)
    assert len(frozen) == 24 and frozen[:8] == frozen[8:16]
    config = OnlineConfig(interval=4, positions="all", optim=OptimConfig(lr=0.01, schedule="constant"))
    learning, numbers = module.follow(head, stream, config)
    assert (
        learning[:4] == frozen[:4] and module.mean(learning[16:]) > module.mean(frozen[16:]) and numbers["updates"] == 6
    )


def test_coverage_at_equal_nodes(
    script: Load, head: Path, tiny_base: TinyBase, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = script("coverage")
    assert list(module.in_turn([[5, 6, 7], [6, 8]], 4)) == [5, 6, 8, 7]
    assert list(module.in_turn([[5, 6, 7], []], 2)) == [5, 6]
    texts = [FinishedAnswer([1, 2, 3, 4, 5], 2)]
    assert module.covered(texts, [[[[4, 9], [7, 8]]]], 2).tolist() == [[1, 2]]
    assert module.covered(texts, [[[[9, 4], [8, 7]]], [[[4], [5]]]], 2).tolist() == [[2, 2]]
    base = tiny_base()
    drafter = DraftHead.from_pretrained(head, base)
    answer = FinishedAnswer([1, 2, *decode(base, None, [1, 2], max_new_tokens=9).tokens], 2)
    (named,) = module.candidates(base, drafter, [answer], 7)
    assert len(named) == answer.positions and all(len(set(each)) == 7 for each in named)
    arguments = ["--suite", "builtin", "--limit", "2", "--max-new-tokens", "8", "--widths", "2,50"]
    module.main(
        ["--head", str(head), *arguments, "--drafters", f"head,head+head:{head}", "--json", f"{tmp_path}/c.json"]
    )
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    shares = [row["coverage"] for row in rows]
    assert shares[:2] == shares[2:], "the same head twice is one head"
    assert 0 <= shares[0] <= shares[1] <= 1 and "coverage of the next token" in capsys.readouterr().out
