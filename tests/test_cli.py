"""The command dispatches, explains itself, and has one grammar for all commands."""

import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import drafthead
from drafthead import cli
from drafthead.errors import UserError
from drafthead.settings.compose import one_line_errors
from support import call, call_fails, cases

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "train": ["recipe=medusa_smollm2"],
    "data": ["recipe=medusa_smollm2"],
    "eval": ["head=x"],
    "generate": ["head=x", "hello"],
    "chat": ["head=x"],
    "replay": ["head=x"],
    "certify": [],
    "doctor": [],
    "adapt": ["head=x"],
    "export": ["head=x", "to=medusa", "out=y"],
    "import": ["from=x", "base=b", "out=y"],
    "push": ["head=x", "repo=me/x"],
    "engines": [],
    "serve": ["recipe=medusa_smollm2"],
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_and_prints_its_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    call_fails("0", command, "--help")
    shown = capsys.readouterr().out
    assert f"drafthead {'train' if command == 'data' else command}" in shown and "settings (key=default):" in shown
    call(command, *SETTINGS[command][:1], "--cfg", "job", *SETTINGS[command][1:])
    assert capsys.readouterr().out.count(":") >= 2


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_misspelt_setting_is_one_line_with_near_matches(command: str) -> None:
    known = dict.fromkeys(("train", "data", "serve"), "seed")
    known |= {"certify": "each", "import": "revision", "push": "private", "doctor": "recipes", "engines": "folder"}
    key = known.get(command, "base")
    call_fails(f"^error: {key}x is not a setting; did you mean {key}", command, *SETTINGS[command], f"{key}x=1")


def test_errors_under_a_debugger_and_with_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OC_CAUSE", "1")  # what OmegaConf does by itself while Python traces
    call_fails("^error: basex is not a setting; did you mean base", "generate", *SETTINGS["generate"], "basex=1")
    with pytest.raises(SystemExit, match=r"^error: no published head at /x\\x1b\[2J\\ny: [^\n]*$"):
        call("import", "from=/x\x1b[2J\ny", "out=y", "base=b")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"], ["--version"], ["-V"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        call(*(arguments or ["--help"]))
    version = arguments and arguments[0].lower() in ("--version", "-v")
    assert stop.value.code == 0
    assert capsys.readouterr().out == (f"drafthead {drafthead.__version__}\n" if version else cli.HELP)
    assert max(map(len, cli.HELP.splitlines())) <= 120


def test_the_documents_name_this_version() -> None:
    version, development, _ = drafthead.__version__.partition(".dev")
    assert f"Status: {version}{' in development' if development else ','}" in (ROOT / "README.md").read_text()
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()


def test_an_unknown_command_is_one_line_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        call("trian", "recipe=x")
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.err == f"drafthead: unknown command 'trian'; choose one of {', '.join(cli.COMMANDS)}, or --help\n"
    assert shown.out == ""


