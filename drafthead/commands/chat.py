"""Chat with the base in the terminal. Accepted drafts are coloured, and every answer is followed by its speed.

usage: drafthead chat head=DIR [key=value ...] [MESSAGE]

drafthead chat head=outputs/medusa_smollm2/head
drafthead chat head=outputs/medusa_smollm2/head < messages.txt
drafthead chat head=outputs/medusa_smollm2/head record=chat.svg "Why is the sky blue?"

Ctrl-C stops an answer, /reset starts a new conversation, /exit or Ctrl-D ends the chat. If standard input is not a
terminal, each of its lines is a message. If words follow the settings, they are the only message.
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from drafthead.commands.command import command
from drafthead.data.text.chat import Message, user_turn
from drafthead.errors import UserError
from drafthead.eval.report.side_by_side import ACCEPTED, coloured
from drafthead.eval.trees.cost_model import ensure_costs
from drafthead.files.local import disk_errors, write_atomic
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.decoding.generate import stream
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.processed import sampling_lines, stock_sampler
from drafthead.models.decoding.sampling import OutputSampler
from drafthead.models.decoding.step import StepRecord
from drafthead.models.drafters.expression import DrafterConfig, load_base_and_drafter
from drafthead.models.kernels.huge_pages import wait_for_huge_pages
from drafthead.settings.schema import Positive, Seed, settings
from drafthead.system.display import PlainConsole
from drafthead.system.machine import OtherProcesses, other_processes_line

PLAIN_TOKENS = 33  # decoded without drafts to measure plain speed; the first comes from the prefill, not a step
SVG_WIDTH = 96


@settings(kw_only=True)
class ChatConfig(DrafterConfig):
    """Settings of ``drafthead chat``."""

    head: str
    """Head folder (``outputs/NAME/head``), Hub repository (``user/name``), or a drafter such as ``prompt_lookup:3``."""
    message: str = ""
    """The only message. By default the messages are lines of standard input."""
    base: BaseConfig = field(default_factory=BaseConfig)
    """Base model. By default the base that the head was trained for."""
    system: str = ""
    """System message of every conversation."""
    max_new_tokens: Positive = 512
    """Largest number of tokens of an answer."""
    sampler: OutputSampler = field(default_factory=OutputSampler)
    """Distribution of the output, by default that of transformers' ``generate``."""
    seed: Seed = 0
    """Seed of the first sampled answer. It rises by 1 with each answer."""
    record: Path | None = None
    """SVG file to which the whole chat is written at the end, with accepted drafts in colour."""


@command("chat", ChatConfig, __doc__, words="message")
def main(config: ChatConfig) -> None:
    if config.record is not None and not config.record.resolve().parent.is_dir():
        raise UserError(f"record={config.record}: its folder does not exist; create it or choose another file")
    console = PlainConsole()
    base, head, head_config = load_base_and_drafter(config.head, config.base)
    if config.by_cost(head):
        ensure_costs(base, head)
    chat = Chat(config, base, *config.build(base, head, config.with_tree(head, head_config)), console)
    for message in [config.message] if config.message else _lines(console):
        if config.message or not sys.stdin.isatty():
            console.print(Text(f"> {message}"), soft_wrap=True)
        chat.say(message)
    chat.end()


def _lines(console: Console) -> Iterator[str]:
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D ends the chat", style="dim")
            continue
        except UnicodeError:
            raise UserError("a message is not UTF-8 text; convert it, for example with iconv -t UTF-8") from None
        if line == "/exit":
            return
        if line:
            yield line


