"""A drafter led along finished texts: the base reads each once, and every position is a place where a step may start.

Shape legend: B texts at a time, T tokens, n positions, V vocabulary, D width.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from drafthead.data.answers.config import SamplerConfig
from drafthead.data.batch import Features, TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import make_folder
from drafthead.eval.prompts.prompt import conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.contract import Drafter, DraftState
from drafthead.models.decoding.corpus import generate_answers
from drafthead.models.decoding.sampling import Sampler

BUDGET = 1 << 23
"""Most values of laws held at a time (per tensor; float64 takes 8 bytes each)."""
OFF_LAW, Z_LIMIT, NATS_LIMIT = 0.02, 6.0, 0.1
"""Texts are refused when more than this share of tokens is impossible, or their surprise is off by so much."""


class Text(NamedTuple):
    """A finished answer, as token ids."""

    ids: list[int]
    """Prompt, then answer."""
    boundary: int
    """Index of the first answer token."""

    @property
    def positions(self) -> int:
        """Places where a step may start: one per answer token but the first."""
        return max(0, len(self.ids) - self.boundary - 1)


def target_probs(base: BaseModel, hidden: Tensor, contexts: list[list[int]], sampler: Sampler) -> Tensor:
    """The target's warped laws after hidden states [n, D] with the tokens before each: [n, V]."""
    logits = base.logits(hidden)
    if sampler.repetition_penalty == 1.0:
        return sampler.probs(logits)
    each = [
        sampler.probs(row[None], torch.tensor([context], device=row.device))
        for row, context in zip(logits, contexts, strict=True)
    ]
    return torch.cat(each)


def positions(
    drafter: Drafter, texts: list[Text], features: list[Features], device: torch.device
) -> Iterator[tuple[list[int], DraftState, Tensor, int]]:
    """The drafter's state and last token wherever a step may start: rows that are not finished, and the position."""
    prompts = torch.zeros(len(texts), max(text.boundary for text in texts), dtype=torch.int64, device=device)
    for row, text in zip(prompts, texts, strict=True):
        row[: text.boundary] = torch.tensor(text.ids[: text.boundary], device=device)
    counts = torch.tensor([text.boundary for text in texts], device=device)
    read = _stack([_slice(f, 0, text.boundary) for f, text in zip(features, texts, strict=True)])
    state = drafter.update(drafter.init_state(len(texts)), prompts, read, counts)
    rows = list(range(len(texts)))
    for t in range(max(text.positions for text in texts)):
        kept = [i for i, row in enumerate(rows) if t < texts[row].positions]
        if len(kept) < len(rows):
            rows, state = [rows[i] for i in kept], state.select(kept)
        last = torch.tensor([texts[row].ids[texts[row].boundary + t] for row in rows], device=device)
        yield rows, state, last, t
        now = _stack([_slice(features[row], texts[row].boundary + t, 1) for row in rows])
        state = drafter.update(state, last[:, None], now)


def read_features(base: BaseModel, drafter: Drafter, texts: list[Text]) -> list[Features]:
    """Per text the base's hidden states [1, T, D], read in one pass."""
    found = []
    for text in texts:
        ids = torch.tensor([text.ids])
        batch = TrainBatch(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1])[None],
            document_ids=torch.zeros_like(ids),
            loss_mask=torch.ones_like(ids, dtype=torch.bool),
        )
        found.append(base.features(batch.to(base.device), drafter.spec))
    return found


def _slice(features: Features, start: int, count: int) -> Features:
    layers = features.layers
    return Features(
        final=features.final[:, start : start + count],
        layers=None if layers is None else layers[:, start : start + count],
    )


def _stack(parts: list[Features]) -> Features:
    """Features [1, T, ...] of several rows as one [B, longest T, ...], zeros behind a row's end."""
    final = torch.nn.utils.rnn.pad_sequence([p.final[0] for p in parts], batch_first=True)
    layers = [p.layers[0] for p in parts if p.layers is not None]
    return Features(final=final, layers=torch.nn.utils.rnn.pad_sequence(layers, batch_first=True) if layers else None)


def batches(texts: Sequence[Text], size: int) -> Iterator[list[Text]]:
    """Texts that have a step, at most ``size`` at a time.

    Raises:
        UserError: none has one.
    """
    whole = [text for text in texts if text.positions]
    if not whole:
        raise UserError("no text has two answer tokens, so there is no step to replay; give longer answers")
    size = max(1, size)
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


