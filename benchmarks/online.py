"""Measure a head that learns along a stream whose topic changes abruptly (Online Speculative Decoding's sharp shift).

    python benchmarks/online.py --head DIR                       the packaged answers of the embedded base
    python benchmarks/online.py --head DIR --limit 600 --json FILE --plot FILE.png
    python benchmarks/online.py --head DIR --first code,arithmetic --second summarising

Nothing is decoded: the answers are packaged, and acceptance on a finished greedy answer is simulated exactly. Every
answer is scored before the head learns from it. At least a third of each topic's answers are held out of the stream.
The head is first trained on the held-out answers of the first topic. A copy is then trained on those of the second
topic: the result to reach. The head runs through the stream three times: frozen, learning from rejected positions, and
learning from all positions. The copy runs through it frozen.
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from common import at_least, entry_point, listed, parser, print_table, save_record
from rich.console import Console

from drafthead.data.answers.store import Answer, open_answers
from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.data.embedded.tasks import TASKS
from drafthead.data.embedded.training_sets import content_hash
from drafthead.errors import UserError
from drafthead.eval.report.plots import INK, new_axes, save_png, styled
from drafthead.eval.trees.simulate import read_hidden_states
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, accepted_length_probs, start_probs
from drafthead.models.simulation.ranks import WIDTH, Ranks, answer_ranks
from drafthead.models.token_tree import TokenTree
from drafthead.train.adapt import OnlineConfig, OnlineExample, OnlineLearner, frozen_copy
from drafthead.train.corpora.answers import FOLDERS
from drafthead.train.trainer.optim import OptimConfig

TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
SEARCHED = 4000
"""Number of prompts per task that are searched."""
WINDOW = 16
"""Answers per point of the figure."""
Stream = list[tuple[Answer, HiddenStates]]
Curve = list[tuple[float, int]]
"""Steps and committed tokens per answer."""


def answers_of(head: DraftHead, folder: str, topics: Sequence[str]) -> list[Answer]:
    """Return the corpus's answers to prompts of ``topics``, ordered by a hash of the first turn.

    A corpus has all first turns before all second turns. The hash keeps the turns of a conversation together, so that
    no held-out conversation is quoted in the stream.
    """
    prompts = {conversation[0].strip() for topic in topics for conversation in islice(TASKS[topic](), SEARCHED)}
    answers = []
    for answer in open_answers(FOLDERS.get(folder, Path(folder))).read(with_hidden_states=False):
        turn = TURN.search(head.base.tokenizer.decode(answer.ids[: answer.boundary]))
        if turn and turn[1].strip() in prompts and answer.positions > 1:
            answers.append((content_hash(turn[1]), answer.prompt_number, answer))
    if len(answers) < 4:
        raise UserError(f"{folder} has {len(answers)} answers to {', '.join(topics)}; choose other topics")
    return [answer for _, _, answer in sorted(answers)]


def with_states(head: DraftHead, answers: Sequence[Answer]) -> Stream:
    """Return the answers with the base's hidden states; one pass each serves all curves."""
    return [(answer, read_hidden_states(head.base_model, head, answer)) for answer in answers]


def train(head: DraftHead, stream: Stream, epochs: int, lr: float) -> None:
    """Train ``head`` on all positions of the answers."""
    config = OnlineConfig(interval=8, positions="all", optim=OptimConfig(lr=lr, schedule="constant"))
    learner = OnlineLearner(head, config)
    for answer, hidden in stream * epochs:
        learner.learn(OnlineExample(text=answer, hidden=hidden, rejected=[]))


def replayed(head: DraftHead, tree: TokenTree, text: Answer, hidden: HiddenStates) -> tuple[float, OnlineExample]:
    """Return how many steps greedy decoding with ``head`` and ``tree`` takes for an answer, and a training example. The
    head reads the finished answer once; nothing is decoded. ``hidden`` are the base's states at its tokens."""
    batch = TrainBatch.of([text.ids], text.boundary).to(head.base.device)
    document_ranks = answer_ranks(head, batch, hidden)
    if not document_ranks:
        return 0.0, OnlineExample(text=text, hidden=hidden, rejected=[])
    ranks = document_ranks[0]
    lengths = accepted_length_probs(accept_probs_of_ranks(ranks, WIDTH), tree)
    (starts,) = start_probs([lengths])
    return float(starts.sum()), OnlineExample(
        text=text, hidden=hidden, rejected=_rejected_ranks(text, ranks, lengths, tree)
    )


def _rejected_ranks(text: Answer, ranks: Ranks, lengths: Any, tree: TokenTree) -> list[tuple[int, int]]:
    """Return (index in ``text.ids``, draft position from 1) of the first token that each greedy step fails to draft.
    ``lengths`` [anchors, depth + 1] are the probabilities of each accepted length."""
    rejected, t = [], 0
    inner = {path[:-1] for path in tree.paths[1:]}
    while t < len(ranks):
        accepted = int(lengths[t].argmax())
        path = tuple(int(rank) for rank in ranks[t, :accepted])
        index = text.boundary + t + accepted + 1
        if path in inner and index < len(text.ids):
            rejected.append((index, accepted + 1))
        t += accepted + 1
    return rejected


