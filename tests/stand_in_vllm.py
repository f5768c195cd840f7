"""A stand-in for vLLM with its connector: it answers greedily and writes hidden states, of a base in this process."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode


class StandIn:
    """The server, which can be made to write something else."""

    def __init__(self, base: BaseModel, folder: Path, start: Callable[..., Any]) -> None:
        """Start with the fixture ``completions_server``, here ``start``; write files to ``folder``."""
        server = start(self.answer, base.tokenizer, base.eos_ids)
        self.base, self.folder, self.server = base, folder, server
        self.change: Callable[[Tensor], Tensor] = lambda states: states
        self.harm: Callable[[Path], None] = lambda path: None
        self.layers: tuple[int, ...] = (0, 1)  # of the files, without the last one
        self.lock = Lock()
        server.models = [{"id": base.name, "max_model_len": 2048}]
        server.extend = self.extend
        folder.mkdir(parents=True, exist_ok=True)

    def states(self, ids: list[int]) -> Tensor:
        """All layers [T, L + 1, D], the last one before the final norm."""
        last: list[Tensor] = []
        hook = self.base.model.model.layers[-1].register_forward_hook(lambda _, inputs, out: last.append(out[0]))
        spec = HiddenStatesSpec(layers=self.layers)
        early = self.base.hidden_states(TrainBatch.of([ids]), spec).layers
        hook.remove()
        assert early is not None
        return torch.stack([*early[0].chunk(len(self.layers), -1), last[0]], 1)

    def answer(self, ids: list[int], body: dict[str, Any]) -> list[int]:
        with self.lock:
            return decode(self.base, None, ids, max_new_tokens=body["max_tokens"]).tokens

    def extend(self, payload: dict[str, Any], body: dict[str, Any]) -> None:
        ids = body["prompt"]
        if body.get("kv_transfer_params", {}).get("include_output_tokens"):
            ids = [*ids, *payload["choices"][0]["token_ids"][:-1]]
        with self.lock:  # requests come at the same time, and a hook would see all of them
            states = self.states(ids)
        path = self.folder / f"{len(self.server.bodies)}-{time.monotonic_ns()}.safetensors"
        changed = self.change(states)
        save_file({"hidden_states": changed.contiguous(), "token_ids": torch.tensor(ids[-len(changed) :])}, path)
        self.harm(path)
        payload["kv_transfer_params"] = {"hidden_states_path": str(path)}
        if body.get("prompt_logprobs"):
            logits = self.base.lm_head.logits(self.base.final_norm(states[:, -1]))
            best = [{str(token): {"rank": 1}} for token in logits.argmax(-1).tolist()]
            payload["choices"][0]["prompt_logprobs"] = [None, *best[:-1]]
