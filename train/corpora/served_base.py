"""A base that a vLLM server runs, so that no layer of it is loaded here. The server answers prompts, and writes hidden
states to files.

Shape legend: T tokens, n layers, D width.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from openai.types import Completion
from torch import Tensor

from drafthead.data.answers.server import RESUMES, Server, as_completed, check_server
from drafthead.data.answers.store import Answer
from drafthead.data.batch import NO_DOCUMENT, HiddenStatesSpec, TrainBatch
from drafthead.data.states.engine_file import BadStatesError, move_engine_file, read_engine_file, remove_engine_file
from drafthead.engines.server import LocalVllm
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layer_by_layer import layers_output
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.format import MOST_CONTEXT
from drafthead.system.display import Display
from drafthead.train.corpora.corpus_config import StatesConfig
from drafthead.train.corpora.layer_check import ERRORS, layer_error
from drafthead.train.corpora.states_server import states_server
from drafthead.train.original_base import OriginalBase

CHECKED = 4  # documents whose states are compared with the server's answers
SAME_TOKENS = 0.98  # least share of positions at which states and server have the same likeliest token
MOST_COMPARED = 256  # first tokens of these documents at which every layer is compared with the base's
LOCK_S = 120.0  # longest wait for the file of an answered request
Text = tuple[int, list[int]]  # the number of a document, for messages, and its token ids


def served_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Return the layers that a server must write for a head that reads ``layers``, ascending: also layer 0, which is
    compared with the base's embedding, and the last one, of which the final state is the norm."""
    return sorted({0, *layers, num_layers})


