"""Datasets of the Hub: one commit for all of a run, and no file that can run code."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafthead.data.text.sources import SourceConfig, iter_documents, open_source, resolve_revision
from drafthead.errors import UserError
from drafthead.files.local import write_checksummed_json
from support import refuses

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
