"""What decoding costs on this machine, part by part, and what a head makes of it.

    python benchmarks/decode.py --head outputs/medusa_smollm2/head --json now.json
    python benchmarks/decode.py --head DIR --only costs,kv
    python benchmarks/decode.py --head DIR --only baselines --baselines transformers,stock,prompt_lookup --prompts 12
    python benchmarks/compare.py before.json now.json

Four parts, all of them unless --only names some:

  costs      v(n), one verification pass over n tokens, for n = 1..32; c, drafting, by depth; o, the rest of the loop.
             v(n) is divided by the fastest way to one token: our pass over one, or a token of transformers' generate,
             over our modules or over stock ones.
  kv         what positions, masks and the key/value cache cost in a step at 200 and at 2,000 tokens of context, beside
             the whole pass. Attention grows with the context; the handling should not.
  baselines  whole answers in one interleaved run: the head, autoregressive decoding and other methods. Ratios are to
             the fastest autoregressive one, with a bootstrap interval over prompts; a prompt counts with the median of
             its repetitions.
  overhead   share of the loop's time outside base and drafter, on the same answers.

Prompts, decoders and parts take turns, so that a drift of the machine hits all alike; nothing else should run.
"""

from functools import partial
from typing import Any

from common import at_least, described, entry_point, listed, parser
from race import AUTOREGRESSIVE, check_baselines, decoders, loop_share, race_record, run_race
from rich.table import Column, Table
from step_costs import load_stock, measure_handling, measure_steps

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.eval.config import TREES, EvalConfig
from drafthead.eval.metrics.summary import METHOD
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.timing.methods import METHOD_FORMS
from drafthead.eval.trees.cost_model import CostModel
from drafthead.models.heads.common.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

PARTS = ("costs", "kv", "baselines", "overhead")
BASELINES = "transformers,stock,prompt_lookup,hf_prompt_lookup:3,autoregressive"
OVERHEAD_TARGET = 0.05


def main(given: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__)
    add = options.add_argument
    add("--head", required=True, metavar="DIR", help="head folder or Hub repository; it names its base")
    add("--only", default=",".join(PARTS), metavar="PARTS", help=f"comma list of {', '.join(PARTS)}")
    add("--tree", default="head", metavar="TREE", help=f"what the head drafts: {TREES}")
    costs = options.add_argument_group("costs and kv").add_argument
    costs("--context", type=int, default=200, metavar="N", help="tokens before v(n) and the short context of kv")
    costs("--long-context", type=int, default=2000, metavar="N", help="the long context of kv")
    costs("--cost-repeats", type=int, default=15, metavar="N", help="times that every pass is timed; medians count")
    race = options.add_argument_group("baselines and overhead").add_argument
    ways = "autoregressive (our loop), transformers (generate over our modules), stock (over unmodified ones)"
    race("--baselines", default=BASELINES, metavar="LIST", help=f"comma list of {ways}, {METHOD_FORMS}")
    race("--suite", default="smoke", metavar="NAME", help="prompts, as in `drafthead eval`")
    race("--prompts", type=int, default=4, metavar="N", help="of them so many, over all tasks")
    race("--repeats", type=int, default=3, metavar="N", help="times that every prompt is answered in every way")
    race("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer")
    race("--seed", type=int, default=0, metavar="N", help="of the prompts' and decoders' order and the bootstrap")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "context", "long_context", "cost_repeats", "prompts", "repeats")
    if arguments.long_context <= arguments.context:
        raise UserError(f"--long-context {arguments.long_context} must be longer than --context {arguments.context}")
    arguments.only = parts = listed("only", arguments.only, PARTS)
    racing, answering = "baselines" in parts, {"baselines", "overhead"} & set(parts)
    arguments.baselines = list(dict.fromkeys(filter(None, arguments.baselines.split(","))))
    specs = arguments.baselines if racing else [AUTOREGRESSIVE[0]]
    check_baselines(specs)
    try:
        config = EvalConfig(tree=arguments.tree, max_new_tokens=arguments.max_new_tokens, seed=arguments.seed)
    except ValueError as error:
        raise UserError(str(error)) from None
    # A wrong name fails before the model loads.
    suite = load_suite(arguments.suite, arguments.prompts, arguments.seed) if answering else []
    display = Display()
    with display.stage(f"head {arguments.head}"):
        base, head = load_base_and_head(arguments.head)
        draft_config = config.draft_config(head)
        stock = load_stock(base) if "costs" in parts or "stock" in specs else None
    record = described("decode", arguments)
    if "costs" in parts:
        assert stock is not None
        progress, repeats = partial(display.progress, "rounds"), arguments.cost_repeats
        with display.stage("costs of a step"):
            found = measure_steps(base, stock, head, context=arguments.context, repeats=repeats, on_progress=progress)
        show_costs(display, found)
        record |= found
    if "kv" in parts:
        tree = draft_config.tree if isinstance(draft_config.tree, TokenTree) else TokenTree.chain(head.depth)
        contexts, progress = (arguments.context, arguments.long_context), partial(display.progress, "repeats")
        with display.stage("keys, values and masks"):
            record["kv"] = measure_handling(base, tree, contexts, arguments.cost_repeats, progress)
        show_handling(display, record["kv"])
    if answering:
        every = decoders(base, stock, head, draft_config, specs, config)
        repeats, progress = arguments.repeats if racing else 1, partial(display.progress, "answers")
        with display.stage(f"answers to {len(suite)} prompts of {arguments.suite}"):
            runs, failed = run_race(every, base.tokenizer, suite, repeats, config.seed, progress)
        for prompt, reason in failed.items():
            display.line(f"left out: {prompt}: {reason}")
        if racing:
            record["baselines"] = race_record(runs, failed, arguments.seed)
            show_race(display, record["baselines"])
        if "overhead" in parts:
            record["overhead"] = {n: loop_share(runs, n) for n in (METHOD, AUTOREGRESSIVE[0]) if n in runs}
            show_overhead(display, record["overhead"])
    if arguments.json:
        write_json(arguments.json, record)
        display.line(f"record: {arguments.json}")