class ServedBase(OriginalBase):
    """A base whose layers only a server has. What a run needs of them are answers and hidden states."""

    def __init__(
        self,
        read_parts: Callable[[], BaseParts | BaseModel],
        config: StatesConfig,
        folder: Path,
        read_layers: Callable[[int], tuple[int, ...]],
        display: Display,
    ) -> None:
        """``folder`` is where the server writes its files, as seen from here. ``read_layers`` gives the layers that the
        head reads, for the base's number of layers."""
        super().__init__(read_parts, lambda sharded: self._refuse())
        self.config, self.folder, self.display, self._read_layers = config, folder, display, read_layers
        self._server: LocalVllm | None = None
        self._model: str | None = None  # the base's name on the server
        self._is_checked, self._is_compared, self._checking = False, False, Lock()

    def _refuse(self) -> BaseModel:
        raise UserError(
            "this needs the base's layers, but with data.states.url a server runs them; leave data.states out, or run "
            "only stages=[corpora,train]"
        )

    @cached_property
    def layers(self) -> list[int]:
        """The layers in the server's files, ascending."""
        return served_layers(self._read_layers(self.parts.num_layers), self.parts.num_layers)

    @property
    def longest(self) -> int:
        return min(self.parts.max_context, MOST_CONTEXT) - 1  # a request for states asks for one more token

    # The server ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server if it is this run's own (``data.states.serve``), on one process of the run."""
        if self.config.serve and self._server is None:
            server = states_server(self.parts, self.config, self.layers, self.folder)
            with self.display.stage(f"vLLM runs {self.parts.name}"):
                self.display.line(f"   {server.command}")
                server.start()
            self._server = server

    def check_alive(self) -> None:
        """Raise a ``UserError`` that says why, if the run's own server has ended."""
        try:
            if self._server is not None:
                self._server.check()
        except UserError as error:
            raise UserError(f"{error}; {RESUMES}") from None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def drop_layers(self) -> None:
        """Stop the run's own server, unless states are computed while training."""
        super().drop_layers()
        if self.config.keep:
            self.close()

    # Hidden states ---------------------------------------------------------------------------------------------------

    def ask(self, texts: Sequence[Text], **more: Any) -> Iterator[tuple[int, Tensor, Completion]]:
        """Yield (number, states [T, n, D] of ``layers``, the server's answer) of every text as they arrive. ``more``
        are additional fields of the requests. A file that is not right is requested once more; if the next one has the
        same fault, a ``UserError`` names it."""
        requests = self.config.requests()
        if self._model is None:
            self._model = check_server(requests, self.parts.name, max((len(ids) for _, ids in texts), default=0) + 1)
        model = self._model

        async def ask(server: Server, text: Text) -> tuple[int, Tensor, Completion]:
            number, ids = text
            body = {"return_token_ids": True, **more}
            request = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "extra_body": body}
            reason = ""
            for _ in range(self.config.tries):
                answer = await server.ask(request, _same, f"the states of document {number}")
                try:
                    states = await asyncio.to_thread(self._read, self._path(answer), ids)
                    return number, states, answer
                except BadStatesError as error:
                    if reason == str(error):  # not by chance
                        break
                    reason = str(error)
            what = f"the server at {self.config.url} gave {reason}"
            raise UserError(f"{what}. Start it with `drafthead serve` and this run's recipe; stored states are kept")

        yield from as_completed(requests, self.display.line, texts, ask, self.check_alive)

    def _path(self, completion: Completion) -> Path:
        """Return the file that an answer names; only files of the agreed folder are read, and removed."""
        given = (completion.model_extra or {}).get("kv_transfer_params")
        name = given.get("hidden_states_path") if isinstance(given, dict) else None
        if not isinstance(name, str):
            what = f"the server at {self.config.url} writes no hidden states"
            raise UserError(f"{what}; start it with `drafthead serve` and this run's recipe")
        path = self.folder / Path(name).name
        if Path(name).parent.name != self.folder.name or not self.folder.is_dir():
            raise UserError(f"the server writes {name}, but its folder should be {self.folder}; set data.states.folder")
        return path

    def _read(self, path: Path, ids: Sequence[int]) -> Tensor:
        """Read, check and remove a file with the states [T, n, D] of the tokens ``ids``."""
        parts = self.parts
        states = read_engine_file(path, ids, len(self.layers), parts.hidden_size, LOCK_S)
        with torch.no_grad():
            embedded = parts.input_embeddings(torch.tensor(ids, device=parts.device)[None])[0].to(states.dtype).cpu()
        if not torch.equal(states[:, 0], embedded):
            share = (states[:, 0] == embedded).float().mean().item()
            what = f"layer 0 of the server at {self.config.url} is not the embedding of {parts.name}"
            raise UserError(f"{what} ({100 * share:.0f} % of the values are equal); serve the base itself")
        return states

    @torch.no_grad()
    def final(self, states: Tensor) -> Tensor:
        """Return the final states [T, D], of the states [T, n, D] of ``layers``."""
        parts = self.parts
        final: Tensor = parts.final_norm(states[:, -1].to(parts.device, parts.dtype))
        return final.to(states.dtype).cpu()

    def chosen(self, states: Tensor, layers: Sequence[int], with_final: bool = True) -> Tensor:
        """Return [T, D (1 + L)] of the states [T, n, D] of all layers in a file: the final state, then ``layers``."""
        kept = [states[:, self.layers.index(layer)] for layer in layers]
        return torch.cat([*([self.final(states)] if with_final else []), *kept], -1)

    def read_rows(self, batch: TrainBatch, spec: HiddenStatesSpec) -> Tensor:
        """Ask for the states of every document in the rows, which it has from its first token in the row on."""
        texts, starts, width = list[Text](), list[tuple[int, int]](), self.parts.hidden_size * (1 + len(spec.layers))
        for row, documents in enumerate(batch.document_ids):
            numbers, counts = torch.unique_consecutive(documents, return_counts=True)
            ends = counts.cumsum(0)
            for number, start, end in zip(numbers.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
                if number != NO_DOCUMENT:
                    texts.append((len(texts), batch.input_ids[row, start:end].tolist()))
                    starts.append((row, start))
        self.check_once(texts)
        values = torch.zeros(*batch.input_ids.shape, width)
        for number, states, _ in self.ask(texts):
            row, start = starts[number]
            values[row, start : start + len(states)] = self.chosen(states, spec.layers)
        return values

    def read_answers(self, answers: Iterable[Answer]) -> Iterator[tuple[Answer, Tensor]]:
        given = list(answers)
        self.start()  # only the first process compares answers
        for number, states, _ in self.ask([(n, answer.ids[:-1]) for n, answer in enumerate(given)]):
            yield given[number], self.final(states)

    def check_once(self, texts: Sequence[Text]) -> None:
        """Check some of the first texts that are asked for without being stored."""
        with self._checking:  # rows are read by several threads
            if not self._is_checked:
                self.check(texts[:CHECKED])
                self._is_checked = True

    @torch.no_grad()
    def check(self, texts: Sequence[Text]) -> None:
        """Compare the states of ``texts`` with the server's own answers: what follows from the last layer must be what
        the server finds likeliest at every position. Layer 0 is compared with the embedding in every file."""
        parts, same, count = self.parts, 0, 0
        found = list[Tensor]()
        for _, states, answer in self.ask(texts, prompt_logprobs=1):
            logits = parts.lm_head.logits(self.final(states).to(parts.device, parts.dtype))
            expected = logits.argmax(-1).tolist()
            pairs = [(a, b) for a, b in zip(expected, _likeliest(answer)[1:], strict=False) if b is not None]
            same, count = same + sum(a == b for a, b in pairs), count + len(pairs)
            found.append(states)
        if same < SAME_TOKENS * count:
            what = f"at {100 * same / count:.0f} % of {count} positions the last layer that the server at"
            raise UserError(
                f"{what} {self.config.url} writes predicts what it answers; serve the base itself, and all layers"
            )
        self.compare_layers(found)

    def compare_layers(self, texts: Sequence[Tensor]) -> None:
        """Compare every layer in ``texts`` [T, n, D] with what stock transformers computes of the layer before it in
        the file, once. This reads the base's checkpoint."""
        if not texts or self._is_compared or not self.config.compare_layers:
            return
        self._is_compared = True
        texts = [states[:MOST_COMPARED] for states in texts]
        with self.display.stage(f"{len(self.layers) - 1} layers from the server, compared with {self.parts.name}"):
            for number, (before, layer) in enumerate(pairwise(self.layers)):
                try:
                    own = layers_output(self.parts, before, layer, [states[:, number] for states in texts])
                except UserError as error:  # layers that cannot run alone, and quantised checkpoints
                    self.display.line(f"   not compared: {error}")
                    return
                off, limit = layer_error([states[:, number + 1] for states in texts], own), ERRORS[texts[0].dtype]
                if not off <= limit:
                    what = f"layer {layer} of the server at {self.config.url} is not that of {self.parts.name}"
                    raise UserError(
                        f"{what}: the median relative error is {off:.2g}, at most {limit:g} is expected. Start the "
                        "server with `drafthead serve` and this run's recipe; data.states.compare_layers=false skips "
                        "this comparison, for a base that is quantised on the server"
                    )
                self.display.line(f"   layer {layer}: equal to {off:.1e}")

    # States that arrive with an answer -------------------------------------------------------------------------------

    WITH_ANSWER = {"kv_transfer_params": {"include_output_tokens": True}}
    """Fields of a request for an answer, whose file then has the states of prompt and answer but for the last token,
    which the base has not read."""

    def keep(self, completion: Completion, answer: Answer | None) -> None:
        """Keep the file with the states of an ``answer``, by its tokens, until ``kept`` reads it. A file that is not
        right is noticed there. Without ``answer``, remove the file."""
        path = self._path(completion)
        if answer is None or not self.config.keep:
            remove_engine_file(path, LOCK_S)
            return
        try:
            move_engine_file(path, self._kept_path(answer.ids[:-1]), LOCK_S)
        except BadStatesError as error:
            self.display.line(f"warning: {error}; these states are requested again")

    def kept(self, ids: Sequence[int]) -> Tensor | None:
        """Return the states [T, n, D] that arrived with the answer ``ids``, and remove their file. The last token's
        are zeros. None if there are none, or not the right ones."""
        path = self._kept_path(ids[:-1])
        if not path.exists():
            return None
        try:
            states = self._read(path, ids[:-1])
        except BadStatesError:
            return None
        return torch.cat([states, torch.zeros_like(states[:1])])

    def _kept_path(self, ids: Sequence[int]) -> Path:
        digest = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()
        return self.folder / f"answers-{self.parts.fingerprint[:12]}" / f"{digest[:32]}.safetensors"


def _same(completion: Completion) -> Completion:
    return completion


def _likeliest(completion: Completion) -> list[int | None]:
    """Return the likeliest token at every position of the prompt; None at the first one."""
    rows = getattr(completion.choices[0], "prompt_logprobs", None)
    if not isinstance(rows, list):
        raise UserError(
            "the server states no prompt_logprobs, with which its states are checked; serve the base in vLLM"
        )
    best: list[int | None] = []
    for row in rows:
        ranked = {int(token): entry["rank"] for token, entry in row.items()} if isinstance(row, dict) else {}
        best.append(next((token for token, rank in ranked.items() if rank == 1), None))
    return best
