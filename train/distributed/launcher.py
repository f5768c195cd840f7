"""Start of the program on all processes of ``accelerate launch`` or ``torchrun``. Training shards with ``sharding.py``
and follows accelerate's mixed precision; other settings of accelerate are rejected by name."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, str_to_bool

from drafthead.data.answers.store import ProcessGroup
from drafthead.errors import UserError
from drafthead.system.devices import device_of
from drafthead.system.display import Display
from drafthead.train.config import RunConfig
from drafthead.train.distributed.processes import COLLECTIVE_TIMEOUT, Processes
from drafthead.train.distributed.sharding import ShardConfig, Sharding

REJECTED = {
    "ACCELERATE_USE_FSDP": ("FSDP", "use shard=full"),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "use shard=full"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "use shard=full"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism_config", "use shard=full, and shard.hybrid=true over nodes"),
}


@dataclass(frozen=True)
class Launch:
    """The run's processes, devices, sharding and console."""

    accelerator: Accelerator
    processes: Processes
    sharding: Sharding
    display: Display

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)


@contextmanager
def launched(run: RunConfig) -> Iterator[Launch]:
    """Join the run's processes. Inside the block, this process ends if another one fails. Call this once."""
    shard = follow_launcher(run.shard)
    accelerator = Accelerator(
        cpu=device_of(None).type == "cpu",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
        log_with=None if run.tracker.kind == "none" else run.tracker.kind,
        project_dir=run.out,
    )
    processes = Processes(run.heartbeat_timeout_s)
    with processes.heartbeat():
        yield Launch(accelerator, processes, Sharding(shard, accelerator.device), Display(accelerator.is_main_process))


def rank_group(accelerator: Accelerator, per_node_data: bool) -> ProcessGroup:
    """Return the processes that share a corpus: all of them, or with ``per_node_data`` those of this node. The group
    waits for the processes of all nodes."""
    if not per_node_data:
        return ProcessGroup(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return ProcessGroup(accelerator.local_process_index, local, accelerator.wait_for_everyone)


def follow_launcher(shard: ShardConfig) -> ShardConfig:
    """Return ``shard`` changed by accelerate's environment variables, and reset the precision there, because
    accelerate would apply it too."""
    followed = with_launcher_settings(os.environ, shard)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return followed


def with_launcher_settings(environment: Mapping[str, str], shard: ShardConfig) -> ShardConfig:
    """Return ``shard`` changed by accelerate's settings in ``environment``; reject any that training cannot obey."""
    for switch, (name, advice) in REJECTED.items():
        if str_to_bool(environment.get(switch, "false")):
            raise UserError(f"accelerate is set to {name}, which training cannot follow; turn it off and {advice}")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16"):
        raise UserError(f"accelerate is set to mixed_precision={precision}; launch with --mixed_precision bf16 or no")
    return replace(shard, precision="bfloat16") if precision == "bf16" else shard
