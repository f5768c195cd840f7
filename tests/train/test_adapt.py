"""Learning while answering: the recorded positions by hand, exact answers, and what is learned of them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from drafthead.eval.trees.simulate import read_hidden_states
from drafthead.files.local import read_json_lines
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree
from drafthead.train.adapt import OnlineConfig, OnlineLearner, frozen_copy, simulated_steps
from drafthead.train.trainer.optim import OptimConfig
from support import (
    TinyBase,
    call,
    noisy_head,
    p_value_of_answers,
    probs_of_answers,
    random_ids,
    randomised,
    refuses,
    small_head,
)

PROMPTS = [random_ids(9 + n, seed=n) for n in range(6)]


def hydra(tiny_base: TinyBase) -> DraftHead:
    return randomised(HydraConfig(num_draft_tokens=3, own_lm_head=False).build(tiny_base()), 0.02).eval()


def make_heads(tiny_base: TinyBase) -> dict[str, DraftHead]:
    base = tiny_base()
    return {
        "hydra": hydra(tiny_base),
        "hydra++": randomised(HydraConfig(num_draft_tokens=3, prefix_layer=True).build(base), 0.02).eval(),
        "draft_lm": DraftLMConfig(num_draft_tokens=3, num_layers=1).build(base).eval(),
        "kangaroo": KangarooConfig(num_draft_tokens=3, exit_layer=1, confidence_threshold=0.0).build(base).eval(),
        "eagle3": noisy_head(Eagle3Config(num_draft_tokens=4, ttt_steps=4), base, 0.03),
    }


@pytest.mark.parametrize("name", ["hydra", "hydra++", "draft_lm", "kangaroo", "eagle3"])
def test_a_recorded_answer_is_what_replay_finds(
    script: Callable[[str], ModuleType], tiny_base: TinyBase, name: str
) -> None:
    """Positions and hidden states, of decoding with an early end too, against one pass over the finished text."""
    head = make_heads(tiny_base)[name]
    head.tree = tree = TokenTree.expansion([2, 1])
    learner = OnlineLearner(head, OnlineConfig(interval=99))
    for ids, new in zip(PROMPTS, (5, 17, 30, 31, 32, 33), strict=True):
        result, lesson = learner.answer(ids, max_new_tokens=new)
        assert result.tokens == decode(head.base, None, ids, max_new_tokens=new).tokens
        hidden = read_hidden_states(head.base, head, lesson.text)
        steps, simulated = script("online").replayed(head, tree, lesson.text, hidden)
        assert steps == simulated_steps(head, tree, lesson.text, hidden) == pytest.approx(len(result.steps))
        within = len(lesson.text.ids) - head.depth  # near the limit decoding drafts less
        rejected = [[pair for pair in each.rejected if pair[0] < within] for each in (lesson, simulated)]
        assert rejected[0] == rejected[1] and (new < 30 or rejected[0])
        torch.testing.assert_close(lesson.hidden.final[:, :-1], hidden.final[:, :-1], rtol=1e-4, atol=1e-4)
        if hidden.layers is not None:
            torch.testing.assert_close(lesson.hidden.layers[:, :-1], hidden.layers[:, :-1], rtol=1e-4, atol=1e-4)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("hydra++", "draft_lm", "kangaroo", "eagle3")]


@pytest.mark.parametrize("name", ["hydra", *OTHERS])
@pytest.mark.parametrize("positions", ["rejected", pytest.param("all", marks=pytest.mark.slow)])
def test_a_head_learns_its_stream(tiny_base: TinyBase, name: str, positions: str) -> None:
    head = make_heads(tiny_base)[name]
    before = {key: value.clone() for key, value in head.state_dict().items()}
    config = OnlineConfig(interval=2, positions=positions, steps=4, optim=OptimConfig(lr=0.01, schedule="constant"))
    learner, frozen = OnlineLearner(head, config), frozen_copy(head)
    steps = []
    for _ in range(4):  # the same prompts again: the base's answers can be learned
        results = [learner.answer(ids, max_new_tokens=24)[0] for ids in PROMPTS]
        expected = [decode(head.base, None, ids, max_new_tokens=24).tokens for ids in PROMPTS]
        assert [result.tokens for result in results] == expected
        steps.append(sum(len(result.steps) for result in results))
    assert steps[-1] < steps[0], steps
    assert learner.updates == 12 and not learner.buffer
    assert all(torch.equal(value, before[key]) for key, value in frozen.state_dict().items())


def test_only_rejected_positions_are_trained(tiny_base: TinyBase) -> None:
    """Head k of Hydra gets a gradient from the k-th draft's rejections alone."""
    head = hydra(tiny_base)
    learner = OnlineLearner(head, OnlineConfig(interval=99))
    _, lesson = learner.answer(PROMPTS[0], max_new_tokens=20)
    assert {k for _, k in lesson.rejected} >= {1}
    index, _ = next(pair for pair in lesson.rejected if pair[1] == 1)
    one = type(lesson)(text=lesson.text, hidden=lesson.hidden, rejected=[(index, 2)])
    learner.buffer.clear()
    learner.buffer.append(one)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    learner.update()
    output = head.loss(one.batch(head.depth, "rejected"), one.hidden, LossConfig())
    assert int(output.tokens) == 1, "one trained position, though it is not the first"
    changed = {key.split(".")[1] for key, value in head.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"1"}, "blocks.1 drafts position 2"


