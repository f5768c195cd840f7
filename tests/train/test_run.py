"""Whole runs on a random tiny base: errors before any work, stages, and work that a second start skips."""

import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from drafthead.data.answers.store import Answer
from drafthead.errors import UserError
from drafthead.eval.trees.calibrate import calibrate
from drafthead.eval.trees.simulate import text_ranks
from drafthead.files.local import claimed, read_json, read_json_lines, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import CostTree
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode_batch, static_draft_config
from drafthead.models.heads.medusa import ResBlock
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree
from drafthead.train import pipeline
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.distributed.signals import Stopped
from drafthead.train.estimate.duration import StageDurations
from drafthead.train.estimate.hours import print_estimate
from drafthead.train.pipeline import run_pipeline
from drafthead.train.preflight import preflight
from drafthead.train.run_folder import check_settings, training_settings
from drafthead.train.trainer import trainer
from support import TinyBase, cases, composed, losses_of, refuses

SHORT = ("phases.pretrain.steps=2", "phases.distill.steps=4", "tree_prompts=1", "eval.limit=1", "eval.max_new_tokens=8")
TRAINED = "stages=[corpora,train]"
PLAIN_MEDUSA = "head=medusa ~head.base_loss ~head.heads_weight ~head.heads_schedule"
NOT_JOINT = "phases.joint.train_base=false"


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*composed(folder, "recipe=medusa_smollm2", "debug=tiny", *SHORT, *overrides))
    return folder / "run"


@pytest.fixture
def finished(medusa_run: Path, tmp_path: Path) -> Path:
    """A folder with a copy of a finished run of ``train``, and its corpora."""
    return Path(shutil.copytree(medusa_run, tmp_path / "finished", symlinks=True))


def test_a_folder_of_other_settings_is_rejected(finished: Path) -> None:
    refuses(r"phases.distill.optim.lr=.*resume=false", train, finished, TRAINED, "phases.distill.optim.lr=0.005")
    refuses("sampler.temperature", train, finished, TRAINED, "data.answers.sampler.temperature=0.5", "resume=false")
    with pytest.raises(UserError, match="another base or adapter .base.fingerprint .* choose another folder"):
        train(finished, TRAINED, "base.seed=1", "resume=false")


def test_a_trained_folder_without_its_settings_is_rejected(finished: Path) -> None:
    (finished / "run" / "training-settings.json").unlink()
    refuses("training-settings.json is missing.*restore", train, finished, TRAINED, "phases.distill.optim.lr=0.005")


@pytest.fixture(scope="module")
def zero_floor() -> RunConfig:
    return recipe(Path("unused"), "phases.distill.boost.floor=0")


@cases(
    "key, saved, is_accepted",
    ("phases.distill.boost.floor", 0, True),
    ("phases.distill.boost.floor", False, False),  # Python's 0 == False
    ("phases.distill.boost.floor", "", False),
    ("phases.distill.boost.floor", None, False),
    ("phases.distill.boost.floor", ..., False),  # absent: its default is 0.1
    ("init_from", ..., True),  # absent: its default is None
    ("init_from", "", False),
    ("phases.distill.optim.clip_norm", ..., True),
    ("phases.distill.rows_per_step", ..., False),
    ("data.answers.sources", ..., False),
    ("phases.distill.unknown", False, False),
)
def test_resuming_tells_values_apart_and_fills_in_defaults(
    zero_floor: RunConfig, tmp_path: Path, key: str, saved: Any, is_accepted: bool
) -> None:
    run, path = zero_floor, tmp_path / "run" / "training-settings.json"
    settings = training_settings(run)
    settings = {k: v for k, v in settings.items() if k != key and not k.startswith(f"{key}.")}
    write_json(path, settings if saved is ... else settings | {key: saved})
    check_settings(path, run)  # nothing is trained yet
    (path.parent / "head").mkdir()
    if is_accepted:
        check_settings(path, run)
    else:
        refuses(f"{key}.*resume=false", check_settings, path, run)


