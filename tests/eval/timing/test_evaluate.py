"""Evaluation runs: what resumes, what is measured again, and predictions."""

import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch

from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import load_suite
from drafthead.eval.config import EvalConfig
from drafthead.eval.evaluate import development_answers, evaluate, predict
from drafthead.eval.report.tables import console_lines
from drafthead.eval.timing.methods import methods, transformers_generate
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.files.local import read_json, read_json_lines
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.drafter import Drafter, DraftSampling
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from support import Said, TinyBase, leaning, random_ids

CONFIG = EvalConfig(suite="builtin", limit=2, max_new_tokens=4)


def resumed(folder: Path, drafter: Drafter, base: BaseModel, *baselines: str) -> list[int]:
    config = replace(CONFIG, baselines=list(baselines), stock_baseline=False)
    return evaluate(base, drafter, config, folder, Said())["resumed"]


@pytest.mark.slow
def test_a_baseline_that_was_trained_again_is_timed_again(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, baseline = tiny_base(), MedusaConfig(num_draft_tokens=2).build(tiny_base())
    head = MedusaConfig(num_draft_tokens=1).build(base)
    baseline.save_pretrained(tmp_path / "baseline")
    baselines = ["prompt_lookup", f"head:{tmp_path / 'baseline'}"]
    assert resumed(tmp_path, head, base, *baselines) == [0, 2]
    assert resumed(tmp_path, head, base, *baselines) == [2, 2]
    with torch.no_grad():
        baseline.blocks[1][0].linear.bias += 1.0
    baseline.save_pretrained(tmp_path / "baseline")
    assert resumed(tmp_path, head, base, *baselines) == [0, 2]
    assert resumed(tmp_path, head, base, *baselines) == [2, 2]
    assert resumed(tmp_path, head, base) == [2, 2], "the others are known without it"


@pytest.mark.parametrize("draft_sampling", ["top_k", "with_replacement"])
def test_sampled_answers_are_compared_by_seed(draft_sampling: str, tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=2).build(base)
    config = replace(CONFIG, sampler=Sampler(temperature=0.7), draft_sampling=draft_sampling)
    found = evaluate(base, head, config, tmp_path, Said())["overall"].get("identical_outputs")
    assert (found and (found["same"], found["of"])) == ((2, 2) if draft_sampling == "top_k" else None)


@pytest.mark.parametrize("change", ["threshold", "layers"])
def test_what_is_measured_is_known_by_more_than_its_name(tiny_base: TinyBase, tmp_path: Path, change: str) -> None:
    base = tiny_base()
    head = KangarooConfig(exit_layer=1, num_draft_tokens=3).build(base)
    assert resumed(tmp_path, head if change == "threshold" else early_exit(base, 1), base) == [0, 2]
    head.confidence_threshold = 0.1
    other = head if change == "threshold" else early_exit(base, 2)
    assert resumed(tmp_path, other, base) == [0, 2]
    assert resumed(tmp_path, other, base) == [2, 2]


def test_every_setting_of_a_drafter_is_part_of_its_identity(tiny_base: TinyBase) -> None:
    base = tiny_base()
    specs = ["prompt_lookup:4", "prompt_lookup:4:2", "suffix_memory:4:9", "suffix_memory:4:8", "early_exit:1:4"]
    specs += ["early_exit:2:4", "budget:32:recent@4", "budget:33:recent@4", "budget:32:sinks:4@4"]
    specs += [f"{form}{specs[4]}+{specs[n]}" for form in ("", "relay:", "nested:") for n in (0, 1)]
    specs += ["relay:early_exit:1@2+prompt_lookup@3", "relay:early_exit:1@2+prompt_lookup@2"]
    identities = [repr(build_drafter(parse_drafter(spec), base)[0].identity()) for spec in specs * 2]
    assert len(set(identities)) == len(specs) and identities[len(specs) :] == identities[: len(specs)]


def test_a_combined_head_is_also_timed_alone(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=2).build(base)
    config = replace(CONFIG, drafter="head+prompt_lookup:4", baselines=["head"], stock_baseline=False)
    config = replace(config, max_new_tokens=24)
    drafter, draft_config = config.build(base, head, config.draft_config(head))
    compared = methods(base, drafter, draft_config, config, head)
    ids = [5, 9, 11, 40, 5, 9, 11, 40, 5, 9]
    alone, joined = (compared[name].answer([ids])[0] for name in ("head", "speculative"))
    expected = decode(base, head, ids, max_new_tokens=24, draft_config=config.draft_config(head))
    assert [step.accepted for step in alone.steps] == [step.accepted for step in expected.steps]
    assert alone.tokens == joined.tokens and compared["head"].composition != compared["speculative"].composition


@pytest.mark.slow
def test_answers_of_a_batch_share_its_time(tiny_base: TinyBase, tmp_path: Path) -> None:
    """With fewer rows than prompts, texts are those of single prompts, and times add up to the time of all."""
    base, alone = tiny_base(), replace(CONFIG, stock_baseline=False, max_new_tokens=24)
    head, together = MedusaConfig(num_draft_tokens=2).build(base), replace(alone, batch_size=2)
    prompts = [random_ids(4 + 3 * n, n) for n in range(7)]
    found = {}
    for config in (alone, together):
        compared = methods(base, head, config.draft_config(head), config, head)
        found[config.batch_size] = {name: compared[name].answer for name in ("autoregressive", "speculative")}
    assert "transformers" not in compared
    expected = [result.tokens for result in found[1]["autoregressive"](prompts)]
    for answer in found[2].values():
        started = perf_counter()
        results = answer(prompts)
        seconds = perf_counter() - started
        assert [result.tokens for result in results] == expected
        assert 0.5 * seconds < sum(result.total_s for result in results) < seconds
    evaluation = evaluate(base, head, together, tmp_path, Said())
    assert evaluation["overall"]["identical_outputs"]["same"] == 2 and evaluation["batch_size"] == 2


def test_an_evaluation_names_the_drafters_of_its_tree(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=2).build(base)
    config = replace(CONFIG, drafter="head+prompt_lookup:4", stock_baseline=False)
    drafter, draft_config = config.build(base, head, config.draft_config(head))
    evaluation = evaluate(base, drafter, config, tmp_path, Said(), draft_config=draft_config, head=head)
    tree = json.loads((tmp_path / "eval.json").read_text())["tree"]
    assert (tree["spec"], tree["nodes"], len(tree["choices"])) == ("head", 7, 6)
    assert [(part["drafter"], part["nodes"]) for part in tree["drafters"]] == [("head", 3), ("prompt_lookup:4", 5)]
    assert "tree: static, 3 nodes and up to 4 of prompt_lookup:4 (" in " ".join(console_lines(evaluation))


def test_three_plain_decoders_are_timed_and_a_prediction_is_kept(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = MedusaConfig(num_draft_tokens=2).build(base)
    costs = measure_costs(base, head, context=16, repeats=1, sizes=(1, 2, 4))
    config = replace(CONFIG, split="test")
    slower = replace(costs, verify={n: 3 * seconds for n, seconds in costs.verify.items()}, draft_prefill=1.0)
    evaluation = evaluate(base, head, config, tmp_path / "three", Said(), costs=costs, costs_after=lambda: slower)
    kept = CostModel.from_json(read_json(tmp_path / "three" / "eval.json")["costs"])
    assert kept.verify == pytest.approx({n: 2 * seconds for n, seconds in costs.verify.items()})
    assert kept == replace(costs, verify=kept.verify, draft_prefill=kept.draft_prefill)
    speeds = evaluation["overall"]["autoregressive_tokens_per_second"]
    assert set(speeds) == {"transformers_stock", "transformers", "autoregressive"}
    ids = [5, 9, 11, 40]
    stock = transformers_generate(base, ids, 8, model=base.stock())
    assert stock.tokens == decode(base, None, ids, max_new_tokens=8).tokens
    assert evaluation["predicted"]["mean_accepted_length"] >= 1
    start = f"forecast from {evaluation['predicted']['answers']} answers to the suite's dev half"
    assert any(line.startswith(start) for line in console_lines(evaluation))
    config = replace(CONFIG, stock_baseline=False)
    without = evaluate(base, head, config, tmp_path / "two", Said(), costs=costs)
    assert "transformers_stock" not in without["overall"]["autoregressive_tokens_per_second"]
    assert "predicted" not in without, "the whole suite has no other half"
    assert "stock transformers was not timed (stock_baseline=false)" in console_lines(without)[0]


@pytest.mark.parametrize("spec", ["head", "head+prompt_lookup:4"])
def test_a_prediction_is_what_decoding_the_development_half_gives(tiny_base: TinyBase, spec: str) -> None:
    base = tiny_base()
    config = replace(CONFIG, split="test", max_new_tokens=24, drafter=spec)
    texts = development_answers(base, config, 6, HiddenStatesSpec())
    head = leaning(MedusaConfig(num_draft_tokens=2).build(base), [(t.ids, t.boundary) for t in texts], 30.0, every=1)
    costs = CostModel(verify={1: 0.01, 8: 0.01}, draft=0.0, overhead=0.0, context=16)
    drafter, draft_config = config.build(base, head, config.draft_config(head))
    prediction = predict(base, drafter, draft_config, config, costs)
    prompts = [conversation_ids(base.tokenizer, prompt) for prompt in load_suite("builtin", split="dev")]
    results = [decode(base, drafter, ids, max_new_tokens=24, draft_config=draft_config) for ids in prompts]
    steps = [step for result in results for step in result.steps]
    tau = sum(step.committed for step in steps) / len(steps)
    # The last step of an answer is cut otherwise.
    assert prediction["mean_accepted_length"] == pytest.approx(tau, rel=0.02)
    assert prediction["speedup"] == pytest.approx(prediction["mean_accepted_length"]), "every pass costs the same"
    assert prediction["interval_95"][0] < tau < prediction["interval_95"][1]
    nodes = 1 + sum(step.proposed for step in steps) / len(steps)
    assert prediction["nodes"] == pytest.approx(nodes, rel=0.05), "not the room of the tree, which is seldom filled"
    assert predict(base, drafter, draft_config, replace(config, split="all"), costs) is None
    sampled = replace(draft_config, draft_sampling=DraftSampling.WITH_REPLACEMENT)
    assert (predict(base, drafter, sampled, config, costs) is None) == (spec != "head"), (
        "its parts' samples are not simulated"
    )


@pytest.mark.slow
def test_predictions_use_the_tasks_and_the_seed_of_the_evaluation(tiny_base: TinyBase) -> None:
    base = tiny_base()
    config = replace(CONFIG, suite="spec_bench_like", split="test", tasks=["math"], seed=3, max_new_tokens=4)
    prompts = load_suite("spec_bench_like", 2, 3, ["math"], "dev")
    texts = development_answers(base, config, 2, HiddenStatesSpec())
    assert [t.ids[: t.boundary] for t in texts] == [conversation_ids(base.tokenizer, prompt) for prompt in prompts]


@pytest.mark.parametrize("given", [None, 1.0])
def test_a_repetition_penalty_of_the_base_applies_to_all_methods(
    given: float | None, tiny_base: TinyBase, tmp_path: Path
) -> None:
    base = BaseModel.load(tiny_base().config)  # not the one that other tests use
    base.model.generation_config.repetition_penalty = 5.0
    base.model.generation_config.suppress_tokens = [7]
    config = replace(CONFIG, max_new_tokens=12, sampler=Sampler(repetition_penalty=given))
    result = evaluate(base, MedusaConfig(num_draft_tokens=2).build(base), config, tmp_path, Said())
    assert result["sampler"]["repetition_penalty"] == (given or 5.0)
    assert result["overall"]["identical_outputs"]["same"] == 2
    assert "not applied, of the base's generation_config.json: suppress_tokens" in console_lines(result)
    (log,) = tmp_path.glob("eval-log-*.jsonl")
    answers = [row["result"]["tokens"] for row in read_json_lines(log)]
    repeats = [len(tokens) - len({*tokens}) for tokens in answers]
    assert len(answers) == 8 and (not any(repeats) if given is None else any(repeats)), repeats
