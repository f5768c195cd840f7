"""How a program begins on all processes of a launch: its processes, the base, and the answers that the base gave."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from drafthead.data.answers.backend import RankGroup
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.config import RunConfig
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.distributed.launcher import follow_launcher
from drafthead.train.distributed.processes import PATIENT, Processes
from drafthead.train.distributed.sharding import Sharding

WAITING = InitProcessGroupKwargs(timeout=PATIENT)
"""Other processes wait for the one that generates; the default time-out ends a run after minutes of that."""


@dataclass(frozen=True)
class Launch:
    """The processes that a launcher started together, seen from one of them."""

    accelerator: Accelerator
    processes: Processes
    sharding: Sharding
    display: Display

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return bool(self.accelerator.is_main_process)


@contextmanager
def launched(run: RunConfig) -> Iterator[Launch]:
    """Join the other processes; inside, each ends when another one dies. Made once a program.

    Raises:
        UserError: the launcher has settings that are not followed.
    """
    shard = follow_launcher(run.shard)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[WAITING],
        log_with=None if run.tracker.kind == "none" else run.tracker.kind,
        project_dir=run.out,
    )
    check_accelerator(accelerator)
    processes = Processes(run.heartbeat_timeout_s)
    with processes.watched():
        yield Launch(accelerator, processes, Sharding(shard, accelerator.device), Display(accelerator.is_main_process))


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse kinds of launchers that are not followed.

    Raises:
        UserError: anything but plain processes; sharding is ``shard=``'s.
    """
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UserError(
            f"accelerate is set to {kind}, which training does not follow; choose plain multi-GPU (accelerate launch "
            "--multi_gpu, or no accelerate config at all), and shard=full to shard"
        )


def open_corpora(run: RunConfig, launch: Launch) -> Corpora:
    """Load the base, and have it answer the prompts that have no answer yet; all processes must call it.

    Raises:
        UserError: the head does not fit the base, or the answers cannot be made.
    """
    display = launch.display
    with display.stage(f"base model {run.base.name or 'random'}"):
        base = BaseModel.load(launch.sharding.base_config(run.base), launch.accelerator.device, display.line)
    run.head_config().check_layers(base.num_layers)  # before hours of generation
    group = group_of(launch.accelerator, run.per_node_data)
    corpora = Corpora(base, run.data, run.seed, display.progress, group, display.line)
    with display.stage("corpus: the base's own answers"):
        stats = corpora.generations().stats
        display.line(f"   {stats.rows} answers, {stats.tokens:,} tokens, {stats.finished} ended by the base itself")
    return corpora


def group_of(accelerator: Accelerator, per_node_data: bool) -> RankGroup:
    """The processes that share a corpus: all that the launcher started, or with ``per_node_data`` those of a node."""
    if not per_node_data:
        return RankGroup(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return RankGroup(accelerator.local_process_index, local, accelerator.wait_for_everyone)
