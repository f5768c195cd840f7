"""Measure the accepted length (tau) of heads by the length of the prompt, for the same questions.

    python benchmarks/long_contexts.py --heads eagle3=outputs/eagle3/head,dspark=outputs/dspark/head --windows 512

A prompt of n tokens is the end of a text of passages from the suite `long_context`; the last passage has the question.
So every length asks the same questions, which need what stands right before them. The base answers greedily, and each
head's greedy chain is simulated on these answers: as the head is, and with windows. Ratios to the shortest prompts are
paired over the questions, with a 95 % interval. Lengths leave room for the answer and the chat template. With --json,
the record is written after every length, and the same command continues.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import at_least, entry_point, new_record, numbers, parser, print_table
from training_quality import ratio, steps_of, tau

import drafthead
from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.loops import is_degenerate
from drafthead.data.answers.store import Answer
from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.data.prompts.suites import load_suite
from drafthead.data.text.chat import user_turn
from drafthead.errors import UserError
from drafthead.eval.trees.simulate import read_hidden_states
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.corpus import generate_answers
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.heads.parts.windows import with_window
from drafthead.models.simulation.acceptance import accept_probs_of_ranks
from drafthead.models.simulation.ranks import answer_ranks
from drafthead.models.token_tree import TokenTree


def prompts(base: BaseModel, length: int, count: int) -> list[list[int]]:
    """Return token ids of ``count`` prompts with ``length`` tokens of passages each."""
    passages = [base.tokenizer(p.user_turns[0] + "\n\n").input_ids for p in load_suite("long_context")]
    ids = []
    for question in range(count):
        text = [token for i in range(len(passages)) for token in passages[(question + 1 + i) % len(passages)]]
        if len(text) < length:
            raise UserError(f"the passages have {len(text)} tokens, too few for --lengths {length}; lower it")
        ids.append(base.prompt_ids(user_turn(base.tokenizer.decode(text[-length:]).strip())))
    return ids


def answers(base: BaseModel, asked: Sequence[list[int]], tokens: int) -> list[Answer]:
    if (longest := max(map(len, asked))) + tokens > base.max_context:
        raise UserError(f"a prompt of {longest} tokens and {tokens} more exceed the context of {base.max_context}")
    sampler = SamplerConfig(temperature=0.0, max_new_tokens=tokens)
    answered = generate_answers(base, list(enumerate(asked)), sampler, batch_size=1, max_prompt_tokens=longest)
    in_order = sorted(answered, key=lambda answer: answer.prompt_number)
    return [answer for answer in in_order if answer.positions]


def judged(head: DraftHead, text: Answer, states: HiddenStates) -> list[float]:
    """Return the positions of an answer and the expected steps of the head's chain."""
    ranks = answer_ranks(head, TrainBatch.of([text.ids], text.boundary), states)
    return steps_of([accept_probs_of_ranks(each, 1) for each in ranks], TokenTree.chain(head.depth))[0]


def measure(base: BaseModel, heads: dict[str, DraftHead], length: int, arguments: Namespace) -> dict[str, Any]:
    """Return the number of answers and of degenerate ones (loops), and each head's positions and steps."""
    results: dict[str, list[list[float]]] = {name: [] for name in heads}
    texts = answers(base, prompts(base, length, arguments.count), arguments.tokens)
    for text in texts:
        states: dict[tuple[int, ...], HiddenStates] = {}  # by the layers that a head reads
        for name, head in heads.items():
            if head.spec.layers not in states:
                states[head.spec.layers] = read_hidden_states(base, head, text)
            results[name].append(judged(head, text, states[head.spec.layers]))
    loops = sum(is_degenerate(text.ids[text.boundary :]) for text in texts)
    return {"length": length, "answers": len(texts), "loops": loops, "heads": results}


def table(results: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Return a line per head and length."""
    lines = list[dict[str, object]]()
    for name, first in results[0]["heads"].items():
        for result in results:
            steps = result["heads"][name]
            line: dict[str, object] = {
                "head": name,
                "tokens": result["length"],
                "tau": f"{tau(steps):.3f}",
                "ratio": "",
            }
            if steps is not first:
                line["ratio"] = "{:.3f} ({:.3f}-{:.3f})".format(*ratio(np.array([steps]), np.array([first])))
            lines.append(line | {"answers": result["answers"], "loops": result["loops"]})
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--heads", required=True, help="NAME=FOLDER of each head, separated by commas")
    options.add_argument("--base", default=EMBEDDED, help="the heads' base")
    options.add_argument("--windows", default="", help="sliding windows in tokens, separated by commas; default: none")
    options.add_argument("--lengths", default="1000,2000,4000,8000", help="tokens of the prompts' passages")
    options.add_argument("--count", type=int, default=8, help="prompts of each length")
    options.add_argument("--tokens", type=int, default=64, help="longest answer")
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "count", "tokens")
    arguments.lengths = numbers("lengths", arguments.lengths)
    windows = numbers("windows", arguments.windows) if arguments.windows else []
    folders = dict(item.split("=", 1) for item in arguments.heads.split(",") if "=" in item)
    if not folders:
        raise UserError(f"--heads needs NAME=FOLDER, got {arguments.heads}")
    base = drafthead.load_base(arguments.base)
    heads = {name: load_head(Path(folder), base) for name, folder in folders.items()}
    for name, head in list(heads.items()):
        heads |= {f"{name}, window {window}": with_window(head, window) for window in windows}
    path = arguments.json
    record = read_json(path) if path and path.exists() else new_record("long_contexts") | {"results": []}
    for length in sorted({*arguments.lengths} - {result["length"] for result in record["results"]}):
        record["results"].append(measure(base, heads, length, arguments))
        print(f"prompts of {length} tokens are done", flush=True)
        if path:
            write_json(path, record)
    print_table("tau by length of the prompt", table(record["results"]))


if __name__ == "__main__":
    entry_point(main)
