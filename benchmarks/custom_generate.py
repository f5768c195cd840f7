"""Measure what `model.generate(..., custom_generate=...)` costs over our own loop, per step, with the same drafts.

    python benchmarks/custom_generate.py --head outputs/medusa_smollm2/head --json custom_generate.json
    python benchmarks/custom_generate.py --head DIR --rows 8 --max-new-tokens 128 --repeats 20

The bare decoding loop and `generate` answer the same prompts with the same base, head, tree and seeds, and take turns.
All tokens must be equal. The overhead is the median difference of a pair, divided by the steps.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import at_least, entry_point, generated, parser, print_table, save_record
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from drafthead.eval.prompts.prompt import conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.models.decoding.loop import EXACT, DecodeLoop, DecodingSequence, default_draft_config
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeConfig
from drafthead.models.drafters.custom_generate import custom_generate
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head


class Never(StoppingCriteria):  # type: ignore[misc]
    """A criterion that is called for every token and stops nothing."""

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


NUCLEUS = {"temperature": 0.8, "top_p": 0.9}
CASES: dict[str, tuple[Sampler, dict[str, Any]]] = {
    "greedy": (Sampler(), {}),
    "greedy, own stopping criterion": (Sampler(), {"stopping_criteria": StoppingCriteriaList([Never()])}),
    "sampled": (Sampler(**NUCLEUS), {"do_sample": True, "top_k": 0, **NUCLEUS}),
    "repetition penalty": (Sampler(repetition_penalty=1.2), {"repetition_penalty": 1.2}),
}
"""Name -> sampler of the loop, arguments of ``generate``."""


def decoded(head: DraftHead, prompts: list[list[int]], sampler: Sampler, new: int) -> tuple[list[list[int]], int]:
    """Return the answers of the bare loop and the number of steps."""
    config = DecodeConfig(draft_config=default_draft_config(head, len(prompts)), sampler=sampler, rule=EXACT)
    loop = DecodeLoop(
        base=head.base,
        drafter=head,
        config=config,
        max_new_tokens=new,
        batch_size=len(prompts),
        capacity=max(map(len, prompts)) + new,
    )
    seeds = torch.randint(2**62, (len(prompts),)).tolist()  # as `generate` draws them
    rows = [DecodingSequence(number=n, prompt=prompts[n], seed=seeds[n]) for n in range(len(prompts))]
    for _ in loop.run(rows):
        pass
    return [row.answer for row in rows], max(len(row.steps) for row in rows)


def measure(
    loop: Callable[[], tuple[list[list[int]], int]], generate: Callable[[], list[list[int]]], repeats: int
) -> dict[str, Any]:
    """Return seconds per step of the loop, and the overhead of ``generate`` per step, from pairs in turn."""
    pairs, steps = [], 1
    for repeat in range(repeats + 1):
        seconds: dict[str, float] = {}
        for way in ("loop", "generate") if repeat % 2 else ("generate", "loop"):
            torch.manual_seed(0)
            started = perf_counter()
            if way == "loop":
                answers, steps = loop()
            else:
                tokens = generate()
            seconds[way] = perf_counter() - started
        assert tokens == answers, "generate and the loop must give the same answers"
        pairs.append(seconds)
    pairs = pairs[1:]  # the first is a warm-up
    step_s = median(pair["loop"] for pair in pairs) / steps
    overhead_s = median(pair["generate"] - pair["loop"] for pair in pairs) / steps
    return {"steps": steps, "step_ms": 1e3 * step_s, "overhead_ms": 1e3 * overhead_s, "overhead": overhead_s / step_s}


def main(given: list[str] | None = None) -> None:
    """Measure every case."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="a saved head")
    add("--suite", default="builtin", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--rows", type=int, default=1, metavar="N", help="prompts, answered as one batch; default 1")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="answer length")
    add("--repeats", type=int, default=10, metavar="N", help="pairs per case; default 10")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "rows", "max_new_tokens", "repeats")
    base, head = load_base_and_head(arguments.head)
    suite = load_suite(arguments.suite, arguments.rows)
    prompts, new = [conversation_ids(base.tokenizer, prompt) for prompt in suite], arguments.max_new_tokens
    results, drafted = {}, {"custom_generate": custom_generate(head), "min_new_tokens": None}
    for name, (sampler, settings) in CASES.items():
        results[name] = measure(
            partial(decoded, head, prompts, sampler, new),
            partial(generated, base.model, prompts, new, **drafted, **settings),
            arguments.repeats,
        )
    title = f"generate over the bare loop, {len(prompts)} rows of {arguments.suite}"
    print_table(title, [{"case": name, **row} for name, row in results.items()])
    save_record(arguments, "custom_generate", {"cases": results})


if __name__ == "__main__":
    entry_point(main)
