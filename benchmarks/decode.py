"""What a decoding step costs on this machine, part by part, and what that makes of a head.

    python benchmarks/decode.py --head outputs/medusa_smollm2/head [--context 200] [--prompts 4]

Prints v(n), the verification pass over n tokens, for growing n; c, drafting; o, everything else in the loop; and the
share of the decode loop's wall time that is spent outside base and head forwards, on real prompts.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drafthead.data.chat import prompt_ids
from drafthead.data.files import write_json
from drafthead.eval.decode import decode
from drafthead.eval.evaluate import choose_tree
from drafthead.eval.latency import measure_costs
from drafthead.eval.metrics import mean_accepted_tokens, overhead
from drafthead.eval.speed import hardware, versions
from drafthead.eval.suites import load_suite
from drafthead.models.loading import load_base_and_head


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    base, head = load_base_and_head(arguments.head)
    costs = measure_costs(base, head, arguments.context, arguments.repeats)
    console = Console(highlight=False)
    table = Table("tokens n", "v(n) ms", "v(n)/v(1)", title=f"verification after {costs.context} tokens of context")
    for n, seconds in costs.verify.items():
        table.add_row(str(n), f"{1e3 * seconds:.1f}", f"{seconds / costs.verify[1]:.2f}")
    console.print(table)
    console.print(f"c, drafting: {1e3 * costs.draft:.2f} ms   o, the loop: {1e3 * costs.overhead:.2f} ms")
    tree = choose_tree(head, "head")
    suite = load_suite("smoke", arguments.prompts)
    results = [
        decode(base, head, prompt_ids(base.tokenizer, p.messages), max_new_tokens=arguments.max_new_tokens, tree=tree)
        for p in suite
    ]
    share = overhead(results).value
    mean = mean_accepted_tokens(results).value
    console.print(
        f"{len(results)} prompts with the head's tree of {len(tree)} nodes: {mean:.2f} tokens a step, loop overhead "
        f"{100 * share:.1f} % of the steps' wall time"
    )
    record = {
        "costs": costs.to_json(),
        "nodes": len(tree),
        "mean_accepted_tokens": mean,
        "overhead": share,
        "hardware": hardware(),
        "versions": versions(),
    }
    if arguments.json:
        write_json(arguments.json, record)
    console.print(json.dumps(record), soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
