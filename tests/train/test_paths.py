"""A run and the commands after it, in a folder whose name is hostile to shells, YAML, Hydra and globs."""

import json
import re
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support import call

FOLDER = "a b#c [1]=x,y 'é日\" (p)+q@3 {z} 50% $H:5"
TASKS = ("cost $\\frac$ or $5 and $6", "[/x] [bold]b", "<img src=x>|![i](u)", "\x1b[31mred\n")
TRAIN = "recipe=eagle3_smollm2_served debug=tiny base.random=false base.tokenizer=builtin:tiny"
SHORT = "phases.pretrain.steps=2 phases.distill.steps=4 eval.limit=2 eval.max_new_tokens=8 tree_prompts=2"


@pytest.mark.slow  # 20 s: a whole run
def test_every_command_works_in_such_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, few = tmp_path / FOLDER, ("limit=2", "max_new_tokens=8")
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 8}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, eos_token_id=258)).save_pretrained(folder / "base")
    rows = [{"prompt": f"Tell me {n} things.", "task": TASKS[n % len(TASKS)]} for n in range(40)]
    prompts, head, answers = folder / "p [1].jsonl", folder / "run" / "head", folder / "answers #.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("sys.stdout", TextIOWrapper(printed := BytesIO(), "ascii"))
    monkeypatch.chdir(folder)

    paths = {"out": "run", "data.folder": "corpora", "base.name": "base"}
    paths |= {"data.prompts": prompts.name, "eval.suite": prompts.name}
    call("train", *TRAIN.split(), *SHORT.split(), *(f"{key}={folder}/{name}" for key, name in paths.items()))
    call("eval", f"head={head}", f"suite={prompts}", *few, "limit=4", "out=evaluation [2], #1")
    call("generate", f"head={head}", "max_new_tokens=8", "Why [is] the sky = blue?")
    call("replay", f"head={head}", f"suite={prompts}", *few, f"save={answers}", f"plot={folder}/plot [1].png")
    call("export", f"head={head}", "to=speculators", f"texts={answers}", "estimate_tolerance=1", f"out={folder}/export")
    call("import", f"from={folder}/export", f"base={folder}/base", "base.tokenizer=builtin:tiny", "out=imported, [1]")
    call("replay", "head=imported, [1]", f"texts={answers}")
    monkeypatch.chdir(folder / "run")
    call("generate", "head=head", "max_new_tokens=8", "Hello")  # a folder with the name of a drafter

    sys.stdout.flush()
    shown = printed.getvalue().decode("ascii")
    assert "[/x] [bold]b" in shown and r"\x1b[31mred" in shown and not re.search(r"[^\n -~]", shown)
    page = (folder / "evaluation [2], #1" / "report.html").read_text()
    assert "[bold]b" in page and "<img src=x>" not in page
    assert r"\<img src=x>\|!\[i\](u)" in (folder / "evaluation [2], #1" / "results.md").read_text()
