"""The chat command on a stored tiny base: piped messages, conversations, Ctrl-C, the context's end, the recording."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from drafthead.commands.chat import Chat, ChatConfig
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.token_tree import TokenTree
from support import TinyBase, call, cases


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
    with pytest.raises(SystemExit, match=f"^error: .*{says}") as stop:
        call("chat", *settings, "base.max_context=90", extra)
    assert "\n" not in str(stop.value)
