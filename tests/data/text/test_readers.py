"""Datasets of the Hub: one commit for all of a run, and no file that can run code."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafthead.data.text import readers
from drafthead.data.text.sources import SourceConfig, iter_documents, resolve_revision
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_checksummed_json

OLD, NEW = "a" * 40, "b" * 40
SET = SourceConfig(kind="hf", name="org/set")


def test_a_dataset_stays_at_the_commit_of_the_start(dataset_hub: Any, tmp_path: Path) -> None:
    """Whatever happens to the Hub or the network; what cannot move is not asked about."""
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
    with pytest.raises(UserError, match=r"commit of dataset 'org/set' .*no route to"):
        resolve_revision([SET], tmp_path / "commits.json")
    assert not (tmp_path / "commits.json").exists(), "another try asks again"


@pytest.mark.parametrize("content", [None, [], [OLD, OLD], ["main"], [1], {"org/set": OLD}])
def test_kept_commits_are_checked(dataset_hub: Any, tmp_path: Path, content: Any) -> None:
    write_checksummed_json(tmp_path / "commits.json", content)
    with pytest.raises(UserError, match="commits.json holds no commits of 1 sources; remove the folder"):
        resolve_revision([SET], tmp_path / "commits.json")


def test_the_hub_is_asked_for_commit_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a dataset, in its client's words."""
    from types import SimpleNamespace

    asked = []

    def dataset_info(self: Any, name: str, *, revision: str | None, timeout: float) -> Any:
        asked.append((name, revision))
        return SimpleNamespace(sha=OLD, siblings=[SimpleNamespace(rfilename="a.parquet")])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    readers._hub_info.cache_clear()
    assert readers._hub_info("org/set", "v1") == readers._hub_info("org/set", "v1") == (OLD, ["a.parquet"])
    assert asked == [("org/set", "v1")]
    readers._hub_info.cache_clear()


@pytest.mark.parametrize("name", ["a.pkl", "deep/a.PT", "a.npz", "a.py"])
def test_pickles_and_scripts_are_refused_by_name(dataset_hub: Any, tmp_path: Path, name: str) -> None:
    """Refuse a folder and a repository before ``datasets`` opens them."""
    about = ["README.md", ".gitattributes", "LICENSE", "dataset_infos.json"]
    for file in (*about, name):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x")
    dataset_hub.files = [*about, name]
    for source in (SourceConfig(kind="hf", name=str(tmp_path)), SET):
        for stream in (True, False):
            with pytest.raises(
                UserError, match=rf"has only files that can run code .*\({name}\); convert it to Parquet"
            ):
                readers.open_dataset(source.name, stream=stream)


def test_data_beside_a_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text("raise SystemExit('run')")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "fine"}))
    assert list(iter_documents(SourceConfig(kind="hf", name=str(tmp_path)), 10)) == ["fine"]


def test_what_cannot_be_listed_is_left_to_the_library(dataset_hub: Any) -> None:
    dataset_hub.up, dataset_hub.rows = False, str
    assert readers.open_dataset("org/set", split="train", revision=OLD, stream=True) == OLD
