"""The corpus of the embedded real model out of a server: transformers' own decoding behind the HTTP protocol."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM

from drafthead.data.answers.store import GenerationStore
from drafthead.data.embedded.packages import smollm2_folder
from drafthead.data.utils.files import read_json
from drafthead.models.base.base_model import BaseModel
from drafthead.train.config import parse_run
from drafthead.train.corpora.corpora import Corpora

PROMPTS, NEW = 8, 32


@pytest.mark.slow
def test_the_corpus_is_that_of_the_built_in_decoding(completions_server: Callable[..., Any], tmp_path: Path) -> None:
    """``drafthead data`` against the server, greedily, and the same prompts without it: token for token."""
    stock = AutoModelForCausalLM.from_pretrained(str(smollm2_folder(lambda line: None)), dtype=torch.float32).eval()
    lock = threading.Lock()

    def answer(prompt: list[int], body: dict[str, Any]) -> list[int]:
        assert body["temperature"] == 0
        ids = torch.tensor([prompt])
        with lock:
            found = stock.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=body["max_tokens"],
                do_sample=False,
                eos_token_id=body["stop_token_ids"],
                pad_token_id=0,
            )
        return found[0, len(prompt) :].tolist()

    common = ["recipe=medusa_smollm2", f"data.generations.prompts={PROMPTS}", "data.generations.self_prompted=0"]
    common += ["data.generations.keep_hidden_states=false", f"data.generations.sampler.max_new_tokens={NEW}"]
    common += [
        "data.text.max_tokens=512",
        "data.generations.fresh=true",
        "data.generations.sources=[{kind: builtin, name: tiny}]",
    ]
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        run = parse_run(compose("train", overrides=[*common, f"data.folder={tmp_path / 'built-in'}"]))
    base = BaseModel.load(run.base)
    server = completions_server(answer, base.tokenizer, base.eos_ids)
    server.models = [{"id": "HuggingFaceTB/SmolLM2-135M-Instruct", "max_model_len": 8192}]
    options = [f"data.generations.server.url={server.url}", f"data.folder={tmp_path / 'server'}", f"out={tmp_path}"]
    command = [sys.executable, "-m", "drafthead.commands.data", *common, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = list(GenerationStore(tmp_path / "server" / "generations").read())
    wanted = list(Corpora(base, run.data, run.seed, lambda *_: None).generations().read())
    assert [g.input_ids.tolist() for g in found] == [g.input_ids.tolist() for g in wanted]
    assert [g.finished for g in found] == [g.finished for g in wanted] and len(found) == PROMPTS
    said = read_json(tmp_path / "server" / "generations" / "manifest.json")["server"]
    assert said == {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "prompts": "ids", "answers": "ids"}
