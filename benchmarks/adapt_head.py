"""Measure heads on fine-tunes of their base: as they are, adapted to answers of the fine-tune, and trained anew.

    python benchmarks/fine_tunes.py                                             # three fine-tunes of SmolLM2
    python benchmarks/adapt_head.py --heads eagle3_smollm2_vllm=outputs/eagle3/head,medusa_smollm2=outputs/medusa/head

--heads names recipes, each with a head that it trained for SmolLM2. Every fine-tune answers its own prompts once; a
head is adapted to several numbers of these answers by `recipe=adapt_head_smollm2`, with two passes over them. Another
head is trained anew by its recipe on the largest number, for as many steps. All heads are judged by the mean accepted
length (tau) of a chain and of the best tree of six nodes, simulated on greedy answers to prompts that no head saw:

    fine-tune    the fine-tune's answers to its test prompts
    original     the original base's answers to the same prompts, drafted for the original base
    general      the original base's answers to spec_bench_like, drafted for the original base: what a head forgets

Ratios are paired over answers, with a 95 % interval. The record is written after every head, and the same command
continues after an interruption.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import at_least, entry_point, new_record, numbers, parser, print_table
from figures import svg
from matplotlib.figure import Figure
from training_quality import NODES, WIDTH, ratio, run_measured, steps_of, tau

from drafthead.data.answers.store import Answer, open_answers
from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.report import plots
from drafthead.eval.trees.finished_answers import base_answers, read_texts, write_texts
from drafthead.eval.trees.search import greedy_tree
from drafthead.eval.trees.simulate import read_hidden_states
from drafthead.files.local import read_json, write_atomic, write_json
from drafthead.models.base.base_config import EMBEDDED, BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.simulation.acceptance import accept_probs_of_ranks
from drafthead.models.simulation.ranks import answer_ranks
from drafthead.models.token_tree import TokenTree

ROOT = Path(__file__).parent.parent
SETS = ("fine-tune", "original", "general")
GENERAL = "spec_bench_like"
TOKENS_PER_STEP = 4 * 512  # prompts included; of the recipes for SmolLM2


def settings_of(tune: Path, arguments: Namespace) -> list[str]:
    """Return the settings that all trainings on a fine-tune share: its base, its prompts and its corpus."""
    return [
        f"base.adapter={tune / 'adapter'}",
        f"data.prompts={tune / 'prompts.jsonl'}:{arguments.prompts}",
        f"data.folder={arguments.out / tune.name / 'corpora'}",
        f"data.answers.sampler.max_new_tokens={arguments.tokens}",
        "validate_every=1000000",
        "tracker=none",
        "stages=[corpora,train]",
    ]


def sizes(folder: Path, answers: int) -> tuple[int, int]:
    """Return the answer tokens of that many of the corpus's answers, and the steps of two passes over them."""
    stored = [*open_answers(folder).read(with_hidden_states=False)]
    own = np.mean([len(answer.input_ids) - answer.boundary for answer in stored])
    whole = np.mean([len(answer.input_ids) for answer in stored])
    return int(answers * own), max(4, round(2 * answers * whole / TOKENS_PER_STEP))


def train(out: Path, recipe: str, settings: Sequence[str], threads: int) -> dict[str, float]:
    """Train a head; an interrupted training continues."""
    command = [sys.executable, "-m", "drafthead", "train", f"recipe={recipe}", *settings, f"out={out}"]
    return run_measured(command, threads)


