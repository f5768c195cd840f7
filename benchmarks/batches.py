"""What a head buys in a batch: v(n, b), the tree chosen for b rows, tokens per second beside batched plain decoding.

    python benchmarks/batches.py --head outputs/medusa_smollm2/head --json batches.json
    python benchmarks/batches.py --head DIR --rows 1,4,16 --prompts 32

For every number of rows b: the costs of a step of b rows with n nodes each; the tree that they make best for answers to
the suite's dev half; then all prompts of the test half, b at a time, by the head with that tree, by our
plain loop and by transformers' `generate` over stock modules (padded on the left), in turn. Speedup is over the faster
plain one. Greedy; answers of one length, so that no row waits for another.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from common import at_least, entry_point, generated, parser, save_record
from rich.table import Table

from drafthead.data.utils.display import Display
from drafthead.eval.prompts.prompt import conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.trees.answers import base_answers, text_ranks
from drafthead.eval.trees.calibrate import calibrate
from drafthead.eval.trees.cost_model import SIZES, measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

Answer = Callable[[list[list[int]]], object]


def chosen_tree(base: BaseModel, head: DraftHead, answers: list[Any], rows: int, sizes: list[int]) -> dict[str, Any]:
    """v(n, b) in milliseconds and the best tree for ``rows``; only its root where no drafts would pay."""
    costs = measure_costs(base, head, repeats=5, sizes=sizes, rows=rows)
    found = calibrate(answers, costs)
    pays = found.expected_speedup > 1
    return {
        "verify_ms": {n: 1e3 * seconds for n, seconds in costs.verify.items()},
        "draft_ms": 1e3 * costs.draft,
        "tree": found.tree if pays else TokenTree.chain(0),
        "expected_speedup": found.expected_speedup if pays else 1.0,
    }


def tokens_per_second(ways: dict[str, Answer], batches: list[list[list[int]]], new: int) -> dict[str, float]:
    """Medians over the batches, which every way answers in turn."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for batch in batches:
        for name, answer in ways.items():
            started = perf_counter()
            answer(batch)
            speeds[name].append(len(batch) * new / (perf_counter() - started))
    return {name: median(found) for name, found in speeds.items()}


def main(given: list[str] | None = None) -> int:
    """Entry point."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="a saved head")
    add("--rows", default="1,2,4,8,16", metavar="LIST", help="rows side by side; default 1,2,4,8,16")
    add("--suite", default="spec_bench_like", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--prompts", type=int, default=16, metavar="N", help="answered at every number of rows; default 16")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="of an answer")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "prompts", "max_new_tokens")
    base, head = load_base_and_head(arguments.head)
    stock, new, display = base.stock(), arguments.max_new_tokens, Display()
    texts = base_answers(
        base, suite=arguments.suite, limit=arguments.prompts, max_new_tokens=new, temperature=0.0, split="dev"
    )
    answers = list(text_ranks(head, texts))
    suite = load_suite(arguments.suite, arguments.prompts, 0, None, "test")
    prompts = [conversation_ids(base.tokenizer, prompt) for prompt in suite]
    found: dict[str, Any] = {}
    table = Table(
        "rows", "v(1)", "v(4) ms", "nodes", "expected", "head tok/s", "our loop", "stock generate", "speedup", "tau"
    )
    for rows in [int(part) for part in arguments.rows.split(",")]:
        display.line(f"{rows} rows side by side")
        chosen = chosen_tree(base, head, answers, rows, [n for n in SIZES if n * rows <= 256])
        config, steps = DraftConfig(tree=chosen["tree"]), []

        def drafted(batch: list[list[int]], config: DraftConfig = config, steps: list[Any] = steps) -> None:
            decoded = decode_batch(base, head, batch, max_new_tokens=new, draft_config=config, ignore_eos=True)
            steps += [step for result in decoded for step in result.steps]

        ways: dict[str, Answer] = {
            "head": drafted,
            "loop": partial(decode_batch, base, None, max_new_tokens=new, ignore_eos=True),
            "stock": partial(generated, stock, new=new),
        }
        batches = [prompts[first : first + rows] for first in range(0, len(prompts) - rows + 1, rows)]
        speeds = tokens_per_second(ways, batches, new)
        speedup = speeds["head"] / max(speeds["loop"], speeds["stock"])
        tau = sum(step.committed for step in steps) / len(steps)
        nodes = len(chosen.pop("tree"))
        found[str(rows)] = {**chosen, "nodes": nodes, "tokens_per_second": speeds, "speedup": speedup, "tau": tau}
        verify = chosen["verify_ms"]
        cells = (verify[1], verify.get(4, float("nan")), chosen["expected_speedup"], *speeds.values(), speedup, tau)
        one, four, expected, *others = (f"{value:.3g}" for value in cells)
        table.add_row(str(rows), one, four, str(nodes), expected, *others)
    display.console.print(table)
    save_record(arguments, "batches", {"rows": found})
    return 0


if __name__ == "__main__":
    entry_point(main)