@cases(
    "override, message",
    ("+head.dpeth=3", r"MedusaConfig has no dpeth; .*misspelt .*\(it has .*num_draft_tokens"),
    ("head.head_type=os.system", "head_type must be one of draft_lm, .*, got 'os.system'"),
    ("data.text.sources=[{_target_:os.system,kind:text,name:x}]", r"sources\[0\]._target_ is not a setting"),
    ("phases.distill.seq_len=64", "rows of up to"),
    ("name=a/b", "name must be letters, digits"),
    ("data.text.stream=true phases.pretrain.store_hidden_states=true", "phases.pretrain.store_hidden_states"),
    ("data.text.stream=true recipe=medusa2_smollm2", "quality_limits"),
    ("recipe=kangaroo_llama3 head.exit_layer=99", "head.exit_layer must be .* got .*99"),
    (f"recipe=medusa2_smollm2 {PLAIN_MEDUSA}", "phases.joint.train_base .*MedusaConfig"),
    (f"recipe=medusa2_smollm2 phases.distill.train_base=true {NOT_JOINT}", "phases.joint .*phases.distill"),
    ("recipe=medusa2_smollm2 base.adapter=some/folder", "base.adapter=some/folder .*phases.joint.train_base"),
)
def test_bad_settings_are_one_clear_error(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=message):
        recipe(tmp_path, *override.split())


def recipe(folder: Path, *overrides: str) -> RunConfig:
    return composed(folder, "recipe=medusa_smollm2", *overrides)[0]


def test_overlong_messages_keep_both_ends() -> None:
    message = str(UserError(f"a.json has a bad name {'9' * 5000!r}; copy it again"))
    assert len(message) < 2300
    assert message.startswith("a.json has a bad name '999") and message.endswith("'; copy it again")


def stream(folder: Path, *overrides: str) -> tuple[RunConfig, str]:
    common = ["recipe=medusa_smollm2", "debug=tiny", "data.text.stream=true", "data.text.stream_shards=2"]
    return composed(folder, *common, "stages=[corpora,train]", *overrides)


def test_broken_prompts_are_named_by_the_setting_that_the_user_typed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    run = ["recipe=medusa_smollm2", "debug=tiny", f"data.prompts={path}"]
    for content, says in {
        "\n": f"jsonl:{path} in data.prompts is empty; name another file",
        '{"text": "x"}': f"no column 'prompt' or .*; present: text; name one: .*name: {path}",
    }.items():
        path.write_text(content)
        for check in (preflight, print_estimate):
            refuses(says, check, composed(tmp_path, *run)[0])
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(UserError, match="1 transcripts cannot be trained on: .*has no assistant's turn"):
        print_estimate(composed(tmp_path, *run[:2], f"data.transcripts={path}")[0])


def test_data_too_few_to_hold_a_conversation_out_is_refused_before_the_base_is_loaded(tmp_path: Path) -> None:
    tiny, path = ("recipe=medusa_smollm2", "debug=tiny"), tmp_path / "chats.jsonl"
    path.write_text(19 * '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n')
    for setting, says in {
        "data.answers.prompts=12": "^12 conversations .* at least 20 .*; raise data.answers.prompts",
        f"data.prompts={path}": "^19 conversations .*; name more data.prompts",
        f"data.transcripts={path}": "^19 conversations .*; name more data.transcripts",
    }.items():
        refuses(says, preflight, composed(tmp_path, *tiny, setting)[0])
    preflight(composed(tmp_path, *tiny, f"data.transcripts={path}", "data.own_answers=true")[0])


def test_too_few_own_prompts_to_measure_on_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, path = ("recipe=medusa_smollm2", "debug=tiny"), tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "What is {n}?"}}\n' for n in range(24)))
    assert composed(tmp_path, *tiny)[0].eval.suite == "builtin", "the prompts are not the user's"
    run_pipeline(*composed(tmp_path, *tiny, f"data.prompts={path}", "stages=[corpora]"))
    assert "measured on builtin: 24 conversations are too few to hold 8 out" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(UserError, match="was trained with hold_out_own_prompts=True, this command has False"):
        run_pipeline(*composed(tmp_path, *tiny, f"data.prompts={path}", "eval.suite=smoke"))
    preflight(composed(tmp_path, *tiny, "data.answers.prompts=12", "stages=[corpora]")[0])


