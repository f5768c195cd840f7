"""What decoding costs on this machine, part by part, and what a head makes of it.

    python benchmarks/decode.py --head outputs/medusa_smollm2/head --json now.json
    python benchmarks/decode.py --head DIR --only costs,kv
    python benchmarks/decode.py --head DIR --only against --against transformers,stock,prompt_lookup --prompts 12
    python benchmarks/compare.py before.json now.json

Four parts, all of them unless --only names some:

  costs     v(n), one verification pass over n tokens, for n = 1..32; c, drafting, by depth; o, the rest of the loop.
            v(n) is divided by the fastest way to one token: our pass over one, or a token of transformers' generate,
            over our modules or over stock ones.
  kv        what positions, masks and the key/value cache cost in a step at 200 and at 2,000 tokens of context, beside
            the whole pass. Attention grows with the context; the handling should not.
  against   whole answers in one interleaved run: the head, autoregressive decoding and other methods. Ratios are to
            the fastest autoregressive one, with a bootstrap interval over prompts; a prompt counts with the median of
            its repetitions.
  overhead  share of the loop's time outside base and drafter, on the same answers.

Prompts, decoders and parts take turns, so that a drift of the machine hits all alike; nothing else should run.
"""

import argparse
from pathlib import Path
from typing import Any

from common import described, entry_point
from race import HEAD, PLAIN, Runners, check_against, loop_share, race_record, run_race
from rich.table import Column, Table
from step_costs import PlainTokens, load_stock, measure_handling, measure_steps, steps_record

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.eval.config import TREES, EvalConfig
from drafthead.eval.prompts.prompt import EvalPrompt
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.timing.methods import METHOD_FORMS
from drafthead.eval.trees.cost_model import CostModel
from drafthead.models.heads.common.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

PARTS = ("costs", "kv", "against", "overhead")
AGAINST = "transformers,stock,prompt_lookup,hf_prompt_lookup:3,plain"
SIZES = range(1, 33)
OVERHEAD_TARGET = 0.05