@cases(
    "words, prompt",
    (["What", "is", "head=x", "x + y = z?"], "What is x + y = z?"),
    (["head=x", "-"], "-"),  # standard input
    (["head=x", "- a list?"], "- a list?"),
    (["head=x", "it's \\'2 + 2=4', ${PATH}, {a}, [b"], "it's \\'2 + 2=4', ${PATH}, {a}, [b"),
)
def test_words_are_the_prompt(words: list[str], prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    call("generate", *words, "--cfg", "job")
    assert OmegaConf.create(capsys.readouterr().out).prompt == prompt


@cases(
    "command, arguments, says",
    ("certify", ["only"], "'only' is not a setting"),
    ("certify", ["only="], "only= has no value"),
    ("certify", ["length=[x"], "length=.x cannot be read .*; quote the value"),
    ("train", ["recipe=medusa_smollm3"], "recipe=medusa_smollm3 is not .*; did you mean medusa_smollm2 or"),
    ("train", ["recipe=medusa_smollm2", "base=/models/mine"], "base=custom base.name=/models/mine$"),
    ("train", ["recipe=medusa_smollm2", "phases.distil.steps=5"], "phases.distil is .* mean phases.distill[?]"),
    ("train", ["recipe=medusa_smollm2", "mode=estimate", "out="], "out must be the name of a folder"),
    ("eval", ["head=/nowhere/head"], "no draft head at /nowhere/head: give a run's head folder .*or a Hub"),
    ("eval", [], "name a head: head=outputs/NAME/head or head=user/repo"),
    ("export", ["head=x", "to=eagle3", "out=y", "base_gguf=f16"], "base_gguf needs .*got to=eagle3"),
    ("export", ["head=x"], "missing: to=... out=...; see --help"),
    ("import", ["from=/nowhere/x", "out=y", "base=b"], "no published head at /nowhere/x: there is no such folder"),
    ("export", ["head=x", "to=medusa", "out=/proc/nope/x"], "/proc/nope cannot be written .*choose another folder"),
)
def test_bad_settings_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    call_fails(f"^error: .*{says}", command, *arguments)
    assert command == "train" or not list(tmp_path.iterdir())


PATHS = ["a b", "x #1", "[1]", "[1", "a=b", "a,b", "it's", 'a"b"', "é日", "{a}", "(a)", "a: b", "* ?", "'", "$a\\'"]


@pytest.mark.parametrize("path", PATHS)
@cases(
    "command, keys",
    ("train", "out data.folder base.name base.adapter init_from eval.suite eval.tree"),
    ("eval", "head suite base.name out tree"),
    ("generate", "head base.adapter"),
    ("replay", "head texts save plot"),
    ("export", "head out texts"),
    ("import", "from_ out"),
    ("push", "head"),
    ("chat", "head record"),
)
def test_settings_take_any_path(command: str, keys: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {key: f"{key.rstrip('_')}=/x/{path}" for key in keys.split()}
    others = [setting for setting in SETTINGS[command] if setting.partition("=")[0] not in given]
    call(command, *others, *given.values(), "--cfg", "job")
    composed = OmegaConf.create(capsys.readouterr().out)
    assert {OmegaConf.select(composed, key) for key in given} == {f"/x/{path}"}


@pytest.mark.parametrize("path", [path for path in PATHS if path not in ("[1]", "* ?")])
def test_a_list_takes_one_path(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    call("train", "recipe=medusa_smollm2", f"data.prompts={path}.jsonl", "--cfg", "job")
    assert OmegaConf.create(capsys.readouterr().out).data.prompts == f"{path}.jsonl"


def test_settings_keep_their_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    call(
        "train",
        "recipe=medusa_smollm2",
        "init_from=null",
        "out='a b'",
        "name=x",
        "data.folder=y/${name}",
        "--cfg",
        "job",
    )
    composed = OmegaConf.create(capsys.readouterr().out)
    assert (composed.init_from, composed.out, composed.data.folder) == (None, "a b", "y/x")
    call("eval", "head=x", "suite='a b'", "tasks=[a, b]", "base.adapter=null", "--cfg", "job")
    composed = OmegaConf.create(capsys.readouterr().out)
    assert (composed.suite, composed.tasks, composed.base.adapter) == ("a b", ["a", "b"], None)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", TextIOWrapper(written := BytesIO(), encoding))
    call("generate", "head=x", "日 – é", "--cfg", "job")
    sys.stdout.flush()
    assert rb"prompt: \u65e5" in written.getvalue()


@pytest.mark.parametrize("command", ["train", "eval", "generate"])
def test_a_seed_that_numpy_does_not_take_is_one_line(command: str) -> None:
    with pytest.raises(SystemExit, match="^error: seed must be at least 0 and at most 2147483647, got 1e"):
        call(command, *SETTINGS[command], "seed=1e18")


@pytest.mark.parametrize("prompt", ["-", "caf\udce9"])
def test_a_prompt_that_is_no_text_is_one_line(prompt: str) -> None:
    with pytest.raises(SystemExit, match="^error: .*prompt is no.* UTF-8"):
        call("generate", "head=x", prompt, stdin=TextIOWrapper(BytesIO(b"caf\xe9"), encoding="utf-8"))


@cases(
    "error, says",
    (UserError("found x, expected y"), "^error: found x, expected y$"),
    (OSError(28, "No space left on device", "rows.json"), "^error: .*No space left"),
    (KeyboardInterrupt(), "^130$"),
)
def test_errors_are_one_line_and_bugs_keep_their_traceback(error: BaseException, says: str) -> None:
    with pytest.raises(SystemExit, match=says), one_line_errors():
        raise error
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError


def test_a_checkout_needs_no_installed_package(tmp_path: Path) -> None:
    """With -S, Python has no site-packages: an editable install cannot help, and ``--help`` cannot wait for torch."""
    code = """
from importlib.util import find_spec
import drafthead.cli, drafthead.errors
names = ("train.run", "models.heads", "eval.config", "recipes", "commands.data")
print(*(name for name in names if find_spec(f"drafthead.{name}")))
"""
    command, env = [sys.executable, "-S", "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["train.run", "models.heads", "eval.config", "recipes", "commands.data"], done.stderr
