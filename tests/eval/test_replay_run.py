"""The replay command: its table, its files of texts, and what it refuses."""

import re
from pathlib import Path

import numpy as np
import pytest

from drafthead.data.answers.loops import is_degenerate
from drafthead.data.answers.store import Answer, AnswerStore
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.trees.finished_answers import base_answers, read_texts, write_texts
from drafthead.eval.trees.replay import own_row, rows_of
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.drafter import DraftSampling
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.simulation.acceptance import accept_probs_of_ranks
from drafthead.models.token_tree import TokenTree
from support import TinyBase, call, call_fails, cases, small_head

COSTS = CostModel(verify={1: 0.01, 8: 0.011, 64: 0.05}, draft=0.001, overhead=0.0005, context=200)
ANSWERS = [accept_probs_of_ranks(np.random.default_rng(s).integers(0, 4, size=(50, 3)), 4) for s in range(6)]


@pytest.mark.parametrize("draft_sampling", [DraftSampling.TOP_K, DraftSampling.WITH_REPLACEMENT])
def test_rows_are_chains_and_trees(draft_sampling: DraftSampling) -> None:
    table_rows = rows_of(ANSWERS, COSTS, [1, 3], [4, 16], draft_sampling)
    assert [r["draft"] for r in table_rows] == ["chain of 1", "chain of 3", "best tree of 4", "best tree of 16"]
    assert [r["nodes"] for r in table_rows] == [2, 4, 4, 16]
    tokens = [r["mean accepted length"] for r in table_rows]
    assert tokens[3] > tokens[2] > 1.5 > tokens[0] and tokens[0] == pytest.approx(1.25, abs=0.1)
    assert table_rows[0]["predicted speedup"] == pytest.approx(tokens[0] * 0.0105 / (COSTS.verify_at(2) + 0.0015))


@cases(
    "line, message",
    (None, "cannot be read"),
    ("", "is empty; give the file that save=FILE wrote"),
    ('{"ids": [1, 2]}\n', "line 1 .*ids"),
    ('{"ids": [1, 2], "boundary": 1}\n{"ids"\n', "line 2 .*ids"),
    ('{"ids": [1, 2], "boundary": 2}\n', "line 1 .*boundary"),
)
def test_a_broken_file_of_texts_is_named(tmp_path: Path, line: str | None, message: str) -> None:
    if line is not None:
        (tmp_path / "t.jsonl").write_text(line)
    call_fails(f"^error: .*t.jsonl.* {message}", "replay", "head=/nowhere", f"texts={tmp_path / 't.jsonl'}")


