"""A head that learns along a stream whose topic changes at once (Online Speculative Decoding's sharp shift).

    python benchmarks/online.py --head DIR                       the embedded base's own answers, as they come
    python benchmarks/online.py --head DIR --limit 600 --json FILE --plot FILE.png
    python benchmarks/online.py --head DIR --first code,arithmetic --second summarising

Nothing is decoded: the answers come with the package, and acceptance on a finished greedy answer is simulated exactly.
Every answer is scored before the head learns from it. At least a third of each topic's answers are kept out of the
stream: the head first learns the first topic's, and a copy of it the second topic's (the line to reach). Then that head
reads the stream frozen, learning from rejected positions, and learning from all positions; and so does the copy.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from common import at_least, entry_point, listed, parser, save_record
from rich.console import Console

from drafthead.data.answers.store import open_answers
from drafthead.data.batch import HiddenStates
from drafthead.data.embedded.tasks import TASKS
from drafthead.data.embedded.training_sets import content_hash
from drafthead.data.utils.errors import UserError
from drafthead.eval.report.plots import ACCENT, INK, MUTED, SOFT, WARM, new_axes, save_png, styled
from drafthead.eval.trees.answers import FinishedAnswer
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree
from drafthead.train.adapt import OnlineConfig, OnlineExample, OnlineLearner, frozen_copy, hidden_of, replayed
from drafthead.train.config import OptimConfig
from drafthead.train.corpora.precomputed import FOLDERS

ANSWERS = "embedded:smollm2"
TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
READ = 4000
"""Prompts of a task that are looked through."""
WINDOW = 16
"""Answers of a point in the figure."""
Stream = list[tuple[FinishedAnswer, HiddenStates]]
Curve = list[tuple[float, int]]
"""Steps and committed tokens of every answer."""


def answers_of(head: DraftHead, folder: str, topics: Sequence[str]) -> list[FinishedAnswer]:
    """The answers of a corpus whose first turn is a prompt of ``topics``, in an order that depends on that turn alone.

    A corpus has all first turns before all second ones. The turns of a conversation stay together here, so that what is
    kept out of the stream is not quoted in it.
    """
    wanted = {conversation[0].strip() for topic in topics for conversation in islice(TASKS[topic](), READ)}
    found = []
    for answer in open_answers(FOLDERS.get(folder, Path(folder))).read(with_hidden_states=False):
        ids = answer.input_ids.tolist()
        turn = TURN.search(head.base.tokenizer.decode(ids[: answer.boundary]))
        if turn and turn[1].strip() in wanted and len(ids) - answer.boundary > 2:
            found.append((content_hash(turn[1]), answer.prompt_number, FinishedAnswer(ids, answer.boundary)))
    if len(found) < 4:
        raise UserError(f"{folder} has {len(found)} answers to {', '.join(topics)}; name other topics")
    return [text for _, _, text in sorted(found)]


def read_all(head: DraftHead, texts: Sequence[FinishedAnswer], console: Console, what: str) -> Stream:
    """Every text with the base's hidden states: one pass each, for all curves."""
    found = []
    for number, text in enumerate(texts, start=1):
        found.append((text, hidden_of(head.base, head, text)))
        if number % 20 == 0 or number == len(texts):
            console.print(f"   {what}: {number} of {len(texts)} answers read")
    return found


def taught(head: DraftHead, stream: Stream, epochs: int, lr: float) -> None:
    """Teach ``head`` all positions of some answers."""
    config = OnlineConfig(interval=8, positions="all", optim=OptimConfig(lr=lr, schedule="constant"))
    learner = OnlineLearner(head, config)
    for _ in range(epochs):
        for text, hidden in stream:
            learner.learn(OnlineExample(text=text, hidden=hidden, rejected=[]))


def follow(head: DraftHead, stream: Stream, config: OnlineConfig | None) -> tuple[Curve, dict[str, float]]:
    """Score every answer, then learn from it; without a config only score."""
    learner = OnlineLearner(head, config) if config else None
    curve: Curve = []
    started = perf_counter()
    for text, hidden in stream:
        steps, lesson = replayed(head, head.tree or TokenTree.chain(head.depth), text, hidden)
        curve.append((steps, text.positions))
        if learner:
            learner.learn(lesson)
    numbers = {"seconds": perf_counter() - started}
    if learner:
        numbers |= {"updates": learner.updates, "update_s": learner.update_s}
    return curve, numbers


def mean(curve: Sequence[tuple[float, int]]) -> float:
    """Mean accepted length."""
    return sum(tokens for _, tokens in curve) / sum(steps for steps, _ in curve)


