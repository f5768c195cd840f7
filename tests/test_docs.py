"""README and docs: links that resolve, commands that the program accepts, and numbers of JSON files."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from head_cases import EXAMPLE, example_blocks

from drafthead import cli
from drafthead.files.local import read_json
from support import call

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not page.read_text().startswith("<!-- Generated")]
FENCE = re.compile(r"^ *```(\w*).*?$\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LAUNCHED = re.compile(
    r"^(?:python|accelerate launch|torchrun|sbatch) .*?(train/run\.py|slurm\.sh|drafthead\.commands\.data) "
)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the command and the arguments of every ``drafthead`` and ``train/run.py`` line of a page.

    Reject lines that a shell would read differently: zsh ends a command with ``[`` or ``?`` outside quotes.
    """
    blocks = [block for language, block in FENCE.findall(text) if language in ("", "bash", "sh", "console")]
    prose = FENCE.sub("", text)
    blocks += re.findall(r"^    .*$", prose, re.MULTILINE)
    inline = [line for line in re.findall(r"`(drafthead [^`]+)`", prose.replace("\n", " ")) if "=" in line]
    found = []
    for line in "\n".join(blocks + inline).replace("\\\n", " ").splitlines():
        line = re.sub(r"^ *(\$ )?([A-Z_]+=\S+ )*", "", line)
        line = LAUNCHED.sub(lambda match: f"drafthead {'data' if 'data' in match[1] else 'train'} ", line)
        if line.startswith("drafthead "):
            bare = re.sub(r"'[^']*'|\"[^\"$`]*\"|\[\.\.\.\]| #.*", "", line)
            assert line in inline or not re.search(r"[][*?{}()!^~$;]|[<>](?! )", bare), f"quote it: {line}"
            name, *arguments = shlex.split(line, comments=True)[1:]
            ends = [i for i, word in enumerate(arguments) if re.match(r"[|<>&]", word)]
            found.append((name, arguments[: min(ends, default=None)]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_accepted(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Placeholders are capitals: ``head=DIR`` is composed as it is, ``recipe=NAME`` cannot be."""
    example = tmp_path / "head" / f"{EXAMPLE}.yaml"
    example.parent.mkdir()
    example.write_text(example_blocks()[f"recipes/head/{EXAMPLE}.yaml"])
    for name, arguments in commands(page.read_text()):
        if name.startswith("-") or "--help" in arguments or re.search(r"recipe=[A-Z.]", " ".join(arguments)):
            continue
        assert name in cli.COMMANDS, name
        if f"head={EXAMPLE}" in arguments:
            arguments = [f"hydra.searchpath=[file://{tmp_path}]", *arguments]
        try:
            call(name, *arguments, "--cfg", "job")
        except SystemExit as stop:
            pytest.fail(f"drafthead {name} {shlex.join(arguments)}: {stop}")


@pytest.mark.parametrize("command", ["--help", *cli.COMMANDS])
def test_examples_of_help_are_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call(*([command] if command == "--help" else [command, "--help"]))
    for name, arguments in commands(f"```\n{capsys.readouterr().out}```"):
        if "-m" not in arguments:  # of Hydra's sweeps, which it cannot print
            call(name, *arguments, "--cfg", "job")


def test_the_commands_of_the_pages_are_found() -> None:
    assert sum(len(commands(page.read_text())) for page in PAGES) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    prose = FENCE.sub("```", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose)):
        path = target.split("#")[0]
        if path and not re.match("[a-z]+:", path):
            assert (page.parent / path).exists(), f"{page.relative_to(ROOT)} links to {target}, which does not exist"


# Figures and numbers of JSON files ------------------------------------------------------------------------------------


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
