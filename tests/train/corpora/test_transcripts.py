"""Runs on transcripts: their agreement with the base, rows to train on, mixtures, and errors before any work."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.prompts.suites import load_suite
from drafthead.data.text.sources import SourceConfig
from drafthead.errors import UserError
from drafthead.files.local import read_json
from drafthead.models.base.base_model import BaseModel
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.corpora.corpus_config import AnswersConfig, DataConfig
from drafthead.train.original_base import OriginalBase
from drafthead.train.pipeline import run_pipeline
from drafthead.train.preflight import preflight
from support import Said, TinyBase, composed, refuses

TURNS = (("user", "How many?"), ("assistant", "Seven."), ("user", "Sure?"), ("assistant", "Quite sure."))


def chats(path: Path, count: int = 40) -> str:
    rows = [{"messages": [{"role": r, "content": f"{text} {n}"} for r, text in TURNS]} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def make(base: BaseModel, folder: Path, transcripts: Any, log: list[str] | None = None, **settings: Any) -> Corpora:
    sources, sampler = [SourceConfig(kind="builtin", name="tiny")], SamplerConfig(max_new_tokens=8)
    answers = AnswersConfig(sources=sources, prompts=24, max_prompt_tokens=400, sampler=sampler)
    config = DataConfig(folder=str(folder), transcripts=transcripts, answers=answers, **settings)
    lines = [] if log is None else log
    return Corpora(OriginalBase.of(base), config, 0, Said(lines), longest=512)


def test_turns_of_a_conversation_are_one_document(tiny_base: TinyBase, tmp_path: Path) -> None:
    """The mask holds the assistant's turns with their ends, and nothing else."""
    base, log = tiny_base(), []
    corpora = make(base, tmp_path, chats(tmp_path / "chats.jsonl"), log)
    rows = corpora.answer_rows(512, held_out=False)
    batch = rows.batch(range(len(rows)))
    trained = base.tokenizer.decode(batch.input_ids[batch.loss_mask].tolist()).split("<|im_end|>")
    numbers = [n for n in range(40) if n % 20 != 19]
    assert sorted(trained) == sorted(["", *(f"{t} {n}" for n in numbers for t in ("Seven.", "Quite sure."))])
    assert len(rows.pieces) == len(numbers)
    held_out, prompts = corpora.answer_rows(512, held_out=True), sorted(corpora.answers().done)
    assert sorted(prompts[piece[0]] % 10**9 for piece in held_out.pieces) == [19, 19, 39, 39]
    assert log[0].startswith("   agreement with the base: ") and "27 assistant turns" in log[0]
    assert "data.prompts=FILE" in log[1] and len(log) == 2
    # Made once; a changed file is another corpus.
    make(base, tmp_path, chats(tmp_path / "chats.jsonl")).answers()
    assert len(list(tmp_path.glob("transcripts-*"))) == 1
    make(base, tmp_path, chats(tmp_path / "chats.jsonl", 39)).answers()
    assert len(list(tmp_path.glob("transcripts-*"))) == 2


def test_prompts_of_the_report_are_not_trained_on_and_near_copies_are_counted(
    tiny_base: TinyBase, tmp_path: Path
) -> None:
    base, path = tiny_base(), chats(tmp_path / "chats.jsonl", 42)
    corpora = make(base, tmp_path, path)
    assert not corpora.suite_prompts and corpora.near_copies() == (0, 4)
    corpora = make(base, tmp_path, path)
    corpora.holds_suite = True
    asked = [base.tokenizer.decode(ids) for ids in corpora.suite_prompts]
    rows = corpora.answer_rows(512, held_out=False)
    trained = base.tokenizer.decode(rows.batch(range(len(rows))).input_ids.flatten().tolist())
    numbers = [n for n in range(42) if n % 20 in (3, 7, 11, 15)]
    assert [text.count("Seven.") for text in asked] == 8 * [1]
    assert all(f"Sure? {n}<" in text for n, text in zip(numbers, asked, strict=True)), "of the last turn"
    assert not any(f"How many? {n}<" in trained for n in (*numbers, 19, 39)) and "How many? 41<" in trained
    few = make(base, tmp_path, chats(tmp_path / "chats.jsonl", 35))
    few.holds_suite = True
    assert not few.suite_prompts and not few.is_left_out(3), "7 prompts are too few to measure on"
    text = (
        '{"messages": [{"role": "user", "content": "a %d"}, {"role": "assistant", "content": "one two three four %d"}]}'
    )
    (tmp_path / "chats.jsonl").write_text("\n".join(text % (n, n) for n in range(40)))
    assert make(base, tmp_path, str(tmp_path / "chats.jsonl")).near_copies() == (2, 2)