class LikelihoodCheck:
    """Whether texts can be samples of the target's law: their surprise against the entropy that it should average."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.tokens = self.impossible = 0
        self.excess = self.variance = 0.0

    def read(self, base: BaseModel, texts: list[Text], features: list[Features]) -> None:
        """Add the answers of ``texts``, whose hidden states [1, T, D] are ``features``."""
        size = max(1, BUDGET // base.vocab_size)
        for text, feature in zip(texts, features, strict=True):
            for start in range(text.boundary, len(text.ids), size):
                places = range(start, min(start + size, len(text.ids)))
                hidden = feature.final[0, places.start - 1 : places.stop - 1]
                probs = target_probs(base, hidden, [text.ids[:at] for at in places], self.sampler).double()
                self.add(probs, torch.tensor([text.ids[at] for at in places], device=base.device))

    def add(self, probs: Tensor, tokens: Tensor) -> None:
        """Laws [n, V] and the tokens [n] that should be samples of them."""
        surprise = -probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
        possible = probs.gather(1, tokens[:, None])[:, 0] > 0
        mean = (probs * surprise).sum(-1)
        spread = (probs * (surprise - mean[:, None]) ** 2).sum(-1)
        self.tokens += len(tokens)
        self.impossible += int((~possible).sum())
        self.excess += float((surprise.gather(1, tokens[:, None])[:, 0] - mean)[possible].sum())
        self.variance += float(spread[possible].sum())

    def check(self) -> None:
        """Refuse texts that the sampler can hardly have made.

        Raises:
            UserError: too many impossible tokens, or too surprising or too likely ones on average.
        """
        off = abs(self.excess) / max(1, self.tokens)
        z = abs(self.excess) / max(self.variance, 1e-12) ** 0.5
        if self.impossible > OFF_LAW * self.tokens or (z > Z_LIMIT and off > NATS_LIMIT):
            raise UserError(
                f"the texts are no samples of the target at {self.sampler}: {self.impossible} of {self.tokens} tokens "
                f"are impossible there, and the others' surprise is {self.excess / max(1, self.tokens):+.2f} nats from "
                "the law's entropy; replay texts that the same sampler made"
            )


SLOTS = 8


def plain_answers(
    base: BaseModel, *, suite: str, limit: int | None, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[Text]:
    """The base's own answers to a suite's first turns; prompts that do not fit the context are left out.

    Raises:
        UserError: an unknown suite, or no prompt fits.
    """
    sampler = SamplerConfig(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    prompts = [(p.number, conversation_ids(base.tokenizer, p)) for p in load_suite(suite, limit, seed)]
    room = base.max_context - max_new_tokens
    fitting = [ids for _, ids in prompts if len(ids) <= room]
    if not fitting:
        raise UserError(
            f"no prompt of {suite} leaves room for {max_new_tokens} tokens in a context of {base.max_context}; lower "
            "max_new_tokens"
        )
    longest = max(len(ids) for ids in fitting)
    answers = generate_answers(base, prompts, sampler, batch_size=SLOTS, max_prompt_tokens=longest)
    found = sorted(answers, key=lambda answer: answer.prompt_number)
    return [Text(answer.input_ids.tolist(), answer.boundary) for answer in found]


def write_texts(path: Path, texts: Sequence[Text]) -> None:
    """One {"ids": [...], "boundary": n} a line.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text("".join(json.dumps(text._asdict()) + "\n" for text in texts))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another file (save=...)") from None


def read_texts(path: Path) -> list[Text]:
    """What ``write_texts`` wrote.

    Raises:
        UserError: no such file, or a line that is no text.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give the file that save=FILE wrote") from None
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            text = Text([int(i) for i in row["ids"]], int(row["boundary"]))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise UserError(f'{path} line {number} is no text; it needs {{"ids": [...], "boundary": n}}') from None
        if not 1 <= text.boundary < len(text.ids):
            raise UserError(
                f"{path} line {number} has its boundary at {text.boundary}, outside its {len(text.ids)} ids; it is the "
                "index of the first answer token"
            )
        texts.append(text)
    if not texts:
        raise UserError(f"{path} is empty; give the file that save=FILE wrote")
    return texts


def _check_free(path: Path) -> None:
    """Refuse a file that could not be written, before the base has answered.

    Raises:
        UserError: a folder of that name, or one that cannot be written.
    """
    if path.is_dir():
        raise UserError(f"--save {path} is a folder; name a file in it, say {path / 'texts.jsonl'}")
    make_folder(path.parent, "--save")
