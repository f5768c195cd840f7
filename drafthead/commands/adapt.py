"""Answer a stream of prompts, and train the head on the answers meanwhile (Online Speculative Decoding, 2310.07177).

usage: drafthead adapt head=DIR [suite=NAME] [key=value ...]

drafthead adapt head=outputs/hydra_smollm2/head suite=code limit=40
drafthead adapt head=outputs/hydra_smollm2/head suite=my.jsonl interval=8 objective=kl positions=all

The head is updated after every `interval` answers, by default with one optimiser step on the positions where its
drafts were rejected, because decoding has already computed the base's distributions at these positions. The output
keeps the base's distribution: the acceptance rule is lossless, and weights change only between answers. Prompts are
answered in the suite's order, first turns only. An interrupted stream resumes after its last update.

Files in out: head/ is the adapted head; answers.jsonl has one line per answer; stream.png shows the mean accepted
length along the stream. With greedy decoding it also shows the original head, simulated on the same answers.
"""

import json
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from drafthead.commands.command import command
from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import folder_beside, load_suite, suite_label
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.report.plots import MUTED, new_axes, save_png, styled
from drafthead.files.local import claimed, make_folder, read_json_lines, write_atomic
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.decoding.loop import static_draft_config
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import settings
from drafthead.system.display import Display
from drafthead.train.adapt import OnlineConfig, OnlineLearner, frozen_copy, simulated_steps


@settings(kw_only=True)
class AdaptConfig(OnlineConfig, SuiteConfig):
    """Settings of ``drafthead adapt``."""

    head: str
    """Head to adapt: a folder (``outputs/NAME/head``) or a Hub repository (``user/name``)."""
    base: BaseConfig = field(default_factory=BaseConfig)
    suite: str = "spec_bench_like"
    tasks: list[str] = field(default_factory=list)
    """Tasks of the suite to answer. Empty: all."""
    sampler: Sampler = field(default_factory=Sampler)
    out: str = ""
    """Folder of the results. By default ``adapt-SUITE`` next to the head."""
    resume: bool = True
    """Continue an interrupted stream after its last update. With false, it starts over."""


@command("adapt", AdaptConfig, __doc__)
def main(config: AdaptConfig) -> None:
    prompts = load_suite(config.suite, config.limit, config.seed, config.tasks)
    display = Display()
    with display.stage(f"head {config.head}"):
        base, head = load_base_and_head(config.head, config.base)
    default = folder_beside(config.head) / f"adapt-{suite_label(config.suite)}"
    folder = Path(config.out) if config.out else default
    make_folder(folder, "out=...")
    frozen, learner = frozen_copy(head), OnlineLearner(head, config)
    ids = [conversation_ids(base.tokenizer, p, template_kwargs=base.config.chat_template_kwargs) for p in prompts]
    fits = [n for n, each in enumerate(ids) if len(each) + config.max_new_tokens <= base.max_context]
    if not fits:
        raise UserError(
            f"no prompt of {config.suite} with max_new_tokens={config.max_new_tokens} fits the base's context of "
            f"{base.max_context} tokens; lower max_new_tokens"
        )
    if skipped := len(ids) - len(fits):
        display.line(f"   skipping {skipped} of {len(ids)} prompts, which do not fit the context of {base.max_context}")
    made_by = stream_identity(config, frozen.base_identity, ids)
    log = folder / "answers.jsonl"
    with claimed(folder):
        if config.resume and learner.restore(folder / "checkpoints", made_by):
            display.line(f"   continuing after {learner.answered} answers and {learner.updates} updates")
        rows: list[dict[str, Any]] = read_json_lines(log)[: learner.answered] if learner.answered else []
        with display.stage(f"answering {len(fits)} prompts of {config.suite}"):
            for position in range(learner.answered, len(fits)):
                number = fits[position]
                seed = config.seed + number
                result, lesson = learner.answer(
                    ids[number], max_new_tokens=config.max_new_tokens, sampler=config.sampler, seed=seed
                )
                row = {"prompt": number, "task": prompts[number].task, "steps": len(result.steps), "s": result.total_s}
                row |= {"tokens": sum(step.committed for step in result.steps), "rejected": len(lesson.rejected)}
                if config.sampler.greedy:
                    tree = static_draft_config(frozen).tree
                    assert isinstance(tree, TokenTree)
                    row["steps_frozen"] = simulated_steps(frozen, tree, lesson.text, lesson.hidden)
                rows.append(row)
                if learner.answered % config.interval == 0:
                    # Write the log first: a resumed stream truncates it to the checkpoint's answers.
                    write_atomic(log, "".join(json.dumps(each) + "\n" for each in rows))
                    learner.save(folder / "checkpoints", made_by)
                display.progress("answers", position + 1, len(fits))
        write_atomic(log, "".join(json.dumps(each) + "\n" for each in rows))
        head.save_pretrained(folder / "head")
    for line in summary(rows, learner):
        display.line(line)
    draw(rows, folder / "stream.png", config.interval)
    display.line(f"adapted head: {folder / 'head'}   log and figure of the stream: {log}, {folder / 'stream.png'}")


