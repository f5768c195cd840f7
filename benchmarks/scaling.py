"""Mean accepted length over the amount of training answers, at equal training steps.

    python benchmarks/scaling.py --tokens 50000,100000,250000,500000,1000000 --steps 1500,500,500
    python benchmarks/scaling.py --only measure --plot docs/scaling.png
    python benchmarks/scaling.py --tokens 99,400 --steps 3 --suite builtin --limit 6 --out outputs/tiny debug=tiny

  train    `drafthead train recipe=<head>_smollm2 data=smollm2_large` for every head and amount; a larger part of the
           answers holds the smaller one, and all runs of a head share one cache of hidden states.
  measure  the base's answers to the test half of a suite, replayed: chains, and the best tree of --nodes nodes,
           each on answers that the tree was not chosen on.

Killed at any point, the same command resumes.
"""

import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import draw_lines, entry_point, listed, numbers, parser, save_record, trained_steps
from heads import COMMAND, HEADS, cell
from rich.console import Console
from rich.table import Table

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import read_json_lines
from drafthead.eval.trees.answers import (
    AcceptProbsConfig,
    FinishedAnswer,
    base_answers,
    read_texts,
    text_accept_probs,
    write_texts,
)
from drafthead.eval.trees.search import cross_fitted
from drafthead.eval.trees.simulate import simulate_acceptance
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

PARTS = ("train", "measure")
Row = dict[str, Any]


def folder_of(args: Namespace, name: str, tokens: int) -> Path:
    """The run folder of a head and an amount."""
    found: Path = args.out / f"{name}-{tokens}"
    return found


def train(args: Namespace, name: str, tokens: int, steps: int) -> None:
    """A run without tree and evaluation; one that is finished is left as it is."""
    folder = folder_of(args, name, tokens)
    if (folder / "head").exists():
        return
    tiny = any(override.startswith("debug=") for override in args.overrides)
    settings = [f"recipe={name}_smollm2", f"out={folder}", "stages=[corpora,train]"]
    settings += [f"data.folder={args.out / 'corpora'}"] + ([] if tiny else ["data=smollm2_large"])
    settings += [f"phases.distill.max_tokens={tokens}", f"phases.distill.steps={steps}"]
    settings += [f"validate_every={max(1, steps // 4)}", f"log_every={max(1, steps // 20)}", *args.overrides]
    if subprocess.run([*COMMAND, "train", *settings], check=False).returncode:
        raise UserError(f"training {name} on {tokens} tokens failed; what it printed says why")


def texts_of(base: BaseModel, args: Namespace) -> list[FinishedAnswer]:
    """The base's answers to the test half, kept in the folder."""
    path = args.out / f"{args.suite}-{args.limit}-{args.max_new_tokens}.jsonl"
    if not path.exists():
        split = "all" if args.suite == "builtin" else "test"
        found = base_answers(base, suite=args.suite, limit=args.limit, max_new_tokens=args.max_new_tokens, split=split)
        write_texts(path, found)
    return read_texts(path)


def measure(args: Namespace, name: str, tokens: int) -> Row:
    """Acceptance of one head on the test half, and the last training loss and top-1 of its run."""
    folder = folder_of(args, name, tokens)
    base, head = load_base_and_head(str(folder / "head"))
    answers = text_accept_probs(base, head, texts_of(base, args), Sampler(temperature=0.0), AcceptProbsConfig())
    chain = simulate_acceptance(answers, TokenTree.chain(head.depth))
    tree = cross_fitted(answers, [args.nodes])[0]
    rows = read_json_lines(folder / "metrics.jsonl")
    held_out = next((row for row in reversed(rows) if "held_out_accept_1" in row), {})
    return {
        "head": name,
        "tokens": tokens,
        "seconds": sum(row["step_ms"] / 1e3 * steps for row, steps in trained_steps(rows)),
        "held_out_top1": held_out.get("held_out_accept_1"),
        "top1": float(sum(a[:, 0, 0].sum() for a in answers) / sum(len(a) for a in answers)),
        "chain": chain.mean_accepted_length,
        "tree": tree.mean_accepted_length,
        "interval_95": tree.interval,
    }


def amount(tokens: int) -> str:
    """As on an axis."""
    return f"{tokens / 1e6:g} M" if tokens >= 1e6 else f"{tokens / 1e3:g} k"


def main(given: list[str] | None = None) -> None:
    """Train, measure, or both."""
    options = parser(__doc__)
    add = options.add_argument
    add("--heads", default="medusa,eagle3,dspark", metavar="LIST")
    add("--tokens", default="50000,100000,250000,500000,1000000", metavar="LIST", help="amounts of answer tokens")
    add("--steps", default="1500,500,500", metavar="LIST", help="of distillation, one number or one for every head")
    add("--only", default=",".join(PARTS), metavar="PARTS", help=f"comma list of {', '.join(PARTS)}")
    add("--out", type=Path, default=Path("outputs/scaling"), metavar="DIR")
    add("--suite", default="spec_bench_like")
    add("--limit", type=int, default=60)
    add("--max-new-tokens", type=int, default=96)
    add("--nodes", type=int, default=6, help="of the tree, root included")
    add("--plot", type=Path, metavar="FILE.png")
    add("overrides", nargs="*", metavar="key=value", help="settings of all runs, as for `drafthead train`")
    args: Namespace = options.parse_intermixed_args(given)
    heads, parts = listed("heads", args.heads, HEADS), listed("only", args.only, PARTS)
    amounts, steps = numbers(args.tokens), numbers(args.steps)
    if not amounts or len(steps) not in (1, len(heads)):
        raise UserError(
            f"--tokens needs numbers and --steps one or {len(heads)} of them, got {args.tokens} and {args.steps}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for tokens in sorted(amounts, reverse=True) if "train" in parts else ():  # the largest reads for all
        for name, count in zip(heads, steps * (1 if len(steps) > 1 else len(heads)), strict=True):
            train(args, name, tokens, count)
    if "measure" not in parts:
        return
    trained = [(name, n) for name in heads for n in sorted(amounts) if (folder_of(args, name, n) / "head").exists()]
    if not trained:
        raise UserError(f"{args.out} has no trained head; run the part train first")
    rows = [measure(args, name, tokens) for name, tokens in trained]
    columns = ("seconds", "held_out_top1", "top1", "chain", "tree")
    shown = Table("head", "tokens", *columns, "95 %", title=f"mean accepted length, {args.suite}, test half")
    for row in rows:
        shown.add_row(row["head"], f"{row['tokens']:,}", *(cell(row[key]) for key in (*columns, "interval_95")))
    console = Console()
    console.width = max(console.width, 110)
    console.print(shown)
    save_record(args, "scaling", {"rows": rows})
    if args.plot:
        ylabel = f"mean accepted length, tree of {args.nodes} nodes"
        draw_lines(rows, "head", "tokens", "tree", "answer tokens trained on", ylabel, args.plot, "interval_95", amount)


if __name__ == "__main__":
    entry_point(main)
