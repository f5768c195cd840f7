"""The corpora of a run in ``data.folder``: packed text, answers, and the base's hidden states of both. Later runs use
them again, and an interrupted run continues."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from drafthead.data.answers.draft_vocab import draft_vocabulary
from drafthead.data.answers.store import ANSWERS, AnswerStore, ProcessGroup
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.prompts.near_duplicates import NearDuplicates
from drafthead.data.states.source import AnswerStates, StatesSource
from drafthead.data.states.stored import StoredStates
from drafthead.data.text.documents import Documents, Ids
from drafthead.data.text.packing import PackedRows, pack, text_documents
from drafthead.data.text.sources import load_documents, resolve_revision
from drafthead.data.text.streaming import StreamedRows
from drafthead.errors import UserError
from drafthead.files import local
from drafthead.system.display import Display
from drafthead.train.corpora import transcripts
from drafthead.train.corpora.answers import PROMPTS, TURN_STRIDE, AnswerGenerator, copy_precomputed
from drafthead.train.corpora.corpus_config import HELD_OUT_EVERY, DataConfig
from drafthead.train.corpora.offline import Offline, OfflineStates
from drafthead.train.corpora.served_base import ServedBase
from drafthead.train.corpora.served_states import PassingStates, ReadStates, ServedStates
from drafthead.train.corpora.states import ComputedStates
from drafthead.train.original_base import OriginalBase

ALONE = ProcessGroup()
LONGEST_TEXT = 8192  # tokens of a document, which a base reads in one pass; longer rows raise this limit
FEWEST_SUITE_PROMPTS = 8  # held-out prompts of the user, on which a run chooses its tree and is measured
SUITE_GROUPS = 18  # groups of ``HELD_OUT_EVERY`` conversations, each with four such prompts
COMPARED = 64, 2000  # largest numbers of held-out and of trained answers that are compared with each other
HELD_OUT_MOST = 512  # conversations; more would cost memory and time without measuring better
_CHARACTERS_PER_TOKEN = 6  # more than most texts have, so that enough text is read


@dataclass(eq=False)
class Corpora:
    """The corpora of one run in ``data.folder``. Each is made on first use and read from disk afterwards. All processes
    of ``group`` must call the methods that open corpora or states at the same time."""

    base: OriginalBase
    config: DataConfig
    seed: int
    display: Display
    group: ProcessGroup = ALONE
    store_states: bool = False  # of answers, by the built-in decoding, unless transcripts are used
    longest: int | None = None  # tokens of a transcript; longer ones are cut at the end (None: no limit)
    holds_suite: bool = False  # hold out conversations for the run's evaluation (``suite_prompts``)
    manifests: dict[str, Any] = field(default_factory=dict, init=False)  # of the opened corpora by name
    _store: AnswerStore | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.config.folder)

    @contextmanager
    def _first(self, folder: Path) -> Iterator[bool]:
        """Lock ``folder`` on the first process, for which True is yielded; afterwards all processes wait for it."""
        first = self.group.rank == 0
        with local.exclusive(folder, self.display.line) if first else nullcontext():
            yield first
        self.group.wait()

    def _text_manifest(self, **sizes: int) -> dict[str, Any]:
        if not self.config.text.sources:
            raise UserError("a phase trains on text, but data.text.sources is empty; name a source")
        return {"base": self.base.parts.identity(), "seed": self.seed, **sizes, **self.config.text.manifest()}

    def _text_documents(self, longest: int) -> Documents:
        """Return the text for pretraining, tokenised and cut into documents of up to ``longest`` tokens. Documents on
        disk are used even if a source has changed since, so that a run resumes with the same text."""
        config, manifest = self.config.text, self._text_manifest(longest=longest)
        folder = local.folder_of_manifest(self.folder / "text", manifest)
        with self._first(folder) as first:
            if first and not local.check_manifest(folder, manifest, "remove the folder"):
                texts = load_documents(config.sources, self.seed, config.max_tokens * _CHARACTERS_PER_TOKEN)

                def documents() -> Iterator[Ids]:
                    done = 0
                    for ids in text_documents(self.base.parts.tokenizer, texts, config.max_tokens):
                        self.display.progress("tokenising text", done, config.max_tokens)
                        done += len(ids)
                        yield from (ids[start : start + longest] for start in range(0, len(ids), longest))
                    self.display.progress("tokenising text", done, done)

                Documents.of(documents()).save(folder)
                local.write_manifest(folder, manifest)  # last, because a manifest means complete documents
        return Documents.open(folder)

    def text_rows(self, seq_len: int) -> PackedRows:
        longest = min(self.base.longest, max(LONGEST_TEXT, seq_len))
        rows = pack(self._text_documents(longest), seq_len, split=True)
        manifest = self._text_manifest(seq_len=seq_len)
        self.manifests[f"text in rows of {seq_len}"] = {**manifest, "rows": len(rows)}
        return rows

    def text_stream(self, seq_len: int, micro_batch_size: int) -> StreamedRows:
        """Return the text for pretraining as rows of ``seq_len`` tokens that are packed during training. Each shard of
        the stream yields ``micro_batch_size`` rows at a time."""
        config, manifest = self.config.text, self._text_manifest(seq_len=seq_len, turn=micro_batch_size)
        folder = local.folder_of_manifest(self.folder / "stream", manifest)
        with self._first(folder) as first:
            if first and not local.check_manifest(folder, manifest, "remove the folder"):
                local.write_manifest(folder, manifest)
            if first:
                resolve_revision(config.sources, folder / "commits.json")
        sources = resolve_revision(config.sources, folder / "commits.json")
        self.manifests[f"stream of text in rows of {seq_len}"] = {
            **manifest,
            "sources": [source.manifest() for source in sources],
        }
        return StreamedRows(
            sources,
            self.base.parts.tokenizer,
            seq_len,
            seed=self.seed,
            shards=config.stream_shards,
            micro_batch_size=micro_batch_size,
            folder=folder,
            workers=config.workers,
        )

    def answers(self) -> AnswerStore:
        """Return the complete corpus of answers: the transcripts, the base's own answers, or both evenly mixed; or the
        offline texts."""
        if self._store is None:
            stores = [self._transcripts()] if self.config.transcripts else []
            stores += [self._offline_texts()] if self.config.offline.folder else []
            stores += [self._own_answers()] if self.config.uses_answers else []
            if len(stores) == 2:
                if self.group.rank == 0:
                    transcripts.write_mixture(self.folder, *stores)
                self.group.wait()
                stores = [transcripts.write_mixture(self.folder, *stores)]
            (self._store,) = stores
        return self._store

    @property
    def is_complete(self) -> bool:
        """True if answers and transcripts are on disk, so that no process runs the base by itself to make them."""
        if self.config.transcripts and not (self._transcripts_folder() / transcripts.AGREEMENT).exists():
            return False
        if self.config.uses_answers and self.config.answers.copied:
            return any((self.folder / ANSWERS).glob("shard-*"))
        return not self.config.uses_answers or self._generator.is_complete

    @cached_property
    def agreement(self) -> dict[str, Any] | None:
        """Agreement of transcripts or offline texts with the base's own choices (``agreement.json``); else None."""
        if not self.config.has_given_answers:
            return None
        self.answers()
        folder = self._transcripts_folder() if self.config.transcripts else self._offline_folder()
        measured: dict[str, Any] = local.read_json(folder / transcripts.AGREEMENT)
        return measured

    def _transcripts_folder(self) -> Path:
        return transcripts.transcripts_folder(self.base.parts, self.config, self.longest)

    def _transcripts(self) -> AnswerStore:
        folder = self._transcripts_folder()
        with self._first(folder) as first:
            if first:
                transcripts.write_transcripts(self.base, self.config, folder, self.longest, self.display)
        store = AnswerStore(folder)
        self.manifests["transcripts"] = {**local.read_manifest(folder), "answers": len(store.done)}
        return store

    @cached_property
    def _offline(self) -> Offline:
        return Offline(self.base.parts, self.config.offline, self.display)

    def _offline_folder(self) -> Path:
        return self._offline.corpus_folder(self.folder, self.longest)

    def _offline_texts(self) -> AnswerStore:
        folder = self._offline_folder()
        with self._first(folder) as first:
            if first:
                self._offline.write_corpus(folder, self.longest)
        store = AnswerStore(folder)
        self.manifests["offline texts"] = {**local.read_manifest(folder), "answers": len(store.done)}
        return store

    @property
    def _generator(self) -> AnswerGenerator:
        folder, states = self.folder / ANSWERS, self.store_states and not self.config.transcripts
        return AnswerGenerator(self.base, self.config.answers, self.seed, folder, self.group, self.display, states)

    def _own_answers(self) -> AnswerStore:
        folder, config = self.folder / ANSWERS, self.config.answers
        if config.copied:
            with self._first(folder) as first:
                if first:
                    copy_precomputed(self.base, config, folder, self.display)
            store = AnswerStore(folder)
        else:
            store = self._generator.complete()
        prompts = {} if config.copied else {PROMPTS: local.file_digest(folder / PROMPTS)}
        self.manifests["answers"] = {**local.read_manifest(folder), **prompts, "answers": len(store.done)}
        return store

    @cached_property
    def suite_prompts(self) -> list[list[int]]:
        """Token ids of the prompts held out for the evaluation, the last turn's prompt of each conversation. The list
        is empty if the run holds out none, or if there are fewer than ``FEWEST_SUITE_PROMPTS``."""
        if not self.holds_suite:
            return []
        prompts = {
            answer.prompt_number % TURN_STRIDE: answer.input_ids[: answer.boundary].tolist()
            for answer in self.answers().read(with_hidden_states=False)
            if is_suite_prompt(answer.prompt_number)
        }
        return list(prompts.values()) if len(prompts) >= FEWEST_SUITE_PROMPTS else []

    def is_left_out(self, prompt_number: int) -> bool:
        return is_held_out(prompt_number) or self.measures(prompt_number)

    def measures(self, prompt_number: int) -> bool:
        return bool(self.suite_prompts) and is_suite_prompt(prompt_number)

    def near_copies(self) -> tuple[int, int]:
        """Return how many of the answers not trained on nearly repeat a trained one, and how many were compared."""
        answers: dict[bool, list[str]] = {True: [], False: []}
        for answer in self.answers().read(with_hidden_states=False):
            texts, most = answers[left_out := self.is_left_out(answer.prompt_number)], COMPARED[not left_out]
            if len(texts) < most:
                ids = answer.input_ids[answer.boundary :].tolist()
                texts.append(str(self.base.parts.tokenizer.decode(ids, skip_special_tokens=True)))
        trained = NearDuplicates(answers[False])
        return sum(text in trained for text in answers[True]), len(answers[True])

    @cached_property
    def _answer_documents(self) -> tuple[Documents, list[int]]:
        """All answers with their prompts as documents, and their prompt numbers. Only answers are trained."""
        answers = list(self.answers().read(with_hidden_states=False))
        trained = [np.arange(len(answer.input_ids)) >= answer.boundary for answer in answers]
        documents = Documents.of([answer.input_ids for answer in answers], trained)
        return documents, [answer.prompt_number for answer in answers]

    def answer_rows(self, seq_len: int, held_out: bool) -> PackedRows:
        """Pack the answers for training, or the held-out ones, into rows of up to ``seq_len`` tokens. For training on
        transcripts a document has all turns of a conversation. Held-out turns stay apart, because each has its own
        acceptance."""
        documents, prompt_numbers = self._answer_documents
        leaves_out = is_held_out if held_out else self.is_left_out
        chosen = [document for document, prompt in enumerate(prompt_numbers) if leaves_out(prompt) == held_out]
        if not chosen:
            raise UserError(
                f"{len(documents)} answers are too few to {'hold some out' if held_out else 'train on'} (one "
                f"conversation in {HELD_OUT_EVERY} is held out); "
                "raise data.answers.prompts or data.answers.self_prompted, or name more data.transcripts"
            )
        if self.config.has_given_answers and not held_out:
            documents, chosen = transcripts.whole_conversations(documents, prompt_numbers, chosen)
        return pack(documents, seq_len, split=False, numbers=chosen)

    def repeated_ids(self) -> Tensor:
        """Return the ids that occur at least twice in the answers, [n] int64."""
        counts = self.answers().token_counts(self.base.parts.vocab_size, self.measures)
        return torch.from_numpy(np.flatnonzero(counts > 1))

    def draft_vocabulary(self, size: int) -> Tensor:
        """Return up to ``size`` ids of the base's vocabulary, [W] int64 ascending: ids that end a turn, and the most
        frequent ids in the answers."""
        counts = self.answers().token_counts(self.base.parts.vocab_size, self.measures)
        return torch.from_numpy(draft_vocabulary(counts, size, self.base.parts.eos_ids))

    def states(
        self, corpus: Literal["text", "answers"], documents: Documents, spec: HiddenStatesSpec, keep: bool = True
    ) -> StatesSource:
        """Return the stored hidden states of ``documents``, which the base computes if they are missing. If the answer
        store has the final states, the base computes only the layers that ``spec`` names. With ``keep`` false,
        ``data.states.keep`` decides whether the states that a server computes are stored. Offline texts have theirs."""
        if corpus == "answers" and self.config.offline.folder:
            rows = [prompt_number % TURN_STRIDE for prompt_number in sorted(self.answers().done)]
            return OfflineStates(self._offline, documents, rows, spec, self.group)
        has_finals = corpus == "answers" and self.answers().has_hidden_states
        if has_finals and not spec.layers:
            return AnswerStates(self.answers(), None)
        base = self.base.parts
        manifest: dict[str, Any] = {"base": base.identity(), "documents": documents.digest}
        manifest |= {"layers": list(spec.layers), "final": not has_finals}
        if isinstance(self.base, ServedBase):
            if not (keep or self.config.states.keep):
                read = ReadStates(documents, spec, self.base, not has_finals)
                passing = PassingStates(read, self.group)
                return AnswerStates(self.answers(), passing) if has_finals else passing
            manifest |= {"computed_by": "server"}
        elif base.kernels is not None and base.kernels.bfloat16_reads:
            manifest |= {"products": "bfloat16"}
        folder = local.folder_of_manifest(self.folder / "states", manifest, f"{corpus}-")
        width = base.hidden_size * (len(spec.layers) + (not has_finals))
        dtype = "bfloat16" if base.dtype == torch.bfloat16 else "float16"
        stored = StoredStates(folder, documents.lengths, width, dtype, manifest)
        arguments = documents, spec, stored, self.group, self.display, corpus
        states: StatesSource
        if isinstance(self.base, ServedBase):
            states = ServedStates(*arguments, with_final=not has_finals, base=self.base)
        else:
            states = ComputedStates(*arguments, with_final=not has_finals, base=self.base)
        return AnswerStates(self.answers(), states) if has_finals else states


def is_held_out(prompt_number: int) -> bool:  # with all turns of its conversation
    group, index = divmod(prompt_number % TURN_STRIDE, HELD_OUT_EVERY)
    return index == HELD_OUT_EVERY - 1 and group < HELD_OUT_MOST


def is_suite_prompt(prompt_number: int) -> bool:  # one in five, up to a limit
    group, index = divmod(prompt_number % TURN_STRIDE, HELD_OUT_EVERY)
    return index in (3, 7, 11, 15) and group < SUITE_GROUPS
