"""The corpus of texts and hidden states that speculators wrote (``data.offline``), and its comparison with the base.

Shape legend: T tokens, n layers, D width.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafthead.data.answers.store import Answer, AnswerStore, ProcessGroup
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.states.offline import OfflineFolder
from drafthead.data.text.documents import Documents
from drafthead.errors import UserError
from drafthead.files.local import MANIFEST_NAME, folder_of_manifest, read_json, write_json
from drafthead.models.base.layer_by_layer import layers_output
from drafthead.models.base.parts import BaseParts
from drafthead.system.display import Display
from drafthead.train.corpora.answers import TURN_STRIDE
from drafthead.train.corpora.built_in import Agreement, agreement_along
from drafthead.train.corpora.corpus_config import OfflineConfig
from drafthead.train.corpora.layer_check import ERRORS, layer_error
from drafthead.train.corpora.transcripts import AGREEMENT, COMPARED, PER_SHARD, agreement_line

LEAST_AGREEMENT = 0.15  # share of the texts' tokens that must be the likeliest ones after the stored last states
CHECKED = 4  # rows whose states are compared with the base
FP8_ERROR = 0.1


def layers_of(config: OfflineConfig, num_layers: int) -> list[int]:
    """Return the layers that the files hold: the setting's layers, or else the defaults of speculators."""
    layers = config.layers or [2, num_layers // 2, num_layers - 3, num_layers]
    if layers[-1] != num_layers:
        what = f"data.offline.layers must end with the base's last layer, {num_layers}, got {layers}"
        raise UserError(f"{what}; speculators always writes it, so name it too")
    return layers


@dataclass(eq=False)
class Offline:
    """The texts of a folder as a corpus, and the states at their tokens."""

    parts: BaseParts
    config: OfflineConfig
    display: Display

    def __post_init__(self) -> None:
        self.files = OfflineFolder(Path(self.config.folder or "").expanduser())
        self.layers = layers_of(self.config, self.parts.num_layers)
        self._norm = deepcopy(self.parts.final_norm).to("cpu", torch.float32)
        self._is_compared = False

    def corpus_folder(self, parent: Path, longest: int | None) -> Path:
        """Return the folder for the corpus of the texts, each cut to ``longest`` tokens (None: never), and create it
        with its manifest if it is new."""
        left_out = self.files.missing() if self.config.missing == "skip" else []
        manifest: dict[str, Any] = {"base": self.parts.identity(), "longest": longest}
        manifest |= {"offline": self.files.digest, "layers": self.layers, "left_out": left_out}
        folder = folder_of_manifest(parent, manifest, "offline-")
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST_NAME).exists():
            AnswerStore(folder, manifest)
        return folder

    def write_corpus(self, folder: Path, longest: int | None) -> None:
        """Write the texts as answers into ``folder``, unless that is done already, and compare states and base."""
        if not (folder / AGREEMENT).exists():
            for path in folder.glob("shard-*"):  # of an interrupted run
                path.unlink()
            store, answers = AnswerStore(folder), list[Answer]()
            numbers = self._usable()
            for done, number in enumerate(numbers, start=1):
                answers += self._answers(number, longest)
                if done % PER_SHARD == 0:
                    self.display.progress("reading texts", done, len(numbers))
                    store.append_shard(answers)
                    answers = []
            store.append_shard(answers)
            if not store.done:
                raise UserError(f"{self.files.folder} has no text with a trained token; name another folder")
            chosen = {*sorted(store.done)[:: -(-len(store.done) // COMPARED)]}
            compared = [a for a in store.read(with_hidden_states=False) if a.prompt_number in chosen]
            write_json(folder / AGREEMENT, asdict(self._agreement(compared)))
        self.display.line(f"   {agreement_line(read_json(folder / AGREEMENT))}")

    def _usable(self) -> list[int]:
        """Return the rows with states; reject missing files, unless they are skipped, and files of other sizes."""
        missing = self.files.missing()
        if missing and (self.config.missing == "reject" or len(missing) == len(self.files)):
            what = f"{len(missing)} of {len(self.files)} rows have no states, such as {self.files.path(missing[0])}"
            remedy = "`speculators generate-offline-data` writes what is missing"
            raise UserError(f"{what}; {remedy}, and data.offline.missing=skip trains on the other rows")
        if missing:
            self.display.line(f"   {len(missing)} of {len(self.files)} rows without states are left out")
        left_out = {*missing}
        return [number for number in range(len(self.files)) if number not in left_out]

    def _answers(self, row: int, longest: int | None) -> Iterator[Answer]:
        """Yield the trained spans of a row as answers to all tokens before them."""
        ids, trained = self.files.row(row)
        if (largest := int(ids.max(initial=0))) >= self.parts.vocab_size:
            what = f"row {row} of {self.files.folder} has the token {largest}"
            raise UserError(f"{what}, but {self.parts.name} has {self.parts.vocab_size}; name the base of these texts")
        edges = np.flatnonzero(np.diff(trained, prepend=False, append=False))
        for turn, (start, end) in enumerate(edges.reshape(-1, 2).tolist()):
            boundary, end = max(start, 1), min(end, longest or end)
            if boundary < end:
                finished = int(ids[end - 1]) in self.parts.eos_ids
                yield Answer(row + turn * TURN_STRIDE, ids[:end], boundary, finished)

    def final(self, states: Tensor) -> Tensor:
        """Return the final states [T, D] of states [T, n, D] of all layers in a file."""
        with torch.no_grad():
            normed: Tensor = self._norm(states[:, -1].float())
        return normed.to(states.dtype)

    def states(self, row: int) -> Tensor:
        return self.files.states(row, len(self.layers), self.parts.hidden_size)

    def _agreement(self, answers: Sequence[Answer]) -> Agreement:
        """Return how likely ``answers`` are by the output head of the base after the last layer of their states. Reject
        states after which they are unlikely."""

        def final_states(answer: Answer) -> Tensor:
            return self.final(self.states(answer.prompt_number % TURN_STRIDE)[: len(answer.input_ids)])

        measured = agreement_along(self.parts, ((answer, final_states(answer)) for answer in answers))
        if measured.greedy < LEAST_AGREEMENT:
            what = f"after the last layer in {self.files.folder} the output head of {self.parts.name} finds"
            what = f"{what} {100 * measured.greedy:.0f} % of {measured.tokens} tokens likeliest"
            raise UserError(f"{what}; the states are of another base or layer (data.offline.layers={self.layers})")
        return measured

    def check_base(self, rows: Sequence[int]) -> None:
        """Compare the layers in the files of ``rows`` with the base: layer 0 with its embedding, the others with what
        stock transformers computes of the layer before it in the files. After the last layer, the output head must find
        the texts likely. Later calls do nothing."""
        if self._is_compared:
            return
        self._is_compared = True
        self._agreement([answer for row in rows for answer in self._answers(row, None)])
        base, before = self.parts, 0
        embedded = [base.input_embeddings(torch.tensor(self.files.row(row)[0], device=base.device)) for row in rows]
        if self.layers[0] == 0:
            self._compare(rows, 0, "the base's", embedded)
        for layer in (layer for layer in self.layers if layer):
            given = [self.states(row)[:, self.layers.index(before)] for row in rows] if before else embedded
            follows = f"the base's after layer {before}" if before else "the base's"
            self._compare(rows, layer, follows, layers_output(base, before, layer, given))
            before = layer

    def _compare(self, rows: Sequence[int], layer: int, whose: str, expected: Sequence[Tensor]) -> None:
        """Reject files whose states of ``layer`` differ from those ``expected`` [T, D] of each of ``rows``."""
        given = [self.states(row) for row in rows]
        limit = max(
            FP8_ERROR if self.files.is_scaled(row) else ERRORS[each.dtype]
            for row, each in zip(rows, given, strict=True)
        )
        error = layer_error([states[:, self.layers.index(layer)] for states in given], expected)
        if not error <= limit:
            what = f"layer {layer} in {self.files.folder} is not {whose} ({self.parts.name}): the median relative error"
            remedy = f"name the base of these states, or their layers (data.offline.layers={self.layers} now)"
            raise UserError(f"{what} is {error:.2g}, at most {limit:g} is expected; {remedy}")
        self.display.line(f"   layer {layer} of the given states is {whose}, to {error:.1e}")


@dataclass(eq=False)
class OfflineStates:
    """States in the files of ``offline`` at the tokens of ``documents``, which are its texts. ``rows`` has the row of
    each document."""

    offline: Offline
    documents: Documents
    rows: Sequence[int]
    spec: HiddenStatesSpec
    group: ProcessGroup
    ahead: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        given = self.offline.layers
        if absent := [layer for layer in self.spec.layers if layer and layer not in given]:
            what = f"the head reads the layers {list(self.spec.layers)}, but {self.offline.files.folder} has {given}"
            remedy = f"set head.layers to some of these, or write layer {absent[0]} too"
            raise UserError(f"{what}; {remedy}. If the folder has other layers, name them in data.offline.layers")

    def prepare(self, documents: Sequence[int]) -> None:
        """Check the sizes of all files, each process some of them, and on the first process the states of a few."""
        rows = sorted({self.rows[document] for document in documents})
        for row in rows[self.group.rank :: self.group.size]:
            self.offline.files.check_header(row, len(self.offline.layers), self.offline.parts.hidden_size)
        if self.group.rank == 0:
            self.offline.check_base(rows[:CHECKED])
        self.group.wait()

    def read(self, documents: Sequence[int]) -> list[Tensor]:
        return [self._states(document) for document in documents]

    def _states(self, document: int) -> Tensor:
        """Return the final state and the layers of the head, [T, D (1 + L)]. Layer 0 is the base's embedding, if the
        file does not have it."""
        ids = self.documents[document]
        states = self.offline.states(self.rows[document])[: len(ids)]
        parts, given = [self.offline.final(states)], self.offline.layers
        for layer in self.spec.layers:
            if layer in given:
                parts.append(states[:, given.index(layer)])
            else:
                embed = self.offline.parts.input_embeddings
                parts.append(embed(torch.tensor(ids.tolist(), device=embed.weight.device)).to(states.dtype).cpu())
        return torch.cat(parts, -1)