@pytest.mark.slow
def test_sampled_answers_stay_exact(tiny_base: TinyBase) -> None:
    """Drafts are sampled, and their distributions change over the stream."""
    head = hydra(tiny_base)
    sampler = Sampler(temperature=1.0, top_k=2)
    config = OnlineConfig(interval=20, steps=2, optim=OptimConfig(lr=0.01, schedule="constant"))
    learner = OnlineLearner(head, config)
    draft_config = DraftConfig(
        tree=TokenTree.chain(3), draft_sampling=DraftSampling.WITH_REPLACEMENT, sampler=Sampler(temperature=1.0)
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(140):
        result, _ = learner.answer(PROMPTS[0], max_new_tokens=3, sampler=sampler, draft_config=draft_config, seed=seed)
        counts[tuple(result.tokens)] += 1
    assert learner.updates == 7
    assert p_value_of_answers(counts, probs_of_answers(head.base, PROMPTS[0], sampler, 3)) > 0.01


def test_what_is_kept_is_bounded(tiny_base: TinyBase) -> None:
    learner = OnlineLearner(hydra(tiny_base), OnlineConfig(interval=99, max_tokens=80))
    for ids in PROMPTS:
        learner.answer(ids, max_new_tokens=20)
        assert sum(len(lesson.text.ids) for lesson in learner.buffer) <= 80
    assert 1 < len(learner.buffer) < len(PROMPTS)


def test_another_stream_and_a_schedule_are_refused(tiny_base: TinyBase, tmp_path: Path) -> None:
    learner = OnlineLearner(hydra(tiny_base), OnlineConfig())
    assert not learner.restore(tmp_path, {})
    learner.save(tmp_path, {"stream": 1})
    refuses("stream = 1.* 2", learner.restore, tmp_path, {"stream": 2})
    refuses("needs a last step, which a stream lacks", OnlineConfig, optim=OptimConfig())


def test_the_command_reports_learning(tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = small_head(tiny_base(), tmp_path / "run" / "head")
    out = tmp_path / "stream"
    call("adapt", f"head={head}", "suite=builtin", "interval=2", "max_new_tokens=12", "optim.lr=0.01", f"out={out}")
    said = capsys.readouterr().out
    assert "mean accepted length" in said and "3 updates took" in said and "the original head" in said
    rows = read_json_lines(out / "answers.jsonl")
    assert len(rows) == 6 and all(row["steps"] <= row["tokens"] <= 11 for row in rows)
    assert (out / "stream.png").stat().st_size > 5000
    before, after = (load_file(folder / "model.safetensors") for folder in (head, out / "head"))
    assert any(not torch.equal(value, before[key]) for key, value in after.items())