def test_the_base_agrees_with_its_own_answers_and_not_with_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    own = make(base, tmp_path, None).answers().read(with_hidden_states=False)
    pairs = [(a.input_ids[: a.boundary].tolist(), a.input_ids[a.boundary :].tolist()) for a in own]
    logs = [{"prompt_token_ids": prompt, "token_ids": answer} for prompt, answer in pairs]
    wrong = [{**row, "token_ids": [(i + 1) % 256 for i in row["token_ids"]]} for row in logs]
    for name, rows, share in (("own", logs, 1.0), ("wrong", wrong, 0.0)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        corpora = make(base, tmp_path, str(tmp_path / f"{name}.jsonl"))
        assert corpora.agreement["greedy"] == pytest.approx(share, abs=0.02), name
    assert corpora.agreement["answers"] == 24 and corpora.agreement["tokens"] == sum(len(a) for _, a in pairs)


def test_a_run_says_what_is_left_out_each_time(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, path = tiny_base(), tmp_path / "chats.jsonl"
    chats(path)
    marked = {"messages": [{"role": r, "content": t, "weight": 0 if t == "Seven." else 1} for r, t in TURNS]}
    lines = [*path.read_text().splitlines(), json.dumps(marked), json.dumps(marked), '{"messages": 5}']
    path.write_text("\n".join(lines))
    log: list[str] = []
    for _ in range(2):
        make(base, tmp_path, str(path), log, bad_transcripts="skip").answers()
    left_out, agreement, _, again, *_ = log
    assert left_out == again and "agreement with the base" in agreement
    assert left_out.startswith("   left out: 2 rows, 1 turn: 1 turn marked as not to train") and "line 43" in left_out
    path.write_text('{"messages": 5}')
    with pytest.raises(UserError, match="no assistant turn to train on .*line 1: column 'messages' holds a int"):
        make(base, tmp_path, str(path), bad_transcripts="skip").answers()


def test_a_mixture_spreads_both(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    path = chats(tmp_path / "chats.jsonl")
    store = make(base, tmp_path, path, own_answers=True).answers()
    own = make(base, tmp_path, None).answers()
    assert len(store.done) == 80 + len(own.done) and not store.has_hidden_states
    kinds = ["Seven." in base.tokenizer.decode(store.answer(n).tolist()) for n in sorted(store.done) if n < 10**9]
    assert sum(kinds) == 40 and sum(kinds[:32]) == pytest.approx(20, abs=1)
    # All turns of a conversation stay together.
    assert sum(n >= 10**9 and kinds[n - 10**9] for n in store.done) == 40
    refuses("own_answers must be false without data.transcripts", make, base, tmp_path, None, own_answers=True)


@pytest.mark.slow
def test_a_run_reports_the_agreement_and_is_measured_on_its_own_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = chats(tmp_path / "chats.jsonl")
    steps = ("phases.pretrain.steps=2", "phases.distill.steps=4", "eval.limit=1", "eval.max_new_tokens=8")
    run_pipeline(*composed(tmp_path, "recipe=medusa_smollm2", "debug=tiny", *steps, f"data.transcripts={path}"))
    folder = tmp_path / "run"
    share = f"{100 * read_json(folder / 'transcripts.json')['greedy']:.1f} % of the transcripts"
    card = (folder / "head" / "README.md").read_text()
    assert share in card and "`chats.jsonl`" in card and "base's answers" not in card
    assert "transcripts: 60 assistant turns" in card, "of 80; 2 of 40 conversations are held out, and 8 for the report"
    suite, evaluation = load_suite(str(folder / "held_out_prompts.jsonl")), read_json(folder / "eval.json")
    assert len(suite) == 8 and evaluation["suite"] == str(folder / "held_out_prompts.jsonl")
    assert "held_out_prompts, at most 8 new tokens" in card and "| own prompts |" in card
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured on 8 of your prompts, which are not trained on" in shown
    assert "answers to 4 prompts (your own, held out)" in shown, "in the plan"
    assert "acceptance on answers to 4 prompts of held_out_prompts (dev half)" in shown
    assert "on 1 prompts of held_out_prompts (test half)" in shown
    assert share in (folder / "report.html").read_text()


def test_broken_files_end_a_run_before_the_base_is_loaded(tmp_path: Path) -> None:
    path = Path(chats(tmp_path / "chats.jsonl"))
    path.write_text(path.read_text() + '\n{"messages": [\n{"messages": [{"role": "user", "content": "q"}]}')
    options = ("recipe=medusa_smollm2", "debug=tiny", f"data.transcripts={path}")
    with pytest.raises(UserError, match=r"2 transcripts .*line 41 is not valid JSON.*line 42: .* no assistant's turn"):
        preflight(composed(tmp_path, *options)[0])
    preflight(composed(tmp_path, *options, "data.bad_transcripts=skip")[0])
