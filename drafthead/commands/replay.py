"""``drafthead replay --head DIR``: what any draft length and tree would do, from plain answers, without decoding."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.eval.trees.choice import Machine, cross_fitted
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.eval.trees.simulate import Chances, Replay, replay
from drafthead.eval.trees.simulate_texts import ChancePlan, replay_texts, text_chances
from drafthead.eval.trees.texts import Text, _check_free, plain_answers, read_texts, write_texts
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.contract import DraftSampling
from drafthead.models.decoding.loop import check_ids, default_draft_config
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.common.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    nodes: int
    depth: int
    replay: Replay
    speedup: float | None
    """Predicted; None where what drafting costs is not known beforehand."""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(prog="drafthead replay", description=__doc__)
    found.add_argument("--head", required=True, help="head folder (outputs/NAME/head) or Hub repository (user/name)")
    found.add_argument("--base", default="", help="base model; by default the one that the head was trained for")
    found.add_argument("--suite", default="smoke", help="prompts that the base answers plainly; default smoke")
    found.add_argument("--limit", type=int, default=None, help="at most so many prompts")
    found.add_argument("--texts", type=Path, default=None, help="answers to replay instead: a .jsonl file (--save)")
    found.add_argument("--save", type=Path, default=None, help="write the base's answers there, for --texts")
    found.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    found.add_argument("--temperature", type=float, default=0.0, help="of the target; default 0, greedy")
    found.add_argument("--nodes", type=_numbers, default=[6, 16, 64], help="tree sizes, root included: 6,16,64")
    found.add_argument("--chain", type=_numbers, default=[1, 2, 3], help="draft lengths of chains: 1,2,3")
    found.add_argument("--draft-sampling", choices=[s.value for s in DraftSampling], default=DraftSampling.TOP_K.value)
    found.add_argument("--draft-temperature", type=float, default=1.0, help="of sampled siblings; default 1")
    found.add_argument(
        "--rule", choices=["exact", "block"], default="exact", help="block: block verification of chains"
    )
    found.add_argument("--seed", type=int, default=0)
    return found


def main() -> None:
    """Entry point."""
    arguments = parser().parse_args()
    try:
        _replay(arguments)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def _replay(arguments: argparse.Namespace) -> None:
    texts = read_texts(arguments.texts) if arguments.texts else []
    if arguments.save:
        _check_free(arguments.save)
    display = Display()
    with display.stage(f"head {arguments.head}"):
        base, head = load_base_and_head(arguments.head, BaseConfig(name=arguments.base))
    if min(arguments.chain) < 1 or max(arguments.chain) > head.depth:
        raise UserError(f"--chain {arguments.chain}: the head drafts 1 to {head.depth} positions")
    if min(arguments.nodes) < 2:
        raise UserError(f"--nodes {arguments.nodes}: the root and one draft are 2 nodes, the least")
    if not texts:
        with display.stage(f"plain answers: {arguments.suite}"):
            texts = plain_answers(base, arguments)
    for number, text in enumerate(texts):
        check_ids(
            text.ids,
            vocab_size=base.vocab_size,
            max_context=base.max_context,
            max_new_tokens=0,
            where=f"text {number}",
        )
    if arguments.save:
        write_texts(arguments.save, texts)
    plan = ChancePlan(
        draft_sampling=DraftSampling(arguments.draft_sampling),
        sampler=Sampler(temperature=arguments.draft_temperature),
        width=1 if arguments.rule == "block" else 10,
        rule=AcceptanceRule(name=arguments.rule),
        seed=arguments.seed,
    )
    with display.stage(f"one pass over {len(texts)} texts"):
        answers = text_chances(base, head, texts, Sampler(temperature=arguments.temperature), plan)
    with display.stage("step costs on this machine"):
        machine = Machine(measure_costs(base, head))
    sizes = [] if arguments.rule == "block" else arguments.nodes
    found = rows(answers, machine, arguments.chain, sizes, plan.draft_sampling, arguments.seed)
    if head.confidence_threshold and plan.draft_sampling is DraftSampling.TOP_K and plan.rule.name == "exact":
        with display.stage("the head's own plan, drafted at every position for its threshold"):
            found.append(own_row(base, head, texts, Sampler(temperature=arguments.temperature), arguments.seed))
    display.console.print(table(found, arguments))


def own_row(base: BaseModel, head: DraftHead, texts: Sequence[Text], sampler: Sampler, seed: int = 0) -> Row:
    """The head's own tree with its threshold, which the other rows know nothing of: they replay whole trees."""
    own = default_draft_config(head)
    replayed = replay_texts(base, head, texts, own, sampler, seed=seed)
    return Row(f"own, threshold {own.confidence_threshold:g}", own.nodes, own.depth, replayed, None)


def rows(
    answers: Sequence[Chances],
    machine: Machine,
    lengths: Sequence[int],
    sizes: Sequence[int],
    draft_sampling: DraftSampling,
    seed: int = 0,
) -> list[Row]:
    """Chains of these lengths, and the best trees of these sizes, each measured on answers it was not searched on."""
    depth = answers[0].shape[1]
    plain = machine.step(TokenTree.chain(0))
    found = []
    for length in lengths:
        if not 1 <= length <= depth:
            raise UserError(f"a chain of {length} drafts is wanted, but the head drafts 1 to {depth} positions")
        chain = TokenTree.chain(length)
        replayed = replay(answers, chain, seed)
        speedup = replayed.mean_accepted_tokens * plain / machine.step(chain)
        found.append(Row(f"chain of {length}", length + 1, length, replayed, speedup))
    if sizes and min(sizes) < 2:
        raise UserError(f"a tree of {min(sizes)} nodes is wanted; the root and one draft are 2")
    # Sampled siblings are trials in order, which only Sequoia's program keeps to.
    method = "search" if draft_sampling is DraftSampling.TOP_K else "sequoia"
    for size, replayed in zip(sizes, cross_fitted(answers, sizes, method, seed) if sizes else [], strict=True):
        seconds = machine.costs.step(size, depth)
        speedup = replayed.mean_accepted_tokens * plain / seconds
        found.append(Row(f"best tree of {size}", size, depth, replayed, speedup))
    return found


def table(found: Sequence[Row], arguments: argparse.Namespace) -> Table:
    """The rows as printed."""
    title = f"replay of plain answers, {arguments.draft_sampling.replace('_', ' ')} siblings, rule {arguments.rule}"
    shown = Table("draft", "nodes", "tokens a step", "95 %", "predicted speedup", title=title)
    for row in found:
        low_high = row.replay.interval
        between = "" if low_high is None else f"{low_high[0]:.2f} to {low_high[1]:.2f}"
        tokens, speedup = row.replay.mean_accepted_tokens, "" if row.speedup is None else f"{row.speedup:.2f}"
        shown.add_row(row.name, str(row.nodes), f"{tokens:.2f}", between, speedup)
    return shown


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
