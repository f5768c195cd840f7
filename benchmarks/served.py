"""Time heads in serving engines, each server alone on the machine, in rounds.

    python benchmarks/served.py --heads eagle3=outputs/eagle3/head,dflash=outputs/dflash/head --json served.json

A round starts one server after another: the engine without a head, then with each head. A server answers all prompts,
one at a time, and stops before the next starts. So an engine never shares the cores with another, and a slow minute
meets every server in another round. The record is written after every server, and the same command continues after an
interruption. Our own decoder drafts equal chains, untimed, to compare acceptance and answers.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import at_least, entry_point, listed, new_record, parser, print_table

from drafthead.data.intervals import bootstrap_interval
from drafthead.data.prompts.suites import load_suite
from drafthead.errors import UserError
from drafthead.eval.config import EngineConfig, EnginesConfig
from drafthead.eval.engines.served import PLAIN as WITHOUT
from drafthead.eval.engines.served import EngineStart, format_for, method_of
from drafthead.eval.lossless.equality import compare_outputs, logit_margin
from drafthead.eval.metrics import steps
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.step import DecodeResult
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base, load_head
from drafthead.models.token_tree import TokenTree

ENGINES = {"vllm": "vLLM", "llamacpp": "llama.cpp"}
PLAIN = "no head"
TIE = 0.01
"""Logits closer than this may swap, because engines order sums differently (as ``engine.tie``)."""


class Served:
    """A head as one engine loads it, or the engine without a head."""

    def __init__(self, engine: str, base: BaseModel, head: DraftHead | None, drafts: int, python: str = "") -> None:
        self.engine, self.base, self.head, self.drafts = engine, base, head, drafts
        self.settings = EnginesConfig(start_timeout_s=900.0)
        setattr(self.settings, engine, EngineConfig(python=python))
        self.target = format_for(engine, head) if head else None

    def export(self, folder: Path) -> None:
        """Write the head to ``folder``."""
        folder.mkdir(exist_ok=True)
        if self.target:
            self.target.export(self.target.fitted(self.head), folder, torch.float32)

    def answers(self, folder: Path, prompts: Sequence[list[int]], new: int) -> tuple[str, list[DecodeResult]]:
        """Start the engine with the head in ``folder``; return the engine's version and its answers."""
        with ExitStack() as stack:
            method = method_of(self.target, self.head) if self.target and self.head else ""
            start = EngineStart(stack, self.engine, self.settings, self.base, folder, method, max(1, self.drafts))
            server = start.server("" if self.head else WITHOUT)
            assert server is not None
            server.answer(prompts[0], 8)  # the first answer includes set-up that later ones do not need
            return server.version(), [server.answer(ids, new) for ids in prompts]


def acceptance(answers: Sequence[DecodeResult]) -> dict[str, Any]:
    """Return the numbers of steps, of accepted drafts by position, and tau."""
    rows = steps.step_table({"": answers})
    return {
        "steps": len(steps.drafting(rows)),
        "accepted": steps.accepted_by_depth(rows),
        "tau": steps.mean_accepted_length(rows),
    }


def equal_texts(
    base: BaseModel, prompts: Sequence[list[int]], plain: Sequence[DecodeResult], answers: Sequence[DecodeResult]
) -> dict[str, int]:
    """Return how many answers equal those of our own decoding without drafts, and how many part at a near-tie."""
    equalities = [
        compare_outputs(
            ours.tokens, theirs.tokens, partial(logit_margin, base, ids, ours.tokens, theirs.tokens), tie=TIE
        )
        for ids, ours, theirs in zip(prompts, plain, answers, strict=True)
    ]
    same, ties = sum(one.same for one in equalities), sum(one.near_tie for one in equalities)
    return {"same": same, "near_ties": ties, "of": len(equalities)}


