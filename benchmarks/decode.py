"""What the parts of a decoding step cost on this machine.

    python benchmarks/decode.py --head outputs/medusa_smollm2/head --json now.json
    python benchmarks/decode.py --head DIR --context 2000

v(n), one verification pass over n tokens, for n = 1..32; c, drafting, by depth; o, the rest of the loop. v(n) is
divided by the fastest way to one token: our pass over one, or a token of transformers' generate, over our modules or
over stock ones. All take turns, so that a drift of the machine hits all alike; nothing else should run.

Whole answers beside those of other methods: `drafthead eval head=DIR baselines=[...]`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from common import at_least, entry_point, parser, save_record
from rich.table import Table

from drafthead.data.utils.display import Display
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.eval.trees.cost_model import CostModel, measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step_log import DecodeResult
from drafthead.models.heads.parts.loading import load_base_and_head

SIZES = range(1, 33)
ROUND = 3
"""Repeats of ``measure_costs`` between two looks at the other ways to a token."""
TOKENS = 8
"""Autoregressive tokens of each way in a round."""
WARM = 2
"""First steps of an answer that do not count."""


def measure_steps(
    base: BaseModel, drafter: Drafter, *, context: int, repeats: int, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """v(n), c and o of ``measure_costs`` and the autoregressive ways to a token, in rounds that take turns.

    Returns:
        "costs", which ``CostModel.from_json`` reads; "one_token", medians of seconds: of v(1) ("verify_s", logits and
        argmax included, without the loop), a whole step of our autoregressive loop ("autoregressive_s"), a token of
        ``generate`` over our modules ("transformers_s") and over stock ones ("stock_s"), and which of them is the
        fastest, but for our loop ("denominator"); "verify_ratio": v(n) over that one.
    """
    stock, rounds = base.stock(), -(-repeats // ROUND)
    found: list[CostModel] = []
    times: dict[str, list[float]] = {"autoregressive_s": [], "transformers_s": [], "stock_s": []}
    for number in range(rounds):
        found.append(measure_costs(base, drafter, context, ROUND, SIZES))
        # Timing does not depend on the ids.
        ids = [n % base.vocab_size for n in range(found[0].context)]
        never = base.vocab_size  # as EOS, an id that is never drawn
        generate = partial(transformers_generate, base, ids, TOKENS + 1, eos_token_id=never)
        ways: dict[str, Callable[[], DecodeResult]] = {
            "autoregressive_s": partial(decode, base, None, ids, max_new_tokens=TOKENS + 1, ignore_eos=True),
            "transformers_s": generate,
            "stock_s": partial(generate, model=stock),
        }
        for name, way in ways.items():
            times[name] += [step.total_s for step in way().steps[WARM:]]
        on_progress(number + 1, rounds)
    tables = [costs.draft_by_depth or [] for costs in found]
    costs = replace(
        found[0],
        verify={n: median(costs.verify[n] for costs in found) for n in found[0].verify},
        draft=median(costs.draft for costs in found),
        overhead=median(costs.overhead for costs in found),
        plain_overhead=median(costs.plain_overhead or 0.0 for costs in found),
        draft_by_depth=[median(depth) for depth in zip(*tables, strict=True)] or None,
    )
    one = {"verify_s": costs.verify[1]} | {name: median(seconds) for name, seconds in times.items()}
    fastest = min(("verify_s", "transformers_s", "stock_s"), key=lambda way: one[way])
    return {
        "costs": costs.to_json(),
        "one_token": one | {"denominator": fastest},
        "verify_ratio": {str(n): seconds / one[fastest] for n, seconds in costs.verify.items()},
    }


def main(given: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="head folder or Hub repository; it names its base")
    add("--context", type=int, default=200, metavar="N", help="tokens before v(n)")
    add("--repeats", type=int, default=15, metavar="N", help="times that every pass is timed; medians count")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "context", "repeats")
    display = Display()
    with display.stage(f"head {arguments.head}"):
        base, head = load_base_and_head(arguments.head)
    with display.stage("costs of a step"):
        progress = partial(display.progress, "rounds")
        found = measure_steps(base, head, context=arguments.context, repeats=arguments.repeats, on_progress=progress)
    show(display, found)
    save_record(arguments, "decode", found)


def show(display: Display, record: dict[str, Any]) -> None:
    """v(n), c, o, and what v(n) is divided by."""
    costs, one = CostModel.from_json(record["costs"]), record["one_token"]
    ways = ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in one.items() if way.endswith("_s"))
    display.line(f"one autoregressive token: {ways}; v(1) is {one['denominator']}")
    table = Table("n", "v(n) ms", "v(n)/v(1)", title=f"verification after {costs.context} tokens")
    for n, seconds in costs.verify.items():
        table.add_row(str(n), f"{1e3 * seconds:.2f}", f"{record['verify_ratio'][str(n)]:.2f}")
    display.console.print(table)
    by_depth = ", ".join(f"{d}: {1e3 * seconds:.2f}" for d, seconds in enumerate(costs.draft_by_depth or []) if d)
    display.line(f"c, drafting a tree: {1e3 * costs.draft:.2f} ms, {costs.draft / one[one['denominator']]:.3f} v(1)")
    display.line(f"   a chain by depth, ms: {by_depth}")
    share = costs.overhead / (costs.verify_at(5) + costs.draft + costs.overhead)
    display.line(f"o, the loop: {1e3 * costs.overhead:.2f} ms, {share:.1%} of a step over 5 tokens")


if __name__ == "__main__":
    entry_point(main)
