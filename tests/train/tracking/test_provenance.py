"""The record is complete in a checkout, honest outside of one, and never in the way."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import drafthead
from drafthead.train.tracking.provenance import MAX_DIFF_BYTES, write_provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "code"
    (root / "drafthead").mkdir(parents=True)
    (root / "pyproject.toml").touch()
    (root / "model.py").write_text("one\n")
    monkeypatch.setattr(drafthead, "__file__", str(root / "drafthead" / "__init__.py"))
    return root


def commit(root: Path) -> str:
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return git(root, "rev-parse", "HEAD")


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "provenance.json").read_text())


def test_a_changed_checkout_leaves_commit_and_diff(tmp_path: Path, checkout: Path) -> None:
    head = commit(checkout)
    (checkout / "model.py").write_text("two\n")
    (checkout / "new.py").touch()
    out = tmp_path / "run"
    assert write_provenance(out, "lr: 0.001\n") == []
    assert (out / "recipe.yaml").read_text() == "lr: 0.001\n"
    assert record(out)["git"] == {"commit": head, "changed": ["model.py"], "untracked": ["new.py"]}
    diff = (out / "git.diff").read_text()
    assert "-one" in diff and "+two" in diff
    commit(checkout)
    assert write_provenance(out, "") == []
    assert not (out / "git.diff").exists(), "an earlier start's"


def test_code_that_is_no_repository_is_not_mistaken_for_the_one_around_it(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "other.txt").touch()
    commit(tmp_path)
    out = tmp_path / "run"
    assert write_provenance(out, "") == []
    assert record(out)["git"] is None and not (out / "git.diff").exists()


def test_versions_and_command_are_stored_and_secrets_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_provenance(tmp_path, "")
    recorded = record(tmp_path)
    assert recorded["versions"]["drafthead"] == drafthead.__version__
    assert all(recorded["versions"][name] for name in ("python", "torch", "transformers", "hydra-core"))
    assert recorded["hardware"]["cores"] >= 1
    assert len(recorded["command"]) >= 2
    assert "very-secret" not in (tmp_path / "provenance.json").read_text()
    assert recorded["environment"]["OMP_NUM_THREADS"] == "1"


def test_a_huge_diff_is_cut(tmp_path: Path, checkout: Path) -> None:
    commit(checkout)
    (checkout / "model.py").write_text("x" * (MAX_DIFF_BYTES + 1000))
    write_provenance(tmp_path / "run", "")
    diff = (tmp_path / "run" / "git.diff").read_text()
    assert len(diff) < MAX_DIFF_BYTES + 100 and "cut: the diff has 2,00" in diff


def test_a_folder_that_cannot_be_written_never_fails_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warnings = write_provenance(tmp_path / "file" / "run", "")
    assert len(warnings) == 3
    assert "recipe.yaml could not be written" in warnings[0]


def test_without_git_installed(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(checkout)
    monkeypatch.setenv("PATH", str(tmp_path))
    (warning,) = write_provenance(tmp_path / "run", "")
    assert "git.diff could not be written" in warning
    assert "FileNotFoundError" in record(tmp_path / "run")["git"]["error"]
