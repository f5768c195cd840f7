"""Whole runs on a random tiny base: bad input is one line before any work; stages, and what a second start repeats."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.batch import LossOutput
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json
from drafthead.eval.timing import methods
from drafthead.eval.trees.cost_model import CostModel
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.heads.medusa import MedusaHead
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree
from drafthead.train import pipeline
from drafthead.train.config import RunConfig, preflight
from drafthead.train.outlook import Outlook
from drafthead.train.pipeline import run_pipeline
from support import TinyBase, composed

ROOT = Path(__file__).parent.parent.parent


SHORT = ("phases.pretrain.steps=2", "phases.distill.steps=4", "eval.limit=1", "eval.max_new_tokens=8")


def train(folder: Path, *overrides: str) -> Path:
    run_pipeline(*composed(folder, "recipe=medusa_smollm2", "debug=tiny", *SHORT, *overrides))
    return folder / "run"


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    trained = "stages=[corpora,train]"
    train(tmp_path, trained)
    with pytest.raises(UserError, match=r"phases.distill.optim.lr=.*resume=false"):
        train(tmp_path, trained, "phases.distill.optim.lr=0.005")
    train(tmp_path, trained, "phases.distill.optim.lr=0.005", "resume=false")
    with pytest.raises(UserError, match="answers was made with sampler.temperature = .* remove the folder"):
        train(tmp_path, trained, "data.answers.sampler.temperature=0.5", "resume=false")
    with pytest.raises(UserError, match="answers was made with base.fingerprint = "):
        train(tmp_path, trained, "base.seed=1", "resume=false")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("recipe=medusa_lama", "medusa_lama"),
        ("optim.lr=1", "optim"),
        ("+phases.distill.stps=3", "stps"),
        ("phases.distill.steps=many", "many"),
        ("+head.dpeth=3", r"MedusaConfig has no dpeth; .*misspelt \(it has .*num_draft_tokens"),
        ("head.head_type=os.system", "head_type must be one of draft_lm, .*, got 'os.system'"),
        ("head.head_type=drafthead.models.base.base_model.BaseModel", "head_type must be one of"),
        ("+data._target_=os.system", "'_target_' not in 'DataConfig'"),
        ("data.text.sources=[{_target_: os.system, kind: text, name: x}]", "Could not override 'data.text.sources'"),
        ("phases.distill.seq_len=64", "rows of up to"),
        ("name=a/b", "name must be letters, digits"),
    ],
)
def test_bad_settings_are_one_clear_error(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=says):
        recipe(tmp_path, override)


def recipe(folder: Path, *overrides: str) -> RunConfig:
    return composed(folder, "recipe=medusa_smollm2", *overrides)[0]


def test_settings_of_another_head_are_named_at_once(tmp_path: Path) -> None:
    """``head=kangaroo`` beside a Medusa recipe: the user typed none of the keys that do not fit."""
    with pytest.raises(UserError) as found:
        recipe(tmp_path, "head=kangaroo", "head.exit_layer=1")
    said, unknown = str(found.value), ("num_layers", "own_lm_head", "induction_rank", "reads_last_token")
    assert f"KangarooConfig has no {', '.join(unknown)}; the recipe sets them for another head" in said
    assert "Choose a recipe of this head" in said and "\n" not in said and said.count("~head.") == len(unknown)
    fitting = recipe(tmp_path, "head=kangaroo", "head.exit_layer=1", *(f"~head.{key}" for key in unknown))
    assert fitting.head["draft_vocab_size"] == 4096


def test_overlong_messages_keep_both_ends() -> None:
    said = str(UserError(f"a.json has a bad name {'9' * 5000!r}; copy it again"))
    assert len(said) < 2300 and said.startswith("a.json has a bad name '999") and said.endswith("'; copy it again")


def stream(folder: Path, *overrides: str) -> tuple[RunConfig, str]:
    common = ["recipe=medusa_smollm2", "debug=tiny", "data.text.stream=true", "data.text.stream_shards=2"]
    return composed(folder, *common, "stages=[corpora,train]", *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["phases.pretrain.store_hidden_states=true"],
            "phases.pretrain.store_hidden_states stores hidden states of",
        ),
        (["recipe=medusa2_smollm2"], "data.text.stream keeps no text for quality_limits"),
        (["data.text.stream_shards=0"], "data.text.stream_shards must be at least 1, got 0"),
    ],
)
def test_streams_that_are_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        stream(tmp_path, *overrides)


def test_a_streamed_file_is_not_read_to_its_end_before_a_run(tmp_path: Path) -> None:
    """It may be larger than a disk; one that is packed is read, so that a broken line is found before the work."""
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{')
    override = f"data.text.sources=[{{kind: jsonl, name: {tmp_path / 'x.jsonl'}}}]"
    preflight(stream(tmp_path, override)[0])
    with pytest.raises(UserError, match=r"x.jsonl line 2 is not valid JSON"):
        preflight(stream(tmp_path, override, "data.text.stream=false")[0])
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        preflight(stream(tmp_path, override)[0])
    with pytest.raises(UserError, match="has no weight, but others have"):  # not after the answers are generated
        preflight(stream(tmp_path, override.replace("}]", "}, {kind: builtin, name: stdlib_tiny, weight: 2}]"))[0])


# Stages --------------------------------------------------------------------------------------------------------


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("measured again")


def test_a_second_start_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path)
    first = read_json(run / "eval.json")
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "measure_costs", never)
        patched.setattr(methods, "decode", never)
        train(tmp_path)
    assert read_json(run / "eval.json") == first
    assert len(list(run.glob("eval-log-*.jsonl"))) == 1

    kept = [run / "calibration.json", *run.glob("eval-log-*.jsonl")]
    stale = run / "eval-log-of-another-tree.jsonl"
    stale.write_text("")
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "measure_costs", never)
        with pytest.raises(AssertionError, match="measured again"):
            train(tmp_path, "resume=false")
    assert not any(path.exists() for path in (*kept, stale))


def test_batches_have_trees_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of eight, where a node costs what eight cost, drafts nothing; its choice is saved with the head."""
    asked: list[int] = []

    def measured(base: BaseModel, head: DraftHead, rows: int = 1) -> CostModel:
        asked.append(rows)
        verify = {n: 1.0 + (n - 1) * {1: 0.01, 2: 0.2, 8: 5.0}[rows] for n in (1, 2, 4, 8, 64)}
        return CostModel(verify=verify, draft=0.0, overhead=0.0, context=200)

    monkeypatch.setattr(pipeline, "measure_costs", measured)
    settings = ("tree_batches=[2,8]", "stages=[corpora,train,tree]")
    base, head = load_base_and_head(train(tmp_path, *settings) / "head")
    assert asked == [1, 2, 8]
    one, two, eight = (head.tree_of(rows) for rows in (1, 2, 8))
    assert one is not None and two is not None and len(one) > len(two) and eight == TokenTree.chain(0)
    assert head.tree_of(7) == two and head.tree_of(16) == eight
    found = decode_batch(base, head, [[5, 6, 7]] * 8, max_new_tokens=4, ignore_eos=True)
    assert {step.proposed for result in found for step in result.steps} == {0}
    train(tmp_path, *settings)
    assert asked == [1, 2, 8], "nothing is measured twice"


