"""The accepted length that a machine and an engine need, before any head is trained.

A step that drafts k tokens for b requests reads b * (k + 1) tokens. If it takes r times as long as a step without
drafts, drafting pays above a mean accepted length of r, and drafting itself takes time on top.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from drafthead.errors import UserError

if TYPE_CHECKING:
    from drafthead.eval.engines.clients import VllmServer

ANSWER = 32  # tokens of an answer: enough for the prompts to be a small part of the steps
ROUNDS = 3


def counts_of(requests: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the numbers of tokens in a step whose times are measured: powers of 2 and 1.5 times these, up to the
    largest that is needed."""
    most = max(requests) * (max(drafts) + 1)
    sizes = {*requests, *(1 << n for n in range(most.bit_length() + 1)), *(3 << n for n in range(most.bit_length()))}
    return sorted(size for size in sizes if size <= most) + [most] * (most not in sizes)


def step_seconds(server: "VllmServer", prompt: list[int], counts: Sequence[int]) -> dict[int, float]:
    """Return the seconds of a step of the engine without drafts, by the number of concurrent requests, which is the
    number of tokens it reads. The counts take turns over several rounds, of which the median counts."""
    server.answer(prompt, ANSWER)  # the first answer includes set-up
    measured: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(ROUNDS):
        for count in counts:
            step_s = server.answer_at_once([prompt] * count, ANSWER, count).step_s
            if step_s is None:
                raise UserError("vLLM counts no inter_token_latency_seconds; use version 0.32 or newer")
            measured[count].append(step_s)
    return {count: float(np.median(values)) for count, values in measured.items()}


def needed_lengths(times: Mapping[int, float], requests: int, drafts: Sequence[int]) -> list[float]:
    """Return for each number of ``drafts`` the mean accepted length that pays for the larger pass. ``times`` are
    seconds by tokens; between them they are joined by lines, and more tokens never take less time."""
    known = sorted(times)
    seconds = np.maximum.accumulate([times[count] for count in known])
    plain = np.interp(requests, known, seconds)
    return [float(np.interp(requests * (count + 1), known, seconds) / plain) for count in drafts]
