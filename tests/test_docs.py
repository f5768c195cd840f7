"""README and docs: links that resolve, and commands that the program accepts."""

import re
import shlex
from pathlib import Path

import pytest
from head_cases import EXAMPLE, example_blocks

from drafthead import cli
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
