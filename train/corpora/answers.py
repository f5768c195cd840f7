"""Generation of an answer corpus: prompts, then an answer to each, shared among all processes of a run."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drafthead.data.answers.store import AnswerStore, ProcessGroup, Prompt
from drafthead.data.embedded import training_sets
from drafthead.data.prompts.near_duplicates import NearDuplicates
from drafthead.data.prompts.suites import load_suite
from drafthead.data.text.chat import Message, num_turns, turns_of, unread_variables, user_turn
from drafthead.data.text.findings import Findings
from drafthead.data.text.sources import load_prompts
from drafthead.errors import UserError
from drafthead.files import local
from drafthead.models.base.base_config import SWITCHES
from drafthead.models.base.base_model import BaseModel
from drafthead.system.display import Display
from drafthead.train.corpora.built_in import BuiltInBackend, agreement, self_prompted_prompts
from drafthead.train.corpora.corpus_config import COMPLETE, AnswersConfig

if TYPE_CHECKING:
    from drafthead.data.answers.server import ServerBackend

T = TypeVar("T")
PROMPTS = "prompts.json"
PROBES = 4
TURN_STRIDE = 10**9  # turn t of conversation n has the prompt number n + t * TURN_STRIDE


class PromptTable:
    """The prompts of a corpus as (number, token ids): one per conversation and turn, each tokenised once."""

    def __init__(
        self, base: BaseModel, conversations: Sequence[list[Message]], config: AnswersConfig, seed: int
    ) -> None:
        self.base, self.conversations, self.config, self.seed = base, conversations, config, seed
        self.turns = max(map(num_turns, conversations))
        self._ids: dict[int, list[int]] = {}

    def of_turn(self, turn: int, store: AnswerStore) -> list[Prompt]:
        """Return the prompts of turn ``turn`` (from 0) of all conversations whose earlier turns are answered in
        ``store``, without prompts longer than ``max_prompt_tokens``."""
        prompts, done = [], store.done
        for first, conversation in enumerate(self.conversations):
            number, earlier = first + turn * TURN_STRIDE, range(first, first + turn * TURN_STRIDE, TURN_STRIDE)
            if turn < num_turns(conversation) and done.issuperset(earlier):
                if number not in self._ids:
                    decode = self.base.tokenizer.decode
                    answers = [str(decode(store.answer(n), skip_special_tokens=True)).strip() for n in earlier]
                    self._ids[number] = self.base.prompt_ids(
                        turns_of(conversation, answers), self._draw("template", first, self.config.chat_template_kwargs)
                    )
                if len(self._ids[number]) <= self.config.max_prompt_tokens:
                    prompts.append((number, self._ids[number]))
        return prompts

    def temperature(self, number: int) -> float:  # of a prompt's answer; equal in all turns of a conversation
        temperature = self._draw("temperature", number % TURN_STRIDE, self.config.temperatures)
        return self.config.sampler.temperature if temperature is None else temperature

    def _draw(self, purpose: str, number: int, options: Sequence[T]) -> T | None:
        """Return a random option, fixed by ``purpose``, seed and conversation ``number``; None without ``options``."""
        return random.Random(f"{purpose} {self.seed} {number}").choice(options) if options else None

    def missing(self, store: AnswerStore) -> list[Prompt]:
        """Return the prompts without an answer in ``store`` whose conversation is answered up to that turn."""
        prompts = [prompt for turn in range(self.turns) for prompt in self.of_turn(turn, store)]
        return [prompt for prompt in prompts if prompt[0] not in store.done]


@dataclass(eq=False)
class AnswerGenerator:
    """Generator of a corpus of the base's answers in ``folder``. All processes of ``group`` run it at the same time.
    The first process locks the folder, chooses the prompts and checks the backend. Then each writes its shards."""

    base: BaseModel
    config: AnswersConfig
    seed: int
    folder: Path
    group: ProcessGroup
    display: Display
    store_states: bool = False  # with the answers (built-in decoding only); answers already in ``folder`` decide

    def complete(self) -> AnswerStore:
        """Generate the answers that ``folder`` lacks and return the corpus. No answer at all is a ``UserError``."""
        first = self.group.rank == 0
        with local.exclusive(self.folder, self.display.line) if first else nullcontext():
            if first:
                self._prepare()
            self.group.wait()
            temperatures = sorted({*self.config.temperatures}) or [self.config.sampler.temperature]
            for turn, temperature in product(range(self.prompts.turns), temperatures):
                store = self._open()
                prompts = self.prompts.of_turn(turn, store)
                self.group.wait()  # every process opens the same shards before one of them writes
                self._answer([p for p in prompts if self.prompts.temperature(p[0]) == temperature], store, temperature)
                self.group.wait()
            if first:
                self._close()
        return self._open()

    @property
    def is_complete(self) -> bool:
        return (self.folder / PROMPTS).exists() and not self.prompts.missing(self._open())

    @cached_property
    def backend(self) -> "BuiltInBackend | ServerBackend":
        config, base = self.config, self.base
        if config.server.url is None:
            # All shards of a corpus have hidden states or none has: earlier shards decide.
            started = AnswerStore(self.folder) if (self.folder / local.MANIFEST_NAME).exists() else None
            states = started.has_hidden_states if started is not None and started.done else self.store_states
            return BuiltInBackend(base, config.sampler, config.batch_size, states, config.max_prompt_tokens)
        from drafthead.data.answers.server import Completions, ServerBackend

        return ServerBackend(
            config.server,
            Completions(base.tokenizer, base.eos_ids, base.vocab_size, config.sampler),
            base=base.name,
            max_prompt_tokens=config.max_prompt_tokens,
            greedy_match_rate=lambda answers: agreement(base, answers).greedy,
            log=self.display.line,
        )

    @cached_property
    def prompts(self) -> PromptTable:
        """The prompts of the corpus. The first process of the first run chooses and stores them; others read them."""
        path = self.folder / PROMPTS
        if path.exists():
            conversations = local.read_checksummed_json(path)
            if not (isinstance(conversations, list) and all(map(_is_conversation, conversations))):
                raise UserError(f"{path} holds no list of prompts; restore the file, or remove {self.folder}")
        elif self.group.rank:
            raise UserError(
                f"process {self.group.rank} does not see {path}; put data.folder on a file system that the nodes share"
            )
        else:
            conversations = self._new_conversations()
            local.write_checksummed_json(path, conversations)
        return PromptTable(self.base, conversations, self.config, self.seed)

    def _open(self) -> AnswerStore:
        """Open the corpus, or create it; reject one that was begun with other settings or another backend."""
        recorded = local.read_manifest(self.folder) if (self.folder / local.MANIFEST_NAME).exists() else {}
        serves = self.config.server.url is not None
        if recorded and ("server" in recorded) != serves:
            before = "the built-in decoding" if serves else "a server"
            remedy = "leave data.answers.server.url out" if serves else "set data.answers.server.url"
            raise UserError(f"{self.folder} was started with {before}; {remedy}, or choose another data.folder")
        manifest = {"base": self.base.identity(), "seed": self.seed, **self.config.manifest()}
        return AnswerStore(self.folder, manifest | self.backend.identity(recorded))

    def _prepare(self) -> None:
        """Check the chat template. Unless all prompts have answers, choose prompts and check backend and disk space."""
        self._check_template()
        store = self._open()
        # A finished corpus needs no backend; a new one is checked before the base writes prompts.
        if self.is_complete:
            return
        texts = list(training_sets.prompts("tiny"))[:PROBES]
        probes = [self.base.prompt_ids(user_turn(text))[: self.config.max_prompt_tokens] for text in texts]
        self.backend.check(list(enumerate(probes)))
        missing, table = self.prompts.missing(store), self.prompts
        if left_out := len(table.conversations) - len(table.of_turn(0, store)):
            self.display.line(
                f"   {left_out} of {len(table.conversations)} prompts are longer than data.answers.max_prompt_tokens="
                f"{self.config.max_prompt_tokens} and are left out"
            )
        states = isinstance(self.backend, BuiltInBackend) and self.backend.keep_hidden_states
        token_bytes = 4 + (2 * self.base.hidden_size if states else 0)
        tokens = sum(len(ids) + self.config.sampler.max_new_tokens for _, ids in missing)
        purpose = "the answers with their hidden states (store_hidden_states)" if states else "the answers"
        local.require_space(self.folder, tokens * token_bytes, purpose)
        store.remove_leftovers()

    def _check_template(self) -> None:
        """Reject variables in ``chat_template_kwargs`` that the chat template does not read. Log settings of the base
        (chat template variables, generation config) that have no effect on the answers."""
        tokenizer, mixed = self.base.tokenizer, self.config.chat_template_kwargs
        if unread := unread_variables(tokenizer, [name for entry in mixed for name in entry]):
            known = [name for name in (*SWITCHES, "tools") if not unread_variables(tokenizer, [name])]
            raise UserError(
                f"data.answers.chat_template_kwargs sets {', '.join(unread)}, which the chat template of "
                f"{self.base.name} does not read (it reads {', '.join(known) or 'no known switch'}); leave it out"
            )
        if unread := unread_variables(tokenizer, self.base.config.chat_template_kwargs):
            self.display.line(
                f"   base.chat_template_kwargs: the chat template does not read {', '.join(unread)}; leave it out"
            )
        if ignored := self.base.ignored_settings():
            self.display.line(
                f"   settings of the base's generation_config.json that answers do not use: {', '.join(ignored)}"
            )

    def _answer(self, prompts: list[Prompt], store: AnswerStore, temperature: float) -> None:
        """Answer this process's share of ``prompts``, as far as ``store`` has no answers, and append the answers."""
        done, total = sum(number in store.done for number, _ in prompts), len(prompts)
        label = (
            "generating answers"
            + (f" at temperature {temperature:g}" if self.config.temperatures else "")
            + (f" (process 1 of {self.group.size})" if self.group.size > 1 else "")
        )

        def on_done() -> None:
            nonlocal done
            done += 1
            self.display.progress(label, done, total)

        if done < total:
            self.display.progress(label, done, total)
        first = store.next_shard
        for index, answers in self.backend.at(temperature).shards(prompts, store.done, self.group, on_done):
            store.append_shard(answers, first + index)

    def _close(self) -> None:
        """Mark the corpus as complete; reject a corpus without answers or with prompts that have none."""
        store = self._open()
        if not store.done:
            for name in (PROMPTS, local.MANIFEST_NAME):  # without answers they must not bind the next try
                (self.folder / name).unlink(missing_ok=True)
            raise UserError(
                f"no answers were generated: none of the prompts fits data.answers.max_prompt_tokens="
                f"{self.config.max_prompt_tokens}; raise this limit or add sources"
            )
        missing = [number for number, _ in self.prompts.missing(store)]
        if missing:
            raise UserError(
                f"{len(missing)} of the prompts have no answer in {self.folder}, {missing[0]} for one; all "
                "processes must see the same data.folder: put it on a file system that the nodes share"
            )
        if not (self.folder / COMPLETE).exists():
            local.write_json(self.folder / COMPLETE, {"answers": len(store.done)})

    def _new_conversations(self) -> list[list[Message]]:
        """Return prompts from the sources and from the base, mixed; leave out near duplicates of evaluation prompts."""
        config, findings, prompts = self.config, Findings(), list[list[Message]]()
        if config.sources and config.prompts:
            prompts = load_prompts(config.sources, self.seed, config.prompts, findings)
        if config.self_prompted:
            count, size, longest = config.self_prompted, config.batch_size, config.max_prompt_tokens
            written = self_prompted_prompts(
                self.base, self.backend.answer, count, self.seed, size, self.display, longest
            )
            # Both lists are spread evenly, so that any prefix has the same mixture: item i of n stands at i / n.
            lists = (prompts, [user_turn(text) for text in written])
            keyed = [(i / len(items), item) for items in lists for i, item in enumerate(items)]
            prompts = [item for _, item in sorted(keyed, key=lambda entry: entry[0])]
        is_evaluated = resembles_suites(config.exclude_suites)
        kept = [p for p in prompts if not is_evaluated(t["content"] for t in p if t["role"] == "user")]
        findings.leave_out("resemble data.answers.exclude_suites", "prompts", row=len(prompts) - len(kept))
        prompts = kept
        for line in findings.lines():
            self.display.line(f"   prompts: {line}")
        if not prompts:
            raise UserError("data.answers has no prompts; add data.answers.sources, or set data.answers.self_prompted")
        return prompts


def resembles_suites(suites: Sequence[str]) -> Callable[[Iterable[str]], bool]:
    """Return a function that tells if one of the given user turns nearly repeats a prompt of evaluation ``suites``."""
    evaluated = NearDuplicates(text for suite in suites for prompt in load_suite(suite) for text in prompt.user_turns)
    return lambda turns: bool(suites) and any(text in evaluated for text in turns)


def _is_conversation(value: Any) -> bool:
    turns = value if isinstance(value, list) else []
    texts = [turn.get(key) for turn in turns if isinstance(turn, dict) for key in ("role", "content")]
    return len(texts) == 2 * len(turns) > 0 and all(isinstance(text, str) for text in texts)
