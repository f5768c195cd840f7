"""Training steps on several gloo processes, and the same steps on one, for test_sharding.py to compare.

As a script, ``python spread.py FOLDER CASE...``, it is one of the processes, with RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE set. The processes find each other by a file in FOLDER.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parity import PASSED, READING, check_key
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.medusa2 import Medusa2Config, Medusa2Head
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.distributed.sharding import ShardConfig, Sharding, full_state_dict, load_optimizers
from drafthead.train.trainer.optim import OptimConfig, head_optimizers
from drafthead.train.trainer.step import evaluate_loss, mean_metrics, train_step
from support import TINY, random_base

PROCESSES = 2
STEPS = 3
ROWS, TIME = 2, 40
MEDUSA = MedusaConfig(num_draft_tokens=3, draft_vocab_size=101)
"""The draft vocabulary is a persistent buffer of the head; 101 rows do not divide by two."""
MEDUSA2 = Medusa2Config(num_draft_tokens=2, lora_rank=4, lora_dropout=0.0, draft_vocab_size=100)
HYDRA_PP = HydraConfig(num_draft_tokens=2, num_layers=2, prefix_layer=True, dropout=0.0)
EAGLE3 = Eagle3Config(num_draft_tokens=3, ttt_steps=3, draft_vocab_size=100)


@dataclass(frozen=True)
class Case:
    """One way to train."""

    head: DraftHeadConfig
    shard: ShardConfig
    grad_accum_steps: int = 1
    train_base: bool = False
    tied: bool = False
    empty: int | None = None
    """Index of the process whose micro-batches have no token to train on."""
    loss: LossConfig = field(default_factory=lambda: LossConfig(ce=0.5, kl=0.5))


KANGAROO = KangarooConfig(num_draft_tokens=2, exit_layer=1)
DRAFT_LM = DraftLMConfig(num_draft_tokens=2, num_layers=1)
MLP = MLPSpeculatorConfig(num_draft_tokens=2, inner_dim=24)
DSPARK = DSparkConfig(num_draft_tokens=3, num_layers=1, markov_rank=4, induction_rank=4)
FULL, HEAD = ShardConfig(mode="full"), ShardConfig(mode="head")
RECOMPUTED = ShardConfig(mode="full", checkpointing=True)
BF16 = ShardConfig(precision="bfloat16")
CASES = {
    "medusa whole": Case(MEDUSA, ShardConfig()),
    "medusa head": Case(MEDUSA, HEAD, grad_accum_steps=2),
    "medusa full, accumulated": Case(MEDUSA, FULL, grad_accum_steps=2),
    "medusa hybrid": Case(MEDUSA, ShardConfig(mode="full", hybrid=True), grad_accum_steps=2),
    "medusa offloaded": Case(MEDUSA, ShardConfig(mode="full", offload_base=True)),
    "medusa shared and tied": Case(MedusaConfig(num_draft_tokens=2, own_lm_head=False), FULL, tied=True),
    "medusa, one part empty": Case(MEDUSA, FULL, empty=1),
    "medusa2 whole": Case(MEDUSA2, ShardConfig(), train_base=True),
    "medusa2 full": Case(MEDUSA2, FULL, grad_accum_steps=2, train_base=True),
    "hydra++ full": Case(HYDRA_PP, FULL, grad_accum_steps=2),
    "hydra++ recomputed": Case(HYDRA_PP, RECOMPUTED),
    "eagle3 full": Case(EAGLE3, FULL, grad_accum_steps=2),
    "eagle3 recomputed": Case(EAGLE3, ShardConfig(mode="head", checkpointing=True)),
    "eagle3, one part empty": Case(
        Eagle3Config(num_draft_tokens=3, ttt_steps=3, own_lm_head=False), FULL, empty=0, grad_accum_steps=2
    ),
    "kangaroo full": Case(KANGAROO, RECOMPUTED),
    "draft lm full": Case(DRAFT_LM, RECOMPUTED),
    "mlp full": Case(MLP, FULL),
    "medusa bf16": Case(MEDUSA, BF16, grad_accum_steps=2),
    "medusa2 bf16": Case(MEDUSA2, replace(BF16, mode="full"), train_base=True),
    "hydra++ bf16": Case(HYDRA_PP, replace(BF16, mode="head", checkpointing=True)),
    "eagle3 bf16": Case(EAGLE3, replace(BF16, mode="full")),
    "dspark full": Case(DSPARK, FULL),
    "dspark bf16": Case(DSPARK, BF16),
    "kangaroo bf16": Case(KANGAROO, BF16),
    "draft lm bf16": Case(DRAFT_LM, BF16),
    "mlp bf16": Case(MLP, replace(BF16, mode="head")),
}


def load_base(tied: bool = False) -> BaseModel:
    return random_base(TINY | {"tie_word_embeddings": tied}, prepack=False)


def read_shards(base: BaseModel, sharding: Sharding) -> BaseModel:
    """Save ``base``, and load this process's share of it as a run does, with the check at load."""
    PASSED.clear()
    with TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        base.model.save_pretrained(folders[0])  # only process 0 saves
        dist.barrier()
        config = BaseConfig(name=folders[0], tokenizer="builtin:tiny", dtype="float32", prepack=False)
        sharded = BaseModel.load(config, shard=sharding.shard_layers)
        dist.barrier()
    assert check_key(sharded, READING) in PASSED and sharded.fingerprint == base.fingerprint
    return sharded


