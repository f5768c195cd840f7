"""Batched generation that keeps its batch full, against transformers' ``generate`` at the same batch size.

    python benchmarks/generation.py [--batch 32] [--prompts 96] [--max-new-tokens 128] [--json FILE]

Both answer the same prompts greedily with the same prepacked modules. ``generate`` gets them sorted by length and
left-padded, in batches; a batch lasts as long as its longest answer. One process; each way is timed ``--repeats``
times in turn, and the median is reported.
"""

from statistics import median
from time import perf_counter

from common import entry_point, generated, parser, save_record
from rich.console import Console
from rich.table import Table

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.text.sources import SourceConfig, load_prompts
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.corpus import generate_answers
from drafthead.models.heads.parts.loading import load_base


def ours(base: BaseModel, prompts: list[list[int]], batch: int, max_new: int, keep_hidden_states: bool) -> int:
    """Answer all prompts; returns the answer tokens."""
    sampler = SamplerConfig(max_new_tokens=max_new)
    answers = generate_answers(
        base, list(enumerate(prompts)), sampler, batch_size=batch, keep_hidden_states=keep_hidden_states
    )
    return sum(len(a.input_ids) - a.boundary for a in answers)


def transformers(base: BaseModel, prompts: list[list[int]], batch: int, max_new: int) -> int:
    """The same with ``generate``; padding after EOS is not counted."""
    eos, ordered = min(base.eos_ids), sorted(prompts, key=len)
    batches = [ordered[n : n + batch] for n in range(0, len(ordered), batch)]
    answers = [answer for part in batches for answer in generated(base.model, part, max_new, eos)]
    return sum(answer.index(eos) + 1 if eos in answer else len(answer) for answer in answers)


def main(given: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__)
    options.add_argument("--base", default=EMBEDDED)
    for name, default in (("batch", 32), ("prompts", 96), ("max-new-tokens", 128), ("repeats", 3)):
        options.add_argument(f"--{name}", type=int, default=default)
    arguments = options.parse_args(given)
    base = load_base(arguments.base)
    source = SourceConfig(kind="embedded", name="questions")
    messages = load_prompts([source], seed=0, limit=arguments.prompts)
    prompts = [base.prompt_ids(m) for m in messages]
    batch, new = arguments.batch, arguments.max_new_tokens
    ways = {
        "drafthead": lambda p: ours(base, p, batch, new, keep_hidden_states=False),
        "drafthead, keeping features": lambda p: ours(base, p, batch, new, keep_hidden_states=True),
        "transformers generate": lambda p: transformers(base, p, batch, new),
    }
    tokens: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[: batch // 4])  # type: ignore[no-untyped-call]
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            started = perf_counter()
            tokens[name] = way(prompts)
            base.synchronise()
            times[name].append(perf_counter() - started)
    table, found = Table("way", "tokens/s", "tokens", "seconds", title=f"greedy, batch {batch}"), {}
    for name, count in tokens.items():
        seconds = median(times[name])
        found[name] = {"tokens": count, "seconds": seconds, "tokens_per_second": count / seconds}
        table.add_row(name, f"{count / seconds:.0f}", str(count), f"{seconds:.1f}")
    Console().print(table)
    save_record(arguments, "generation", {"results": found})


if __name__ == "__main__":
    entry_point(main)
