"""The generated pages of docs/reference equal what the code generates."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import drafthead
from drafthead.cli import COMMANDS
from drafthead.data.prompts.suites import SUITES, load_suite

FOLDER = Path(__file__).parent.parent / "docs" / "reference"


def test_generated_pages_are_up_to_date(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = script("reference")
    monkeypatch.setenv("HOME", str(tmp_path))  # pages do not depend on the user
    made = {path.stem: text for path, text in reference.pages()}
    assert made.keys() == reference.PAGES.keys()
    for name, text in made.items():
        assert (FOLDER / f"{name}.md").read_text() == text, "run: python benchmarks/reference.py"
        assert text.startswith(reference.GENERATED)


def test_a_record_names_every_version_that_was_run(script: Callable[[str], ModuleType]) -> None:
    root = FOLDER.parent.parent
    runs = [run for rows in script("reference").engine_runs().values() for run in rows]
    for engine, _, _, *records in runs:
        text = "".join((root / record).read_text() for record in records)
        versions = re.findall(r"\d+(?:\.\d+)+|build \d+", engine)
        assert versions and all(version in text for version in versions), (engine, records)
    text = "".join(path.read_text() for path in (root / "docs" / "results").glob("*.json"))
    for version in re.findall(r'"(?:vllm|version)": "([\d.]+)"', text):
        assert any(engine.endswith(f" {version}") for engine, *_ in runs), version


def test_pages_cover_commands_and_public_names() -> None:
    text = {name: (FOLDER / f"{name}.md").read_text() for name in ("commands", "api")}
    assert all(f"\n## drafthead {name}\n" in text["commands"] for name in COMMANDS)
    assert all(f"\n| `{suite}` |" in (FOLDER / "suites.md").read_text() for suite in SUITES)
    assert all(f"## drafthead.{name}\n" in text["api"] for name in drafthead.__all__ if name != "__version__")


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_has_as_many_prompts_as_its_page_says(suite: str) -> None:
    prompts = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", (FOLDER / "suites.md").read_text(), re.MULTILINE))
    assert set(prompts) == set(SUITES) and len(load_suite(suite)) == int(prompts[suite])


@pytest.mark.slow
def test_the_page_of_bases_has_what_the_benchmark_finds(script: Callable[[str], ModuleType]) -> None:
    bases = script("bases")
    names = ("mistral", "gemma3n_text", "bloom", "mamba")
    made = bases.tables({name: bases.outcome(bases.SHAPES[name]) for name in names}).splitlines()
    page = (FOLDER / "bases.md").read_text()
    assert page.startswith(bases.INTRODUCTION)
    for name in names:
        (row,) = [line for line in made if line.startswith(f"| {name} |")]
        assert row in page.splitlines(), "run: python benchmarks/bases.py --write"
