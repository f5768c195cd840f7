"""What a step costs in a serving engine, plainly and with a head's chains, and the acceptance that would pay.

    python benchmarks/served_steps.py --head outputs/eagle3_smollm2_served/head --engine llamacpp --bases f32,q8_0

Every server of one base stands at the same time and all take turns, prompt by prompt. A chain pays when the mean
accepted length is above the cost of its step in plain steps ("break-even"), which hardly depends on the head's
training. llama.cpp also says what n new tokens cost behind a cached prompt: v(n), with the last one's logits alone, so
that the rest of a step is drafting, sampling and the server.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import at_least, entry_point, listed, parser, save_record
from rich.console import Console
from rich.table import Table

from drafthead.eval.config import ENGINES, EngineConfig, EnginesConfig
from drafthead.eval.engines.served import EngineStart, check_drafts, export, format_for, method_of
from drafthead.eval.engines.servers import EngineServer, LlamaCppServer
from drafthead.eval.metrics.acceptance import mean_accepted_length
from drafthead.eval.prompts.suites import load_suite
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.step_log import DecodeResult
from drafthead.models.formats.gguf.gguf_files import KINDS
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head

WIDTHS = (1, 2, 3, 4, 5)
"""Numbers of tokens whose pass is timed."""
CONTEXT = 128


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for every base and chain; write the record."""
    options = parser(__doc__)
    options.add_argument("--head", required=True)
    options.add_argument("--engine", default="llamacpp", help=f"one of {', '.join(ENGINES[:2])}")
    options.add_argument("--python", default="", help="the interpreter that has the engine")
    options.add_argument("--bases", default="f32,f16,q8_0,q4_0", help="of llama.cpp's base file")
    options.add_argument("--drafts", default="1,2,3")
    options.add_argument("--suite", default="spec_bench_like")
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args(argv)
    at_least(given, 1, "prompts", "threads")
    engine = listed("engine", given.engine, ENGINES[:2])[0]
    kinds = listed("bases", given.bases, list(KINDS)) if engine == "llamacpp" else ["f32"]
    lengths = [int(n) for n in listed("drafts", given.drafts, [str(n) for n in range(1, 9)])]
    base, head = load_base_and_head(given.head)
    texts = load_suite(given.suite, given.prompts, 0, split="test")
    prompts = [base.prompt_ids(prompt.messages) for prompt in texts]
    found: dict[str, Any] = {}
    for kind in kinds:
        settings = EnginesConfig(threads=given.threads)
        setattr(settings, engine, EngineConfig(python=given.python, base_type=kind))
        found[kind] = measure(base, head, engine, settings, lengths, prompts, given.max_new_tokens)
        Console().print(table(f"{engine}, {kind}", found[kind]))
        save_record(given, "served_steps", {"bases": found})  # an interruption keeps those that are done


def measure(
    base: BaseModel,
    head: DraftHead,
    engine: str,
    settings: EnginesConfig,
    lengths: list[int],
    prompts: list[list[int]],
    new: int,
) -> dict[str, Any]:
    """Per chain (0: plainly) the seconds of a step, tokens/s and accepted length; "verify_s" by number of tokens."""
    target = format_for(engine, head)
    for length in lengths:
        check_drafts(head, length)
    with ExitStack() as stack:
        published = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "published"
        export(head, target, published)
        servers: dict[int, EngineServer] = {}
        for length in (0, *lengths):
            method = method_of(target, head)
            start = EngineStart(stack, engine, settings, base, published, method, max(1, length))
            server = start.server(plain=length == 0)
            assert server is not None
            servers[length] = server
            server.answer(prompts[0], 8)  # the first answer pays for what later ones find
        answers: dict[int, list[DecodeResult]] = {length: [] for length in servers}
        for number, ids in enumerate(prompts):
            order = list(servers)[number % len(servers) :] + list(servers)[: number % len(servers)]
            for length in order:
                answers[length].append(servers[length].answer(ids, new))
        plain = servers[0]
        widths = verify_seconds(base, plain) if isinstance(plain, LlamaCppServer) else {}
    chains = {length: chain_costs(found) for length, found in answers.items()}
    for row in chains.values():
        row["break_even"] = row["step_s"] / chains[0]["step_s"]
    return {"chains": chains, "verify_s": widths}


def chain_costs(answers: list[DecodeResult]) -> dict[str, float]:
    """Of all answers together, the prompts' own passes left out."""
    seconds = sum(answer.total_s - answer.prefill_s for answer in answers)
    steps = sum(len(answer.steps) for answer in answers)
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    return {
        "tokens_per_second": tokens / seconds,
        "step_s": seconds / steps,
        "mean_accepted_length": mean_accepted_length(answers).value,
    }


def verify_seconds(base: BaseModel, server: LlamaCppServer, repeats: int = 9) -> dict[int, float]:
    """Seconds of a pass over n new tokens behind a cached context: medians."""
    generator = torch.Generator().manual_seed(0)
    context, times = torch.randint(100, 4000, (CONTEXT,), generator=generator).tolist(), {n: [] for n in WIDTHS}
    server.read(context)
    for _ in range(repeats):
        for width in WIDTHS:
            new = torch.randint(100, 4000, (width,), generator=generator).tolist()
            read, seconds = server.read([*context, *new])
            if read == width:
                times[width].append(seconds)
    return {width: median(found) for width, found in times.items() if found}


def table(title: str, found: dict[str, Any]) -> Table:
    """A row a chain."""
    shown = Table("drafts", "tokens/s", "ms a step", "break-even", "accepted length", "v(n + 1), ms", title=title)
    for length, row in found["chains"].items():
        width = found["verify_s"].get(length + 1)
        shown.add_row(
            str(length or "plain"),
            f"{row['tokens_per_second']:.1f}",
            f"{1e3 * row['step_s']:.1f}",
            f"{row['break_even']:.2f}",
            f"{row['mean_accepted_length']:.2f}",
            "" if width is None else f"{1e3 * width:.1f}",
        )
    return shown


if __name__ == "__main__":
    entry_point(main)
