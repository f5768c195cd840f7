"""Compare trees by cost with the head's fixed tree, the best chain and dynamic trees, in one interleaved run.

    python benchmarks/cost_trees.py --head outputs/medusa_smollm2/head --json cost_trees.json
    python benchmarks/cost_trees.py --head DIR --lookup 8 --suite spec_bench_like --limit 24
    python benchmarks/cost_trees.py --head DIR --rows 16 --limit 32

On answers to the dev half of the suite, it measures the costs of a step on this machine, fits the acceptance of drafts,
and chooses the fixed tree, the chain, and the size of dynamic trees: the mean size of trees by cost. Then all methods
answer the test half in turn, greedily. The tables have tau, nodes and milliseconds per step (for trees by cost also
those that were expected), the speedup over decoding without drafts, and the speedup by task.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from common import at_least, entry_point, parser, print_table, save_record

from drafthead.data.answers.store import Answer
from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import load_suite
from drafthead.eval.config import SuiteConfig
from drafthead.eval.metrics.steps import mean_accepted_length, speedup, speedup_interval, step_table
from drafthead.eval.timing.interleaved import Decoder, TimedResults, run_interleaved
from drafthead.eval.timing.methods import shared_times
from drafthead.eval.trees.acceptance_fit import calibration_error, candidate_fates, with_acceptance
from drafthead.eval.trees.calibrate import calibrate
from drafthead.eval.trees.cost_model import batch_context, measure_costs
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.eval.trees.simulate import simulate_texts, text_ranks
from drafthead.files.local import finite
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_tree import CostTree, TreeCosts
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DynamicTree
from drafthead.models.decoding.loop import decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeResult, StepRecord
from drafthead.models.drafters.combined import CombinedDrafter, union
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.token_tree import TokenTree
from drafthead.system.machine import other_processes_line

PLAIN, COST = "autoregressive", "by cost"
Methods = dict[str, tuple[Drafter, DraftConfig]]


def prepare(base: BaseModel, head: DraftHead, texts: Sequence[Answer], rows: int) -> int:
    """Give ``head`` its tree and its costs for batches of ``rows``, by the dev half's answers ``texts``; return the
    length of the best chain."""
    context = batch_context([text.middle for text in texts], rows)
    costs = measure_costs(base, head, context, rows=rows)
    ranks = text_ranks(head, texts)
    calibration = calibrate(ranks, costs)
    head.tree = calibration.tree if calibration.expected_speedup > 1 else TokenTree.chain(0)
    measured = TreeCosts(costs={rows: costs}, speedup={rows: calibration.expected_speedup})
    head.tree_costs = with_acceptance(base, head, texts, Sampler(), measured)
    tables = [accept_probs_of_ranks(answer, 1) for answer in ranks]
    tokens = {n: simulate_acceptance(tables, TokenTree.chain(n)).mean_accepted_length for n in range(head.depth + 1)}
    return max(tokens, key=lambda n: costs.speedup(tokens[n], n + 1, n))


def methods(base: BaseModel, head: DraftHead, chain: int, lookup: int, texts: Sequence[Answer]) -> Methods:
    """Return the drafters to compare, by name. Dynamic trees have as many nodes as trees by cost have on average."""
    assert head.tree is not None and head.tree_costs is not None
    by_cost = CostTree(costs=head.tree_costs, depth=max(head.depth, lookup))
    found: Methods = {COST: (head, DraftConfig(tree=replace(by_cost, depth=head.depth)))}
    if chain:
        found[f"chain of {chain}"] = head, DraftConfig(tree=TokenTree.chain(chain))
    if len(head.tree) > 1:
        found[f"fixed, {len(head.tree)} nodes"] = head, DraftConfig(tree=head.tree)
    sizes = simulate_texts(base, head, texts, found[COST][1], Sampler()).nodes or {}
    nodes = max(2, round(sum(size * share for size, share in sizes.items())))
    found[f"dynamic, {nodes} nodes"] = head, DraftConfig(tree=DynamicTree(nodes=nodes, depth=head.depth))
    if lookup:
        limited = CombinedDrafter([head, PromptLookup(lookup, per_match=2)], nodes=max(2, len(head.tree)))
        found["fixed + lookup"] = limited, DraftConfig(tree=union(limited.trees))
        found[f"{COST} + lookup"] = CombinedDrafter([head, PromptLookup(lookup)]), DraftConfig(tree=by_cost)
    return found


def answer(
    base: BaseModel,
    drafter: Drafter | None,
    config: DraftConfig | None,
    rows: int,
    new: int,
    prompts: Sequence[list[int]],
) -> list[DecodeResult]:
    """Answer ``prompts``, ``rows`` at a time; a step's time is shared by its answers."""
    options: dict[str, Any] = {"max_new_tokens": new, "draft_config": config, "batch_size": rows}
    results = decode_batch(base, drafter, prompts, timed=True, **options)
    return results if rows == 1 else [shared_times(result) for result in results]


