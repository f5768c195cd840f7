"""Measure the peak memory of a Medusa training step's loss: chunked and with whole matrices.

    python benchmarks/loss_memory.py                  5 heads, 128256 ids, 4096 tokens, width 256
    python benchmarks/loss_memory.py --width 4096     Llama-3-8B's width (weights and gradients alone take 21 GB)
    python benchmarks/loss_memory.py --json FILE      write the record

The chunked form avoids the [tokens, vocabulary] matrices, whose size does not depend on the width. The default width
keeps the projections small enough for a laptop. Each form runs in a separate process and reports by how much its
resident memory rose above weights, inputs and gradient buffers.
"""

import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from common import entry_point, parser, print_table, save_record

from drafthead.errors import UserError
from drafthead.models.base.lm_head import LMHead
from drafthead.models.heads.parts.losses import Labels, LossConfig, heads_loss


class PeakMemory:
    """Highest resident memory of this process inside the ``with`` block in bytes, sampled every millisecond."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = self.resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self.resident())

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self.resident())

    @staticmethod
    def resident() -> int:
        """Return the resident memory of this process in bytes."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def whole_step(hidden: torch.Tensor, heads: list[LMHead], targets: Labels, config: LossConfig) -> float:
    """Compute loss and gradients with whole matrices and autograd, one head after the other.

    One graph for all heads would need five times as much memory.
    """
    assert targets.target_lm_head is not None and targets.target_hidden is not None
    probs = targets.target_lm_head.logits(targets.target_hidden).float().softmax(-1)
    total, weights = 0.0, config.weights_of(len(heads))
    for k, head in enumerate(heads):
        logits = head.logits(hidden[k]).float()
        ce = F.cross_entropy(logits, targets.ids, reduction="sum")
        kl = F.kl_div(logits.log_softmax(-1), probs, reduction="sum")
        loss = weights[k] * (config.ce * ce + config.kl * kl)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def measure(form: str, heads: int, vocabulary: int, tokens: int, width: int) -> dict[str, float]:
    """Return by how much one forward and backward pass of the loss raises resident memory."""
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, width)
    hidden = torch.randn(heads, tokens, width, requires_grad=True)
    projections = [LMHead(weight=weight.clone().requires_grad_()) for _ in range(heads)]
    for head in projections:
        head.weight.grad = torch.zeros_like(head.weight)
    hidden.grad = torch.zeros_like(hidden)
    targets = Labels(
        ids=torch.randint(0, vocabulary, (tokens,)),
        valid=torch.ones(heads, tokens, dtype=torch.bool),
        target_hidden=torch.randn(tokens, width),
        target_lm_head=LMHead(weight=weight),
    )
    config, started = LossConfig(ce=0.5, kl=0.5), time.perf_counter()
    with PeakMemory() as memory:
        if form == "chunked":
            value, _ = heads_loss(hidden, projections, targets, config)
            value.backward()  # type: ignore[no-untyped-call]
            loss = float(value.detach())
        else:
            loss = whole_step(hidden, projections, targets, config)
    return {"bytes": memory.peak - memory.before, "seconds": time.perf_counter() - started, "loss": loss}


def main(given: list[str] | None = None) -> None:
    """Measure each form in a separate process."""
    options, sizes = parser(__doc__), {"heads": 5, "vocabulary": 128256, "tokens": 4096, "width": 256}
    for name, default in sizes.items():
        options.add_argument(f"--{name}", type=int, default=default)
    arguments = options.parse_args(given)
    sizes = {name: getattr(arguments, name) for name in sizes}
    results = {}
    for form in ("chunked", "whole"):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            try:
                results[form] = process.submit(measure, form, **sizes).result()
            except BrokenProcessPool:
                raise UserError(f"the process that measures the {form} form was killed (out of memory?)") from None
    print_table("memory above weights and inputs", [{"form": form, **row} for form, row in results.items()])
    ratio = results["whole"]["bytes"] / max(1, results["chunked"]["bytes"])
    print(f"the chunked loss needs {ratio:.1f} times less memory")
    save_record(arguments, "loss_memory", results | {"times_less": ratio})


if __name__ == "__main__":
    entry_point(main)