def parse_arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line; lists are split, and what cannot be run is refused.

    Raises:
        UserError: an unknown part or peer, or a number that cannot be meant.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--head", required=True, metavar="DIR", help="head folder or Hub repository; it names its base")
    add("--only", default=",".join(PARTS), metavar="PARTS", help=f"comma list of {', '.join(PARTS)}")
    add("--json", type=Path, metavar="FILE", help="write the record here, for compare.py")
    add("--tree", default="head", metavar="TREE", help=f"what the head drafts: {TREES}")
    costs = parser.add_argument_group("costs and kv").add_argument
    costs("--context", type=int, default=200, metavar="N", help="tokens before v(n) and the short context of kv")
    costs("--long-context", type=int, default=2000, metavar="N", help="the long context of kv")
    costs("--cost-repeats", type=int, default=15, metavar="N", help="times that every pass is timed; medians count")
    race = parser.add_argument_group("against and overhead").add_argument
    plain = "plain (our loop without a drafter), transformers (generate over our modules), stock (over unmodified ones)"
    race("--against", default=AGAINST, metavar="LIST", help=f"comma list of {plain}, {METHOD_FORMS}; default {AGAINST}")
    race("--suite", default="smoke", metavar="NAME", help="prompts, as in `drafthead eval`")
    race("--prompts", type=int, default=4, metavar="N", help="of them so many, over all tasks")
    race("--repeats", type=int, default=3, metavar="N", help="times that every prompt is answered in every way")
    race("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer")
    race("--seed", type=int, default=0, metavar="N", help="of the prompts' and decoders' order and the bootstrap")
    arguments = parser.parse_args(given)
    for name in ("context", "long_context", "cost_repeats", "prompts", "repeats"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    if arguments.long_context <= arguments.context:
        raise UserError(f"--long-context {arguments.long_context} must be longer than --context {arguments.context}")
    for name in ("only", "against"):
        setattr(arguments, name, list(dict.fromkeys(part for part in getattr(arguments, name).split(",") if part)))
    unknown = [part for part in arguments.only if part not in PARTS]
    if unknown or not arguments.only:
        raise UserError(f"--only knows {', '.join(PARTS)}, got {', '.join(unknown) or 'nothing'}")
    if "against" in arguments.only:
        check_against(arguments.against)
    return arguments


def main(given: list[str] | None = None) -> None:
    """Entry point."""
    arguments = parse_arguments(given)
    config = _checked_config(arguments)
    racing = "against" in arguments.only
    answering = racing or "overhead" in arguments.only
    # A wrong name fails before the model loads.
    suite = load_suite(arguments.suite, arguments.prompts, arguments.seed) if answering else []
    specs = arguments.against if racing else [PLAIN[0]]
    display = Display()
    with display.stage(f"head {arguments.head}"):
        base, head = load_base_and_head(arguments.head)
        draft_config = config.draft_config(head)
        stock = load_stock(base) if "costs" in arguments.only or "stock" in specs else None
    runners = Runners(base=base, stock=stock, drafter=head, draft_config=draft_config, specs=specs, config=config)
    record = described("decode", arguments)
    if "costs" in arguments.only:
        record |= _costs(display, arguments, runners)
    if "kv" in arguments.only:
        record["kv"] = _handling(display, arguments, runners)
    if answering:
        record |= _answers(display, arguments, runners, suite)
    if arguments.json:
        write_json(arguments.json, record)
        display.line(f"record: {arguments.json}")


def _costs(display: Display, arguments: argparse.Namespace, runners: Runners) -> dict[str, Any]:
    assert runners.stock is not None
    with display.stage("costs of a step"):
        costs, plain = measure_steps(
            runners.base,
            runners.stock,
            runners.drafter,
            context=arguments.context,
            repeats=arguments.cost_repeats,
            sizes=SIZES,
            on_progress=lambda done, total: display.progress("rounds", done, total),
        )
    show_costs(display, costs, plain)
    return steps_record(costs, plain)


def _handling(display: Display, arguments: argparse.Namespace, runners: Runners) -> dict[str, Any]:
    tree = runners.draft_config.tree
    with display.stage("keys, values and masks"):
        found = measure_handling(
            runners.base,
            tree if isinstance(tree, TokenTree) else TokenTree.chain(runners.drafter.depth),
            (arguments.context, arguments.long_context),
            arguments.cost_repeats,
            lambda done, total: display.progress("repeats", done, total),
        )
    show_handling(display, found)
    return found


def _answers(
    display: Display, arguments: argparse.Namespace, runners: Runners, suite: list[EvalPrompt]
) -> dict[str, Any]:
    racing = "against" in arguments.only
    with display.stage(f"answers to {len(suite)} prompts of {arguments.suite}"):
        race = run_race(
            runners,
            suite,
            arguments.repeats if racing else 1,
            lambda done, total: display.progress("answers", done, total),
        )
    for prompt, reason in race.failed.items():
        display.line(f"left out: {prompt}: {reason}")
    found: dict[str, Any] = {}
    if racing:
        found["against"] = race_record(race, arguments.seed)
        show_race(display, found["against"])
    if "overhead" in arguments.only:
        found["overhead"] = {name: loop_share(race, name) for name in (HEAD, PLAIN[0]) if name in race.runs}
        show_overhead(display, found["overhead"])
    return found


def _checked_config(arguments: argparse.Namespace) -> EvalConfig:
    try:
        return EvalConfig(tree=arguments.tree, max_new_tokens=arguments.max_new_tokens, seed=arguments.seed)
    except ValueError as error:
        raise UserError(str(error)) from None


def show_costs(display: Display, costs: CostModel, plain: PlainTokens) -> None:
    """v(n), c, o, and what v(n) is divided by."""
    name, fastest = plain.fastest
    display.line(
        f"one autoregressive token: our pass {1e3 * plain.verify_s:.2f} ms (our whole loop {1e3 * plain.plain_s:.2f}), "
        f"generate over our modules {1e3 * plain.transformers_s:.2f}, over stock modules {1e3 * plain.stock_s:.2f}"
    )
    display.line(f"v(1) is {name}, {1e3 * fastest:.2f} ms")
    table = Table("n", "v(n) ms", "v(n)/v(1)", title=f"verification after {costs.context} tokens")
    for n, seconds in costs.verify.items():
        table.add_row(str(n), f"{1e3 * seconds:.2f}", f"{seconds / fastest:.2f}")
    display.console.print(table)
    depths = costs.draft_by_depth or []
    by_depth = ", ".join(f"{d}: {1e3 * seconds:.2f}" for d, seconds in enumerate(depths) if d)
    display.line(f"c, drafting a tree: {1e3 * costs.draft:.2f} ms, {costs.draft / fastest:.3f} v(1)")
    display.line(f"   a chain by depth, ms: {by_depth}")
    step = costs.verify_at(5) + costs.draft + costs.overhead
    display.line(
        f"o, the loop: {1e3 * costs.overhead:.2f} ms, {100 * costs.overhead / step:.1f} % of a step over 5 tokens"
    )


def show_handling(display: Display, found: dict[str, Any]) -> None:
    """Handling and whole pass at both contexts."""
    short, long = map(str, found["contexts"])
    columns = [
        "case",
        f"handling ms at {short}",
        f"at {long}",
        "ratio",
        f"whole pass ms at {short}",
        f"at {long}",
        "ratio",
    ]
    table = Table(*columns, title=f"a step of {found['nodes']} nodes; handling is all but the layers")
    for kind, case in found["cases"].items():
        cells = []
        for part in ("handling", "pass"):
            seconds = case[f"{part}_s"]
            cells += [f"{1e3 * seconds[short]:.2f}", f"{1e3 * seconds[long]:.2f}", f"{case[f'{part}_growth']:.2f}"]
        table.add_row(kind, *cells)
    display.console.print(table)


def show_race(display: Display, found: dict[str, Any]) -> None:
    """Every method against the fastest autoregressive decoding."""
    title = f"{found['prompts']} prompts; x is against {found['fastest_plain']}, same output as {found['reference']}"
    name_column = Column("method", overflow="fold")
    table = Table(name_column, "tokens/s", "x", "95 %", "tokens a step", "same", "loop", title=title)
    for name, numbers in sorted(found["methods"].items(), key=lambda item: -(item[1]["tokens_per_second"] or 0)):
        low, high = numbers["interval_95"]
        table.add_row(
            name,
            _cell(numbers["tokens_per_second"], ".1f"),
            _cell(numbers["ratio_to_fastest_plain"], ".2f"),
            f"{_cell(low, '.2f')} to {_cell(high, '.2f')}",
            _cell(numbers["mean_accepted_length"], ".2f"),
            f"{numbers['same']}/{found['prompts']}",
            _cell(numbers["overhead"], ".1%"),
        )
    display.console.print(table)


def show_overhead(display: Display, found: dict[str, float | None]) -> None:
    """The loop's share, and whether it meets the target."""
    shares = ", ".join(f"{name} {_cell(share, '.1%')}" for name, share in found.items())
    missed = [name for name, share in found.items() if share is not None and share > OVERHEAD_TARGET]
    missing = f"missed by {', '.join(missed)}" if missed else "met"
    display.line(
        f"loop outside base and drafter: {shares} of the steps' time (target {OVERHEAD_TARGET:.0%}: {missing})"
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    entry_point(main)