def test_a_streamed_file_is_not_read_to_its_end_before_a_run(tmp_path: Path) -> None:
    """It may be larger than the disk. A file to be packed is read, so that a broken line is found before the work."""
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{')
    override = f"data.text.sources=[{{kind: jsonl, name: {tmp_path / 'x.jsonl'}}}]"
    preflight(stream(tmp_path, override)[0])
    refuses("x.jsonl line 2", preflight, stream(tmp_path, override, "data.text.stream=false")[0])
    (tmp_path / "x.jsonl").write_text("\n")
    refuses("is empty", preflight, stream(tmp_path, override)[0])
    with pytest.raises(UserError, match="has no weight"):  # not after the answers are generated
        preflight(stream(tmp_path, override.replace("}]", "}, {kind: builtin, name: stdlib_tiny, weight: 2}]"))[0])


# Stages --------------------------------------------------------------------------------------------------------


def test_a_second_start_measures_nothing_again(finished: Path, step_costs: Any) -> None:
    run = finished / "run"
    results = [run / "calibration.json", run / "eval.json"]
    first = [path.read_text() for path in results]  # measured times never repeat
    train(finished)
    assert [path.read_text() for path in results] == first and step_costs.rows == []
    (log,) = run.glob("eval-log-*.jsonl")
    train(finished, "stages=[tree]", "eval.sampler.temperature=0.5")
    assert results[0].read_text() != first[0] and step_costs.rows, "the tree was chosen for greedy answers"
    (run / "eval-log-of-another-tree.jsonl").touch()
    train(finished, "resume=false", "stages=[tree,evaluate]")
    assert all(path.read_text() != content for path, content in zip(results, first, strict=True))
    assert step_costs.rows and not (run / "eval-log-of-another-tree.jsonl").exists()


def test_batches_have_their_own_trees(finished: Path, step_costs: Any) -> None:
    """In a batch of eight, where extra nodes are expensive, drafting does not pay. The choice is saved."""
    (finished / "run" / "calibration.json").unlink()

    def model(rows: int) -> CostModel:
        verify = {n: 1.0 + (n - 1) * {1: 0.01, 2: 0.2, 8: 5.0}[rows] for n in (1, 2, 4, 8, 64)}
        return CostModel(verify=verify, draft=0.0, overhead=0.0, context=200)

    step_costs.model = model
    settings = ("tree_batches=[2,8]", "stages=[tree]")
    base, head = load_base_and_head(train(finished, *settings) / "head")
    assert step_costs.rows == [1, 2, 8]
    one, two, seven, eight, many = (static_draft_config(head, rows).tree for rows in (1, 2, 7, 8, 16))
    assert head.tree_costs is not None and {*head.tree_costs.costs} == {1, 2, 8} == {*head.tree_costs.speedup}
    by_cost = DraftConfig(tree=CostTree(costs=head.tree_costs, depth=head.depth))
    results = decode_batch(base, head, [[5, 6, 7]] * 8, max_new_tokens=4, draft_config=by_cost, ignore_eos=True)
    assert {step.proposed for result in results for step in result.steps} == {0}
    assert isinstance(one, TokenTree) and isinstance(two, TokenTree)
    assert len(one) > len(two) and seven == two and eight == many == TokenTree.chain(0)
    results = decode_batch(base, head, [[5, 6, 7]] * 8, max_new_tokens=4, ignore_eos=True)
    assert {step.proposed for result in results for step in result.steps} == {0}
    train(finished, *settings)
    assert step_costs.rows == [1, 2, 8], "nothing is measured twice"


@pytest.mark.parametrize("gain, spec", [(1.03, "cost"), (1.01, "head")])
def test_trees_by_cost_are_the_default_where_they_win(
    finished: Path, step_costs: Any, monkeypatch: pytest.MonkeyPatch, gain: float, spec: str
) -> None:
    def by_cost(head: DraftHead, texts: list[Answer], temperature: float) -> tuple[float, float]:
        nonlocal expected
        ranks = text_ranks(head, texts)
        assert head.tree_costs is not None
        expected = calibrate(ranks, head.tree_costs.costs[1]).expected_speedup
        return gain * expected, 3.0

    expected = 0.0
    monkeypatch.setattr(pipeline, "speedup_by_cost", by_cost)
    (finished / "run" / "calibration.json").unlink()
    run = train(finished, "eval.split=test", "stages=[tree,evaluate]")
    _, head = load_base_and_head(run / "head")
    assert expected and head.prefers_cost is (spec == "cost")
    assert read_json(run / "eval.json")["tree"]["spec"] == spec


def test_trees_by_cost_are_no_default_without_a_fit_or_beside_a_threshold() -> None:
    context, head = Mock(development_answers=None), Mock(confidence_threshold=0.0, prefers_cost=True)
    assert "not fitted" in pipeline._choose_by_cost(context, head, Mock()) and not head.prefers_cost
    context, head = Mock(development_answers=[1]), Mock(confidence_threshold=0.4, prefers_cost=True)
    assert "confidence threshold" in pipeline._choose_by_cost(context, head, Mock()) and not head.prefers_cost


def test_resume_false_keeps_files_that_no_run_wrote(tmp_path: Path) -> None:
    precious = tmp_path / "run" / "head" / "novel.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("Call me Ishmael.")
    refuses("head, but .* has no training-settings.json", train, tmp_path, "resume=false")
    assert precious.exists()


def test_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    refuses("mixed_precision=fp8", train, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    with claimed(tmp_path / "run"), pytest.raises(UserError, match="run is in use by process"):
        train(tmp_path)
    assert not (tmp_path / "run" / "training-settings.json").exists()


def test_a_run_without_a_token_to_train_on_fails(with_medusa_corpora: Path) -> None:
    """A head learns the second token after a position, which documents of a single letter lack."""
    (with_medusa_corpora / "letters.jsonl").write_text('{"text": "a"}\n' * 2000)
    source = f"data.text.sources=[{{kind: jsonl, name: {with_medusa_corpora / 'letters.jsonl'}}}]"
    refuses("phase pretrain, step 2: .* no token to train on", train, with_medusa_corpora, "log_every=2", source)


def test_validation_and_saving_do_not_count_as_training_time(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every validation takes an hour by the clock that the loop reads."""
    clock = [0.0]

    def tick(module: torch.nn.Module, _inputs: Any) -> None:
        if isinstance(module, ResBlock):
            clock[0] += 0.001 if module.training else 3600

    monkeypatch.setattr(trainer, "perf_counter", lambda: clock[0])
    hook = register_module_forward_pre_hook(tick)
    run = train(finished, TRAINED, "resume=false", "log_every=2", "validate_every=3")
    hook.remove()
    assert clock[0] > 3600
    assert max(row["step_ms"] for row in read_json_lines(run / "metrics.jsonl") if "step_ms" in row) < 1000


@pytest.mark.slow
def test_each_stage_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage reads the files of earlier stages; without them, the error names the missing stage."""
    config, resolved = composed(tmp_path, "recipe=medusa_smollm2", "debug=tiny", *SHORT)
    run = tmp_path / "run"

    def only(stage: str, **changes: Any) -> None:
        run_pipeline(replace(config, stages=[stage], **changes), resolved)

    for stage, missing in (("tree", "train"), ("evaluate", "train"), ("card", "evaluate")):
        refuses(f"run the stage {missing} first", only, stage)
    only("corpora")
    assert not (run / "checkpoints").exists() and "try it" not in capsys.readouterr().out
    only("train")
    assert f"drafthead generate head={run / 'head'} " in (printed := capsys.readouterr().out)
    assert "report.html" not in printed and printed.splitlines()[-1].startswith("time: ")
    assert not (run / "calibration.json").exists()
    refuses("calibration.json is missing.*stages=.tree,evaluate", only, "evaluate")
    for stage in ("tree", "evaluate", "card"):
        only(stage)
    assert (run / "head" / "README.md").exists() and (run / "report.html").exists()
    suite = read_json(run / "eval.json")["suite"]
    only("evaluate", resume=False)
    assert read_json(run / "eval.json")["suite"] == suite and (run / "checkpoints").exists()


@pytest.mark.parametrize("processes", [1, 2, 8, 16, 32])
def test_the_rows_of_a_step_are_those_of_the_recipe_on_any_number_of_processes(tmp_path: Path, processes: int) -> None:
    def phase(*overrides: str) -> PhaseConfig:
        return composed(tmp_path, "recipe=eagle3_llama3", *overrides)[0].phases["distill"]

    assert phase().rows(processes) == 16 and phase().micro_batches(processes, 16) == max(1, 8 // processes)
    assert phase("phases.distill.grad_accum_steps=2").rows(processes) == 2 * 2 * processes


def test_rows_that_the_processes_cannot_share_are_refused(tmp_path: Path) -> None:
    uneven = ("phases.distill.grad_accum_steps=null", "phases.distill.rows_per_step=5")
    run = composed(tmp_path, "recipe=medusa_smollm2", "debug=tiny", *uneven)[0]
    assert run.phases["distill"].batch_line(2, 5) == "5 rows per step (up to 2 per process x 2 x 2 accumulated)"
    preflight(run, 2)
    refuses("phases.distill.rows_per_step=5 .* 8 processes.*, such as 8", preflight, run, 8)


def test_a_step_split_into_micro_batches_trains_the_same(finished: Path) -> None:
    losses = [losses_of(finished / "run")]
    for size in (1, 3):
        batch = ("grad_accum_steps=null", "rows_per_step=2", f"micro_batch_size={size}")
        losses.append(losses_of(train(finished, TRAINED, "resume=false", *(f"phases.distill.{key}" for key in batch))))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == losses[0]


def test_packaged_answers_are_those_of_the_embedded_base_alone(tmp_path: Path) -> None:
    """Another base answers itself, unless the recipe says otherwise."""

    def copied(*overrides: str) -> bool:
        return composed(tmp_path, "recipe=medusa_smollm2", *overrides)[0].data.answers.copied

    other = ("base=custom", "base.name=my/llama")
    assert copied() and not copied(*other) and not copied("base.adapter=lora")
    assert copied(*other, "data.answers.fresh=false") and not copied("data.answers.fresh=true")
    assert copied(*other, "data.answers.precomputed=folder"), "a folder of answers is compared with the base later"
    none = ("recipe=medusa_smollm2", "debug=tiny", "data.answers.prompts=0", "data.answers.self_prompted=0")
    refuses("set data.answers.prompts or data.answers.self_prompted", composed, tmp_path, *none)
    composed(tmp_path, *none, "data.transcripts=chats.jsonl")


@pytest.mark.parametrize("error", [None, UserError("the disk is full"), Stopped(15)])
def test_the_tracker_is_closed_however_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    def stage(context: pipeline.RunContext) -> None:
        context.tracker.log({"phase": "distill"}, step=1)
        if error is not None:
            raise error

    tracker = Mock()
    monkeypatch.setattr(pipeline, "Tracker", Mock(return_value=tracker))
    monkeypatch.setattr(pipeline, "STAGES", {"train": stage})
    with nullcontext() if error is None else pytest.raises(type(error)):
        train(tmp_path, TRAINED)
    tracker.finish.assert_called_once_with(failed=error is not None)


def test_a_run_first_prints_its_stages_and_their_durations(tmp_path: Path, tiny_base: TinyBase) -> None:
    """Every long stage has a row with its size. More work takes longer. A step's rows depend on the processes."""

    def rows(*overrides: str, devices: int = 1) -> dict[str, tuple[str, float]]:
        run, _ = composed(tmp_path, "recipe=medusa_smollm2", "debug=tiny", *overrides)
        stages = StageDurations(run, tiny_base(), devices).rows()
        return {stage: (work, seconds) for stage, work, seconds in stages}

    by_stage = rows()
    assert list(by_stage) == ["corpora", "phase pretrain", "phase distill", "tree", "evaluate"]
    assert "24 prompts" in by_stage["corpora"][0] and "10 steps on text" in by_stage["phase pretrain"][0]
    assert "3 answers of 24 tokens (builtin), each by 6 methods" in by_stage["evaluate"][0]
    assert rows("phases.distill.steps=1000")["phase distill"][1] > 10 * by_stage["phase distill"][1]
    assert list(rows("stages=[tree]")) == ["tree"]
    work = rows("phases.distill.grad_accum_steps=3", devices=8)["phase distill"][0]
    assert "48 rows per step (2 per process x 8 x 3 accumulated)" in work


@cases("recipe", "medusa_smollm2", "eagle3_smollm2", "dspark_smollm2")
def test_layers_are_loaded_only_to_answer_and_to_compute_states(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    load, step = BaseModel.load, trainer.train_step

    def recorded(*args: Any) -> BaseModel:
        loaded.append(weakref.ref(base := load(*args)))
        return base

    def without_layers(*args: Any, **kwargs: Any) -> Any:
        assert not any(base() is not None for base in loaded)
        return step(*args, **kwargs)

    monkeypatch.setattr(BaseModel, "load", recorded)
    monkeypatch.setattr(trainer, "train_step", without_layers)
    stored = "phases.pretrain.store_hidden_states=true"
    settings = (f"recipe={recipe}", "debug=tiny", *SHORT[:2], TRAINED, "base.prepack=false", stored)
    run_pipeline(*composed(tmp_path, *settings))
    assert loaded
    losses = losses_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    loaded.clear()
    run_pipeline(*composed(tmp_path, *settings))
    assert not loaded
    assert losses_of(tmp_path / "run") == losses
