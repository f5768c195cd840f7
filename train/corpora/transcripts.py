"""The corpus of transcripts: existing conversations, and their agreement with the base's own choices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from drafthead.data.answers.store import Answer, AnswerStore
from drafthead.data.embedded.training_sets import content_hash
from drafthead.data.text.documents import Documents
from drafthead.data.text.findings import Findings
from drafthead.data.text.sources import SourceConfig, files_of, resolve_revision
from drafthead.data.text.transcripts import Answered, TranscriptEncoder, iter_transcripts
from drafthead.errors import UserError
from drafthead.files.local import MANIFEST_NAME, file_digest, folder_of_manifest, read_json, read_manifest, write_json
from drafthead.models.base.parts import BaseParts
from drafthead.system.display import Display
from drafthead.train.corpora.answers import TURN_STRIDE, resembles_suites
from drafthead.train.corpora.built_in import agreement
from drafthead.train.corpora.corpus_config import DataConfig
from drafthead.train.original_base import OriginalBase

AGREEMENT = "agreement.json"  # written last: a folder with this file holds a complete corpus
COMPARED = 32  # largest number of assistant turns whose tokens are compared with the base's choices
LOW_AGREEMENT = 0.5
PER_SHARD = 1000  # conversations


def transcripts_folder(base: BaseParts, config: DataConfig, longest: int | None) -> Path:
    """Return the folder for the corpus of ``config.transcripts``, and create it with its manifest if it is new. Other
    settings or changed local files give another folder. Transcripts are cut to ``longest`` tokens (None: never)."""
    files = [file_digest(path) for s in config.transcripts if s.kind != "hf" for path in files_of(s)]
    manifest = {
        "base": base.identity(),
        "transcripts": [source.manifest() for source in config.transcripts],
        "files": files,
        "longest": longest,
        "exclude_suites": config.answers.exclude_suites,
        "bad_transcripts": config.bad_transcripts,
    }
    folder = folder_of_manifest(Path(config.folder), manifest, "transcripts-")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST_NAME).exists():
        AnswerStore(folder, manifest)
    return folder


def write_transcripts(
    base: OriginalBase, config: DataConfig, folder: Path, longest: int | None, display: Display
) -> None:
    """Encode the transcripts into ``folder``, unless that is done already, and log their agreement with the base."""
    if not (folder / AGREEMENT).exists():
        for path in folder.glob("shard-*"):  # of an interrupted run
            path.unlink()
        store, findings = AnswerStore(folder), Findings()
        answers: list[Answer] = []
        sources = resolve_revision(config.transcripts, folder / "commits.json")
        for number, turns in enumerate(_conversations(base.parts, config, sources, findings, longest)):
            answers += [
                Answer(number + t * TURN_STRIDE, np.asarray(ids, np.int32), boundary, ids[-1] in base.parts.eos_ids)
                for t, (ids, boundary) in enumerate(turns)
            ]
            if number % PER_SHARD == PER_SHARD - 1:
                display.progress("reading transcripts", number + 1, number + 1)
                store.append_shard(answers)
                answers = []
        if config.bad_transcripts == "reject":
            findings.raise_rejected()
        store.append_shard(answers)
        found = findings.lines()
        if not store.done:
            raise UserError(f"data.transcripts has no assistant turn to train on ({'; '.join(found)}); repair it")
        chosen = set(sorted(store.done)[:: -(-len(store.done) // COMPARED)])
        measured = agreement(base, (a for a in store.read(with_hidden_states=False) if a.prompt_number in chosen))
        write_json(folder / AGREEMENT, {**asdict(measured), "findings": found})
    result = read_json(folder / AGREEMENT)
    for line in (*result.get("findings", ()), agreement_line(result)):
        display.line(f"   {line}")
    if result["greedy"] < LOW_AGREEMENT:
        better = "the base's own answers (data.prompts=FILE) are better"
        display.line(f"   this agreement is low: in use, fewer drafts are accepted; {better}")


def agreement_line(measured: dict[str, Any]) -> str:
    return (
        f"agreement with the base: {100 * measured['greedy']:.1f} % of the transcripts' tokens are its greedy choice, "
        f"and their mean probability is {measured['probability']:.2f} ({measured['tokens']:,} tokens of "
        f"{measured['answers']} assistant turns)"
    )


def _conversations(
    base: BaseParts, config: DataConfig, sources: Iterable[SourceConfig], findings: Findings, longest: int | None
) -> Iterator[list[Answered]]:
    """Yield each transcript's encoded assistant turns; leave out duplicates and near-copies of evaluation prompts.
    Faults and omissions are added to ``findings``."""
    encoder = TranscriptEncoder(base.tokenizer, base.eos_ids, base.vocab_size, base.config.chat_template_kwargs)
    seen: set[str] = set()
    is_evaluated = resembles_suites(config.answers.exclude_suites)
    for source in sources:
        for where, transcript in iter_transcripts(source, findings):
            key = content_hash(repr(transcript))
            if key in seen:
                findings.leave_out("repeat an earlier one", where, row=1)
                continue
            seen.add(key)
            if is_evaluated(m["content"] for m in transcript.messages if m["role"] == "user"):
                findings.leave_out("resemble data.answers.exclude_suites", where, row=1)
                continue
            if turns := encoder.answers(transcript, findings, where, longest):
                yield turns


def whole_conversations(
    documents: Documents, prompt_numbers: Sequence[int], chosen: Sequence[int]
) -> tuple[Documents, list[int]]:
    """Choose documents that hold all turns of their conversation, and train each on all of these turns. A document is a
    turn with the turns before it. If the chat template changes earlier turns when a later one follows, the last
    document before the change is also chosen. ``chosen`` are the turns to use, ``prompt_numbers`` those of all
    documents. Return the documents with other trained tokens, and the numbers of the chosen ones."""
    assert documents.trained is not None
    trained, last_turns = documents.trained.copy(), list[int]()
    for turn in sorted(chosen, key=lambda n: (prompt_numbers[n] % TURN_STRIDE, prompt_numbers[n])):
        before = last_turns[-1] if last_turns else turn
        if prompt_numbers[before] % TURN_STRIDE == prompt_numbers[turn] % TURN_STRIDE and before != turn:
            ids = documents[before]
            if np.array_equal(documents[turn][: len(ids)], ids):
                start, earlier = documents.offsets[turn], documents.offsets[before]
                trained[start : start + len(ids)] = trained[earlier : earlier + len(ids)]
                last_turns.pop()
        last_turns.append(turn)
    return replace(documents, trained=trained), last_turns


def write_mixture(parent: Path, transcripts: AnswerStore, own: AnswerStore) -> AnswerStore:
    """Return a corpus below ``parent`` with the conversations of both stores, evenly mixed; write it if it is new.
    Conversations get new prompt numbers. Hidden states are left out."""
    sources = (transcripts, own)
    manifest = {"mixture": [{**read_manifest(source.folder), "answers": len(source.done)} for source in sources]}
    store = AnswerStore(folder_of_manifest(parent, manifest, "mixture-"), manifest)
    if not store.done:
        keyed = []
        for index, source in enumerate(sources):
            numbers = sorted({number % TURN_STRIDE for number in source.done})
            keyed += [(i / len(numbers), index, number) for i, number in enumerate(numbers)]
        new_number = {entry[1:]: n for n, entry in enumerate(sorted(keyed))}
        mixed = []
        for index, source in enumerate(sources):
            for answer in source.read(with_hidden_states=False):
                turn, number = divmod(answer.prompt_number, TURN_STRIDE)
                mixed.append(replace(answer, prompt_number=new_number[index, number] + turn * TURN_STRIDE))
        store.append_shard(mixed)
    return store
