"""Report speed and correctness on this machine, on one page to paste into an issue.

usage: drafthead doctor [key=value ...]

drafthead doctor > page.txt
drafthead doctor 'train=[recipe=medusa_llama3]'  # step costs of another recipe's base and head

The page takes up to two minutes.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import field
from functools import partial
from pathlib import Path
from time import perf_counter

from drafthead.commands.command import command
from drafthead.errors import UserError, one_line
from drafthead.eval.lossless.self_check import check_drafts
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.settings.compose import say
from drafthead.settings.schema import settings
from drafthead.system.devices import device_of, memory
from drafthead.system.machine import hardware, other_processes_line, versions
from drafthead.train.config import composed
from drafthead.train.estimate.hours import base_for_times, untrained_head
from drafthead.train.estimate.memory import Estimate, size

LIMIT_S = 110  # after these seconds, no further part of the page is started


@settings(kw_only=True)
class DoctorConfig:
    """Settings of ``drafthead doctor``."""

    train: list[str] = field(default_factory=lambda: ["recipe=medusa_smollm2"])
    """Settings of ``drafthead train`` that choose the base and the untrained head to time."""
    recipes: list[str] = field(default_factory=lambda: ["medusa_smollm2", "eagle3_smollm2", "medusa_llama3"])
    """Recipes whose estimated memory is compared with the device's free memory."""


@command("doctor", DoctorConfig, __doc__)
def main(config: DoctorConfig) -> None:
    started, failed = perf_counter(), 0
    parts: dict[str, Callable[[], Iterator[str]]] = {"machine": machine, "exactness of a tiny head": exactness}
    parts["costs of a step"] = partial(costs, config.train)
    parts |= {f"memory of {name}": partial(memory_line, name) for name in config.recipes}
    for name, lines in parts.items():
        say(f"{name} ...")
        try:
            if perf_counter() - started > LIMIT_S:
                raise TimeoutError("time ran out; choose smaller models with train= or recipes=")
            text = list(lines())
        except Exception as error:  # the page is most useful on a machine where something fails
            text, failed = [f"{name} FAILED: {type(error).__name__}: {one_line(error)}"], failed + 1
        sys.stdout.write("\n".join([*text, ""]))
    if failed:
        raise UserError(f"{failed} parts of the page failed; correct what these lines say, or report the page")


def machine() -> Iterator[str]:
    host, (free, total) = hardware(), memory()
    yield f"versions   {', '.join(f'{name} {version}' for name, version in versions().items())}"
    yield f"device     {device_of(None)}, {host['gpu'] or 'no accelerator'}, {size(free)} of {size(total)} free"
    yield f"cpu        {host['cpu']}, {host['cores']} cores, {host['torch_threads']} torch threads, {host['ram_gb']} GB"
    yield f"disk       {size(shutil.disk_usage(Path.cwd()).free)} free in {Path.cwd()}"


def exactness() -> Iterator[str]:
    tiny = composed(["recipe=eagle3_smollm2", "debug=tiny", "head.draft_vocab_size=null"])
    result = check_drafts(untrained_head(tiny, base_for_times(tiny)))
    yield f"exactness of a tiny eagle3 head on this device, {result['accepted']:.0%} of its drafts accepted"
    for way, rate in result["ways"].items():
        yield f"  {way:<16}{rate['same']} of {rate['of']} as plain decoding{rate['found'] or ''}"


def costs(overrides: list[str]) -> Iterator[str]:
    """Yield the times of a decoding step with the base and the untrained head that ``overrides`` choose."""
    run = composed(overrides)
    base = base_for_times(run)
    head = untrained_head(run, base).eval()
    measured = measure_costs(base, head, repeats=5, sizes=[1, 2, 4, 8, 16, 32, 64])
    yield f"kernels    {base.kernels or 'those of torch'}; graphs {'on' if base.uses_graphs else 'off'}"
    yield (
        f"step of {base.name}, {str(base.dtype)[6:]}, {measured.context} tokens in the cache, {head.config.head_type}"
    )
    yield "  nodes         " + "".join(f"{n:>8}" for n in measured.verify)
    yield "  pass, ms      " + "".join(f"{1e3 * seconds:>8.1f}" for seconds in measured.verify.values())
    yield f"  draft, ms     {1e3 * measured.draft:>8.1f}\n  the rest, ms  {1e3 * measured.overhead:>8.1f}"
    yield f"  {other_processes_line(measured.other_processes_cores)}"


def memory_line(recipe: str) -> Iterator[str]:
    estimate = Estimate(composed([f"recipe={recipe}"]), device=device_of(None).type)
    needed = max(estimate.total(phase) for phase in estimate.phases)
    fits = 1.1 * needed + 2**30 < memory()[0]  # the margin that estimate/memory.py names
    yield f"training {recipe:<20}{size(needed):>10}  {'fits' if fits else 'does not fit'}"
