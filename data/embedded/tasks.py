"""Training prompts by set: packaged questions, and prompts of one kind of task each, from templates over passages.

A conversation is the user's turns; the base answers each. A task's order is fixed by its name, and its passages are its
own.
"""

import random
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

from drafthead.data.embedded import training_sets

Conversation = tuple[str, ...]
"""The user's turns."""
PASSAGE_CHARACTERS = (250, 1200)
"""Most of these prompts and their answers fit into 512 tokens."""
LONG_PASSAGE_CHARACTERS = (4000, 24000)
"""1,000 to 6,000 tokens: so that acceptance does not fall after contexts longer than training's."""
SENTENCE_CHARACTERS = (40, 220)
ARITHMETIC = 5000
"""Word problems; drawn with repetition, so fewer are distinct."""
_TITLE = re.compile(r"(.{3,60}?) -- ")
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")


def _passages(kind: str, lengths: tuple[int, int] = PASSAGE_CHARACTERS) -> Iterator[str]:
    """The passages of a kind, titles cut off, in its own order."""
    shortest, longest = lengths
    for text in _dealt()[kind]:
        body = _TITLE.sub("", text, count=1).strip()
        if shortest <= len(body) <= longest:
            yield body


@cache
def _dealt() -> dict[str, list[str]]:
    """Every training passage given to one of the kinds."""
    texts = list(training_sets.documents("passages"))
    random.Random("passages").shuffle(texts)
    return {kind: texts[place :: len(TASKS)] for place, kind in enumerate(TASKS)}


def _excerpts(kind: str, most: int) -> Iterator[str]:
    """One to ``most`` sentences in a row out of each passage."""
    rng = random.Random(kind)
    for text in _passages(kind):
        sentences = _SENTENCE_END.split(text)
        count = rng.randint(1, most)
        start = rng.randrange(max(1, len(sentences) - count + 1))
        excerpt = " ".join(sentences[start : start + count]).strip()
        low, high = SENTENCE_CHARACTERS
        if low <= len(excerpt) <= high * count:
            yield excerpt


_REQUESTS: dict[str, tuple[str, ...]] = {
    "summarising": (
        "Give a summary of this text in two sentences",
        "Sum up the main points of the text below as a short list",
        "What is this passage about? Answer in one paragraph",
        "Write a headline and a one-sentence abstract for this article",
        "Explain the text to a ten-year-old in a few sentences",
        "Make this shorter without losing the important facts",
    ),
    "rewriting": (
        "Rewrite this in simple English",
        "Rewrite the following text in a formal tone",
        "Turn this into a casual message to a friend",
        "Rephrase the text so that it is easier to read",
        "Change this text to the future tense",
        "Correct any mistakes in this text and return the corrected version",
        "Turn these sentences into bullet points",
        "Rewrite this as a question and an answer",
        "Replace difficult words in this text by easier ones",
    ),
    "translation": tuple(
        form.format(language)
        for form, language in product(
            ("Translate this text into {}", "How do you say this in {}?", "Give the {} translation of the following"),
            ("French", "Spanish", "Italian", "Portuguese", "Dutch"),
        )
    ),
    "extraction": (
        "List all names of people and places in this text",
        "Extract every date and number from the passage, each with what it refers to",
        "Which organisations and works are mentioned here? Answer as a list",
        "Make a table with the columns subject and fact from the text",
        "Return the key facts of this text as JSON",
        "List the five most important terms of this text and explain each in a few words",
    ),
    "long_passages": (
        "Summarise this text in one paragraph",
        "Who are the people in this text, and what does each of them do",
    ),
}


def _asked(kind: str, texts: Callable[[str], Iterator[str]]) -> Iterator[Conversation]:
    """Each text of a kind with one of its requests, before or after it."""
    rng = random.Random(f"requests of {kind}")
    for text in texts(kind):
        request = rng.choice(_REQUESTS[kind])
        yield (f"{text}\n\n{request}." if rng.random() < 0.3 else f"{request}:\n\n{text}",)


def passage_questions() -> Iterator[Conversation]:
    """Questions over a passage, mostly written by people (BoolQ)."""
    rng = random.Random("passage_questions")
    rows = [row for row in training_sets.questions_on_passages() if len(row[0]) <= PASSAGE_CHARACTERS[1]]
    rng.shuffle(rows)
    forms = (
        "{passage}\n\n{question}?",
        "Context:\n{passage}\n\nUsing only the context, answer: {question}?",
        "Read the text and answer the question. Explain your answer.\n\nText: {passage}\n\nQ: {question}?",
        "{question}? Here is what I found:\n\n{passage}",
    )
    for passage, question in rows:
        yield (rng.choice(forms).format(passage=passage, question=question.strip().rstrip("?").capitalize()),)