def test_resume_false_keeps_what_no_run_made(tmp_path: Path) -> None:
    precious = tmp_path / "run" / "head" / "novel.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("Call me Ishmael.")
    with pytest.raises(UserError, match=r"would remove .*head, but .* has no training-settings.json"):
        train(tmp_path, "resume=false")
    assert precious.exists()


def test_what_the_launcher_says_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="mixed_precision=fp8"):
        train(tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_to_train_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MedusaHead.loss

    def nothing(self: MedusaHead, *args: Any) -> LossOutput:
        out = original(self, *args)
        return LossOutput(
            loss_sum=out.loss_sum * 0, tokens=torch.zeros_like(out.tokens), sums=out.sums * 0, names=out.names
        )

    monkeypatch.setattr(MedusaHead, "loss", nothing)
    with pytest.raises(UserError, match=r"phase pretrain, step 2: the last 2 steps had no token to train on"):
        train(tmp_path, "log_every=2")


def test_validation_and_saving_do_not_count_as_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every validation takes an hour by the clock that the loop reads."""
    from drafthead.train.trainer import trainer as loop

    clock = [0.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: clock.__setitem__(0, clock[0] + 0.001) or clock[0])
    validate = loop.Trainer._validate

    def slow(self: loop.Trainer, *args: Any) -> None:
        validate(self, *args)
        clock[0] += 3600

    monkeypatch.setattr(loop.Trainer, "_validate", slow)
    run = train(tmp_path, "stages=[corpora,train]", "phases.distill.steps=10", "log_every=2", "validate_every=3")
    rows = loop.MetricsLog(run / "metrics.jsonl").rows()
    assert max(row["step_ms"] for row in rows if "step_ms" in row) < 1000


def test_each_stage_runs_alone(tmp_path: Path) -> None:
    """From what the stages before it left on disk; without that, the line names the stage that is missing."""
    for stage, missing in (("tree", "train"), ("evaluate", "train"), ("card", "evaluate")):
        with pytest.raises(UserError, match=f"run the stage {missing} first"):
            train(tmp_path, f"stages=[{stage}]")
    train(tmp_path, "stages=[corpora]")
    assert not (tmp_path / "run" / "checkpoints").exists()
    train(tmp_path, "stages=[train]")
    assert not (tmp_path / "run" / "calibration.json").exists()
    with pytest.raises(UserError, match="run the stage tree first"):
        train(tmp_path, "stages=[evaluate]")
    for stage in ("tree", "evaluate", "card"):
        train(tmp_path, f"stages=[{stage}]")
    run = tmp_path / "run"
    assert (run / "head" / "README.md").exists() and (run / "report.html").exists()
    kept = read_json(run / "eval.json")
    train(tmp_path, "stages=[evaluate]", "resume=false")
    assert read_json(run / "eval.json")["suite"] == kept["suite"] and (run / "checkpoints").exists()
    with pytest.raises(UserError, match=r"stages must be a list of corpora, train, .*, got \['trein'\]"):
        train(tmp_path, "stages=[trein]")
    with pytest.raises(UserError, match=r"push must be true for stages=\[push\], got False"):
        train(tmp_path, "stages=[push]")


def test_a_run_says_first_what_it_will_do(tmp_path: Path, tiny_base: TinyBase) -> None:
    """Every stage that takes time, with its size; more work takes longer."""

    def rows(*overrides: str) -> dict[str, tuple[str, float]]:
        run, _ = composed(tmp_path, "recipe=medusa_smollm2", "debug=tiny", *overrides)
        return {stage: (what, seconds) for stage, what, seconds in Outlook(run, tiny_base(), 1).rows()}

    found = rows()
    assert list(found) == ["corpora", "phase pretrain", "phase distill", "tree", "evaluate"]
    assert "24 prompts" in found["corpora"][0] and "10 steps on text" in found["phase pretrain"][0]
    assert "3 answers of 24 tokens (builtin), each by 6 methods" in found["evaluate"][0]
    assert rows("phases.distill.steps=1000")["phase distill"][1] > 10 * found["phase distill"][1]
    assert list(rows("stages=[tree]")) == ["tree"]
