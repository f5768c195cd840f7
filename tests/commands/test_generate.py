"""The generate command on a stored base: the base's generation config decides, as in stock ``generate``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text.chat import prompt_ids, user_turn
from drafthead.errors import visible
from support import TinyBase, call

ODD = {"typical_p": 1e-6}
"""Keeps only the token whose information is nearest to the entropy: samples are certain, and differ from the argmax."""
SETTINGS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "no settings": ({}, [], {}),
    "greedy": (
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 12, "suppress_tokens": [7, 9]},
        [],
        {},
    ),
    "sampled": ({"do_sample": True, "repetition_penalty": 1.3, **ODD}, [], {}),
    "greedy by the user": ({"do_sample": True, "temperature": 9.0}, ["sampler.temperature=0"], {"do_sample": False}),
    "penalty by the user": (
        {"repetition_penalty": 1.5},
        ["sampler.repetition_penalty=1.1"],
        {"repetition_penalty": 1.1},
    ),
    "sampled by the user": (
        {"suppress_tokens": [7]},
        ["sampler.temperature=0.5", "sampler.typical_p=1e-6"],
        {"do_sample": True, "temperature": 0.5, **ODD},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_that_of_stock_generate(
    name: str, tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, settings, arguments = SETTINGS[name]
    tiny_base().stock().save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=299, **config).save_pretrained(tmp_path)
    base = [f"base.name={tmp_path}", "base.tokenizer=builtin:tiny", "base.dtype=float32", "max_new_tokens=24"]
    call("generate", "head=prompt_lookup:3", *base, *settings, "hello hello")
    shown = capsys.readouterr().out

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), tiny_tokenizer()
    ids = torch.tensor([prompt_ids(tokenizer, user_turn("hello hello"))])
    eos = sorted({299, tokenizer.eos_token_id})
    how = {"max_new_tokens": 24, "eos_token_id": eos, "pad_token_id": 0, **arguments}
    answer, greedy = (model.generate(ids, **how | more)[0, ids.shape[1] :] for more in ({}, {"do_sample": False}))
    assert torch.equal(answer, greedy) == (not name.startswith("sampled"))
    expected = visible(tokenizer.decode(answer, skip_special_tokens=True), keep="\n\t")
    assert shown.startswith(expected + "\n") and "and the same text: speedup" in shown
    used = [f"{key}={value}" for key, value in config.items() if key == "repetition_penalty" and not settings]
    assert all(setting in shown for setting in used) and ("sampled as by" in shown) is (
        name not in ("no settings", "greedy by the user")
    )


def test_settings_that_no_command_applies_are_named(
    tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_base().stock().save_pretrained(tmp_path)
    GenerationConfig(num_beams=3, guidance_scale=1.5, repetition_penalty=1.2).save_pretrained(tmp_path)
    base = [f"base.name={tmp_path}", "base.tokenizer=builtin:tiny", "max_new_tokens=4"]
    for command in ("generate", "chat"):
        call(command, "head=prompt_lookup:3", *base, "hello")
        shown = capsys.readouterr().out
        assert "with repetition_penalty=1.2" in shown
        assert "not applied, of the base's generation_config.json: num_beams=3, guidance_scale=1.5" in shown