def show_costs(display: Display, record: dict[str, Any]) -> None:
    """v(n), c, o, and what v(n) is divided by."""
    costs, one = record["costs"], record["one_token"]
    ways = ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in one.items() if way.endswith("_s"))
    fastest = one[one["denominator"]]
    display.line(f"one autoregressive token: {ways}; v(1) is {one['denominator']}")
    table = Table("n", "v(n) ms", "v(n)/v(1)", title=f"verification after {costs['context']} tokens")
    for n, seconds in costs["verify"].items():
        table.add_row(str(n), f"{1e3 * seconds:.2f}", f"{record['verify_ratio'][str(n)]:.2f}")
    display.console.print(table)
    by_depth = ", ".join(f"{d}: {1e3 * seconds:.2f}" for d, seconds in enumerate(costs["draft_by_depth"] or []) if d)
    display.line(f"c, drafting a tree: {1e3 * costs['draft']:.2f} ms, {costs['draft'] / fastest:.3f} v(1)")
    display.line(f"   a chain by depth, ms: {by_depth}")
    share = costs["overhead"] / (CostModel.from_json(costs).verify_at(5) + costs["draft"] + costs["overhead"])
    display.line(f"o, the loop: {1e3 * costs['overhead']:.2f} ms, {share:.1%} of a step over 5 tokens")


def show_handling(display: Display, found: dict[str, Any]) -> None:
    """Handling and whole pass at both contexts."""
    short, long = map(str, found["contexts"])
    columns = [column for part in ("handling", "pass") for column in (f"{part} ms at {short}", f"at {long}", "ratio")]
    table = Table("case", *columns, title=f"a step of {found['nodes']} nodes; handling is all but the layers")
    for kind, case in found["cases"].items():
        cells = []
        for part in ("handling", "pass"):
            seconds = case[f"{part}_s"]
            cells += [f"{1e3 * seconds[short]:.2f}", f"{1e3 * seconds[long]:.2f}", f"{case[f'{part}_growth']:.2f}"]
        table.add_row(kind, *cells)
    display.console.print(table)


def show_race(display: Display, found: dict[str, Any]) -> None:
    """Every method against the fastest autoregressive decoding."""
    about = f"x is against {found['fastest_autoregressive']}, same output as {found['reference']}"
    columns = (Column("method", overflow="fold"), "tokens/s", "x", "95 %", "tau", "same", "loop")
    table = Table(*columns, title=f"{found['prompts']} prompts; {about}")
    for name, numbers in sorted(found["methods"].items(), key=lambda item: -(item[1]["tokens_per_second"] or 0)):
        table.add_row(
            name,
            _cell(numbers["tokens_per_second"], ".1f"),
            _cell(numbers["ratio_to_autoregressive"], ".2f"),
            " to ".join(_cell(end, ".2f") for end in numbers["interval_95"]),
            _cell(numbers["mean_accepted_length"], ".2f"),
            f"{numbers['same']}/{found['prompts']}",
            _cell(numbers["overhead"], ".1%"),
        )
    display.console.print(table)


def show_overhead(display: Display, found: dict[str, float | None]) -> None:
    """The loop's share, and whether it meets the target."""
    shares = ", ".join(f"{name} {_cell(share, '.1%')}" for name, share in found.items())
    missed = [name for name, share in found.items() if share is not None and share > OVERHEAD_TARGET]
    result = f"target {OVERHEAD_TARGET:.0%}: " + (f"missed by {', '.join(missed)}" if missed else "met")
    display.line(f"loop outside base and drafter: {shares} of the steps' time ({result})")


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    entry_point(main)
