"""Costs of the servers of a run (``mode=estimate``): of one that computes hidden states, and of one that answers.

GPUs of a server share its weights (tensor parallelism). Times are those of the matrix products, and in answering of
reading all weights once per step if that is longer. Communication between GPUs is not included.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from drafthead.system.display import duration
from drafthead.train.estimate.memory import Estimate, size

ROOM = 0.9  # share of a GPU's memory that vLLM takes by default (--gpu-memory-utilization)
ROWS = 8  # longest rows whose keys and values must fit at least
MOST_GPUS = 16


class ServerEstimate:
    """Bytes and seconds of a run's servers."""

    def __init__(self, plan: Estimate) -> None:
        self.plan, base = plan, plan.base
        self.longest = max(phase.seq_len for phase in plan.phases.values())
        self.layers = len({0, *plan.head.spec.layers, base.num_layers})  # that a server writes
        self.state_bytes = self.layers * base.hidden_size * base.dtype.itemsize
        # Per token; states pass through a separate cache.
        self.cache_bytes = base.cache_shape.nbytes(self.longest) / self.longest + self.state_bytes
        self.weights: int = base.model.num_parameters() * base.dtype.itemsize
        self.least_bytes = self.weights + ROWS * self.longest * self.cache_bytes
        corpora = {phase.corpus for phase in plan.phases.values() if phase.store_hidden_states}
        self.tokens = plan.data.text.max_tokens * ("text" in corpora) + plan.answer_tokens * ("answers" in corpora)
        self._per_token = plan.read_operations(self.longest) / self.longest

    def gpus(self, gigabytes: int) -> int | None:
        """Return the least power of two of GPUs that hold a server; None: more than ``MOST_GPUS``."""
        count = 1
        while count * ROOM * gigabytes * 10**9 < self.least_bytes:
            count *= 2
        return count if count <= MOST_GPUS else None

    def states_s(self, operations: float) -> float:
        """Return the seconds to compute the states with ``operations`` per second."""
        return self.tokens * self._per_token / operations

    def answers_s(self, operations: float, bandwidth: float) -> float:
        """Return the seconds to answer with ``operations`` and ``bandwidth`` (bytes) per second."""
        config = self.plan.data.answers
        prompts, rows = config.prompts + config.self_prompted, config.server.concurrency
        steps = prompts * config.sampler.max_new_tokens / rows
        step_s: float = max(2 * self.plan.base.model.num_parameters() * rows / operations, self.weights / bandwidth)
        return steps * step_s + prompts * config.max_prompt_tokens * self._per_token / operations


def server_table(plan: Estimate, gpus: Mapping[str, Any], share: float) -> Group:
    """Return the tables of a run's servers on each of ``gpus``, at this ``share`` of their operations."""
    costs, data = ServerEstimate(plan), plan.data
    sizes = Table(box=None, pad_edge=False)
    sizes.add_column("each server", min_width=26)
    sizes.add_column("size", justify="right", min_width=12)
    sizes.add_row("weights of the base", size(costs.weights))
    sizes.add_row("keys, values, states/token", size(costs.cache_bytes))
    if data.states.url:
        sizes.add_row(f"states of {costs.layers} layers/token", size(costs.state_bytes))
    title = f"a server on these GPUs, by arithmetic ({share:.0%} of the peak): at least"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("h:mm:ss", min_width=18)
    columns = ["GPUs", *["states", "written/s"] * bool(data.states.url), *["answers"] * bool(data.answers.server.url)]
    for column in columns:
        table.add_column(column, justify="right", min_width=10)
    for name, gpu in gpus.items():
        count = costs.gpus(gpu.gigabytes)
        if count is None:
            table.add_row(f"{name}, {gpu.gigabytes} GB", f"over {MOST_GPUS}")
            continue
        operations = gpu.tera_operations * 1e12 * share * count
        cells = [str(count)]
        if data.states.url:
            seconds = costs.states_s(operations)
            cells += [duration(seconds), size(round(costs.tokens * costs.state_bytes / max(seconds, 1)))]
        if data.answers.server.url:
            cells.append(duration(costs.answers_s(operations, gpu.bandwidth * 1e9 * count)))
        table.add_row(f"{name}, {gpu.gigabytes} GB", *cells)
    return Group(sizes, table)