def follow_ups() -> Iterator[Conversation]:
    """Two and three turns about the titles of passages: the later ones build on the answers before."""
    openings = (
        "Tell me about {}.",
        "Write a short introduction to {} for a travel or culture magazine.",
        "Give me five interesting facts about {}.",
        "I have to give a talk about {}. Where should I begin?",
        "Explain {} to somebody who has never heard of it.",
        "Write a dialogue between a teacher and a student about {}.",
        "What are common misconceptions about {}?",
        "Draft an e-mail to a colleague about {}.",
    )
    later = (
        "Rewrite your answer in three sentences.",
        "Now explain it in simpler words.",
        "Can you give an example?",
        "Turn that into a numbered list.",
        "Which of these points matters most, and why?",
        "Write the same as a letter to a friend.",
        "What would somebody who disagrees say?",
        "Add a title and a closing sentence to your text.",
        "Ask me three questions about what you have just written.",
    )
    rng = random.Random("follow_ups")
    titles = [match[1] for text in _dealt()["follow_ups"] if (match := _TITLE.match(text))]
    for title in titles:
        yield (rng.choice(openings).format(title), *rng.sample(later, rng.choice((1, 1, 2))))


def arithmetic() -> Iterator[Conversation]:
    """Word problems of two or three steps."""
    names = ("Maya", "Tom", "Lena", "Omar", "Grace", "Ivan", "Priya", "Jonas", "Alice", "Ken")
    things = ("apples", "books", "tickets", "stickers", "bottles of water", "pencils", "cookies", "plants", "coins")
    stories = (
        "{name} buys {a} {things} at {b} dollars each and a bag for {c} dollars. How much does {name} pay?",
        "{name} has {a} {things}, gives {b} to a friend and buys {c} more. How many {things} does {name} have now?",
        "A box holds {a} {things}. {name} fills {b} boxes and has {c} {things} left. How many were there at first?",
        "{name} earns {a} dollars an hour and works {b} hours a day for {c} days. How much does {name} earn?",
        "There are {a} {things} on each of {b} shelves. {c} of them are sold. How many are left?",
        "{name} saves {a} dollars every week for {b} weeks and then spends {c} dollars. How many dollars remain?",
        "A bus makes {a} trips a day with {b} passengers each. {c} seats stay empty on every trip. How many seats does "
        "it have, and how many passengers travel in a day?",
        "{name} reads {a} pages on Monday, {b} more on Tuesday than on Monday, and {c} on Wednesday. How many pages is "
        "that in all?",
        "What is {a} times {b} plus {c}? Show each step.",
    )
    rng = random.Random("arithmetic")
    for _ in range(ARITHMETIC):
        a, b, c = rng.randint(6, 48), rng.randint(2, 5), rng.randint(3, 11)
        yield (rng.choice(stories).format(name=rng.choice(names), things=rng.choice(things), a=a, b=b, c=c),)


def code() -> Iterator[Conversation]:
    """Small programs to be written, explained, tested and repaired."""
    jobs = (
        *("reverses the words of a sentence", "counts the vowels of a string", "checks whether a word is a palindrome"),
        *("merges two sorted lists", "finds the longest word of a text", "converts Celsius to Fahrenheit"),
        *("computes the factorial of a number", "lists the prime numbers up to n", "removes duplicates from a list"),
        *("sorts a dictionary by its values", "reads a CSV file and sums one column", "flattens a nested list"),
        *("generates a random password", "counts how often each character occurs"),
        *("computes the n-th Fibonacci number", "finds the most frequent element of an array"),
        *("validates an e-mail address", "rotates a matrix by 90 degrees"),
        *("computes the greatest common divisor", "implements a stack with push and pop", "searches a sorted array"),
        *("splits a list into chunks of equal size", "converts a number to binary", "measures how long a call takes"),
        *("downloads a web page and prints its title", "draws a triangle of stars", "computes the mean and the median"),
        *("checks whether brackets are balanced", "replaces tabs by spaces in a file", "finds the two largest numbers"),
    )
    forms = (
        "Write a {} function that {}.",
        "Write a {} program that {}, and explain how it works.",
        "Show me a {} class with a method that {}, with comments.",
        "How would you write a {} function that {}? Add two unit tests.",
        "Give me the simplest {} code that {}, and say what can go wrong.",
    )
    found = [(form.format(language, job),) for form, language, job in product(forms, _LANGUAGES, jobs)]
    random.Random("code").shuffle(found)
    return iter(found)


_LANGUAGES = ("Python", "JavaScript", "Java", "C++")
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
"""Kinds of tasks by the name of their set."""


def _questions(name: str) -> Iterator[Conversation]:
    return ((text,) for text in training_sets.prompts(name))


PROMPT_SETS: dict[str, dict[str, Callable[[], Iterator[Conversation]]]] = {
    "embedded": {"questions": partial(_questions, "questions"), **TASKS},
    "builtin": {"tiny": partial(_questions, "tiny")},
}
"""Names by kind of source: ``builtin`` sets need no package."""