@styled
def draw(curves: dict[str, Curve], change: int, path: Path) -> None:
    """Mean accepted length along the stream, over the latest answers."""
    figure, axes = new_axes(height=3.4)
    colours = dict(zip(curves, (MUTED, ACCENT, WARM, SOFT), strict=True))
    for name, curve in curves.items():
        places = range(WINDOW // 2, len(curve) + 1, WINDOW // 2)
        values = [mean(curve[max(0, place - WINDOW) : place]) for place in places]
        axes.plot(list(places), values, label=name, color=colours[name])
    axes.axvline(change, color=INK, linewidth=0.8)
    axes.set_xlabel("answers (the line: the topic changes)")
    axes.set_ylabel(f"mean accepted length, last {WINDOW} answers")
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    save_png(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stream four times."""
    options = parser(__doc__)
    options.add_argument("--head", required=True, help="head folder")
    options.add_argument("--answers", default=ANSWERS, help="folder of a corpus, or embedded:smollm2")
    options.add_argument("--first", default="follow_ups", help="tasks of the first topic")
    options.add_argument("--second", default="code,arithmetic", help="tasks of the second")
    options.add_argument("--limit", type=int, default=600, help="most answers of each topic in the stream")
    options.add_argument("--outside", type=int, default=300, help="most answers of each topic outside it")
    options.add_argument("--interval", type=int, default=8)
    options.add_argument("--steps", type=int, default=1, help="optimiser steps of an update")
    options.add_argument("--lr", type=float, default=3e-4)
    options.add_argument("--objective", default="kl")
    options.add_argument("--epochs", type=int, default=2, help="of the answers outside the stream")
    options.add_argument("--plot", type=Path, metavar="FILE.png")
    args: Namespace = options.parse_args(arguments)
    at_least(args, 1, "limit", "outside", "interval", "steps", "epochs")
    console = Console()
    _, head = load_base_and_head(args.head)
    topics = [listed(name, getattr(args, name), tuple(TASKS)) for name in ("first", "second")]
    streams, outside = [], []
    for topic in topics:
        texts = answers_of(head, args.answers, topic)
        count = min(args.limit, 2 * len(texts) // 3)
        console.print(f"{', '.join(topic)}: {len(texts)} answers, {count} of them in the stream")
        streams.append(read_all(head, texts[-count:], console, "stream"))
        outside.append(read_all(head, texts[:-count][: args.outside], console, "outside the stream"))
    taught(head, outside[0], args.epochs, args.lr)
    oracle = frozen_copy(head)
    taught(oracle, outside[1], args.epochs, args.lr)
    stream = streams[0] + streams[1]
    shared = {"interval": args.interval, "steps": args.steps, "objective": args.objective}
    optim = OptimConfig(lr=args.lr, schedule="constant")
    ways: dict[str, tuple[DraftHead, OnlineConfig | None]] = {
        "frozen": (head, None),
        "rejected positions": (frozen_copy(head), OnlineConfig(positions="rejected", optim=optim, **shared)),
        "all positions": (frozen_copy(head), OnlineConfig(positions="all", optim=optim, **shared)),
        "taught the second topic": (oracle, None),
    }
    curves: dict[str, Curve] = {}
    rows: dict[str, Any] = {}
    change = len(streams[0])
    late = change + len(streams[1]) // 2
    for name, (drafter, config) in ways.items():
        curves[name], numbers = follow(drafter, stream, config)
        rows[name] = {
            "first_topic": mean(curves[name][:change]),
            "second_topic": mean(curves[name][change:]),
            "second_half_of_second_topic": mean(curves[name][late:]),
            **numbers,
        }
        shown = "  ".join(f"{key} {value:.3f}" for key, value in rows[name].items())
        console.print(f"{name}: {shown}", highlight=False)
    low, high = (rows[name]["second_half_of_second_topic"] for name in ("frozen", "taught the second topic"))
    for name in ("rejected positions", "all positions"):
        found = rows[name]["second_half_of_second_topic"]
        rows[name]["recovered"] = (found - low) / (high - low) if high != low else None
        console.print(f"{name}: recovers {rows[name]['recovered']:.0%} of the distance {low:.2f} to {high:.2f}")
    steps = {name: [step for step, _ in curve] for name, curve in curves.items()}
    tokens = [text.positions for text, _ in stream]
    save_record(args, "online", {"rows": rows, "change": change, "steps": steps, "tokens": tokens})
    if args.plot:
        draw(curves, change, args.plot)


if __name__ == "__main__":
    entry_point(main)
