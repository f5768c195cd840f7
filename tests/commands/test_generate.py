"""The generate and chat commands on a stored tiny base."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GenerationConfig

from drafthead.commands.chat import Chat, ChatConfig
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.text.chat import prompt_ids, user_turn
from drafthead.errors import visible
from drafthead.files.local import read_json
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.token_tree import TokenTree
from support import TinyBase, call, call_fails, cases

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
    "sampled, drafts know the draws": (
        {},
        ["sampler.temperature=0.5", "sampler.typical_p=1e-6", "sampler.coupled=true"],
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


@pytest.mark.slow
def test_trees_by_cost_are_named_in_both_commands(
    tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The costs of a step are measured, because no head brings them."""
    tiny_base().stock().save_pretrained(tmp_path)
    base = [f"base.name={tmp_path}", "base.tokenizer=builtin:tiny", "max_new_tokens=8", "tree=cost"]
    for drafter in ("head=prompt_lookup:3", "head=early_exit:1:2", "head=early_exit:1:2+prompt_lookup:3"):
        call("generate", drafter, *base, "hello")
        assert "and the same text: speedup" in capsys.readouterr().out
    call("chat", "head=early_exit:1:2", *base, "hello")
    assert "mean accepted length" in capsys.readouterr().out
    call_fails("cannot be read", "generate", "head=prompt_lookup:3", *base[:-1], "tree=cost:1", "hello")
    suite = tmp_path / "s.jsonl"
    suite.write_text("".join(f'{{"prompt": "{c * 9}"}}\n' for c in "abcd"))
    more = [f"suite={suite}", "split=test", "stock_baseline=false", f"out={tmp_path / 'out'}"]
    call("eval", "head=early_exit:1:2", "drafter=head+prompt_lookup:3", *base, *more)
    evaluation = read_json(tmp_path / "out" / "eval.json")
    assert evaluation["tree"]["spec"] == "cost" and evaluation["predicted"]["mean_accepted_length"] >= 1
    same = evaluation["overall"]["methods"]["speculative"]["identical_outputs"]
    assert same["same"] == same["of"] == 2


# Conversations --------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tiny_base: TinyBase, tmp_path: Path) -> list[str]:
    tiny_base().stock().save_pretrained(tmp_path / "base")
    base = [f"base.name={tmp_path / 'base'}", "base.tokenizer=builtin:tiny"]
    return ["head=prompt_lookup:3", *base, "max_new_tokens=16"]


def test_piped_messages_are_answered_without_colour_and_recorded_with_it(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "chat.svg"
    call("chat", *settings, f"record={svg}", stdin=io.StringIO("aaaa\n\n/reset\naaaa\n/exit\nnot read\n"))
    shown = capsys.readouterr().out
    first, second = shown.split("new conversation\n")
    assert "\x1b" not in shown and "not read" not in shown and shown.startswith("plain decoding: ")
    # Without the first conversation, the second answer is the first.
    answers = [part.split("> aaaa\n")[1].split("16 tokens, ")[0] for part in (first, second)]
    assert answers[0] == answers[1] and answers[0].strip()
    assert len(re.findall(r"16 tokens, \d+ of them accepted drafts; .* \(tau\) .*; speedup so far \d", shown)) == 2
    assert shown.count("stopped at max_new_tokens=16") == 2
    recorded = svg.read_text()
    assert recorded.startswith("<svg") and "font-weight: bold" in recorded and "aaaa" in recorded
    assert "@font-face" not in recorded  # a page with it loads nothing from elsewhere


def test_the_end_of_the_context_is_one_line(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = io.StringIO(f"hello\nhello again\n{'x' * 200}\n/reset\nhello\n")
    call("chat", *settings, "base.max_context=90", "max_new_tokens=80", stdin=said)
    shown = capsys.readouterr().out.splitlines()
    assert sum("stopped because the base's context is full" in line for line in shown) == 2
    assert sum(bool(re.search(r"has \d+ tokens, which fill the base's context of 90", line)) for line in shown) == 2


class _Interrupting(io.StringIO):
    """Output that presses Ctrl-C when an answer's second piece is written, once."""

    writes = -1

    def write(self, text: str) -> int:
        self.writes -= 1
        if self.writes == 0:
            raise KeyboardInterrupt  # a signal would be ignored in processes that a shell started in the background
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_the_conversation_continues(tiny_base: TinyBase) -> None:
    base, out = tiny_base(), _Interrupting()
    drafter = ModelDrafter(tiny_base(), base, num_tokens=3)
    config = ChatConfig(head="model:x", max_new_tokens=24, system="be brief")
    draft_config = DraftConfig(tree=TokenTree.chain(3))
    chat = Chat(config, base, drafter, draft_config, Console(file=out, width=80, highlight=False))
    out.writes = 2
    chat.say("hello")
    assert "stopped by Ctrl-C" in out.getvalue()
    chat.say("hello again")
    assert out.getvalue().count("Ctrl-C") == 1
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert 0 < len(chat.messages[2]["content"]) < len(chat.messages[4]["content"])


@cases(
    "extra, says", ("record=missing/chat.svg", "its folder does not exist"), (f"system={'x' * 200}", "leaves no room")
)
def test_bad_settings_are_one_line(settings: list[str], extra: str, says: str) -> None:
    call_fails(f"^error: .*{says}", "chat", *settings, "base.max_context=90", extra)
