"""Measure the parts of a decoding step on this machine.

    python benchmarks/decode.py --head outputs/medusa_smollm2/head --json now.json
    python benchmarks/decode.py --head DIR --context 2000

v(n) is one verification pass over n tokens, n = 1 to 32; c is drafting, by depth; o is the rest of the loop. v(n) is
also reported relative to the cost of one token. That is the fastest of our pass over one token and a token of
transformers' `generate`, over our modules or over stock ones. All measurements take turns, so that changes of the
machine's speed affect all of them. The machine must be otherwise idle.

To compare whole answers: `drafthead eval head=DIR baselines=[...]`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from common import at_least, entry_point, parser, print_table, save_record

from drafthead.data.utils.display import Display
from drafthead.eval.timing.transformers_generate import transformers_generate
from drafthead.eval.trees.cost_model import CostModel, measure_costs
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.heads.parts.loading import load_base_and_head

SIZES = range(1, 33)
ROUND = 3
"""Repeats of ``measure_costs`` per round; the autoregressive decoders run between rounds."""
TOKENS = 8
"""Autoregressive tokens per decoder and round."""
WARM = 2
"""Number of first steps per answer that are not counted."""


def measure_steps(
    base: BaseModel, drafter: Drafter, *, context: int, repeats: int, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Measure v(n), c, o and the autoregressive decoders in turn.

    Returns:
        "costs": a ``CostModel`` as JSON. "one_token": median seconds of v(1) ("verify_s", with logits and argmax), of a
        step of our autoregressive loop ("autoregressive_s"), of a token of ``generate`` over our modules
        ("transformers_s") and over stock ones ("stock_s"), and the name of the fastest of these, our loop excluded
        ("denominator"). "verify_ratio": v(n) over the denominator.
    """
    stock, rounds = base.stock(), -(-repeats // ROUND)
    models: list[CostModel] = []
    times: dict[str, list[float]] = {"autoregressive_s": [], "transformers_s": [], "stock_s": []}
    for number in range(rounds):
        models.append(measure_costs(base, drafter, context, ROUND, SIZES))
        ids = [n % base.vocab_size for n in range(models[0].context)]  # times do not depend on the tokens
        generate = partial(transformers_generate, base, ids, TOKENS + 1, eos_token_id=base.vocab_size)  # never ends
        decoders: dict[str, Callable[[], DecodeResult]] = {
            "autoregressive_s": partial(decode, base, None, ids, max_new_tokens=TOKENS + 1, ignore_eos=True),
            "transformers_s": generate,
            "stock_s": partial(generate, model=stock),
        }
        for name, decoder in decoders.items():
            times[name] += [step.total_s for step in decoder().steps[WARM:]]
        on_progress(number + 1, rounds)
    costs = replace(
        models[0],
        verify={n: median(model.verify[n] for model in models) for n in models[0].verify},
        draft=median(model.draft for model in models),
        overhead=median(model.overhead for model in models),
        plain_overhead=median(model.plain_overhead or 0.0 for model in models),
        draft_by_depth=[median(s) for s in zip(*(m.draft_by_depth or [] for m in models), strict=True)] or None,
    )
    one = {"verify_s": costs.verify[1]} | {name: median(seconds) for name, seconds in times.items()}
    fastest = min(("verify_s", "transformers_s", "stock_s"), key=lambda name: one[name])
    return {
        "costs": costs.to_json(),
        "one_token": one | {"denominator": fastest},
        "verify_ratio": {str(n): seconds / one[fastest] for n, seconds in costs.verify.items()},
    }


def main(given: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="head folder or Hub repository; it names its base")
    add("--context", type=int, default=200, metavar="N", help="tokens in the cache before v(n)")
    add("--repeats", type=int, default=15, metavar="N", help="number of measurements per pass; the median counts")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "context", "repeats")
    display = Display()
    with display.stage(f"head {arguments.head}"):
        base, head = load_base_and_head(arguments.head)
    with display.stage("costs of a step"):
        progress = partial(display.progress, "rounds")
        record = measure_steps(base, head, context=arguments.context, repeats=arguments.repeats, on_progress=progress)
    costs, one, ratio = CostModel.from_json(record["costs"]), record["one_token"], record["verify_ratio"]
    rows = [{"n": n, "v(n) ms": 1e3 * s, "v(n)/v(1)": ratio[str(n)]} for n, s in costs.verify.items()]
    print_table(f"verification after {costs.context} tokens", rows)
    by_depth = ", ".join(f"{d}: {1e3 * s:.2f}" for d, s in enumerate(costs.draft_by_depth or []) if d)
    times = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in one.items() if name.endswith("_s"))
    share = costs.overhead / (costs.verify_at(5) + costs.draft + costs.overhead)
    display.line(f"one autoregressive token: {times}; v(1) is {one['denominator']}")
    display.line(f"c, drafting a tree: {1e3 * costs.draft:.2f} ms, {costs.draft / one[one['denominator']]:.3f} v(1)")
    display.line(f"   a chain by depth, ms: {by_depth}")
    display.line(f"o, the loop: {1e3 * costs.overhead:.2f} ms, {share:.1%} of a step over 5 tokens")
    save_record(arguments, "decode", record)


if __name__ == "__main__":
    entry_point(main)
