"""Figures and numbers of README and docs are those of the JSON files that commands wrote."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from drafthead.files.local import read_json

ROOT = Path(__file__).parent.parent
Load = Callable[[str], ModuleType]


@pytest.fixture
def figures(script: Load) -> ModuleType:
    return script("figures")


def test_tables_are_those_of_the_json_files(figures: ModuleType) -> None:
    stale = [f"{page.name}: {name}" for name, page, text in figures.pages() if text != page.read_text()]
    assert not stale, f"run: python benchmarks/figures.py ({stale})"
    assert {(name, page.stem) for name, page, _ in figures.pages()} >= {
        ("demo", "README"),
        ("demo", "index"),
        ("planted_faults", "README"),
        ("planted_faults", "served"),
        *((n, n) for n in figures.TABLES if n != "planted_faults"),
    }


def test_summaries_repeat_the_pages(figures: ModuleType) -> None:
    """Compare the one number that summaries name of a result with its JSON."""
    results, docs = ROOT / "docs" / "results", ROOT / "docs"
    gain = f"{read_json(results / 'batches.json')['rows']['1']['speedup']:.2f}x for one r"
    pages = (ROOT / "README.md", docs / "start" / "which_head.md", results / "index.md")
    assert [page.name for page in pages if gain not in page.read_text()] == []
    metrics = read_json(results / "sampling.json")["metrics"].values()
    best = max(m["speedup"] for m in metrics if m.get("speedup"))
    assert f"up to {best:.2f}x at temperature 0.7" in pages[2].read_text()


def test_the_demo_was_undisturbed_and_lossless(figures: ModuleType) -> None:
    demo = read_json(figures.DEMO)
    same = demo["overall"]["identical_outputs"]
    assert same["same"] == same["of"] and demo["rule"]["lossless"]
    assert demo["overall"]["hardware"]["other_processes_cores"] < 0.2


@pytest.mark.slow
def test_every_figure_is_drawn_and_shown(figures: ModuleType, tmp_path: Path) -> None:
    figures.main(["--out", str(tmp_path)])
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {f"{name}.svg" for name in figures.PLOTS}
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert not [name for name in drawn if f"assets/{name})" not in text]
