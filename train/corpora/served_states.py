"""Hidden states that a vLLM server computes (``drafthead serve``), so that no layer of the base is loaded here.

Shape legend: T tokens, n layers, D width.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai.types import Completion
from torch import Tensor

from drafthead.data.answers.answer_config import ServerConfig
from drafthead.data.answers.server import Server, as_completed, check_server
from drafthead.data.states.engine_file import BadStatesError, read_engine_file
from drafthead.errors import UserError
from drafthead.models.base.parts import BaseParts
from drafthead.train.corpora.corpus_config import StatesConfig
from drafthead.train.corpora.states import StatesOfDocuments

CHECKED = 4  # documents whose states are compared with what is known of the base
SAME_TOKENS = 0.98  # least share of positions at which states and server have the same likeliest token
LOCK_S = 120.0  # longest wait for the file of an answered request


def served_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Return the layers that a server must write for a head that reads ``layers``, ascending: also layer 0, which is
    compared with the base's embedding, and the last one, of which the final state is the norm."""
    return sorted({0, *layers, num_layers})


@dataclass(eq=False)
class ServedStates(StatesOfDocuments):
    """States that a server computes from the documents' token ids, in requests for one more token."""

    parts: BaseParts
    config: StatesConfig
    folder: Path  # into which the server writes its files, as seen from here
    _model: str = field(default="", init=False)

    def fill(self, documents: Sequence[int], missing: Sequence[int]) -> None:
        ours = missing[self.group.rank :: self.group.size]
        if not ours:
            return
        self._model = check_server(self._requests, self.parts.name, int(self.documents.lengths[[*missing]].max()) + 1)
        self._check(ours[:CHECKED])
        label = f"hidden states of {self.label}, from the server"
        for done, (document, states, _) in enumerate(self._ask(ours)):
            self.display.progress(label, done, len(ours))
            self.stored.write([document], [self._chosen(states)])
        self.display.progress(label, len(ours), len(ours))

    @property
    def _requests(self) -> ServerConfig:
        config = self.config
        return ServerConfig(url=config.url, concurrency=config.concurrency, timeout=config.timeout, tries=config.tries)

    def _layers(self) -> list[int]:
        return served_layers(self.spec.layers, self.parts.num_layers)

    def _chosen(self, states: Tensor) -> Tensor:
        """Return the values to store, [T, D (1 + L)], of the states [T, n, D] of all layers in the file."""
        kept = [states[:, self._layers().index(layer)] for layer in self.spec.layers]
        return torch.cat([*([self._final(states)] if self.with_final else []), *kept], -1)

    @torch.no_grad()
    def _final(self, states: Tensor) -> Tensor:
        parts = self.parts
        final: Tensor = parts.final_norm(states[:, -1].to(parts.device, parts.dtype))
        return final.to(states.dtype).cpu()

    def _ask(self, documents: Sequence[int], **more: Any) -> Iterator[tuple[int, Tensor, Completion]]:
        """Yield (document, its states [T, n, D], the server's answer) as they arrive."""
        layers, width = len(self._layers()), self.parts.hidden_size

        async def ask(server: Server, document: int) -> tuple[int, Tensor, Completion]:
            ids, name = self._ids(document), f"the states of document {document}"
            reason = ""
            for _ in range(self.config.tries):
                answer, path = await server.ask(self._request(ids, **more), self._with_path, name)
                try:
                    states = await asyncio.to_thread(read_engine_file, path, ids, layers, width, LOCK_S)
                    return document, states, answer
                except BadStatesError as error:
                    if reason == str(error):  # not by chance
                        break
                    reason = str(error)
            what = f"the server at {self.config.url} gave {reason}"
            raise UserError(f"{what}. Start it with `drafthead serve` and this run's recipe; stored states are kept")

        yield from as_completed(self._requests, self.display.line, documents, ask)

    def _ids(self, document: int) -> list[int]:
        ids: list[int] = np.asarray(self.documents[document]).tolist()
        return ids

    def _request(self, ids: list[int], **more: Any) -> dict[str, Any]:
        body = {"return_token_ids": True, **more}
        return {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "extra_body": body}

    def _with_path(self, completion: Completion) -> tuple[Completion, Path]:
        """Return an answer and the file that it names; only files of the agreed folder are read, and removed."""
        given = (completion.model_extra or {}).get("kv_transfer_params")
        name = given.get("hidden_states_path") if isinstance(given, dict) else None
        if not isinstance(name, str):
            raise UserError(
                f"the server at {self.config.url} writes no hidden states; start it with `drafthead serve` and this "
                "run's recipe"
            )
        path = self.folder / Path(name).name
        if Path(name).parent.name != self.folder.name or not self.folder.is_dir():
            raise UserError(f"the server writes {name}, but its folder should be {self.folder}; set data.states.folder")
        return completion, path

    @torch.no_grad()
    def _check(self, documents: Sequence[int]) -> None:
        """Compare what the server writes with the base: layer 0 with its embedding, bit for bit, and the likeliest
        tokens after the last layer with those that the server states. Other layers cannot be told from another layer's,
        so their number is compared, and that no two are equal."""
        parts, same, count = self.parts, 0, 0
        for document, found, answer in self._ask(documents, prompt_logprobs=1):
            tokens = _likeliest(answer)
            ids = torch.tensor(self._ids(document), device=parts.device)
            embedded = parts.input_embeddings(ids[None])[0].to(found.dtype).cpu()
            if not torch.equal(found[:, 0], embedded):
                share = (found[:, 0] == embedded).float().mean().item()
                what = f"layer 0 of the server at {self.config.url} is not the embedding of {parts.name}"
                raise UserError(f"{what} ({100 * share:.0f} % of the values are equal); serve the base itself")
            logits = parts.lm_head.logits(self._final(found).to(parts.device, parts.dtype))
            expected = logits.argmax(-1).tolist()
            pairs = [(a, b) for a, b in zip(expected, tokens[1:], strict=False) if b is not None]
            same, count = same + sum(a == b for a, b in pairs), count + len(pairs)
        if same < SAME_TOKENS * count:
            what = f"at {100 * same / count:.0f} % of {count} positions the last layer that the server at"
            raise UserError(
                f"{what} {self.config.url} writes predicts what it answers; serve the base itself, and all layers"
            )


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
