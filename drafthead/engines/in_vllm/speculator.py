"""Any head in vLLM's V2 model runner. **Not run**: the runner needs a GPU.

``Speculator`` has the methods of vLLM 0.32's ``BaseSpeculator``. vLLM refuses ``custom_class`` in this runner, and its
``init_speculator`` builds speculators of a fixed list of methods, so a plugin (entry point ``vllm.general_plugins``)
has to replace that function. Unlike the V1 runner, this one verifies K drafts of every request: shorter chains are
padded by the last token, and lengths are not chosen by what pays.

Shape legend: R requests, K drafts, T tokens of the step, S slots of requests.
"""

from typing import Any

import torch
from torch import Tensor

from drafthead.engines.in_vllm.proposer import ProposerConfig, parts_of, rows_of, states_of
from drafthead.models.decoding.engine_rows import EngineRows, Read


class Speculator:
    """The speculator of one V2 model runner."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are certain
    num_query_per_req = 1
    num_extra_query_per_req = 0

    def __init__(self, vllm_config: Any, runner: Any, config: ProposerConfig) -> None:
        self._config, self._runner, self._settings = vllm_config, runner, config
        self._drafts: int = vllm_config.speculative_config.num_speculative_tokens
        self._rows: EngineRows | None = None  # built at the first step, because the base is loaded later than this

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Drafting uses no graphs of vLLM."""

    def capture(self) -> None:
        """Drafting uses no graphs of vLLM."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Return the drafts of every request after a step, [R, K]; the runner ignores those of unread prompts.

        Args:
            last_hidden_states: [T, D] after the final norm.
            aux_hidden_states: [T, D] of each of the head's layers, ascending.
            num_sampled: [R] tokens that the step added; 0 while a prompt is read.
            num_rejected: [R] drafts of the step that were rejected.
            last_sampled: [S, 1] the last token of each request.
        """
        count = input_batch.num_reqs
        if dummy_run:
            return last_sampled.new_zeros(count, self._drafts)
        rows, state = self._loaded(), self._runner.req_states
        layers = rows.drafters[0].spec.layers
        rows.drop([request for request in rows.requests if request not in state.req_id_to_index])
        slots, ends = input_batch.idx_mapping_np.tolist(), input_batch.query_start_loc_np[1:].tolist()
        texts, computed = state.all_token_ids.gpu, state.num_computed_tokens.gpu
        verified = input_batch.num_draft_tokens_per_req
        reads, last_tokens, first = [], {}, 0
        numbers = zip(slots, ends, num_sampled.tolist(), num_rejected.tolist(), strict=False)
        for row, (slot, end, sampled, rejected) in enumerate(numbers):
            request = input_batch.req_ids[row]
            text = texts[slot, : int(computed[slot])].cpu().numpy()
            states = states_of(last_hidden_states, aux_hidden_states, layers, first, end - rejected)
            reads.append(Read(request, text, states, 0 if verified is None else int(verified[row])))
            if sampled:
                last_tokens[request] = int(last_sampled[slot])
            first = end
        rows.feed(reads)
        chains = rows.draft(last_tokens)
        drafts = last_sampled[input_batch.idx_mapping[:count]].expand(-1, self._drafts).clone()
        for row, request in enumerate(input_batch.req_ids):
            chain = chains.get(request, [])
            drafts[row, : len(chain)] = torch.tensor(chain, dtype=drafts.dtype, device=drafts.device)
        return drafts

    def _loaded(self) -> EngineRows:
        if self._rows is None:
            parts = parts_of(self._runner.model, self._config.model_config)
            self._rows = rows_of(self._settings, parts, self._drafts)
        return self._rows
