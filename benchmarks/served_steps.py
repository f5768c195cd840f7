"""Measure a step in a serving engine, with and without a head's chains, and the acceptance at which drafting pays.

    python benchmarks/served_steps.py --head outputs/eagle3_smollm2_served/head --engine llamacpp --bases f32,q8_0

All servers of one base run at the same time and take turns, prompt by prompt. A chain pays if the mean accepted length
is above "break-even", the cost of its step in plain steps. Break-even hardly depends on the head's training. llama.cpp
also reports the time for n new tokens after a cached prompt: v(n), with the logits of the last token only. The rest of
a step is drafting, sampling and the server.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import at_least, entry_point, listed, parser, print_table, save_record

from drafthead.data.prompts.suites import load_suite
from drafthead.eval.config import ENGINES, EngineConfig, EnginesConfig
from drafthead.eval.engines.clients import EngineServer, LlamaCppServer
from drafthead.eval.engines.served import PLAIN, EngineStart, check_drafts, format_for, method_of
from drafthead.eval.metrics.steps import mean_accepted_length, step_table
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.formats.gguf.gguf_files import KINDS
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head

WIDTHS = (1, 2, 3, 4, 5)
"""Numbers of tokens whose pass is timed."""
CONTEXT = 128


def main(given: Sequence[str] | None = None) -> None:
    """Print a table per base and write the record."""
    options = parser(__doc__)
    options.add_argument("--head", required=True)
    options.add_argument("--engine", default="llamacpp", help=f"one of {', '.join(ENGINES[:2])}")
    options.add_argument("--python", default="", help="the interpreter in which the engine is installed")
    options.add_argument("--bases", default="f32,f16,q8_0,q4_0", help="number formats of llama.cpp's base file")
    options.add_argument("--drafts", default="1,2,3")
    options.add_argument("--suite", default="spec_bench_like")
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = options.parse_args(given)
    at_least(arguments, 1, "prompts", "threads")
    engine = listed("engine", arguments.engine, ENGINES[:2])[0]
    kinds = listed("bases", arguments.bases, list(KINDS)) if engine == "llamacpp" else ["f32"]
    lengths = [int(n) for n in listed("drafts", arguments.drafts, [str(n) for n in range(1, 9)])]
    base, head = load_base_and_head(arguments.head)
    suite = load_suite(arguments.suite, arguments.prompts, 0, split="test")
    prompts = [base.prompt_ids(prompt.messages) for prompt in suite]
    results: dict[str, Any] = {}
    for kind in kinds:
        settings = EnginesConfig(threads=arguments.threads)
        setattr(settings, engine, EngineConfig(python=arguments.python, base_type=kind))
        results[kind] = measure(head, engine, settings, lengths, prompts, arguments.max_new_tokens)
        verify = results[kind]["verify_s"]
        rows = [
            {"drafts": n or "none", **row, "v(n + 1) s": verify.get(n + 1)}
            for n, row in results[kind]["chains"].items()
        ]
        print_table(f"{engine}, {kind}", rows)
        save_record(arguments, "served_steps", {"bases": results})  # after every base, in case of an interruption


def measure(
    head: DraftHead, engine: str, settings: EnginesConfig, lengths: list[int], prompts: list[list[int]], new: int
) -> dict[str, Any]:
    """Return the costs per chain length (0: no drafts), and "verify_s" by number of tokens."""
    target = format_for(engine, head)
    for length in lengths:
        check_drafts(head, length)
    with ExitStack() as stack:
        published = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "published"
        target.export(target.fitted(head), published, torch.float32)
        servers: dict[int, EngineServer] = {}
        for length in (0, *lengths):
            method = method_of(target, head)
            start = EngineStart(stack, engine, settings, head.base, published, method, max(1, length))
            server = start.server("" if length else PLAIN)
            assert server is not None
            servers[length] = server
            server.answer(prompts[0], 8)  # the first answer includes set-up that later ones do not need
        answers: dict[int, list[DecodeResult]] = {length: [] for length in servers}
        for number, ids in enumerate(prompts):
            first = number % len(servers)  # another server starts each round
            for length in [*servers][first:] + [*servers][:first]:
                answers[length].append(servers[length].answer(ids, new))
        plain = servers[0]
        widths = verify_seconds(plain) if isinstance(plain, LlamaCppServer) else {}
    chains = {length: chain_costs(results) for length, results in answers.items()}
    for row in chains.values():
        row["break_even"] = row["step_s"] / chains[0]["step_s"]
    return {"chains": chains, "verify_s": widths}


def chain_costs(answers: list[DecodeResult]) -> dict[str, float]:
    """Return speed, step time and accepted length over all answers, prefill excluded."""
    seconds = sum(answer.total_s - answer.prefill_s for answer in answers)
    steps = sum(len(answer.steps) for answer in answers)
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    return {
        "tokens_per_second": tokens / seconds,
        "step_s": seconds / steps,
        "mean_accepted_length": mean_accepted_length(step_table({"": answers})),
    }


def verify_seconds(server: LlamaCppServer, repeats: int = 9) -> dict[int, float]:
    """Return the median seconds of a pass over n new tokens after a cached context."""
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(100, 4000, (CONTEXT,), generator=generator).tolist()
    times: dict[int, list[float]] = {n: [] for n in WIDTHS}
    server.read(context)
    for _ in range(repeats):
        for width in WIDTHS:
            new = torch.randint(100, 4000, (width,), generator=generator).tolist()
            processed, seconds = server.read([*context, *new])
            if processed == width:  # otherwise the context was not taken from the cache
                times[width].append(seconds)
    return {width: median(seconds) for width, seconds in times.items() if seconds}


if __name__ == "__main__":
    entry_point(main)
