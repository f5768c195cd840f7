"""The command dispatches, forwards what it was given, and explains itself."""

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import drafthead
from drafthead import cli
from drafthead.data.utils.errors import UserError

ROOT = Path(__file__).parent.parent
Fake = Callable[[str, Callable[[], None]], None]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["drafthead", *arguments])
    cli.main()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    def install(module: str, main: Callable[[], None]) -> None:
        replacement = types.ModuleType(module)
        replacement.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module, replacement)

    return install


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_gets_its_arguments(fake: Fake, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    seen: list[list[str]] = []
    fake(cli.COMMANDS[command], lambda: seen.append(sys.argv))
    run(monkeypatch, command, "recipe=x", "--help", "a b")
    assert seen == [[f"drafthead {command}", "recipe=x", "--help", "a b"]]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_module_and_a_line_of_help(command: str) -> None:
    spec = importlib.util.find_spec(cli.COMMANDS[command])
    assert spec is not None and spec.origin is not None
    assert "def main() -> None:" in Path(spec.origin).read_text()
    assert f"\n  {command} " in cli.HELP


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments)
    assert stop.value.code == 0
    assert capsys.readouterr().out == cli.HELP


def test_help_fits_a_terminal() -> None:
    assert max(map(len, cli.HELP.splitlines())) <= 120


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "--version")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"drafthead {drafthead.__version__}\n"


def test_an_unknown_command_is_one_line_with_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "trian", "recipe=x")
    assert stop.value.code == 2
    shown = capsys.readouterr()
    commands = "train, data, eval, generate, replay, sweep, certify, export, import, push"
    assert shown.err == f"drafthead: unknown command 'trian'; choose one of {commands}, or --help\n"
    assert shown.out == ""


def test_bad_input_is_one_line_and_no_traceback(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UserError("found x, expected y")

    fake(cli.COMMANDS["data"], refuse)
    with pytest.raises(SystemExit, match="^error: found x, expected y$"):
        run(monkeypatch, "data")


def test_a_bug_keeps_its_traceback(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise ZeroDivisionError

    fake(cli.COMMANDS["data"], crash)
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, "data")


def test_a_checkout_imports_from_its_folders_and_the_command_starts_light(tmp_path: Path) -> None:
    """Tracebacks say data/errors.py, not drafthead/data/errors.py.

    Python runs with -S, without site-packages: an editable install cannot help, and ``--help`` cannot wait for torch.
    """
    code = "import drafthead.cli as a, drafthead.data.utils.errors as b; print(a.__file__, b.__file__, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [str(ROOT / "drafthead/cli.py"), str(ROOT / "data/utils/errors.py")], done.stderr
