"""What ``accelerate launch`` says of sharding and precision: followed where it can be, and else refused by name.

Training shards by itself (``train/sharding.py``), so accelerate's FSDP plugin is never made; its settings reach this
program as environment variables and are read here.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from accelerate import Accelerator
from accelerate.utils import gather_object

from drafthead.data.utils.errors import UserError
from drafthead.train.config import ShardConfig

OTHERS = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "use shard=full"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "use shard=full"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism_config", "use shard=full, and shard.hybrid=true over nodes"),
}
"""Other ways to spread a model: their switch, their name, and what to do instead."""
STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}


@dataclass(frozen=True)
class _Rule:
    """One setting of accelerate's FSDP plugin."""

    name: str
    """As in accelerate's configuration file."""
    values: tuple[str, ...] | None = None
    """Those that can be followed; None: any, it changes nothing here."""
    advice: str = ""


SWITCH = ("TRUE", "FALSE")
FSDP = {
    "VERSION": _Rule("fsdp_version", ("1", "2"), "set it to 2"),
    "SHARDING_STRATEGY": _Rule(
        "fsdp_sharding_strategy",
        ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"),
        "a frozen base is sharded only if its layers are freed after use: choose FULL_SHARD, HYBRID_SHARD or NO_SHARD",
    ),
    "RESHARD_AFTER_FORWARD": _Rule(
        "fsdp_reshard_after_forward",
        ("TRUE",),
        "a frozen base is sharded only if its layers are freed after use: set it to true",
    ),
    "OFFLOAD_PARAMS": _Rule("fsdp_offload_params", SWITCH, "set it to true or false"),
    "ACTIVATION_CHECKPOINTING": _Rule("fsdp_activation_checkpointing", SWITCH, "set it to true or false"),
    "ACTIVATION_CHECKPOINTING_OFFLOAD": _Rule(
        "fsdp_activation_checkpointing_offload", ("FALSE",), "activations stay on the device: set it to false"
    ),
    "AUTO_WRAP_POLICY": _Rule(
        "fsdp_auto_wrap_policy",
        ("TRANSFORMER_BASED_WRAP",),
        "what is gathered at a time is a decoder layer of the base: set TRANSFORMER_BASED_WRAP or leave it out",
    ),
    "TRANSFORMER_CLS_TO_WRAP": _Rule(
        "fsdp_transformer_layer_cls_to_wrap", ("",), "every decoder layer is wrapped, whatever its class: leave it out"
    ),
    "BACKWARD_PREFETCH": _Rule("fsdp_backward_prefetch", ("BACKWARD_PRE", "1"), "set BACKWARD_PRE or leave it out"),
    "STATE_DICT_TYPE": _Rule(
        "fsdp_state_dict_type",
        ("FULL_STATE_DICT", "1"),
        "checkpoints hold whole tensors, so that any number of processes can go on from them: set FULL_STATE_DICT",
    ),
    "IGNORED_MODULES": _Rule("fsdp_ignored_modules", ("",), "leave it out"),
    "MIN_NUM_PARAMS": _Rule("fsdp_min_num_params"),  # of a wrap policy that is refused
    "FORWARD_PREFETCH": _Rule("fsdp_forward_prefetch"),  # done in any case
    "USE_ORIG_PARAMS": _Rule("fsdp_use_orig_params"),  # FSDP2 always does
    "SYNC_MODULE_STATES": _Rule("fsdp_sync_module_states"),  # every process reads the same weights
    "CPU_RAM_EFFICIENT_LOADING": _Rule("fsdp_cpu_ram_efficient_loading"),  # likewise
}


def follow_launcher(shard: ShardConfig) -> ShardConfig:
    """``shard`` and what accelerate's settings ask for besides; they are then taken out of the environment.

    transformers reads them there, too, and treats processes other than the first as not having read the weights.

    Raises:
        UserError: a setting that cannot be followed, or that contradicts the recipe.
    """
    found = asked_for(os.environ, shard)
    os.environ["ACCELERATE_USE_FSDP"] = "false"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return found


def asked_for(environment: Mapping[str, str], shard: ShardConfig) -> ShardConfig:
    """``shard`` and what the settings in ``environment`` ask for besides.

    Raises:
        UserError: as ``follow_launcher``.
    """
    for switch, (name, advice) in OTHERS.items():
        if _is_on(environment, switch):
            raise UserError(f"accelerate is set to {name}, which training does not follow; turn it off and {advice}")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16"):
        raise UserError(
            f"accelerate is set to mixed_precision={precision}, but a head computes in float32 or bfloat16; launch "
            "with --mixed_precision bf16 or no"
        )
    if precision == "bf16":
        shard = replace(shard, precision="bfloat16")
    return _with_fsdp(environment, shard) if _is_on(environment, "ACCELERATE_USE_FSDP") else shard


def _with_fsdp(environment: Mapping[str, str], shard: ShardConfig) -> ShardConfig:
    settings = {k.removeprefix("FSDP_"): v.upper() for k, v in environment.items() if k.startswith("FSDP_")}
    # accelerate's launcher sets both; a version reads one of them.
    settings.pop("RESHARD_AFTER_FORWARD" if settings.get("VERSION", "1") == "1" else "SHARDING_STRATEGY", None)
    strategy = settings.get("SHARDING_STRATEGY", "FULL_SHARD")
    settings["SHARDING_STRATEGY"] = strategy = STRATEGIES.get(strategy, strategy)
    for key, value in settings.items():
        rule = FSDP.get(key, _Rule(f"fsdp_{key.lower()}", (), "leave it out"))
        if rule.values is not None and value not in rule.values:
            raise UserError(f"accelerate's {rule.name}={value} is not followed: {rule.advice}")
    if strategy == "NO_SHARD":
        return shard
    if shard.mode == "head":
        raise UserError(
            "accelerate's FSDP shards base and head, the recipe only the head (shard.mode=head); launch without "
            "--use_fsdp, or set shard=full"
        )
    return replace(
        shard,
        mode="full",
        hybrid=shard.hybrid or strategy == "HYBRID_SHARD",
        offload_base=shard.offload_base or settings.get("OFFLOAD_PARAMS") == "TRUE",
        checkpointing=shard.checkpointing or settings.get("ACTIVATION_CHECKPOINTING") == "TRUE",
    )


def main_process_first(accelerator: Accelerator, per_node_data: bool) -> AbstractContextManager[None]:
    """In the block first comes the one process that writes corpora and caches, and the others find them written.

    Args:
        accelerator: of the run.
        per_node_data: every node has data folders of its own, and so a writer.
    """
    found: AbstractContextManager[None] = (
        accelerator.local_main_process_first() if per_node_data else accelerator.main_process_first()
    )
    return found


def check_common(accelerator: Accelerator, what: str, digest: str) -> None:
    """Refuse corpora that differ between processes: a row's number would mean another row on another node.

    Args:
        accelerator: of the run; all processes must call.
        what: names the corpus.
        digest: of its rows.

    Raises:
        UserError: they differ.
    """
    found = gather_object([digest])
    if len(set(found)) > 1:
        raise UserError(
            f"the rows of {what} differ between processes ({', '.join(found)}): per_node_data=true made other "
            f"corpora on "
            "another node; copy data.folder from one node to the others, or use a common one with per_node_data=false"
        )


def _is_on(environment: Mapping[str, str], switch: str) -> bool:
    return environment.get(switch, "false").lower() in ("true", "1", "yes")
