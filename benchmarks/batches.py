"""Measure the speedup of a head in batches: step costs v(n, b), the best tree for b rows, tokens per second.

    python benchmarks/batches.py --head outputs/medusa_smollm2/head --json batches.json
    python benchmarks/batches.py --head DIR --rows 1,4,16 --prompts 32

For every batch size b: measure the cost of a step with n nodes in each of b rows, choose the best tree for these costs
on answers to the dev half of the suite, then answer the prompts of the test half, b at a time. The head, our
autoregressive loop and transformers' `generate` over stock modules (padded on the left) take turns. The speedup is over
the faster autoregressive decoder. Decoding is greedy. All answers have the same length, so no row waits for another.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from common import at_least, entry_point, generated, numbers, parser, print_table, save_record

from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import load_suite
from drafthead.eval.config import SuiteConfig
from drafthead.eval.trees.calibrate import calibrate
from drafthead.eval.trees.cost_model import SIZES, measure_costs
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.eval.trees.simulate import text_ranks
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

Decoder = Callable[[list[list[int]]], object]


def tokens_per_second(decoders: dict[str, Decoder], batches: list[list[list[int]]], new: int) -> dict[str, float]:
    """Return the median speed of every decoder; all decoders answer each batch in turn."""
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for batch in batches:
        for name, decoder in decoders.items():
            started = perf_counter()
            decoder(batch)
            speeds[name].append(len(batch) * new / (perf_counter() - started))
    return {name: median(values) for name, values in speeds.items()}


def measure(head: DraftHead, ranks: list[Any], prompts: list[list[int]], rows: int, new: int) -> dict[str, Any]:
    """Measure batches of ``rows`` prompts; ``ranks`` of the dev half's true tokens choose the tree."""
    base, steps = head.base_model, []
    costs = measure_costs(base, head, repeats=5, sizes=[n for n in SIZES if n * rows <= 256], rows=rows)
    calibration = calibrate(ranks, costs)
    pays = calibration.expected_speedup > 1
    tree = calibration.tree if pays else TokenTree.chain(0)

    def draft(batch: list[list[int]]) -> None:
        config = DraftConfig(tree=tree)
        for result in decode_batch(base, head, batch, max_new_tokens=new, draft_config=config, ignore_eos=True):
            steps.extend(result.steps)

    decoders: dict[str, Decoder] = {
        "head": draft,
        "loop": partial(decode_batch, base, None, max_new_tokens=new, ignore_eos=True),
        "stock": partial(generated, base.stock(), new=new),
    }
    batches = [prompts[first : first + rows] for first in range(0, len(prompts) - rows + 1, rows)]
    speeds = tokens_per_second(decoders, batches, new)
    return {
        "verify_ms": {n: 1e3 * seconds for n, seconds in costs.verify.items()},
        "draft_ms": 1e3 * costs.draft,
        "nodes": len(tree),
        "expected_speedup": calibration.expected_speedup if pays else 1.0,
        "speedup": speeds["head"] / max(speeds["loop"], speeds["stock"]),
        "tau": sum(step.committed for step in steps) / len(steps),
        "tokens_per_second": speeds,
    }


def main(given: list[str] | None = None) -> None:
    """Measure every batch size."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="a saved head")
    add("--rows", default="1,2,4,8,16", metavar="LIST", help="batch sizes; default 1,2,4,8,16")
    add("--suite", default="spec_bench_like", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--prompts", type=int, default=16, metavar="N", help="answered at every batch size; default 16")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="answer length")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "prompts", "max_new_tokens")
    sizes, new = numbers("rows", arguments.rows), arguments.max_new_tokens
    base, head = load_base_and_head(arguments.head)
    config = SuiteConfig(suite=arguments.suite, limit=arguments.prompts, max_new_tokens=new)
    answers = base_answers(base, config, split="dev")
    ranks = list(text_ranks(head, answers))
    suite = load_suite(arguments.suite, arguments.prompts, 0, None, "test")
    prompts = [conversation_ids(base.tokenizer, prompt) for prompt in suite]
    results = {rows: measure(head, ranks, prompts, rows, new) for rows in sizes}
    table = [
        {"rows": rows, "v(1) ms": row["verify_ms"][1], "v(4) ms": row["verify_ms"].get(4)}
        | {key: row[key] for key in ("nodes", "expected_speedup", "speedup", "tau")}
        | {f"{name} tok/s": speed for name, speed in row["tokens_per_second"].items()}
        for rows, row in results.items()
    ]
    print_table(f"{arguments.suite}, greedy", table)
    save_record(arguments, "batches", {"rows": {str(rows): row for rows, row in results.items()}})


if __name__ == "__main__":
    entry_point(main)