def speedup(rounds: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ratio of tokens per second to those without a head.

    "interval" is the 95 % bootstrap interval over prompts, with all rounds of a prompt together; "rounds" has the ratio
    of every round.
    """
    count = min(len(rounds), len(plain))
    sums = [
        np.sum([one[key] for one in served[:count]], axis=0)
        for served in (rounds, plain)
        for key in ("tokens", "seconds")
    ]

    def ratio(totals: np.ndarray) -> np.ndarray:
        tokens, seconds, plain_tokens, plain_s = np.moveaxis(totals, -1, 0)
        return np.asarray((tokens / seconds) / (plain_tokens / plain_s))

    prompts = np.stack(sums, axis=-1)
    each = [
        float(ratio(np.array([sum(one[key]) for one in pair for key in ("tokens", "seconds")])))
        for pair in zip(rounds, plain, strict=False)
    ]
    return {"ratio": float(ratio(prompts.sum(0))), "interval": bootstrap_interval(prompts, ratio), "rounds": each}


def tokens_per_second(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return tokens per second over all rounds, prefill included."""
    return sum(sum(one["tokens"]) for one in rounds) / sum(sum(one["seconds"]) for one in rounds)


def main(given: Sequence[str] | None = None) -> None:
    """Run every server that the record lacks, and print the table."""
    options = parser(__doc__)
    options.set_defaults(json=Path("served.json"))
    add = options.add_argument
    add("--heads", required=True, metavar="NAME=DIR,...", help="heads; an engine skips those that it cannot load")
    add("--engines", default=",".join(ENGINES), metavar="LIST", help="default %(default)s")
    add("--base", default="embedded:smollm2")
    add("--suite", default="spec_bench_like")
    add("--prompts", type=int, default=16, metavar="N", help="first turns of the suite's test half; default 16")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--rounds", type=int, default=3, metavar="N")
    arguments = options.parse_args(given)
    at_least(arguments, 1, "prompts", "rounds", "max_new_tokens")
    engines = listed("engines", arguments.engines, list(ENGINES))
    folders = dict(pair.partition("=")[::2] for pair in arguments.heads.split(","))
    facts = {name: getattr(arguments, name) for name in ("base", "suite", "prompts", "max_new_tokens")}
    record = read_json(arguments.json) if arguments.json.exists() else new_record("served") | facts
    if changed := [key for key, value in facts.items() if record[key] != value]:
        raise UserError(f"{arguments.json} was begun with another {', '.join(changed)}; choose another --json")
    base = load_base(arguments.base)
    heads = {name: load_head(folder, base) for name, folder in folders.items()}
    servers = record["engines"] = {engine: {} for engine in engines} | record.get("engines", {})
    for engine, name, head in pending(servers, engines, {PLAIN: None, **heads}, arguments.rounds):
        row = run(engine, base, head, arguments)
        rounds = [*servers[engine].get(name, {}).get("rounds", ()), row.pop("round")]
        servers[engine][name] = row | {"rounds": rounds}
        write_json(arguments.json, record)
    print_table("served", table(record))


def pending(
    servers: Mapping[str, Any], engines: Sequence[str], heads: Mapping[str, DraftHead | None], rounds: int
) -> Iterator[tuple[str, str, DraftHead | None]]:
    """Yield engine, name and head of each server to run, round by round."""
    for number in range(rounds):
        for engine in engines:
            for name, head in heads.items():
                if len(servers[engine].get(name, {}).get("rounds", ())) == number and loads(engine, head):
                    yield engine, name, head


def loads(engine: str, head: DraftHead | None) -> bool:
    """Return True if ``engine`` can serve ``head`` on this machine."""
    try:
        # vLLM drafts with DSpark heads on GPUs only.
        return head is None or format_for(engine, head).name != "dspark" or torch.accelerator.is_available()
    except UserError:
        return False


def run(engine: str, base: BaseModel, head: DraftHead | None, arguments: Any) -> dict[str, Any]:
    """Let one server answer all prompts; return its record."""
    drafts = min(head.config.trained_positions, head.depth) if head else 0
    served, new = Served(engine, base, head, drafts), arguments.max_new_tokens
    prompts = load_suite(arguments.suite, arguments.prompts, 0, split="test")
    ids = [base.prompt_ids(prompt.messages) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        served.export(Path(folder))
        version, answers = served.answers(Path(folder), ids, new)
    plain = [decode(base, None, prompt, max_new_tokens=new) for prompt in ids]
    row: dict[str, Any] = {"version": version, "texts": equal_texts(base, ids, plain, answers), "drafts": drafts}
    if head and served.target:
        fitted, chain = served.target.fitted(head), DraftConfig(tree=TokenTree.chain(drafts))
        ours = [decode(base, fitted, prompt, max_new_tokens=new, draft_config=chain) for prompt in ids]
        row |= {"format": served.target.name, "acceptance": {"engine": acceptance(answers), "ours": acceptance(ours)}}
    row["round"] = {
        "tokens": [len(answer.tokens) for answer in answers],
        "seconds": [answer.total_s for answer in answers],
    }
    return row


def table(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row of cells per engine and head."""
    rows = []
    for engine, servers in record["engines"].items():
        for name, row in servers.items():
            speed = speedup(row["rounds"], servers[PLAIN]["rounds"])
            texts, counts = row["texts"], row.get("acceptance")
            cells = {"engine": ENGINES[engine], "head": name, "format": row.get("format", "")}
            if counts:
                theirs, (low, high) = counts["engine"], speed["interval"]
                accepted = " ".join(map(str, theirs["accepted"]))
                cells["accepted by position, of steps"] = f"{accepted} of {theirs['steps']}"
                cells["tau; drafthead"] = f"{theirs['tau']:.2f}; {counts['ours']['tau']:.2f}"
                cells["speedup"], cells["95 %"] = f"{speed['ratio']:.2f}x", f"{low:.2f}–{high:.2f}"
                cells["by round"] = f"{min(speed['rounds']):.2f}–{max(speed['rounds']):.2f}"
            else:
                cells |= {"accepted by position, of steps": "", "tau; drafthead": "1.00"}
                cells |= {"speedup": "1.00x", "95 %": "", "by round": ""}
            cells["tokens/s"] = f"{tokens_per_second(row['rounds']):.1f}"
            cells["equal texts, near-ties"] = f"{texts['same']}, {texts['near_ties']} of {texts['of']}"
            rows.append(cells)
    return rows


if __name__ == "__main__":
    entry_point(main)
