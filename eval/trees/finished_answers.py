"""Finished answers along which acceptance is simulated: made by the base, or read from a file or a corpus."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.answers.store import Answer, open_answers
from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import load_suite
from drafthead.data.text.readers import json_object, read_lines
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.files.local import make_folder
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.corpus import generate_answers

BATCH_SIZE = 32


def base_answers(
    base: BaseModel,
    config: SuiteConfig,
    temperature: float = 0.0,
    tasks: Sequence[str] | None = None,
    split: str = "all",
    keep_hidden_states: bool = False,
) -> list[Answer]:
    """Let the base answer the prompts of ``config``; return its answers in order of prompt and turn. Later turns follow
    the base's earlier answers. A conversation ends before a turn that is too long for the context."""
    length = config.max_new_tokens
    sampler = SamplerConfig(temperature=temperature, max_new_tokens=length, seed=config.seed)
    prompts = load_suite(config.suite, config.limit, config.seed, tasks, split)
    answers_of: dict[int, list[Answer]] = {prompt.number: [] for prompt in prompts}
    for turn in range(max(prompt.turns for prompt in prompts)):
        asked = []
        for prompt in prompts:
            before = [text.ids[text.boundary :] for text in answers_of[prompt.number]]
            if len(before) == turn < prompt.turns:
                ids = conversation_ids(base.tokenizer, prompt, before, base.config.chat_template_kwargs)
                if len(ids) <= base.max_context - length:
                    asked.append((prompt.number, ids))
        if not asked:
            break
        limits = {"batch_size": BATCH_SIZE, "max_prompt_tokens": max(len(ids) for _, ids in asked)}
        for answer in generate_answers(base, asked, sampler, **limits, keep_hidden_states=keep_hidden_states):
            answers_of[answer.prompt_number].append(answer)
    texts = [text for _, answers in sorted(answers_of.items()) for text in answers]
    if not texts:
        raise UserError(f"no prompt of {config.suite} leaves max_new_tokens={length} free in {base.max_context} tokens")
    return texts


def write_texts(path: Path, texts: Sequence[Answer]) -> None:
    """Write a JSONL file with a line {"ids": [...], "boundary": n} per answer; hidden states are not written."""
    try:
        path.write_text("".join(json.dumps({"ids": t.ids, "boundary": t.boundary}) + "\n" for t in texts))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another file (save=...)") from None


def check_writable(path: Path) -> None:
    """Reject a path to which ``write_texts`` could not write, before the base answers; create its folder."""
    if path.is_dir():
        raise UserError(f"save={path} is a folder; name a file in it, say {path / 'texts.jsonl'}")
    make_folder(path.parent, "save")


def read_texts(path: Path, limit: int | None = None) -> list[Answer]:
    """Read the first ``limit`` answers (None: all) from a file of ``write_texts`` or from the folder of a corpus."""
    if path.is_dir():
        answers = open_answers(path).read(with_hidden_states=False)
        return list(islice(answers, limit))
    texts = []
    for line, content in read_lines(path):
        try:
            row = json_object(content)
            text = Answer.of([int(i) for i in row["ids"]], int(row["boundary"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            expected = '{"ids": [...], "boundary": n} with n in [1, number of ids)'
            raise UserError(f"{path} {line} is not an answer; it needs {expected}") from None
        texts.append(text)
    if not texts:
        raise UserError(f"{path} is empty; give the file that save=FILE wrote")
    return texts[:limit]