def follow(head: DraftHead, stream: Stream, config: OnlineConfig | None) -> tuple[Curve, dict[str, float]]:
    """Score every answer, then learn from it; without ``config`` only score."""
    learner = OnlineLearner(head, config) if config else None
    curve: Curve = []
    started = perf_counter()
    for answer, hidden in stream:
        steps, example = replayed(head, head.tree or TokenTree.chain(head.depth), answer, hidden)
        curve.append((steps, answer.positions))
        if learner:
            learner.learn(example)
    costs = {"seconds": perf_counter() - started}
    if learner:
        costs |= {"updates": learner.updates, "update_s": learner.update_s}
    return curve, costs


def mean(curve: Sequence[tuple[float, int]]) -> float:
    """Return the mean accepted length."""
    return sum(tokens for _, tokens in curve) / sum(steps for steps, _ in curve)


@styled
def draw(curves: dict[str, Curve], change: int, path: Path) -> None:
    """Draw the mean accepted length of the latest answers along the stream."""
    figure, axes = new_axes(height=3.4)
    for name, curve in curves.items():
        ends = list(range(WINDOW // 2, len(curve) + 1, WINDOW // 2))
        axes.plot(ends, [mean(curve[max(0, end - WINDOW) : end]) for end in ends], label=name)
    axes.axvline(change, color=INK, linewidth=0.8)
    axes.set(xlabel="answers (the line: the topic changes)")
    axes.set(ylabel=f"mean accepted length, last {WINDOW} answers")
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    save_png(figure, path)


def main(given: Sequence[str] | None = None) -> None:
    """Run through the stream four times."""
    options = parser(__doc__)
    options.add_argument("--head", required=True, help="head folder")
    options.add_argument("--answers", default="embedded:smollm2", help="folder of a corpus, or embedded:smollm2")
    options.add_argument("--first", default="follow_ups", help="tasks of the first topic")
    options.add_argument("--second", default="code,arithmetic", help="tasks of the second topic")
    options.add_argument("--limit", type=int, default=600, help="most answers per topic in the stream")
    options.add_argument("--outside", type=int, default=300, help="most held-out answers per topic")
    options.add_argument("--interval", type=int, default=8)
    options.add_argument("--steps", type=int, default=1, help="optimiser steps per update")
    options.add_argument("--lr", type=float, default=3e-4)
    options.add_argument("--objective", default="kl")
    options.add_argument("--epochs", type=int, default=2, help="epochs over the held-out answers")
    options.add_argument("--plot", type=Path, metavar="FILE.png")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "limit", "outside", "interval", "steps", "epochs")
    topics = [listed(name, getattr(arguments, name), tuple(TASKS)) for name in ("first", "second")]
    console, (_, head) = Console(), load_base_and_head(arguments.head)
    streams, outside = [], []
    for topic in topics:
        answers = answers_of(head, arguments.answers, topic)
        count = min(arguments.limit, 2 * len(answers) // 3)
        console.print(f"{', '.join(topic)}: {len(answers)} answers, {count} of them in the stream")
        streams.append(with_states(head, answers[-count:]))
        outside.append(with_states(head, answers[:-count][: arguments.outside]))
    train(head, outside[0], arguments.epochs, arguments.lr)
    oracle = frozen_copy(head)
    train(oracle, outside[1], arguments.epochs, arguments.lr)
    shared: dict[str, Any] = {name: getattr(arguments, name) for name in ("interval", "steps", "objective")}
    shared["optim"] = OptimConfig(lr=arguments.lr, schedule="constant")
    learners: dict[str, tuple[DraftHead, OnlineConfig | None]] = {
        "frozen": (head, None),
        "rejected positions": (frozen_copy(head), OnlineConfig(positions="rejected", **shared)),
        "all positions": (frozen_copy(head), OnlineConfig(positions="all", **shared)),
        "trained on the second topic": (oracle, None),
    }
    stream, change = streams[0] + streams[1], len(streams[0])
    late = change + len(streams[1]) // 2
    curves: dict[str, Curve] = {}
    rows: dict[str, dict[str, float | None]] = {}
    for name, (drafter, config) in learners.items():
        curve, costs = follow(drafter, stream, config)
        means = {"first_topic": mean(curve[:change]), "second_topic": mean(curve[change:])}
        curves[name], rows[name] = curve, {**means, "second_half_of_second_topic": mean(curve[late:]), **costs}
    low, high = (mean(curves[name][late:]) for name in ("frozen", "trained on the second topic"))
    for name in ("rejected positions", "all positions"):
        rows[name]["recovered"] = (mean(curves[name][late:]) - low) / (high - low) if high != low else None
    columns = ("head", *rows["all positions"])
    print_table("mean accepted length", [dict.fromkeys(columns) | {"head": name} | row for name, row in rows.items()])
    steps = {name: [count for count, _ in curve] for name, curve in curves.items()}
    tokens = [answer.positions for answer, _ in stream]
    save_record(arguments, "online", {"rows": rows, "change": change, "steps": steps, "tokens": tokens})
    if arguments.plot:
        draw(curves, change, arguments.plot)


if __name__ == "__main__":
    entry_point(main)
