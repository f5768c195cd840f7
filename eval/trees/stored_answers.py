"""Answers whose hidden states a run has stored, so that acceptance is simulated without the base's layers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from drafthead.data.answers.store import Answer, open_answers
from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.data.states.source import AnswerStates
from drafthead.data.states.stored import StoredStates
from drafthead.data.text.documents import Documents
from drafthead.errors import UserError
from drafthead.files.local import read_manifest, same_base
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.simulation.acceptance import AcceptProbs, accept_probs_of_ranks
from drafthead.models.simulation.ranks import WIDTH, answer_ranks


def stored_accept_probs(
    folder: Path, head: DraftHead, limit: int | None = None, is_chosen: Callable[[Answer], bool] = lambda answer: True
) -> tuple[list[AcceptProbs], list[Answer]]:
    """Return acceptance probabilities [T, K, S] of the drafts of ``head`` along the first ``limit`` answers (None: all)
    of the corpus in ``folder`` whose states are stored, of those that are chosen, and these answers. Raises a
    ``UserError`` if no states are stored."""
    probs, used = list[AcceptProbs](), list[Answer]()
    found = ((a, states) for a, states in read_stored(folder, head) if is_chosen(a))
    for answer, states in islice(found, limit):
        batch = TrainBatch.of([answer.ids], answer.boundary).to(head.base.device)
        for ranks in answer_ranks(head, batch, states):  # none if the answer has one token
            probs.append(accept_probs_of_ranks(ranks, WIDTH))
            used.append(answer)
    return probs, used


def read_stored(folder: Path, head: DraftHead) -> Iterator[tuple[Answer, HiddenStates]]:
    """Yield the answers of the corpus in ``folder`` whose states are stored, with these. Nothing is drafted after the
    last token, whose states may be zeros. Raises a ``UserError`` if no states are stored."""
    answers, base, wanted = open_answers(folder), head.base, list(head.spec.layers)
    texts = list(answers.read(with_hidden_states=False))
    documents = Documents.of([text.input_ids for text in texts])
    finals = AnswerStates(answers, None) if answers.has_hidden_states else None
    sources = [_Source(None, [])] if finals is not None and not wanted else []
    for path in sorted((folder / "states").glob("answers-*")):
        manifest = read_manifest(path)
        sizes, layers = manifest.pop("store"), manifest["layers"]
        is_of_base = same_base(str(manifest["base"].get("fingerprint")), base.fingerprint)
        has_all = {*wanted} <= {*layers} and (manifest["final"] or finals is not None)
        if is_of_base and has_all and manifest["documents"] == documents.digest:
            stored = StoredStates(path, documents.lengths, sizes["width"], sizes["dtype"], manifest)
            sources.append(_Source(stored, layers, manifest["final"], {*stored.missing(range(len(texts)))}))
    if not sources:
        what = f"{folder} has no hidden states of {base.name} in the layers {wanted or 'final'} for its answers"
        raise UserError(f"{what}; make them with `drafthead data` and data.states, or leave stored_states out")
    source = min(sources, key=lambda each: len(each.missing))
    for number, text in enumerate(texts):
        if number in source.missing:
            continue
        values = [] if source.stored is None else source.stored.read([number])
        if not source.has_final:
            assert finals is not None
            values = [*finals.read([number]), *values]
        given = torch.cat([value.float().nan_to_num().to(base.device) for value in values], -1)[None]
        final, *each = torch.split(given, base.hidden_size, -1)
        early = [each[source.layers.index(layer)] for layer in wanted]
        yield text, HiddenStates(final=final, layers=torch.cat(early, -1) if early else None)


@dataclass(frozen=True, eq=False)
class _Source:
    """A folder of states; without one, the answers have all that is needed."""

    stored: StoredStates | None
    layers: list[int]
    has_final: bool = False
    missing: set[int] = field(default_factory=set)  # documents
