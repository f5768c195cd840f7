"""The corpus of the base's own answers: prompts, then an answer to each, by all processes of a run together."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafthead.data.answers.backend import Backend, ProcessGroup, Prompt
from drafthead.data.answers.store import AnswerStore
from drafthead.data.embedded import training_sets
from drafthead.data.text.chat import Message, num_turns, turns_of, user_turn
from drafthead.data.text.sources import load_prompts
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import (
    MANIFEST_NAME,
    exclusive,
    read_checksummed_json,
    read_json,
    require_space,
    write_checksummed_json,
    write_json,
)
from drafthead.eval.prompts.near_duplicates import NearDuplicates
from drafthead.eval.prompts.suites import load_suite
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.corpus import BuiltInBackend, greedy_match_rate, self_prompted_prompts
from drafthead.train.config import COMPLETE, AnswersConfig

Progress = Callable[[str, int, int], None]
"""(what is being made, done, total)."""
Log = Callable[[str], None]
"""Receives lines for the user."""
PROMPTS = "prompts.json"
PROBES = 4
TURN_STRIDE = 10**9
"""Between the numbers of a conversation's answers: the first one's, plus so much for each turn after it."""


def backend_of(base: BaseModel, config: AnswersConfig, log: Log) -> Backend:
    """What answers the prompts; ``log`` receives lines about transient errors."""
    if config.server.url is None:
        return BuiltInBackend(
            base,
            config.sampler,
            batch_size=config.batch_size,
            keep_hidden_states=config.keep_hidden_states,
            max_prompt_tokens=config.max_prompt_tokens,
        )
    from drafthead.data.answers.server import Completions, ServerBackend

    return ServerBackend(
        config.server,
        Completions(base.tokenizer, base.eos_ids, base.vocab_size, config.sampler),
        base=base.name,
        max_prompt_tokens=config.max_prompt_tokens,
        greedy_match_rate=lambda answers: greedy_match_rate(base, answers),
        log=log,
    )


class AnswerGenerator:
    """Completes the corpus of answers in ``folder``, on every process of ``group`` at once.

    The first process holds the folder, chooses the prompts and checks the backend; then each one writes its shards.
    """

    def __init__(
        self,
        base: BaseModel,
        config: AnswersConfig,
        seed: int,
        folder: Path,
        group: ProcessGroup,
        progress: Progress,
        log: Log = lambda line: None,
    ) -> None:
        self.base, self.config, self.seed, self.folder = base, config, seed, folder
        self.group, self.progress = group, progress
        self.backend = backend_of(base, config, log)

    def complete(self) -> AnswerStore:
        """The corpus with an answer to every prompt."""
        first = self.group.rank == 0
        with exclusive(self.folder, self.progress) if first else nullcontext():
            if first:
                self._prepare()
            self.group.wait()
            for turn in range(max(map(num_turns, self._messages()))):
                store = self._open()
                prompts = self._prompts(turn, store)
                self.group.wait()  # all have opened the same shards before the first one writes
                self._answer(prompts, store)
                self.group.wait()
            if first:
                self._close()
        return self._open()

    def _open(self) -> AnswerStore:
        found = read_json(self.folder / MANIFEST_NAME) if (self.folder / MANIFEST_NAME).exists() else {}
        recorded = found if isinstance(found, dict) else {}
        self._check_kind(recorded)
        made_by = {"base": self.base.identity(), "seed": self.seed, **self.config.manifest()}
        return AnswerStore(self.folder, made_by | self.backend.identity(recorded))

    def _check_kind(self, recorded: dict[str, Any]) -> None:
        serves = self.config.server.url is not None
        if recorded and ("server" in recorded) != serves:
            kinds = ("a server", "the built-in decoding")
            was, now = kinds if "server" in recorded else reversed(kinds)
            remedy = "leave data.answers.server.url out" if serves else "set data.answers.server.url"
            raise UserError(
                f"{self.folder} was started with {was}, and this run would continue with {now}; {remedy}, or choose "
                "another data.folder"
            )

    def _prepare(self) -> None:
        store = self._open()
        new = not (self.folder / PROMPTS).exists()
        if new:  # before the base writes prompts
            self.backend.check(self._probes())
        missing = self._missing(store)
        if not missing:
            return
        if not new:
            self.backend.check(self._probes())
        config = self.config
        token_bytes = 4 + (2 * self.base.hidden_size if config.keep_hidden_states else 0)
        tokens = sum(len(ids) + config.sampler.max_new_tokens for _, ids in missing)
        purpose = (
            "the answers with their hidden states (keep_hidden_states)" if config.keep_hidden_states else "the answers"
        )
        require_space(self.folder, tokens * token_bytes, purpose)
        store.remove_leftovers()

    def _probes(self) -> list[Prompt]:
        texts = list(training_sets.prompts("tiny"))[:PROBES]
        found = [self.base.prompt_ids(user_turn(text)) for text in texts]
        return [(n, ids[: self.config.max_prompt_tokens]) for n, ids in enumerate(found)]

    def _answer(self, prompts: list[Prompt], store: AnswerStore) -> None:
        """This process's part of what is missing."""
        done, total = sum(number in store.done for number, _ in prompts), len(prompts)
        label = "generating answers" + (f" (process 1 of {self.group.size})" if self.group.size > 1 else "")

        def on_done() -> None:
            nonlocal done
            done += 1
            self.progress(label, done, total)

        if done < total:
            self.progress(label, done, total)
        first = store.next_shard
        for place, answers in self.backend.shards(prompts, store.done, self.group, on_done):
            store.append_shard(answers, first + place)

    def _close(self) -> None:
        store = self._open()
        if not store.done:
            for name in (PROMPTS, MANIFEST_NAME):  # nothing was made, so nothing binds the next try
                (self.folder / name).unlink(missing_ok=True)
            raise UserError(
                f"no answers were generated: none of the prompts fits data.answers.max_prompt_tokens="
                f"{self.config.max_prompt_tokens}; raise it or add sources"
            )
        left = [number for number, _ in self._missing(store)]
        if left:
            raise UserError(
                f"{len(left)} of the prompts have no answer in {self.folder}, {left[0]} for one; all processes must "
                "see one data.folder: put it on a file system that the nodes share"
            )
        if not (self.folder / COMPLETE).exists():
            write_json(self.folder / COMPLETE, {"answers": len(store.done)})

    def _prompts(self, turn: int, store: AnswerStore) -> list[Prompt]:
        """Numbered prompts of one turn as token ids, within the length limit; earlier turns must be answered."""
        found = []
        for number, conversation in enumerate(self._messages()):
            earlier = [number + before * TURN_STRIDE for before in range(turn)]
            if turn < num_turns(conversation) and store.done.issuperset(earlier):
                answers = [self._text(store.answer(before)) for before in earlier]
                ids = self.base.prompt_ids(turns_of(conversation, answers))
                if len(ids) <= self.config.max_prompt_tokens:
                    found.append((number + turn * TURN_STRIDE, ids))
        return found

    def _missing(self, store: AnswerStore) -> list[Prompt]:
        """The prompts that can be answered now, of all turns."""
        turns = max(map(num_turns, self._messages()))
        return [p for turn in range(turns) for p in self._prompts(turn, store) if p[0] not in store.done]

    def _text(self, ids: npt.NDArray[np.int32]) -> str:
        return str(self.base.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def _messages(self) -> list[list[Message]]:
        """The conversations to answer; kept on disk so that a later run has the same."""
        path = self.folder / PROMPTS
        if not path.exists():
            if self.group.rank:
                raise UserError(
                    f"process {self.group.rank} does not see {path}, which process 0 has written; put data.folder on a "
                    "file system that the nodes share"
                )
            write_checksummed_json(path, self._new_messages())
        found = read_json(path)  # a plain list in earlier versions
        messages: list[list[Message]] = found if isinstance(found, list) else read_checksummed_json(path)
        if not (isinstance(messages, list) and all(map(_is_conversation, messages))):
            raise UserError(f"{path} holds no list of prompts; restore it, or remove {self.folder}")
        return messages

    def _new_messages(self) -> list[list[Message]]:
        config = self.config
        found = load_prompts(config.sources, self.seed, config.prompts) if config.sources and config.prompts else []
        if config.self_prompted:
            written = self_prompted_prompts(
                self.base,
                self.backend,
                config.self_prompted,
                self.seed,
                config.batch_size,
                self.progress,
                config.max_prompt_tokens,
            )
            found = _interleave(found, [user_turn(text) for text in written])
        if config.exclude_suites:
            evaluated = NearDuplicates(
                text for suite in config.exclude_suites for prompt in load_suite(suite) for text in prompt.user_turns
            )
            found = [m for m in found if not any(t["role"] == "user" and t["content"] in evaluated for t in m)]
        if not found:
            raise UserError("data.answers names no prompts; set sources, or self_prompted to a number")
        return found


def _is_conversation(found: Any) -> bool:
    turns = found if isinstance(found, list) else []
    texts = [turn.get(key) for turn in turns if isinstance(turn, dict) for key in ("role", "content")]
    return len(texts) == 2 * len(turns) > 0 and all(isinstance(text, str) for text in texts)


def _interleave(first: list[Any], second: list[Any]) -> list[Any]:
    """Both lists spread evenly, so that any prefix has the same mixture."""
    keyed = [
        (i / max(1, len(part)), which, item)
        for which, part in enumerate((first, second))
        for i, item in enumerate(part)
    ]
    return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]
