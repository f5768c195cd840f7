"""``drafthead generate head=DIR Why is the sky blue?``: stream an answer, then say what drafting bought."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING
from rich.console import Console

from drafthead.commands.command import command
from drafthead.data.text.chat import user_turn
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.machine import OtherProcesses, other_processes_line
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.expression import DrafterConfig, load_base_and_drafter

USAGE = """\
usage: drafthead generate head=DIR [key=value ...] PROMPT

  PROMPT              the user's message; - reads standard input
  head=DIR            head folder (outputs/NAME/head) or Hub repository (user/name), or a drafter: prompt_lookup:3,
                      relay:head:DIR@2+prompt_lookup@4, ... (see drafthead eval --help)
  drafter=head+...    a drafter around the head, head+prompt_lookup:8:2 (see drafthead eval --help)
  base=NAME           base model; by default the one that the head was trained for (base.dtype=..., and so on, too)
  max_new_tokens=256  length of the answer
  temperature=0       0 is greedy: the base's own text exactly; else top_p=1, top_k=0 (all tokens) and seed=0 count, too
  raw=true            continue the prompt as it is, without the chat template
  compare=false       skip the autoregressive decoding that the speedup is measured against
"""


@dataclass(kw_only=True)
class GenerateConfig(DrafterConfig):
    """Settings of the command."""

    head: str = MISSING
    prompt: str = MISSING
    base: BaseConfig = field(default_factory=BaseConfig)
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    raw: bool = False
    compare: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampler = Sampler(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@command("generate", GenerateConfig, USAGE, words="prompt")
def main(config: GenerateConfig) -> None:
    """Answer the prompt with the head, and by default without it, too."""
    try:
        text = sys.stdin.read() if config.prompt == "-" else config.prompt
        text.encode()
    except UnicodeError:
        raise UserError("the prompt is no UTF-8 text; convert it, for example with iconv -t UTF-8") from None
    if not text.strip():
        raise UserError("the prompt is empty; give some words")
    base, head, draft_config = load_base_and_drafter(config.head, config.base)
    drafter, draft_config = config.build(base, head, draft_config)
    if config.raw:
        ids = base.tokenizer(text).input_ids
    else:
        ids = base.prompt_ids(user_turn(text))
    decode(
        base, drafter, ids[-8:], max_new_tokens=4, draft_config=draft_config
    )  # warm up, so that the first answer is timed like any other
    console = Console(highlight=False)
    settings: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "sampler": config.sampler, "seed": config.seed}
    with OtherProcesses() as others:
        result = decode(base, drafter, ids, **settings, draft_config=draft_config, on_tokens=_printer(base, console))
    console.out("")
    rate = len(result.tokens) / result.total_s
    mean = sum(s.committed for s in result.steps) / max(1, len(result.steps))
    line = f"{len(result.tokens)} tokens, {rate:.1f} tokens/s, mean accepted length {mean:.2f}"
    if config.compare:
        with others:
            baseline = decode(base, None, ids, **settings)
        if baseline.tokens == result.tokens:
            same = "the same text"
        elif config.sampler.greedy:
            same = "another text (a near-tie; see drafthead eval)"
        else:
            same = "another sample of the same distribution"
        baseline_rate = len(baseline.tokens) / baseline.total_s
        line += f"; autoregressive {baseline_rate:.1f} tokens/s and {same}: speedup {rate / baseline_rate:.2f}"
    console.print(f"\n[dim]{line}; {other_processes_line(others.cores)}[/dim]", soft_wrap=True)
    if base.ignored_settings:
        left = f"not applied, of the base's generation_config.json: {', '.join(base.ignored_settings)}"
        console.print(f"{left} (docs/bases.md)", style="dim", markup=False, soft_wrap=True)


def _printer(base: BaseModel, console: Console) -> Callable[[list[int]], None]:
    """Prints text as soon as it is final."""
    answer: list[int] = []
    shown = 0

    def show(tokens: list[int]) -> None:
        nonlocal shown
        answer.extend(tokens)
        text = base.tokenizer.decode(answer, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half of a multi-byte character: wait for the rest
            console.out(text[shown:], end="", highlight=False)
            shown = len(text)

    return show
