"""Stream an answer to a prompt with a head, then print its speed and speedup.

usage: drafthead generate head=DIR [key=value ...] PROMPT

drafthead generate head=outputs/medusa_smollm2/head "Why is the sky blue?"
drafthead generate head=user/medusa-llama3 drafter=head+prompt_lookup:8:2 sampler.temperature=0.7 "Tell me a story"
drafthead generate head=outputs/medusa_smollm2/head tree=cost "Write a haiku"
drafthead generate head=prompt_lookup:3 base=embedded:smollm2 - < prompt.txt

All words that are not settings are the prompt; - reads the prompt from standard input.
"""

import sys
from dataclasses import field

from drafthead.commands.command import command
from drafthead.data.text.chat import user_turn
from drafthead.errors import UserError, visible
from drafthead.eval.trees.cost_model import ensure_costs
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.decoding.generate import stream
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.processed import sampling_lines, stock_sampler
from drafthead.models.decoding.sampling import OutputSampler
from drafthead.models.drafters.expression import DrafterConfig, load_base_and_drafter
from drafthead.models.kernels.huge_pages import wait_for_huge_pages
from drafthead.settings.schema import Positive, Seed, settings
from drafthead.system.display import PlainConsole
from drafthead.system.machine import OtherProcesses, other_processes_line


@settings(kw_only=True)
class GenerateConfig(DrafterConfig):
    """Settings of ``drafthead generate``."""

    head: str
    """Head folder (``outputs/NAME/head``), Hub repository (``user/name``), or a drafter such as ``prompt_lookup:3``."""
    prompt: str
    """The user's message; ``-`` reads it from standard input."""
    base: BaseConfig = field(default_factory=BaseConfig)
    """Base model. By default the base that the head was trained for."""
    max_new_tokens: Positive = 256
    """Largest number of tokens of the answer."""
    sampler: OutputSampler = field(default_factory=OutputSampler)
    """Distribution of the output, by default that of transformers' ``generate``."""
    seed: Seed = 0
    """Seed of the sampled answer."""
    raw: bool = False
    """Continue the prompt itself, without the chat template."""
    compare: bool = True
    """Also decode without drafts, and print the speedup."""


@command("generate", GenerateConfig, __doc__, words="prompt")
def main(config: GenerateConfig) -> None:
    try:
        text = sys.stdin.read() if config.prompt == "-" else config.prompt
        text.encode()
    except UnicodeError:
        raise UserError("the prompt is not UTF-8 text; convert it, for example with iconv -t UTF-8") from None
    if not text.strip():
        raise UserError("the prompt is empty; give some words")
    base, head, draft_config = load_base_and_drafter(config.head, config.base)
    if config.by_cost(head):
        ensure_costs(base, head)
    drafter, draft_config = config.build(base, head, config.with_tree(head, draft_config))
    if config.raw:
        ids = base.tokenizer(text).input_ids
    else:
        ids = base.prompt_ids(user_turn(text))
    if config.compare:
        wait_for_huge_pages()  # moving weights slows decoding down, and would slow only the first answer
    decode(base, drafter, ids[-8:], max_new_tokens=4, draft_config=draft_config)  # warm up, for the same reason
    console = PlainConsole()
    sampler = stock_sampler(base, ids, config.max_new_tokens, config.sampler)
    most, seed = config.max_new_tokens, config.seed
    with OtherProcesses() as others:
        answer = stream(base, drafter, ids, max_new_tokens=most, sampler=sampler, seed=seed, draft_config=draft_config)
        for piece in answer:
            console.out(visible(piece.text, keep="\n\t"), end="")
    console.out("")
    tokens = answer.sequence.answer
    rate = len(tokens) / answer.sequence.total_s
    line = f"{len(tokens)} tokens, {rate:.1f} tokens/s, mean accepted length {answer.mean_accepted_length:.2f}"
    if config.compare:
        with others:
            baseline = decode(base, None, ids, max_new_tokens=most, sampler=sampler, seed=seed)
        # Top-k drafts do not change the text of a seed.
        same = "the same text" if baseline.tokens == tokens else "another text (a near-tie; see drafthead eval)"
        baseline_rate = len(baseline.tokens) / baseline.total_s
        line += f"; autoregressive {baseline_rate:.1f} tokens/s and {same}: speedup {rate / baseline_rate:.2f}"
    console.print()
    for note in (f"{line}; {other_processes_line(others.cores)}", *sampling_lines(base, sampler)):
        console.print(note, style="dim", soft_wrap=True)
