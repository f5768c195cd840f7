"""The benchmarks run: on a random tiny base, for their function and not for their times."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from head_cases import EXAMPLE

from drafthead.data.answers.store import Answer
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.data.text.chat import user_turn
from drafthead.errors import UserError
from drafthead.eval.trees.simulate import read_hidden_states, simulate_texts
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.token_tree import TokenTree
from drafthead.train.adapt import OnlineConfig
from drafthead.train.trainer.optim import OptimConfig
from support import TinyBase, cases, noisy_head, refuses

Load = Callable[[str], ModuleType]


@cases(
    "name, given, says",
    ("served", ["--heads", "a=b", "--rounds", "0"], "--rounds .*, got 0"),
    ("batches", ["--head", "nowhere", "--rows", "1,0"], "--rows .*, got 1,0"),
    ("cost_trees", ["--head", "nowhere", "--rows", "0"], "--rows .*, got 0"),
    ("draft_shapes", ["--depths", "1,2", "--widths", "16"], "one width per depth, got 1 for 2 depths"),
    ("train_step", ["--steps", "0", "recipe=medusa_smollm2"], "--steps .*, got 0"),
    ("train_step", ["--phase", "joint", "recipe=medusa_smollm2"], "phase 'joint'"),
    ("training_quality", ["nowhere.yaml"], "nowhere.yaml is not a readable YAML file"),
    ("training_quality", ["benchmarks/studies/eagle3.yaml", "--rows", "vlm"], "--rows .*, got vlm"),
    ("quantised", ["--targets", "q8_0,int3"], "--targets .*, got int3"),
    ("adapt_head", ["--sizes", "0"], "--sizes must be at least 1, got 0"),
    ("adapt_head", ["--fine-tunes", "nowhere", "--heads", "a=b"], "nowhere has no fine-tune"),
    ("heads", ["--heads", "medsua"], "--heads .*, got medsua"),
    ("long_contexts", ["--heads", "nowhere"], "--heads needs NAME=FOLDER, got nowhere"),
    ("heads", ["--stage", "table", "--json", "nowhere.json"], "nowhere.json has no trained head yet"),
)
def test_bad_input_fails_before_anything_loads(script: Load, name: str, given: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        script(name).main(given)


def test_bad_input_ends_a_script_with_one_line(script: Load, capsys: pytest.CaptureFixture[str]) -> None:
    common = script("common")

    def refuse() -> None:
        raise UserError("no such thing")

    with pytest.raises(SystemExit) as ended:
        common.entry_point(refuse)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such thing\n"


# Training ------------------------------------------------------------------------------------------------------


def test_ratios_of_settings_are_those_of_the_same_answers_and_seeds(script: Load) -> None:
    """Answers and seeds differ by far more than the settings do; only a paired interval is narrow."""
    quality, generator = script("training_quality"), np.random.default_rng(0)
    steps = generator.uniform(20, 80, (3, 40)) * np.array([[0.5], [1.0], [2.0]])
    baseline = np.stack([np.full((3, 40), 80.0), steps], -1)
    row = np.stack([np.full((3, 40), 80.0), steps / 1.1], -1)
    assert quality.ratio(row, baseline) == pytest.approx((1.1, 1.1, 1.1))
    assert quality.ratio(row, baseline[:, ::-1])[1] < 1 < quality.ratio(row, baseline[:, ::-1])[2]


def test_a_row_of_a_study_may_name_another(script: Load, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("recipe: x\nrows: {a: &a [p=1], b: [*a, q=2], c: {speculators: [--lr=1]}}\n")
    rows = script("training_quality").read_study(tmp_path / "a.yaml")["rows"]
    assert rows == {"a": ["p=1"], "b": ["p=1", "q=2"], "c": {"speculators": ["--lr=1"]}}


@cases(
    "settings",
    (),
    ("--phase", "distill", "phases.distill.store_hidden_states=true", "phases.distill.grad_accum_steps=2"),
    ("shard=full", "shard.precision=bfloat16"),
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


def test_peaks_of_gpus(script: Load) -> None:
    peaks = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A1000 Laptop GPU": None}
    for name, peak in peaks.items():
        assert script("train_step").peak_operations(name) == peak


@pytest.mark.slow
def test_both_forms_of_the_loss_agree(script: Load, tmp_path: Path) -> None:
    small = ["--heads", "2", "--vocabulary", "500", "--tokens", "64", "--width", "16"]
    script("loss_memory").main([*small, "--json", str(tmp_path / "memory.json")])
    record = json.loads((tmp_path / "memory.json").read_text())
    assert record["chunked"]["loss"] == pytest.approx(record["whole"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_sharded_base_trains_as_a_whole_one(script: Load, tmp_path: Path) -> None:
    script("shard_memory").main(["--hidden", "32", "--layers", "2", "--json", str(tmp_path / "memory.json")])
    record = json.loads((tmp_path / "memory.json").read_text())
    assert record["loss_difference"] < 1e-5 and len(record["processes"]["full"]) == 2


# Heads ---------------------------------------------------------------------------------------------------------


def test_a_new_head_needs_no_list(script: Load) -> None:
    """EXAMPLE is the head of docs/tutorials/new_head.md, which is only a module of ``models.heads``."""
    assert {EXAMPLE, "medusa", "hydra_pp"} <= set(script("heads").known_heads())


@pytest.mark.slow
def test_heads_are_trained_for_equal_time_and_measured(script: Load, tmp_path: Path) -> None:
    out, path = tmp_path / "heads", tmp_path / "heads.json"
    given = ["--heads", "medusa,hydra,medusa2", "--minutes", "0.02", "--suite", "builtin", "--limit", "2"]
    given += ["--max-new-tokens", "8", "--time-limit", "2", "--out", str(out), "--json", str(path), "debug=tiny"]
    assert script("heads").main([*given, "--seeds", "0"]) == 0
    record = json.loads(path.read_text())
    trained = {(run["head"], run["seed"]): run for run in record["runs"]}
    assert set(trained) == {(name, 0) for name in ("medusa", "hydra", "medusa2")}
    for (name, _), run in trained.items():
        step_s = record["heads"][name]["step_s"]
        seconds = sum(count * step_s[phase] for phase, count in run["steps"].items())
        assert seconds == pytest.approx(0.02 * 60, abs=sum(step_s.values())), "steps that take the budget"
        assert run["alone"]["tau"] >= 1 and len(run["acceptance"]) >= 3
        assert json.loads((out / f"{name}-0.02min-seed0" / "head" / "tree.json").read_text())["choices"]
    assert record["lookup"]["tau"] >= 1 and set(record["speed"]["groups"]) == {"shared", "medusa2"}
    for speed in record["speed"]["heads"].values():
        assert speed["alone"]["identical_outputs"]["same"] == speed["with_lookup"]["identical_outputs"]["same"] == 2
    assert path.with_suffix(".svg").stat().st_size > 5000

    # A second seed is added; what is finished is not trained again.
    before = {file: file.stat().st_mtime_ns for file in out.glob("*-seed0/head/*.safetensors")}
    assert script("heads").main([*given, "--seeds", "0,1", "--stage", "train,table"]) == 0
    runs = json.loads(path.read_text())["runs"]
    assert [run for run in runs if run["seed"] == 0] == record["runs"] and len(runs) == 6
    assert {file: file.stat().st_mtime_ns for file in before} == before
    with pytest.raises(UserError, match=r"other settings \(nodes\)"):
        script("heads").main([*given, "--nodes", "5"])


def small_record() -> dict[str, Any]:
    taus = [("medusa", 4, 0, 1.5), ("medusa", 4, 1, 1.6), ("hydra", 4, 0, 1.7), ("medusa", 15, 0, 1.8)]
    runs = [
        {"head": head, "minutes": m, "seed": seed, "alone": {"tau": tau}, "with_lookup": {"tau": tau + 0.3}}
        | {"acceptance": [tau / 4]}
        for head, m, seed, tau in taus
    ]
    speed = {"heads": {"medusa": {"alone": {"speedup": 1.2}, "with_lookup": {"speedup": 1.3}}}}
    speed["groups"] = {"shared": {"lookup": {"speedup": 1.1}}}
    machine = {"hardware": {"cpu": "a CPU"}, "date": "2026-11-24", "settings": {"limit": 2, "suite": "s", "nodes": 6}}
    return {**machine, "heads": {"medusa": {}, "hydra": {}}, "lookup": {"tau": 1.4}, "runs": runs, "speed": speed}


def test_the_table_of_heads_has_medians_ranges_and_gaps(script: Load) -> None:
    text = script("heads_table").markdown(small_record())
    assert "4 minutes: 1 to 2 seeds, 15 minutes: 1 seed (1 of 2 heads)" in text
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()[4:]
    }
    assert list(cells) == ["`hydra`", "`medusa`", "prompt lookup alone"], "the best comes first"
    assert cells["`medusa`"] == ["1.55 (1.50–1.60)", "1.85 (1.80–1.90)", "1.80", "2.10", "45", "1.20x", "1.30x"]
    assert cells["`hydra`"] == ["1.70", "2.00", "–", "–", "42", "–", "–"]
    assert cells["prompt lookup alone"] == ["–", "1.40", "–", "1.40", "–", "–", "1.10x"]


def test_the_pages_show_the_record_of_heads(script: Load) -> None:
    heads, table = script("heads"), script("heads_table")
    record = json.loads(heads.RECORD.read_text())
    for page in heads.PAGES:
        shown = page.read_text().partition(heads.MARKS[0])[2].partition(heads.MARKS[1])[0]
        assert shown == f"{table.markdown(record)}\n", f"{page}: run python benchmarks/heads.py --stage table --write"
    drawn = table.figure(record).axes[0].lines
    dots = sum(len(line.get_xdata()) for line in drawn if line.get_marker() == "o")
    assert dots == 2 * len(record["runs"])


def test_a_stream_that_changes_its_topic(script: Load, tiny_base: TinyBase) -> None:
    module = script("online")
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=2).build(base).eval()
    prompts = [[n, n + 1] for n in range(8)]
    answers = [Answer.of([*ids, *decode(base, None, ids, max_new_tokens=20).tokens], 2) for ids in prompts]
    stream = [(answer, read_hidden_states(base, head, answer)) for answer in answers] * 3
    frozen, _ = module.follow(head, stream, None)
    assert len(frozen) == 24 and frozen[:8] == frozen[8:16]
    config = OnlineConfig(interval=4, positions="all", optim=OptimConfig(lr=0.01, schedule="constant"))
    learning, costs = module.follow(head, stream, config)
    assert costs["updates"] == 6
    assert learning[:4] == frozen[:4] and module.mean(learning[16:]) > module.mean(frozen[16:])


# Trees by cost -------------------------------------------------------------------------------------------------


@cases("rows", 1, 2)
def test_trees_by_cost_are_compared_on_equal_texts(
    script: Load, tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    module, base = script("cost_trees"), tiny_base()
    head = noisy_head(MedusaConfig(num_draft_tokens=2), base, 0.1)
    monkeypatch.setattr(module, "load_base_and_head", lambda folder: (base, head))
    costs = CostModel(
        verify={1: 1e-3, 32: 1.1e-3}, draft=1e-5, overhead=0.0, context=9, draft_by_depth=[0.0, 1e-5, 2e-5]
    )
    monkeypatch.setattr(module, "measure_costs", lambda *given, **named: costs)
    (tmp_path / "s.jsonl").write_text("".join(f'{{"prompt": "{c * 9}", "task": "{c}"}}\n' for c in "abcdef"))
    given = ["--suite", str(tmp_path / "s.jsonl"), "--limit", "3", "--max-new-tokens", "12", "--rows", str(rows)]
    module.main(["--head", "any", "--lookup", "3", *given, "--json", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    compared = {row["method"]: row for row in record["rows"]}
    assert {"autoregressive", "by cost", "by cost + lookup"} < {*compared}
    assert any(name.startswith("dynamic") for name in compared)
    assert all(row["same"] == row["of"] == 3 for row in compared.values())
    for name in ("by cost", "by cost + lookup"):
        assert compared[name]["nodes"] > 1 and compared[name]["expected_tokens"] >= 1
        assert 0 < compared[name]["expected_ms"] < 1.2 * rows


# Long contexts -------------------------------------------------------------------------------------------------


def test_every_length_asks_the_same_questions(
    script: Load, tiny_base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, base, path = script("long_contexts"), tiny_base(), tmp_path / "record.json"
    head = noisy_head(Eagle3Config(num_draft_tokens=2, ttt_steps=2), base, 0.1)
    monkeypatch.setattr(module.drafthead, "load_base", lambda name: base)
    monkeypatch.setattr(module, "load_head", lambda folder, base: head)
    passages = [EvalPrompt("t", i, user_turn(c * 40)) for i, c in enumerate("abc")]
    monkeypatch.setattr(module, "load_suite", lambda name: passages)
    short, long = (module.prompts(base, n, 3) for n in (20, 60))
    assert [len(ids) for ids in long] == [len(ids) + 40 for ids in short]
    assert [ids[-16:] for ids in long] == [ids[-16:] for ids in short]
    given = ["--heads", "own=any", "--windows", "8", "--count", "3", "--tokens", "8", "--json", str(path)]
    module.main([*given, "--lengths", "20"])
    module.main([*given, "--lengths", "20,60"])
    results = json.loads(path.read_text())["results"]
    assert [result["length"] for result in results] == [20, 60]
    assert [{*result["heads"]} for result in results] == [{"own", "own, window 8"}] * 2
    texts = module.answers(base, long, 8)
    simulated = simulate_texts(base, head, texts, DraftConfig(tree=TokenTree.chain(2)), Sampler())
    assert sum(steps for _, steps in results[1]["heads"]["own"]) == pytest.approx(simulated.steps)


# GPU checklist -------------------------------------------------------------------------------------------------


def test_a_checklist_survives_faults_and_resumes(script: Load, tmp_path: Path) -> None:
    checklist, path, calls = script("gpu_checklist"), tmp_path / "gpu.jsonl", list[str]()
    faulty = True

    def work(name: str) -> Any:
        calls.append(name)
        if name == "b" and faulty:
            raise RuntimeError("no kernel\nimage")
        return {"ms": 1.5}

    steps = [(name, "", partial(work, name)) for name in "abc"]
    steps.insert(1, ("gpu", "needs a GPU", partial(work, "gpu")))
    refuses("1 steps failed", checklist.run_steps, path, steps)
    faulty = False
    checklist.run_steps(path, steps)
    checklist.run_steps(path, steps)
    assert calls == ["a", "b", "c", "b"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == ["a", "gpu", "b", "c", "b"]
    assert rows[1]["skipped"] == "needs a GPU" and rows[2]["error"].startswith("RuntimeError: no kernel")


@pytest.mark.slow
def test_a_decoding_step_has_shares(script: Load) -> None:
    result = script("gpu_checklist").passes(["recipe=medusa_smollm2", "debug=tiny"], 100)
    assert 0 < result["draft_share"] < 1 and 0 < result["loop_share"] < 1
    assert result["bandwidth_share"] is None and result["costs"]["context"] == 100


def test_the_table_of_quantised_targets(script: Load) -> None:
    """Tau is tokens per step over all answers, and the ratio is that of the target's own head to the other."""
    quantised = script("quantised")
    kinds = {kind: [[30, 20.0], [10, 5.0]] for kind in ("chain", "tree")}
    worse = {kind: [[30, 30.0], [10, 10.0]] for kind in kinds}
    of = {quantised.OF_TARGET: {"mt_bench": kinds}, quantised.OF_FLOAT32: {"mt_bench": worse}}
    runs = [
        {"target": "float32", "judged": {quantised.OF_TARGET: {"mt_bench": kinds}}},
        {"target": "q4_0", "judged": of},
    ]
    first, second = quantised.lines({"runs": runs}, "chain")
    assert first["tau, trained on the target"] == "1.600" and first["tau, trained on float32"] == ""
    assert second["tau, trained on float32"] == "1.000"
    assert str(second["target / float32 (95 %)"]).startswith("1.600 (1.500-2.000)")