def row_of(results: Sequence[DecodeResult]) -> dict[str, Any]:
    """Return means per step: nodes with the root, tokens and milliseconds, and those that trees by cost expected."""
    steps = [step for result in results for step in result.steps]

    def average(values: Sequence[float]) -> float:
        known = [value for value in values if value == value]
        return sum(known) / len(known) if known else float("nan")

    expecting: list[StepRecord] = [step for step in steps if step.expected == step.expected]
    return {
        "nodes": 1 + average([step.proposed for step in steps]),
        "draft_ms": 1e3 * average([step.draft_s for step in steps]),
        "step_ms": 1e3 * average([step.total_s for step in steps]),
        "without_drafts": average([float(step.proposed == 0) for step in steps]),
        "expected_tokens": average([step.expected for step in expecting]),
        "tokens": average([step.committed for step in expecting]),
        "expected_ms": 1e3 * average([step.expected_s / step.rows for step in expecting]),
        "measured_ms": 1e3 * average([step.total_s for step in expecting]),
    }


def summary(timed: TimedResults) -> list[dict[str, Any]]:
    """Return a row per method, with its speedup over plain decoding in all and by task."""
    table = step_table(timed.results, timed.prompts, timed.turns)
    rows = []
    for name, results in timed.results.items():
        run, plain = (table[table.method == each] for each in (name, PLAIN))
        same = sum(a.tokens == b.tokens for a, b in zip(results, timed.results[PLAIN], strict=True))
        tasks = {
            str(task): speedup(run[run.task == task], plain[plain.task == task]) for task in dict.fromkeys(run.task)
        }
        rows.append(
            {"method": name, "tau": mean_accepted_length(run), **row_of(results), "same": same, "of": len(results)}
            | {"speedup": speedup(run, plain), "interval_95": speedup_interval(run, plain), "by_task": tasks}
        )
    return rows


def main(given: Sequence[str] | None = None) -> None:
    """Prepare the head, answer the prompts with all methods, and print the tables."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="a saved head")
    add("--lookup", type=int, default=8, metavar="TOKENS", help="drafts of prompt lookup; 0: none; default 8")
    add("--rows", type=int, default=1, help="prompts to answer at once; default 1")
    add("--suite", default="spec_bench_like", metavar="NAME", help="prompts, as in `drafthead eval`")
    add("--limit", type=int, default=24, metavar="N", help="prompts of each half; default 24")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="length of answers; default 64")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "rows", "limit")
    at_least(arguments, 2, "max_new_tokens")
    at_least(arguments, 0, "lookup")
    base, head = load_base_and_head(arguments.head)
    config = SuiteConfig(suite=arguments.suite, limit=arguments.limit, max_new_tokens=arguments.max_new_tokens)
    texts = base_answers(base, config, split="dev")
    chain = prepare(base, head, texts, arguments.rows)
    compared = methods(base, head, chain, arguments.lookup, texts)
    run = partial(answer, base)
    how = arguments.rows, arguments.max_new_tokens
    decoders: dict[str, Decoder] = {PLAIN: partial(run, None, None, *how)}
    decoders |= {name: partial(run, *method, *how) for name, method in compared.items()}
    timed = run_interleaved(
        load_suite(arguments.suite, arguments.limit, 0, None, "test"),
        lambda prompt, answers: conversation_ids(base.tokenizer, prompt, answers, base.config.chat_template_kwargs),
        decoders,
        None,
        0,
        lambda done, total: None,
        batch_size=arguments.rows,
    )
    rows = summary(timed)
    plain = zip(timed.ids, timed.results[PLAIN], strict=True)
    fates = candidate_fates(base, head, [Answer.of(ids + each.tokens, len(ids)) for ids, each in plain], Sampler())
    assert head.tree_costs is not None
    error = None if fates is None else calibration_error(head.tree_costs.acceptance, fates)
    shown = ("method", "tau", "nodes", "draft_ms", "step_ms", "without_drafts", "expected_tokens", "expected_ms")
    title = f"{arguments.suite}, {arguments.rows} at once, greedy; {other_processes_line(timed.other_processes_cores)}"
    table = [{key: row[key] for key in (*shown, "speedup")} | {"same": f"{row['same']} of {row['of']}"} for row in rows]
    print_table(title, table)
    print_table("speedup by task", [{"method": row["method"]} | row["by_task"] for row in rows])
    record: dict[str, Any] = {"rows": rows, "calibration_error": error, "tree_costs": asdict(head.tree_costs)}
    save_record(arguments, "cost_trees", finite(record | {"other_processes_cores": timed.other_processes_cores}))


if __name__ == "__main__":
    entry_point(main)
