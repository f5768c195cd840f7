"""Start of the program on all processes of ``accelerate launch`` or ``torchrun``, with accelerate's settings. Training
shards with ``sharding.py`` and never creates accelerate's FSDP plugin. The plugin's settings arrive as environment
variables and are read here. A setting that cannot be followed is rejected by name."""

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
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "use shard=full"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "use shard=full"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism_config", "use shard=full, and shard.hybrid=true over nodes"),
}
STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
FSDP = {  # settings of accelerate's FSDP plugin, and the supported values
    "VERSION": ("2", "1"),
    # Sharding a frozen base saves memory only if its layers are freed after use.
    "SHARDING_STRATEGY": ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"),
    "RESHARD_AFTER_FORWARD": ("TRUE",),
    "OFFLOAD_PARAMS": ("TRUE", "FALSE"),
    "ACTIVATION_CHECKPOINTING": ("TRUE", "FALSE"),
    "ACTIVATION_CHECKPOINTING_OFFLOAD": ("FALSE",),
    # Every decoder layer of the base is wrapped, of any class.
    "AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP",),
    "TRANSFORMER_CLS_TO_WRAP": ("",),
    "BACKWARD_PREFETCH": ("BACKWARD_PRE", "1"),
    # Checkpoints hold full tensors, so that any number of processes can resume.
    "STATE_DICT_TYPE": ("FULL_STATE_DICT", "1"),
}
NO_EFFECT = (  # accepted with any value
    "MIN_NUM_PARAMS",  # of a wrap policy that is rejected
    "FORWARD_PREFETCH",  # always done
    "USE_ORIG_PARAMS",  # always true in FSDP2
    "SYNC_MODULE_STATES",  # every process reads its share of the weights
    "CPU_RAM_EFFICIENT_LOADING",  # the same
)


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
    # oneDNN keeps compiled products of up to 1,024 sizes; every training step adds some, 300 MB in all.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
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
    """Return ``shard`` changed by accelerate's environment variables, and reset them, because transformers reads them
    too and would load weights on the first process only."""
    followed = with_launcher_settings(os.environ, shard)
    os.environ["ACCELERATE_USE_FSDP"] = "false"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return followed


def with_launcher_settings(environment: Mapping[str, str], shard: ShardConfig) -> ShardConfig:
    """Return ``shard`` changed by accelerate's settings in ``environment``; reject any that training cannot obey."""
    for switch, (name, advice) in REJECTED.items():
        if str_to_bool(environment.get(switch, "false")):
            raise UserError(f"accelerate is set to {name}, which training cannot follow; turn it off and {advice}")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16"):
        raise UserError(
            f"accelerate is set to mixed_precision={precision}, but a head computes in float32 or bfloat16; launch "
            "with --mixed_precision bf16 or no"
        )
    if precision == "bf16":
        shard = replace(shard, precision="bfloat16")
    if not str_to_bool(environment.get("ACCELERATE_USE_FSDP", "false")):
        return shard
    settings = {k.removeprefix("FSDP_"): v.upper() for k, v in environment.items() if k.startswith("FSDP_")}
    # accelerate's launcher sets both; each FSDP version reads one of them.
    settings.pop("RESHARD_AFTER_FORWARD" if settings.get("VERSION", "1") == "1" else "SHARDING_STRATEGY", None)
    strategy = settings.get("SHARDING_STRATEGY", "FULL_SHARD")
    settings["SHARDING_STRATEGY"] = strategy = STRATEGIES.get(strategy, strategy)
    for key, value in settings.items():
        values = FSDP.get(key, ())
        if value not in values and key not in NO_EFFECT:
            name = key.lower().replace("_cls_", "_layer_cls_")  # as in accelerate's configuration file
            advice = f"set it to {' or '.join(values)}, or leave it out" if any(values) else "leave it out"
            raise UserError(f"accelerate's fsdp_{name}={value} cannot be followed; {advice}")
    if strategy == "NO_SHARD":
        return shard
    if shard.mode == "head":
        raise UserError(
            "accelerate's FSDP shards base and head, but the recipe shards only the head (shard.mode=head); launch "
            "without --use_fsdp, or set shard=full"
        )
    return replace(
        shard,
        mode="full",
        hybrid=shard.hybrid or strategy == "HYBRID_SHARD",
        offload_base=shard.offload_base or settings.get("OFFLOAD_PARAMS") == "TRUE",
        checkpointing=shard.checkpointing or settings.get("ACTIVATION_CHECKPOINTING") == "TRUE",
    )