class Chat:
    """The current conversation, and the measurements of all conversations."""

    def __init__(
        self, config: ChatConfig, base: BaseModel, drafter: Drafter, draft_config: DraftConfig, console: Console
    ) -> None:
        """Start an empty conversation; measure and print the speed of plain decoding, to which speedups refer."""
        self.config, self.console = config, console
        self.base, self.drafter, self.draft_config = base, drafter, draft_config
        self.transcript = Text()
        self.steps: list[StepRecord] = []
        self.others = OtherProcesses()
        self.count = 0
        self._system: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        self.messages = list(self._system)
        ids = base.prompt_ids([*self._system, *user_turn("Tell me a story.")])
        tokens = min(PLAIN_TOKENS, base.max_context - len(ids))
        if tokens < 2:
            raise UserError(f"system= leaves no room in the base's context of {base.max_context} tokens; shorten it")
        wait_for_huge_pages()  # moving weights slows decoding down
        decode(base, drafter, ids, max_new_tokens=min(4, tokens), draft_config=draft_config)  # warm up
        decode(base, None, ids, max_new_tokens=2)
        sampler = stock_sampler(base, ids, tokens, config.sampler)
        with self.others:
            plain = decode(base, None, ids, max_new_tokens=tokens, sampler=sampler, ignore_eos=True)
        self.plain_rate = _rate(plain.steps)
        measured = f"plain decoding: {self.plain_rate:.1f} tokens/s"
        self._note(
            f"{measured}, measured now over {len(plain.steps)} steps after a short prompt. Speedups refer to this "
            "speed, without the time to read prompts. As a conversation grows, plain decoding slows down, so the "
            "speedups are too low rather than too high.",
            recorded=measured,
        )
        for line in sampling_lines(base, sampler):
            self._note(line)

    def say(self, message: str) -> None:
        """Print the answer to ``message`` and add both to the conversation; ``/reset`` starts a new one."""
        self.transcript.append(f"> {message}\n", style="bold")
        if message == "/reset":
            self.messages = list(self._system)
            self._note("new conversation")
            return
        messages = [*self.messages, *user_turn(message)]
        ids = self.base.prompt_ids(messages)
        room = self.base.max_context - len(ids)
        if room < 1:
            limit = f"the base's context of {self.base.max_context}"
            self._note(f"the conversation has {len(ids)} tokens, which fill {limit}; /reset starts a new one")
            return
        most = min(self.config.max_new_tokens, room)
        base, draft_config, seed = self.base, self.draft_config, self.config.seed + self.count
        sampler = stock_sampler(base, ids, most, self.config.sampler)
        answer = stream(
            base, self.drafter, ids, max_new_tokens=most, draft_config=draft_config, sampler=sampler, seed=seed
        )
        self.count += 1
        text, ending = Text(), ""
        try:
            with self.others:
                for piece in answer:
                    shown = coloured([piece])
                    text.append_text(shown)
                    self.console.print(shown, end="", soft_wrap=True)
            if not {*answer.sequence.answer[-1:]} & self.base.eos_ids:
                ending = f"; stopped at max_new_tokens={self.config.max_new_tokens}"
                if room <= self.config.max_new_tokens:
                    ending = "; stopped because the base's context is full, /reset starts a new conversation"
        except KeyboardInterrupt:
            ending = "; stopped by Ctrl-C"
        self.console.print()
        self.transcript.append_text(text).append("\n")
        if text.plain:
            self.messages = [*messages, {"role": "assistant", "content": text.plain}]
        line = f"{len(answer.sequence.answer)} tokens, {answer.accepted} of them accepted drafts"
        if steps := answer.sequence.steps:
            self.steps += steps
            line += f"; {_rate(steps):.1f} tokens/s, mean accepted length (tau) {answer.mean_accepted_length:.2f}"
            line += f"; speedup so far {_rate(self.steps) / self.plain_rate:.2f}"
        self._note(f"{line}{ending}\n")

    def _note(self, line: str, recorded: str = "") -> None:
        self.console.print(Text(line, style="dim"), soft_wrap=True)
        self.transcript.append(f"{recorded or line}\n", style="dim")

    def end(self) -> None:
        self._note(other_processes_line(self.others.cores))
        if self.config.record is None:
            return
        self.transcript.append("coloured", style=ACCEPTED).append(": accepted drafts of the head")
        recording = PlainConsole(record=True, width=SVG_WIDTH, file=io.StringIO())
        recording.print(self.transcript)
        svg = recording.export_svg(title=f"drafthead chat: {self.base.name}", theme=MONOKAI)
        svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # rich's fonts lie on another site
        with disk_errors("the recording", self.config.record.parent):
            write_atomic(self.config.record, svg)
        self.console.print(f"recorded in {self.config.record}", soft_wrap=True)


def _rate(steps: list[StepRecord]) -> float:  # tokens per second
    return sum(step.committed for step in steps) / sum(step.total_s for step in steps)
