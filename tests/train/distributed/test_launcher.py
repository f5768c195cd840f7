"""accelerate's settings: mixed precision is followed, others are rejected by name."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from drafthead.train.distributed.launcher import follow_launcher, with_launcher_settings
from drafthead.train.distributed.sharding import ShardConfig
from drafthead.train.trainer.trainer import Trainer
from support import cases, refuses

LAUNCH = Path(__file__).parents[3] / "recipes" / "launch"
NONE, FULL = ShardConfig(), ShardConfig(mode="full")


def launched(*flags: str) -> dict[str, str]:
    """Return the environment in which ``accelerate launch`` would start processes."""
    given = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0", *flags, "x.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    environment: dict[str, str] = prepare_multi_gpu_env(arguments)
    return environment


@cases(
    "flags, shard, expected",
    ("", NONE, NONE),  # accelerate writes a default for every setting
    ("--mixed_precision bf16", NONE, replace(NONE, precision="bfloat16")),
    ("--mixed_precision bf16", FULL, replace(FULL, precision="bfloat16")),
)
def test_followed_settings(flags: str, shard: ShardConfig, expected: ShardConfig) -> None:
    assert with_launcher_settings(launched(*flags.split()), shard) == expected


@cases(
    "given, message",
    ("--mixed_precision fp16", "mixed_precision=fp16"),
    ("--use_fsdp --fsdp_version 2", "FSDP.* shard=full"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed.* shard=full"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config.* shard.hybrid=true"),
)
def test_rejected_settings(given: str | dict[str, str], message: str) -> None:
    """Flags of ``accelerate launch``, and variables that it or another launcher may set."""
    refuses(message, with_launcher_settings, launched(*given.split()) if isinstance(given, str) else given, NONE)


def test_accelerate_does_not_apply_the_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in launched("--mixed_precision", "bf16").items():
        monkeypatch.setenv(key, value)
    assert follow_launcher(NONE) == replace(NONE, precision="bfloat16")
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"


def test_corpora_that_differ_between_nodes_are_refused() -> None:
    two: Any = SimpleNamespace(processes=SimpleNamespace(gather=lambda digest: [digest, "abc"]))
    Trainer._check_common(two, "distill", "abc")
    refuses("rows of phase distill.*per_node_data", Trainer._check_common, two, "distill", "def")


@pytest.mark.parametrize("name", ["gpus", "nodes"])
def test_the_configurations_that_come_along(name: str) -> None:
    machines = ["--num_machines", "2", "--num_processes", "16", "--machine_rank", "1", "--main_process_ip", "host"]
    given = ["--config_file", str(LAUNCH / f"{name}.yaml"), *(machines if name == "nodes" else []), "x.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    arguments.main_process_port = 12345
    environment = prepare_multi_gpu_env(arguments)
    assert with_launcher_settings(environment, NONE) == replace(NONE, precision="bfloat16")
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