@cases(
    "setting, message",
    ("save=/proc/nope/x.jsonl", "choose another folder"),
    ("save=FOLDER", "is a folder; name a file in it"),
)
def test_settings_refused_at_once(setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    call_fails(f"^error: .*{message}", "replay", "head=/nowhere", setting)


def test_base_answers_follow_the_suite(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, suite = tiny_base(), tmp_path / "s.jsonl"
    suite.write_text('{"turns": ["one", "then"]}\n{"prompt": "two words"}\n')
    first, second, other = texts = base_answers(base, SuiteConfig(suite=str(suite), max_new_tokens=5))
    assert all(2 <= len(t.ids) - t.boundary + 1 <= 6 for t in texts)
    answer = base.tokenizer.decode(first.ids[first.boundary :], skip_special_tokens=True).strip()
    asked = base.tokenizer.decode(second.ids[: second.boundary])
    assert answer in asked and "then" in asked and "then" not in base.tokenizer.decode(other.ids)
    with pytest.raises(UserError, match="leaves max_new_tokens"):
        base_answers(base, SuiteConfig(suite=str(suite), max_new_tokens=base.max_context - 1))


@pytest.mark.slow
def test_thresholds_have_a_row(tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_base()
    texts = [Answer.of([5, 6, 7, *decode(base, None, [5, 6, 7], max_new_tokens=12, ignore_eos=True).tokens], 3)]
    head = MedusaConfig(num_draft_tokens=2).build(base).eval()
    plain = own_row(base, head, texts, Sampler())
    head.confidence_threshold = 0.999
    row = own_row(base, head, texts, Sampler())
    assert row["predicted speedup"] is None and row["mean accepted length"] < plain["mean accepted length"]
    write_texts(tmp_path / "t.jsonl", texts)
    for threshold in (0.0, 0.25):
        head.confidence_threshold, head.tree = threshold, TokenTree.chain(2)
        head.save_pretrained(tmp_path / "head")
        settings = [f"head={tmp_path / 'head'}", f"texts={tmp_path / 't.jsonl'}", "nodes=[3]"]
        call("replay", *settings, "chain=[1]")
        shown = capsys.readouterr().out
        assert ("own, threshold" in shown) == (threshold > 0)
        assert re.search(r"best tree of 3 +│ +3 ", shown) and "predicted" in shown
    call("replay", *settings, "chain=[1]", "costs=false")
    shown = capsys.readouterr().out
    assert "step costs" not in shown and "predicted" not in shown and re.search(r"best tree of 3 +│ +3 ", shown)
    call_fails(r"chain=\[1, 4\].* 2 positions", "replay", *settings, "chain=[1,4]")


@pytest.mark.slow
def test_any_drafters_are_simulated_on_the_same_texts(
    tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated answer is in a suffix memory the second time; the others know nothing of it."""
    monkeypatch.setenv("COLUMNS", "200")
    base = tiny_base()
    head = small_head(base, tmp_path / "head")
    answer = decode(base, None, [7, 8, 9], max_new_tokens=30, ignore_eos=True).tokens
    write_texts(tmp_path / "t.jsonl", [Answer.of([7, 8, 9, *answer], 3)] * 2)
    drafters = "drafters=[prompt_lookup@4,suffix_memory@4,relay:head@1+prompt_lookup@3,head+prompt_lookup@2]"
    texts, plot = f"texts={tmp_path / 't.jsonl'}", f"plot={tmp_path / 'bars.png'}"
    call("replay", f"head={head}", "chain=[1]", texts, drafters, plot)
    said = capsys.readouterr().out
    said, by_context = said.split("Mean accepted length by context")
    assert "relay:head@1+prompt_lookup@3" in by_context
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in said.splitlines() if line.count("│") > 4]
    length_of = {name: float(tokens) for name, _, tokens in rows}
    assert length_of["suffix_memory@4"] > length_of["prompt_lookup@4"] + 0.5, said
    assert length_of["relay:head@1+prompt_lookup@3"] >= 1 and (tmp_path / "bars.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="simulated with draft_sampling=top_k only"):
        call("replay", f"head={head}", "drafters=[prompt_lookup]", "draft_sampling=with_replacement")


def test_a_corpus_is_replayed(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "corpus" / "answers", {"made": "here"})
    store.append_shard([Answer(n, np.array([1, 2, 3 + n], np.int32), 2, True) for n in (1, 0)])
    assert [(a.ids, a.boundary) for a in read_texts(tmp_path / "corpus")] == [([1, 2, 3], 2), ([1, 2, 4], 2)]
    assert [a.ids for a in read_texts(tmp_path / "corpus" / "answers", 1)] == [[1, 2, 3]]


@pytest.mark.slow
def test_acceptance_by_context_length(
    tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and tau of every bin, by hand: greedy drafts of prompt lookup on an answer of one token, which repeats."""
    monkeypatch.setenv("COLUMNS", "200")
    base = tiny_base()
    head = small_head(base, tmp_path / "head")
    answer = decode(base, None, [7, 8, 9], max_new_tokens=400, ignore_eos=True).tokens
    write_texts(tmp_path / "t.jsonl", [Answer.of([7, 8, 9, *answer], 3)])
    call("replay", f"head={head}", "chain=[1,2]", f"texts={tmp_path / 't.jsonl'}", "nodes=[2]", "costs=false",
         "drafters=[prompt_lookup@3]")  # fmt: skip
    shown = capsys.readouterr().out
    table = shown.split("Mean accepted length by context")[1]
    assert re.search("chain of 2 .*prompt_lookup@3 ", table)
    lines = [line.split("│")[1:-1] for line in table.splitlines() if line.startswith("│")]
    assert [line[0].strip() for line in lines] == ["0 to 255", "", "256 to 511", ""]
    for n in (1, 2):
        taus, steps = ([float(re.sub(r"[^\d.]", "", line[n])) for line in half] for half in (lines[::2], lines[1::2]))
        tokens = sum(tau * count for tau, count in zip(taus, steps, strict=True))
        assert tokens == pytest.approx(399, rel=0.02), "the answer's tokens after the prefill's"
    assert ("repeat themselves" in shown) == is_degenerate(answer)
