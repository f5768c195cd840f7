"""The choice of a device on a machine without an accelerator; ``tests/accelerator`` has one."""

import subprocess
import sys

import pytest
import torch

from drafthead.system.devices import device_of, on_device, peak_memory, rng_states, set_rng_states
from support import call, call_fails, refuses

if torch.accelerator.is_available():
    pytest.skip("this machine has an accelerator", allow_module_level=True)


def test_the_cpu_is_the_default_and_a_device_number_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(None) == device_of("cpu") == torch.device("cpu")
    assert on_device([3, 4], torch.device("cpu")).tolist() == [3, 4]
    set_rng_states(rng_states())
    for name, value in {"is_available": True, "current_accelerator": torch.device("cuda"), "device_count": 2}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    assert device_of("cuda:1") == torch.device("cuda:1")
    refuses("device=cuda:2 cannot be used; torch finds 2 of type cuda", device_of, "cuda:2")


@pytest.mark.parametrize("name", ["cuda", "mps", "quantum"])
def test_other_devices_are_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(f"device={name}", device_of, name)
    call_fails(f"device={name}", "generate", f"device={name}", "head=prompt_lookup:3", "base=embedded:smollm2", "Hello")


def test_every_command_accepts_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("eval", "train", "certify"):
        call(command, "device=cpu", *(["head=/nowhere"] if command == "eval" else []), "--cfg", "job")
    assert "device" not in capsys.readouterr().out.split()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no peak without that of the starting process")
def test_the_peak_of_memory_is_that_of_this_process_not_of_the_one_that_started_it() -> None:
    large = torch.ones(2**29, dtype=torch.uint8)
    assert peak_memory() > len(large)
    code = "from drafthead.system.devices import peak_memory; print(peak_memory())"
    assert int(subprocess.check_output([sys.executable, "-c", code])) < peak_memory() - len(large) // 2
