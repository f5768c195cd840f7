"""accelerate's settings: each is followed, has no effect, or is rejected by name."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from drafthead.errors import UserError
from drafthead.train.distributed.launcher import FSDP, NO_EFFECT, follow_launcher, with_launcher_settings
from drafthead.train.distributed.sharding import ShardConfig
from drafthead.train.trainer.trainer import Trainer

LAUNCH = Path(__file__).parents[3] / "recipes" / "launch"
NONE, FULL = ShardConfig(), ShardConfig(mode="full")


def launched(*flags: str) -> dict[str, str]:
    """Return the environment in which ``accelerate launch`` would start processes."""
    given = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0", *flags, "x.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    environment: dict[str, str] = prepare_multi_gpu_env(arguments)
    return environment


def test_every_setting_of_the_plugin_has_a_rule() -> None:
    """A setting without a rule would be rejected as unknown."""
    keys = {key for key in launched("--use_fsdp", "--fsdp_version", "2") if key.startswith("FSDP_")}
    assert keys and {key.removeprefix("FSDP_") for key in keys} <= {*FSDP, *NO_EFFECT}


@pytest.mark.parametrize(
    ("flags", "shard", "expected"),
    [
        ("", NONE, NONE),  # accelerate writes a default for every setting
        ("--use_fsdp", NONE, FULL),
        ("--use_fsdp --fsdp_version 2", NONE, FULL),
        ("--mixed_precision bf16", NONE, replace(NONE, precision="bfloat16")),
        ("--use_fsdp", FULL, FULL),
        ("--use_fsdp --fsdp_sharding_strategy HYBRID_SHARD", NONE, replace(FULL, hybrid=True)),
        ("--use_fsdp --fsdp_sharding_strategy 4", NONE, replace(FULL, hybrid=True)),
        ("--use_fsdp --fsdp_sharding_strategy NO_SHARD", ShardConfig(mode="head"), ShardConfig(mode="head")),
        ("--use_fsdp --fsdp_offload_params true", NONE, replace(FULL, offload_base=True)),
        ("--use_fsdp --fsdp_activation_checkpointing true", NONE, replace(FULL, checkpointing=True)),
        ("--use_fsdp --fsdp_state_dict_type FULL_STATE_DICT", NONE, FULL),
        ("--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP", NONE, FULL),
        ("--use_fsdp --fsdp_version 2 --fsdp_sharding_strategy SHARD_GRAD_OP", NONE, FULL),  # v1's alone
    ],
)
def test_followed_settings(flags: str, shard: ShardConfig, expected: ShardConfig) -> None:
    assert with_launcher_settings(launched(*flags.split()), shard) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--mixed_precision fp16", "mixed_precision=fp16"),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", "fsdp_sharding_strategy=SHARD_GRAD_OP"),
        ("--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false", "fsdp_reshard_after_forward=FALSE"),
        ("--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP", "fsdp_auto_wrap_policy=SIZE_BASED_WRAP"),
        ("--use_fsdp --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer", "fsdp_transformer_layer_cls_to_wrap"),
        ("--use_fsdp --fsdp_state_dict_type SHARDED_STATE_DICT", "fsdp_state_dict_type=SHARDED_STATE_DICT .*"),
        ("--use_fsdp --fsdp_backward_prefetch BACKWARD_POST", "fsdp_backward_prefetch=BACKWARD_POST"),
        (
            "--use_fsdp --fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true",
            "fsdp_activation_checkpointing_offload=TRUE",
        ),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SORCERY": "7"}, "fsdp_sorcery=7"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed.* shard=full"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config.* shard.hybrid=true"),
    ],
)
def test_rejected_settings(given: str | dict[str, str], message: str) -> None:
    """Flags of ``accelerate launch``, and variables that it or another launcher may set."""
    with pytest.raises(UserError, match=message):
        with_launcher_settings(launched(*given.split()) if isinstance(given, str) else given, NONE)


def test_a_recipe_that_says_otherwise() -> None:
    with pytest.raises(UserError, match="shard.mode=head.*without --use_fsdp"):
        with_launcher_settings(launched("--use_fsdp"), ShardConfig(mode="head"))


def test_transformers_does_not_see_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It treats processes other than the first as not having read the weights."""
    from transformers.distributed import fsdp

    for key, value in launched("--use_fsdp", "--mixed_precision", "bf16").items():
        monkeypatch.setenv(key, value)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    enabled = fsdp.is_fsdp_enabled()
    settings = follow_launcher(NONE)
    enabled_after = fsdp.is_fsdp_enabled()
    torch.distributed.destroy_process_group()
    assert enabled and not enabled_after and settings == replace(FULL, precision="bfloat16")
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"


def test_corpora_that_differ_between_nodes_are_refused() -> None:
    two: Any = SimpleNamespace(processes=SimpleNamespace(gather=lambda digest: [digest, "abc"]))
    Trainer._check_common(two, "distill", "abc")
    with pytest.raises(UserError, match="rows of phase distill.*per_node_data"):
        Trainer._check_common(two, "distill", "def")


@pytest.mark.parametrize(("name", "wanted"), [("gpus", NONE), ("fsdp", FULL), ("nodes", NONE)])
def test_the_configurations_that_come_along(name: str, wanted: ShardConfig) -> None:
    machines = ["--num_machines", "2", "--num_processes", "16", "--machine_rank", "1", "--main_process_ip", "host"]
    given = ["--config_file", str(LAUNCH / f"{name}.yaml"), *(machines if name == "nodes" else []), "x.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    arguments.main_process_port = 12345
    environment = prepare_multi_gpu_env(arguments)
    assert with_launcher_settings(environment, NONE) == replace(wanted, precision="bfloat16")
    if name == "nodes":
        assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "8", 1)
        assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("static", "host:12345")


def test_the_slurm_script_starts_a_launcher_on_every_node(tmp_path: Path) -> None:
    """Against stand-ins for SLURM's commands and for accelerate's."""
    stubs = {
        "scontrol": "printf 'first\\nsecond\\n'",
        "srun": 'shift; for node in 0 1; do SLURM_NODEID=$node "$@"; done',
        "accelerate": 'echo "$OMP_NUM_THREADS: $*"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "n[1-2]", "JOB_ID": "123456", "NNODES": "2", "GPUS_ON_NODE": "4", "CPUS_PER_TASK": "32"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **{f"SLURM_{k}": v for k, v in slurm.items()}}
    script = [str(LAUNCH / "slurm.sh"), "recipe=medusa_llama3", "name=two words"]
    done = subprocess.run(script, env=environment, cwd=LAUNCH.parent.parent, capture_output=True, text=True, check=True)
    expected = (
        "8: launch --config_file recipes/launch/nodes.yaml --num_machines 2 --num_processes 8 --machine_rank {} "
        "--main_process_ip first --main_process_port 23456 train/run.py recipe=medusa_llama3 name=two words"
    )
    assert done.stdout.splitlines() == [expected.format(0), expected.format(1)]


def test_the_slurm_script_asks_for_time_to_save() -> None:
    """The signal is for the steps, which train; ``B:`` would send it to the script alone, which waits for them."""
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert asked["signal"] == "TERM@120" and "requeue" in asked and asked["open-mode"] == "append"
    commands = lines.index("set -euo pipefail")
    assert not any(line.startswith("#SBATCH") for line in lines[commands:]), "sbatch stops reading at the first command"
