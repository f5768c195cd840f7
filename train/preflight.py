"""Checks of a run's inputs before its model is loaded."""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path

from drafthead.data.prompts.suites import load_suite
from drafthead.data.states.offline import OfflineFolder
from drafthead.data.text.findings import Findings
from drafthead.data.text.sources import SourceConfig, iter_documents, iter_prompts, num_entries, shares
from drafthead.data.text.transcripts import iter_transcripts
from drafthead.errors import UserError
from drafthead.eval.timing.methods import check_methods
from drafthead.files.hub import require_login
from drafthead.models.heads.parts.head_folder import read_head_config, resolve_folder
from drafthead.train.config import RunConfig
from drafthead.train.corpora.corpus_config import COMPLETE, HELD_OUT_EVERY

WHOLLY_READ = ("jsonl", "text")  # kinds that are read to their end, to find broken lines; others may be large
ONLINE = ("hf", "embedded", "builtin")  # kinds of sources that may have to be downloaded


def preflight(run: RunConfig, processes: int = 1) -> None:
    if run.push:
        require_login("push=true")
    load_suite(run.eval.suite, run.eval.limit, run.eval.seed, run.eval.tasks, run.eval.split)
    check_methods(run.eval.baselines)
    for name, phase in run.phases.items():
        rows = phase.rows(processes)
        if (least := phase.micro_batches(processes, rows) * processes) > rows:
            raise UserError(
                f"phases.{name}.rows_per_step={rows} does not fit {processes} processes; take more, such as {least}"
            )
        if phase.boost.head:
            read_head_config(resolve_folder(phase.boost.head))
    if run.init_data is not None and not (Path(run.init_data) / "answers").is_dir():
        raise UserError(f"init_data={run.init_data} has no folder 'answers'; name the data.folder of an earlier run")
    answers = run.data.answers
    is_needed = not (answers.copied or run.data.states.serve or (Path(run.data.folder) / "answers" / COMPLETE).exists())
    if answers.server.url is not None and is_needed:
        from drafthead.data.answers.server import check_server

        check_server(answers.server, run.base.name, answers.max_prompt_tokens + answers.sampler.max_new_tokens)
    check_sources(run, WHOLLY_READ + ONLINE)


def check_sources(run: RunConfig, kinds: Collection[str] = WHOLLY_READ) -> None:
    """Reject empty, broken or too few sources of text, transcripts and prompts, of these ``kinds``."""
    answers, text = run.data.answers, run.data.text
    for sources in (text.sources, answers.sources):
        shares(sources)
    for source in (source for source in text.sources if source.kind in kinds):
        wholly = source.kind in WHOLLY_READ and not text.stream
        _require_entries(
            iter_documents(source, max_characters=None if wholly else 1), wholly, "data.text.sources", source
        )
    findings = Findings()
    for source in (source for source in run.data.transcripts if source.kind in kinds):
        wholly = source.kind in WHOLLY_READ
        usable = sum(1 for _ in islice(iter_transcripts(source, findings), None if wholly else 1))
        if not usable or run.data.bad_transcripts == "reject":
            findings.raise_rejected()
        if not usable:
            raise UserError(f"{source} in data.transcripts is empty; name another file or dataset")
    for source in (source for source in answers.sources if run.data.uses_answers and source.kind in kinds):
        key = "data.prompts" if run.data.prompts else "data.answers.sources"
        _require_entries(iter_prompts(source), source.kind in WHOLLY_READ, key, source)
    _require_held_out(run)


def _require_held_out(run: RunConfig) -> None:
    """Reject data with too few conversations to hold one out, as far as their number is known before reading them."""
    data, answers = run.data, run.data.answers
    count, remedy = _most_entries(data.transcripts), "name more data.transcripts"
    if data.offline.folder:
        count, remedy = len(OfflineFolder(Path(data.offline.folder).expanduser())), "write more texts"
    if data.uses_answers:
        available = math.inf if answers.copied else _most_entries(answers.sources)
        count += min(answers.prompts, available) + answers.self_prompted
        remedy = "name more data.prompts" if data.prompts else "raise data.answers.prompts, or name more sources"
    if count < HELD_OUT_EVERY and "train" in run.stages:
        raise UserError(f"{count} conversations are too few, at least {HELD_OUT_EVERY} are needed; {remedy}")


def _most_entries(sources: Sequence[SourceConfig]) -> float:  # upper bound; inf if unknown
    return sum(math.inf if (count := num_entries(source)) is None else count for source in sources)


def _require_entries(entries: Iterable[object], wholly: bool, key: str, source: SourceConfig) -> None:
    """Reject a ``source`` without entries. ``wholly``: read all entries, to find broken ones. ``key``: its setting."""
    count = sum(1 for _ in entries) if wholly else next((1 for _ in entries), 0)
    if not count:
        raise UserError(f"{source} in {key} is empty; name another file or dataset")