def stream_identity(config: AdaptConfig, base: dict[str, Any], ids: Sequence[list[int]]) -> dict[str, Any]:
    """Return the settings and inputs that must be equal to resume a stream, as JSON values."""
    online = {key: getattr(config, key) for key in ("interval", "positions", "objective", "steps", "max_tokens")}
    return {
        **online,
        "optim": repr(config.optim),
        "base": base["fingerprint"],
        "head": config.head,
        "suite": [config.suite, config.limit, config.seed, len(ids), sum(map(len, ids))],
        "answers": [config.max_new_tokens, repr(config.sampler)],
    }


def accepted_length(rows: Sequence[dict[str, Any]], key: str = "steps") -> float:
    """Return all tokens / all steps of ``rows``. With ``key`` "steps_frozen", steps are those of the original head."""
    steps = sum(row[key] for row in rows)
    return sum(row["tokens"] for row in rows) / steps if steps else float("nan")


def summary(rows: Sequence[dict[str, Any]], learner: OnlineLearner) -> list[str]:
    quarter = max(1, len(rows) // 4)
    lines = [
        f"mean accepted length: {accepted_length(rows):.2f} over {len(rows)} answers; the first {quarter}: "
        f"{accepted_length(rows[:quarter]):.2f}, the last {quarter}: {accepted_length(rows[-quarter:]):.2f}"
    ]
    if all("steps_frozen" in row for row in rows):
        lines.append(
            f"the original head, simulated on the same answers: {accepted_length(rows, 'steps_frozen'):.2f}; the last "
            f"{quarter}: {accepted_length(rows[-quarter:], 'steps_frozen'):.2f}"
        )
    share = learner.update_s / learner.decode_s if learner.decode_s else float("nan")
    if not learner.updates:
        every = learner.config.interval
        return [*lines, f"no update: {len(rows)} answers, an update needs {every}; raise limit or lower interval"]
    lines.append(f"{learner.updates} updates took {learner.update_s:.1f} s, {100 * share:.0f} % of the decoding time")
    return lines


@styled
def draw(rows: Sequence[dict[str, Any]], path: Path, interval: int) -> None:
    figure, axes = new_axes(height=3.2)
    groups = [rows[start : start + interval] for start in range(0, len(rows), interval)]
    centres = [start + len(group) / 2 for start, group in zip(range(0, len(rows), interval), groups, strict=True)]
    axes.plot(centres, [accepted_length(group) for group in groups], marker="o", label="learning")
    if all("steps_frozen" in row for row in rows):
        frozen = [accepted_length(group, "steps_frozen") for group in groups]
        axes.plot(centres, frozen, marker="o", color=MUTED, label="frozen (simulated)")
    axes.set_xlabel("answers")
    axes.set_ylabel("mean accepted length")
    axes.legend(fontsize=8, frameon=False)
    save_png(figure, path)
