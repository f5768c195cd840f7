"""Measure the peak memory of two processes that train on a base of 1 GB: whole (shard=head) and sharded (shard=full).

    python benchmarks/shard_memory.py --json docs/results/shard_memory.json      2 minutes

A random Llama is saved to a temporary folder. Two gloo processes load it as a run does, with the check against stock
transformers, and train a Medusa head for three steps. The peak is that of resident memory, which includes pages of the
mapped weight file, less the resident memory after all imports. ``anonymous`` leaves mapped files out.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from common import at_least, entry_point, parser, print_table, save_record
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafthead.data.batch import TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.distributed.sharding import ShardConfig, Sharding
from drafthead.train.trainer.optim import OptimConfig, head_optimizers
from drafthead.train.trainer.step import train_step

PROCESSES = 2
VOCABULARY, TOKENS, STEPS = 2048, 128, 3


def memory_now(*keys: str) -> int:
    """Return the sum of ``keys`` in this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.split(":")[0] in keys)


class AnonymousPeak(threading.Thread):
    """Samples this process's anonymous memory every 5 ms until ``stop``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.stopping = 0, threading.Event()

    def run(self) -> None:
        """Sample."""
        while not self.stopping.wait(0.005):
            self.bytes = max(self.bytes, memory_now("RssAnon"))

    def stop(self) -> int:
        """Return the peak in bytes."""
        self.stopping.set()
        self.join()
        return self.bytes


def reduced(value: Tensor) -> Tensor:
    """Return the sum of ``value`` over the processes."""
    value = value.clone()
    dist.all_reduce(value)
    return value


def worker(folder: Path, mode: Any, output: Path) -> None:
    """Load and train on this process, one of several; write peaks and losses to ``output`` plus the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    resident, anonymous = memory_now("VmRSS"), memory_now("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    sampler = AnonymousPeak()
    sampler.start()
    started = time.perf_counter()
    sharding = Sharding(ShardConfig(mode=mode), torch.device("cpu"))
    config = BaseConfig(name=str(folder), tokenizer="builtin:tiny", prepack=False)
    base = BaseModel.load(config, shard=sharding.shard_layers if sharding.shards_base else None)
    loaded = time.perf_counter() - started
    torch.manual_seed(0)
    head = MedusaConfig(num_draft_tokens=2, own_lm_head=False).build(base).train()
    sharding.shard(head)
    optimizers, losses = head_optimizers(head, OptimConfig()), []
    for step in range(STEPS):
        ids = torch.randint(3, 300, (TOKENS,), generator=torch.Generator().manual_seed(PROCESSES * step + rank))
        batch = TrainBatch.of([ids.tolist()])
        micro_batches = [(batch, base.hidden_states(batch, head.spec))]
        result = train_step(head, optimizers, micro_batches, LossConfig(), lr=1e-3, clip_norm=1.0, reduce=reduced)
        losses.append(result.metrics()["loss"])
    peaks = {"resident": memory_now("VmHWM") - resident, "anonymous": sampler.stop() - anonymous}
    result_of = {**peaks, "losses": losses, "fingerprint": base.fingerprint, "load_s": round(loaded, 2)}
    output.with_name(f"{output.name}.{rank}").write_text(json.dumps(result_of))
    dist.destroy_process_group()


def save_base(folder: Path, hidden: int, layers: int) -> int:
    """Save a random Llama in ``folder``, and return the size of its weights in bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=VOCABULARY, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def measured(folder: Path, mode: str) -> list[dict[str, Any]]:
    """Return each process's results."""
    output = folder.parent / mode
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    command = [*launch, __file__, "--worker", mode, str(folder), str(output)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(output.with_name(f"{mode}.{rank}").read_text()) for rank in range(PROCESSES)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both modes, print a table, and write the record."""
    options = parser(__doc__)
    options.add_argument("--hidden", type=int, default=768, help="hidden size")
    options.add_argument("--layers", type=int, default=35, help="number of layers")
    options.add_argument("--worker", nargs=3, metavar=("MODE", "FOLDER", "OUTPUT"), help="used by the script itself")
    arguments = options.parse_args(argv)
    if arguments.worker:
        mode, folder, output = arguments.worker
        return worker(Path(folder), mode, Path(output))
    at_least(arguments, 1, "hidden", "layers")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "base"
        size = save_base(folder, arguments.hidden, arguments.layers)
        results = {mode: measured(folder, mode) for mode in ("head", "full")}
    whole, sharded = results["head"], results["full"]
    if any(result["fingerprint"] != whole[0]["fingerprint"] for result in sharded):
        raise UserError("the sharded base has another fingerprint")
    ratio = max(result["resident"] for result in sharded) / max(result["resident"] for result in whole)
    pairs = zip(sharded[0]["losses"], whole[0]["losses"], strict=True)
    difference = max(abs(loss / expected - 1) for loss, expected in pairs)
    rows = [
        {
            "shard": mode,
            "process": rank,
            "peak, GB": f"{result['resident'] / 1e9:.2f}",
            "anonymous, GB": f"{result['anonymous'] / 1e9:.2f}",
            "load, s": result["load_s"],
        }
        for mode, by_rank in results.items()
        for rank, result in enumerate(by_rank)
    ]
    print_table(f"memory per process, base of {size / 1e9:.2f} GB", rows)
    print(f"sharded / whole: {ratio:.2f}; largest relative difference of a loss: {difference:.1e}")
    record = {"base_bytes": size, "processes": results, "ratio": ratio, "loss_difference": difference}
    save_record(arguments, "shard_memory", record)


if __name__ == "__main__":
    entry_point(main)