class Judge:
    """A fine-tune and its original base, with their answers."""

    def __init__(self, tune: Path, arguments: Namespace) -> None:
        self.folder, self.tokens = arguments.out, arguments.tokens
        self.bases = {
            "fine-tune": BaseModel.load(BaseConfig(name=EMBEDDED, adapter=str(tune / "adapter"))),
            "original": BaseModel.load(BaseConfig(name=EMBEDDED)),
        }
        self.states: dict[tuple[str, tuple[int, ...]], list[HiddenStates]] = {}
        test = str(tune / "test.jsonl")
        self.texts = {
            "fine-tune": self._answers("fine-tune", tune.name, test, None, "all"),
            "original": self._answers("original", tune.name, test, None, "all"),
            "general": self._answers("original", "", GENERAL, 24, "test"),
        }

    def _answers(self, base: str, tune: str, suite: str, limit: int | None, split: str) -> list[Answer]:
        path = self.folder / tune / "answers" / f"{base}-{Path(suite).stem}-{self.tokens}.jsonl"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            config = SuiteConfig(suite=suite, limit=limit, max_new_tokens=self.tokens)
            write_texts(path, base_answers(self.bases[base], config, split=split))
        return [text for text in read_texts(path) if text.positions]

    def _states(self, name: str, head: DraftHead) -> list[HiddenStates]:
        """Return the hidden states of a set of answers, which heads that read the same layers share."""
        key = (name, head.spec.layers)
        if key not in self.states:
            self.states[key] = [read_hidden_states(head.base_model, head, text) for text in self.texts[name]]
        return self.states[key]

    def judge(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Return the acceptance of a saved head by set of answers: positions and expected steps of each answer."""
        tables = {}
        for name in SETS:
            head = load_head(folder, self.bases["fine-tune" if name == "fine-tune" else "original"], any_base=True)
            pairs = zip(self.texts[name], self._states(name, head), strict=True)
            batches = ((TrainBatch.of([text.ids], text.boundary), states) for text, states in pairs)
            ranks = (r for batch, states in batches for r in answer_ranks(head, batch, states))
            tables[name] = [accept_probs_of_ranks(each, WIDTH) for each in ranks]
        tree = greedy_tree(tables["fine-tune"], NODES - 1).tree(NODES - 1)
        trees = {"chain": TokenTree.chain(head.depth), "tree": tree}
        return {name: {kind: steps_of(table, t) for kind, t in trees.items()} for name, table in tables.items()}


def rows(
    tune: Path, recipe: str, head: Path, done: set[str], arguments: Namespace
) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Yield the name, the facts and the folder of each head of a fine-tune whose name is not ``done``; train it."""
    if "original head" not in done:
        yield "original head", {}, head
    common, corpora = settings_of(tune, arguments), arguments.out / tune.name / "corpora"
    if not (corpora / "answers" / "complete.json").exists():
        command = [f"init_from={head}", *common, "stages=[corpora]"]
        train(arguments.out / tune.name / "corpus", "adapt_head_smollm2", command, arguments.threads)
    adapted = [(f"adapted, {n:,} answers", "adapt_head_smollm2", [f"init_from={head}"], n) for n in arguments.sizes]
    for name, used, start, answers in [*adapted, ("anew", recipe, ["~phases.pretrain"], max(arguments.sizes))]:
        if name in done:
            continue
        tokens, steps = sizes(corpora, answers)
        out = arguments.out / tune.name / f"{recipe}-{'anew' if name == 'anew' else answers}"
        limits = [f"phases.distill.max_tokens={tokens}", f"phases.distill.steps={steps}"]
        cost = train(out, used, [*start, *common, *limits, *arguments.set], arguments.threads)
        yield name, {"answers": answers, "answer_tokens": tokens, "steps": steps, "cost": cost}, out / "head"


def table(record: Mapping[str, Any], kind: str) -> list[dict[str, object]]:
    """Return a line per head: tau and, for a fine-tune's answers, the ratio to the original head."""
    lines, firsts = list[dict[str, object]](), dict[tuple[str, str], Any]()
    for run in record["runs"]:
        first = firsts.setdefault((run["fine_tune"], run["recipe"]), run)
        line: dict[str, object] = {"base": run["fine_tune"], "head": run["recipe"], "trained": run["row"]}
        for name in SETS:
            line[name] = f"{tau(run['judged'][name][kind]):.3f}"
        latest, original = (np.array(of["judged"]["fine-tune"][kind])[None] for of in (run, first))
        line["ratio on the fine-tune"] = (
            "" if run is first else "{:.3f} ({:.3f}-{:.3f})".format(*ratio(latest, original))
        )
        line["CPU s"] = f"{run['cost']['cpu_s']:.0f}" if "cost" in run else ""
        lines.append(line)
    return lines


@plots.styled
def figure(record: Mapping[str, Any], kind: str = "chain") -> Figure:
    """Draw tau on the fine-tune by number of answers: a panel per fine-tune, a colour per head."""
    names = list(dict.fromkeys(run["fine_tune"] for run in record["runs"]))
    recipes = list(dict.fromkeys(run["recipe"] for run in record["runs"]))
    counts = sorted({run["answers"] for run in record["runs"] if "answers" in run})
    largest = counts[-1]
    drawn = Figure(figsize=(3.2 * len(names), 4.2), layout="constrained", facecolor="white")
    panels = drawn.subplots(1, len(names), sharey=True, squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        for recipe, colour in zip(recipes, ("#2f81f7", "#d4770c", "#8c96a3"), strict=False):
            runs = [run for run in record["runs"] if (run["fine_tune"], run["recipe"]) == (name, recipe)]
            lengths = {run["row"]: tau(run["judged"]["fine-tune"][kind]) for run in runs}
            adapted = [(run["answers"], lengths[run["row"]]) for run in runs if run["row"].startswith("adapted")]
            if adapted:
                axes.plot(*zip(*adapted, strict=True), "o-", color=colour, label=f"{recipe}, adapted")
            axes.axhline(lengths["original head"], color=colour, linestyle=":", label=f"{recipe}, as it was")
            if "anew" in lengths:
                axes.plot(largest, lengths["anew"], "x", color=colour, label=f"{recipe}, trained anew, equal steps")
        axes.set(xscale="log", title=name, xlabel="answers of the fine-tune")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
    panels[0][0].set_ylabel("mean accepted length")
    handles = {
        label: handle for axes in panels[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = sorted(handles)
    drawn.legend([handles[each] for each in labels], labels, loc="outside lower center", ncols=2, frameon=False)
    return drawn


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--fine-tunes", type=Path, default=ROOT / "outputs" / "fine_tunes", help="folder of them")
    options.add_argument("--only", help="names of fine-tunes, separated by commas; default: all")
    options.add_argument("--heads", default="", help="RECIPE=FOLDER of each original head, separated by commas")
    options.add_argument("--sizes", default="100,300,700", help="numbers of answers to adapt to")
    options.add_argument("--prompts", type=int, default=950, help="prompts that a fine-tune answers")
    options.add_argument("--tokens", type=int, default=64, help="longest answer")
    options.add_argument("--set", nargs="*", default=[], help="more settings of all trainings")
    options.add_argument("--threads", type=int, default=1, help="threads of a training")
    options.add_argument("--out", type=Path, default=ROOT / "outputs" / "adapt_head", help="folder of the heads")
    options.add_argument("--plot", type=Path, help="write the figure to this SVG file")
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "prompts", "tokens", "threads")
    arguments.sizes = numbers("sizes", arguments.sizes)
    path = arguments.json or arguments.out / "record.json"
    record = read_json(path) if path.exists() else new_record("adapt_head") | {"runs": []}
    heads = dict(item.split("=", 1) for item in arguments.heads.split(",") if "=" in item)
    names = arguments.only.split(",") if arguments.only else None
    tunes = [adapter.parent for adapter in sorted(arguments.fine_tunes.glob("*/adapter"))]
    tunes = [tune for tune in tunes if names is None or tune.name in names]
    if heads and not tunes:
        raise UserError(f"{arguments.fine_tunes} has no fine-tune; make them with benchmarks/fine_tunes.py")
    for tune in tunes:
        judge = None
        for recipe, head in heads.items():
            of = {"fine_tune": tune.name, "recipe": recipe}
            done = {run["row"] for run in record["runs"] if of.items() <= run.items()}
            for name, facts, folder in rows(tune, recipe, Path(head), done, arguments):
                judge = judge or Judge(tune, arguments)
                record["runs"].append(of | {"row": name} | facts | {"judged": judge.judge(folder)})
                write_json(path, record)
    for kind in ("chain", "tree"):
        print_table(f"tau of a {kind}", table(record, kind))
    if arguments.plot:
        write_atomic(arguments.plot, svg(figure(record), "adapt_head"))


if __name__ == "__main__":
    entry_point(main)
