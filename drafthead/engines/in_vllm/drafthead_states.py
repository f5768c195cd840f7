"""A connector of vLLM that writes a request's hidden states to a file, on a CPU. vLLM imports this module; it imports
nothing of drafthead.

vLLM's own connector copies with CUDA streams. Only what it does with them is replaced here: the copy is made at once,
so it has ended when the request is asked about. Everything else, the format of the files included, is vLLM's.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

FINISHED = SimpleNamespace(query=lambda: True)  # in place of the CUDA event that ends a copy


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """vLLM's connector without CUDA."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:
        return None  # a CPU has only one layout

    def _submit_async_write(self, pending: Any) -> None:
        size = self._block_size
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id, None)
        try:
            partial = f"{pending.filename}.partial"
            save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, partial)
            os.replace(partial, pending.filename)  # a reader never sees half a file
        finally:
            if lock is not None:
                os.close(lock)  # readers wait for this lock
        self._req_copy_events[pending.req_id] = FINISHED
