"""The data that needs no download and no package: for ``debug=tiny`` and tests."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from drafthead.data.utils.errors import UserError

DOCUMENT_SETS = ("stdlib_tiny",)
PROMPT_SETS = ("tiny",)
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


def documents(name: str) -> Iterator[str]:
    """``stdlib_tiny``: a few small sources of the Python standard library.

    Raises:
        UserError: this Python comes without its sources.
    """
    assert name in DOCUMENT_SETS
    for module in _MODULES:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise UserError(f"this Python has no source of its module {module!r}; use another Python or another source")
        yield Path(spec.origin).read_text(encoding="utf-8")


def prompts(name: str) -> Iterator[str]:
    """``tiny``: 24 written questions."""
    assert name in PROMPT_SETS
    yield from _PROMPTS
