"""Workflows run targets of the Makefile, and a tag publishes only the version that it names, with its changelog."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import drafthead

ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS: dict[str, Any] = {f"{name} {job}": jobs for name, flow in WORKFLOWS.items() for job, jobs in flow["jobs"].items()}


def test_make_has_every_target() -> None:
    lines = [step.get("run", "") for job in JOBS.values() for step in job["steps"]]
    targets = {target for line in lines for target in re.findall(r"\bmake ([a-z-]+)", line)}
    targets |= {row["target"] for row in WORKFLOWS["nightly"]["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert targets >= {"check", "docs", "test-slow", "test-engines", "test-accelerator", "test-oldest", "test-newest"}
    for target in targets:
        assert not subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False).returncode, target


def test_actions_have_versions_and_jobs_few_permissions() -> None:
    actions = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert actions and all(re.search(r"@v\d+", action) for action in actions)
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    writing = {name: {*job["permissions"]} for name, job in JOBS.items() if "permissions" in job}
    assert writing == {
        "docs deploy": {"pages", "id-token"},
        "nightly report": {"issues"},
        "publish publish": {"id-token"},
        "publish release": {"contents"},
    }


@pytest.mark.parametrize("tag", [f"v{drafthead.__version__}", "v0.0.1"])
def test_a_tag_publishes_its_own_section(tag: str, tmp_path: Path) -> None:
    (step,) = [step for step in JOBS["publish build"]["steps"] if "notes.md" in step.get("run", "")]
    for name in ("CHANGELOG.md", "drafthead/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env |= {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=env, check=False, capture_output=True)
    assert (done.returncode == 0) == (tag != "v0.0.1"), done.stderr
    if not done.returncode:
        notes = (tmp_path / "notes.md").read_text()
        (section,) = re.findall(
            rf"\n## {re.escape(drafthead.__version__)} \(.*?\n(.*?)\n## ",
            (ROOT / "CHANGELOG.md").read_text(),
            re.DOTALL,
        )
        assert notes.strip() == section.strip()
