"""The command that serves a head in vLLM, up to the start of vLLM."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.engines.server import LocalVllm
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lora import LoraBase
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from support import TINY, TinyBase, call, call_fails, random_base


def test_the_line_has_what_the_head_and_this_machine_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    folder, absent = tmp_path / "base", "python=/no/python"
    random_base(TINY).stock().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    base = BaseModel.load(BaseConfig(name=str(folder), dtype="float32"), "cpu")
    for name, config in {"medusa": MedusaConfig(), "hydra_pp": HydraConfig(prefix_layer=True)}.items():
        head = config.build(base)
        head.save_pretrained(tmp_path / name)
        settings = [f"head={tmp_path / name}", "drafter=head+prompt_lookup:8:2", 'arguments=[--seed,"3"]', absent]
        call_fails("there is no /no/python; install vLLM", "serve", *settings)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "the command:" in line]
        words = shlex.split(line.partition("the command:")[2])
        values = dict(zip(words, words[1:], strict=False))
        spoken = json.loads(values["--speculative-config"])
        assert spoken["num_speculative_tokens"] == 8, "prompt lookup's tokens are more than the head's"
        extra = {"head": str(tmp_path / name), "drafter": "head+prompt_lookup:8:2", "fit_length": True}
        assert spoken["draft_load_config"]["model_loader_extra_config"] == extra
        assert values["--model"] == str(folder) and values["--max-num-seqs"] == "4" and words[-2:] == ["--seed", "3"]
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in words and "--kv-cache-memory-bytes" in words
        assert ("--no-enable-prefix-caching" in words) == (name == "hydra_pp"), "only Hydra++ reads all states"


def test_the_adapter_of_a_fine_tune_is_merged_for_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gets a folder with the fine-tune's weights, which is removed when it ends."""
    random_base(TINY).stock().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    config = BaseConfig(name=str(tmp_path / "base"), dtype="float32")
    LoraBase(BaseModel.load(config, "cpu"), ["q_proj"], r=2, lora_alpha=4, lora_dropout=0.0).save(tmp_path / "lora")
    tuned = BaseModel.load(replace(config, adapter=str(tmp_path / "lora")), "cpu")
    MedusaConfig().build(tuned).save_pretrained(tmp_path / "head")
    served = list[Path]()

    def look(server: LocalVllm, display: object, ready: str) -> None:
        served.append(Path(shlex.split(server.command)[shlex.split(server.command).index("--model") + 1]))
        assert BaseModel.load(replace(config, name=str(served[0])), "cpu").fingerprint in tuned.fingerprint

    monkeypatch.setattr("drafthead.commands.serve.serve_vllm", look)
    call("serve", f"head={tmp_path / 'head'}")
    assert served and not served[0].exists()


def test_what_vllm_cannot_serve_is_refused(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    KangarooConfig(exit_layer=1).build(base).save_pretrained(tmp_path / "kangaroo")
    call_fails("type kangaroo runs layers of the base", "serve", f"head={tmp_path / 'kangaroo'}")
    MedusaConfig().build(base).save_pretrained(tmp_path / "medusa")
    call_fails("vLLM cannot serve random-llama", "serve", f"head={tmp_path / 'medusa'}")
    call_fails("missing: head=", "serve", "drafts=3")
