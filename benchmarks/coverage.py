"""What a second drafter adds to the first at equal nodes (SpecInfer's boosting): coverage of the next token.

    python benchmarks/coverage.py --head DIR --drafters head,head+head:SECOND,head+head:BOOSTED,head+prompt_lookup@1
    python benchmarks/coverage.py --head DIR --widths 1,2,4,8,16 --json FILE --plot FILE.png

The base answers greedily. Wherever a step may start, every drafter names candidates for the next token, and a width is
covered where the answer's token is among them. Parts of a drafter take turns: the likeliest of each, then the next of
each, tokens that are named already left out, until there are as many as the width says. So all rows of a width cost
the target the same number of nodes.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import at_least, draw_lines, entry_point, numbers, parser, save_record
from rich.console import Console
from rich.table import Table

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.floats import bootstrap_interval
from drafthead.eval.report.plots import short_name
from drafthead.eval.trees.answers import FinishedAnswer, base_answers, positions, read_hidden_states, read_texts
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree

BATCH = 16
Candidates = list[list[list[int]]]
"""Per text and position the next token's candidates, the likeliest first."""


@torch.inference_mode()
def candidates(base: BaseModel, drafter: Drafter, texts: Sequence[FinishedAnswer], width: int) -> Candidates:
    """What ``drafter`` names for the next token wherever a step may start."""
    siblings = DraftConfig(tree=TokenTree.from_paths([(rank,) for rank in range(width)]))
    found: Candidates = []
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        named: Candidates = [[] for _ in batch]
        for rows, state, last, _ in positions(drafter, batch, read_hidden_states(base, drafter, batch), base.device):
            proposal = drafter.draft(state, last, siblings)
            first = (proposal.shape.depths == 1).expand_as(proposal.tokens) & (proposal.shape.parents == 0)
            for place, row in enumerate(rows):
                named[row].append(proposal.tokens[place][first[place]].tolist())
        found += named
    return found


def in_turn(parts: Sequence[list[int]], width: int) -> Iterator[int]:
    """The likeliest candidate of every part, then the next of each, without repetitions; at most ``width``."""
    seen: dict[int, None] = {}
    for rank in range(max(map(len, parts), default=0)):
        seen |= dict.fromkeys(part[rank] for part in parts if rank < len(part))
    yield from list(seen)[:width]


def covered(
    texts: Sequence[FinishedAnswer], parts: Sequence[Candidates], width: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[texts, 2] positions whose next token is among ``width`` candidates, and positions."""
    rows = []
    for number, text in enumerate(texts):
        answer = text.ids[text.boundary + 1 :]
        hits = sum(
            token in in_turn([part[number][place] for part in parts], width) for place, token in enumerate(answer)
        )
        rows.append((hits, len(answer)))
    return np.array(rows, dtype=np.float64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every drafter at every width."""
    options = parser(__doc__)
    options.add_argument("--head", required=True, help="head folder: what head stands for")
    options.add_argument("--drafters", default="head,head+prompt_lookup@1", help="as in drafthead eval, joined by +")
    options.add_argument("--widths", default="1,2,4,8,16")
    options.add_argument("--suite", default="spec_bench_like")
    options.add_argument("--limit", type=int, default=36)
    options.add_argument("--texts", type=Path, help="answers that drafthead replay save=FILE wrote")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--plot", type=Path, metavar="FILE.png")
    args: Namespace = options.parse_args(arguments)
    at_least(args, 1, "limit")
    at_least(args, 3, "max_new_tokens")
    if not (widths := numbers(args.widths)):
        raise UserError(f"--widths needs numbers of at least 1, got {args.widths}")
    expressions = [parse_drafter(text) for text in args.drafters.split(",")]
    console = Console()
    base, head = load_base_and_head(args.head)
    own = DraftConfig(tree=TokenTree.chain(1))
    if args.texts:
        texts = read_texts(args.texts)
    else:
        texts = base_answers(base, suite=args.suite, limit=args.limit, max_new_tokens=args.max_new_tokens)
    texts = [text for text in texts if text.positions]
    known: dict[str, Candidates] = {}
    rows: list[dict[str, Any]] = []
    for expression in expressions:
        parts = expression.parts if expression.kind == "combine" else (expression,)
        for part in parts:
            if part.text not in known:
                drafter, _ = build_drafter(part, base, head, own)
                known[part.text] = candidates(base, drafter, texts, max(widths))
        for width in widths:
            hits = covered(texts, [known[part.text] for part in parts], width)
            low, high = bootstrap_interval(hits, lambda totals: totals[:, 0] / totals[:, 1])
            share = float(hits[:, 0].sum() / hits[:, 1].sum())
            rows.append({"drafter": expression.text, "width": width, "coverage": share, "interval_95": [low, high]})
        console.print(f"   {expression.text}: done", highlight=False)
    total = sum(text.positions for text in texts)
    shown = Table("drafter", *map(str, widths), title=f"coverage of the next token, {total} of {len(texts)} answers")
    for expression in expressions:
        shown.add_row(
            short_name(expression.text),
            *(f"{row['coverage']:.3f}" for row in rows if row["drafter"] == expression.text),
        )
    console.print(shown)
    save_record(args, "coverage", {"rows": rows, "positions": total})
    if args.plot:
        draw_lines(rows, "drafter", "width", "coverage", "candidates for the next token", "covered", args.plot)


if __name__ == "__main__":
    entry_point(main)