def build_head(case: Case, sharding: Sharding | None = None) -> DraftHead:
    base, config = load_base(case.tied), case.head
    if sharding is not None and sharding.shards_base and not (config.needs_layers or config.starts_from_layers):
        base = read_shards(base, sharding)
    size = case.head.draft_vocab_size
    torch.manual_seed(1)
    head = case.head.build(base, None if size is None else torch.arange(0, 2 * size, 2))
    with torch.no_grad():
        for parameter in head.parameters():  # blocks start at zero, where many gradients are zero
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    if case.train_base:
        assert isinstance(head, Medusa2Head)
        head.train_base(now=True)
        for parameter in head.adapter.values():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    return head.train()


def batch_of(number: int, empty: bool) -> TrainBatch:
    """Return packed rows. Documents, trained positions and token counts differ from batch to batch."""
    random = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 300, (ROWS, TIME), generator=random)
    cut = int(torch.randint(8, 24, (1,), generator=random))
    documents = (torch.arange(TIME) >= cut).long().expand(ROWS, TIME).contiguous()
    positions = torch.arange(TIME) - cut * documents
    mask = torch.rand(ROWS, TIME, generator=random) < torch.rand(1, generator=random)
    return TrainBatch(input_ids=ids, position_ids=positions, document_ids=documents, loss_mask=mask & (not empty))


def micro_batches(
    case: Case, head: DraftHead, step: int, parts: range | list[int]
) -> Iterator[tuple[TrainBatch, HiddenStates]]:
    for micro in range(case.grad_accum_steps):
        for chunk in parts:
            batch = batch_of((step * case.grad_accum_steps + micro) * PROCESSES + chunk, chunk == case.empty)
            yield batch, head.base.hidden_states(batch, head.spec)


def steps(
    case: Case,
    head: DraftHead,
    optimizers: list[torch.optim.Optimizer],
    numbers: range,
    parts: list[int],
    reduce: Callable[[Tensor], Tensor],
) -> list[dict[str, float]]:
    """Train and return the metrics of every step."""
    metrics = []
    for step in numbers:
        batches = micro_batches(case, head, step, parts)
        done = (step + 1) / STEPS
        result = train_step(
            head, optimizers, batches, case.loss, lr=1e-3, clip_norm=1.0, share_done=done, reduce=reduce
        )
        metrics.append(result.metrics())
    return metrics


def begin(
    case: Case, saved: dict[str, Any] | None = None, sharding: Sharding | None = None
) -> tuple[DraftHead, list[torch.optim.Optimizer]]:
    """Return the head and its optimiser, new or from a ``saved`` state."""
    head = build_head(case, sharding)
    if saved is not None:
        head.load_state_dict(saved["weights"])
    if sharding is not None:
        sharding.shard(head)
    optimizers = head_optimizers(head, OptimConfig())
    if saved is not None:
        load_optimizers(head, optimizers, saved["moments"])
    return head, optimizers


def state_of(head: DraftHead, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    return dict(zip(("weights", "moments"), full_state_dict(head, optimizers), strict=True))


def one_process(name: str, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the case in this process without sharding: all steps, or the last one from a ``saved`` state."""
    case = CASES[name]
    head, optimizers = begin(case, saved)
    numbers = range(STEPS) if saved is None else range(STEPS - 1, STEPS)
    metrics = steps(case, head, optimizers, numbers, [0, 1], lambda value: value)
    return {"metrics": metrics, **state_of(head, optimizers)}


def spread(name: str, rank: int) -> dict[str, Any]:
    """Run the case on all processes: two steps, a save, a second start from it, and the last step."""
    case = CASES[name]

    def reduce(value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    head, optimizers = begin(case, sharding=Sharding(case.shard, torch.device("cpu")))
    metrics = steps(case, head, optimizers, range(STEPS - 1), [rank], reduce)
    saved = [state_of(head, optimizers)]
    dist.broadcast_object_list(saved)  # as if each had read the file

    sharding = Sharding(case.shard, torch.device("cpu"))
    head, optimizers = begin(case, saved[0], sharding)
    head.eval()
    batches = micro_batches(case, head, 0, [1 if case.empty == 0 else 0])
    validated = mean_metrics([evaluate_loss(head, *batch, case.loss) for batch in batches])
    sharding.reshard(head.train())
    metrics += steps(case, head, optimizers, range(STEPS - 1, STEPS), [rank], reduce)
    layer = next(head.base.model.model.layers[0].parameters())
    return {
        **state_of(head, optimizers),
        "metrics": metrics,
        "saved": saved[0],
        "validated": validated,
        "held": {name: local(parameter).numel() for name, parameter in head.named_parameters()},
        "layer": tuple(local(layer).shape),
        "tied": head.base.embedding.data_ptr() == head.base.lm_head.weight.data_ptr(),
    }


FAMILIES = {
    "gemma3_text": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "olmo": {},  # its norms have no weights
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},  # stacked when read
}


def families() -> dict[str, int]:
    """Return the number of values of a sharded base that this process holds by family, if all of them are right."""
    held = {}
    for kind, settings in FAMILIES.items():
        whole = random_base(TINY | {"model_type": kind} | settings, prepack=False)
        sharded = read_shards(whole, Sharding(FULL, torch.device("cpu")))
        found = sharded.model.state_dict()
        for name, expected in whole.model.state_dict().items():
            tensor = found[name]
            assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, expected), (kind, name)
        held[kind] = sum(local(p).numel() for p in sharded.model.model.layers.parameters())
    return held


def local(parameter: Tensor) -> Tensor:
    """Return this process's shard of ``parameter``."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=PROCESSES)
    for name in names:
        result = families() if name == "families" else spread(name, rank)
        torch.save(result, folder / f"{name}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
