"""What ``mode=estimate`` says of phases that train the base, against a base with adapters that is really built."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from rich.console import Console

from drafthead.data.batch import TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.base.lora import LoraBase, LoraSettings
from drafthead.models.base.shape import ModelShape
from drafthead.models.heads.common.size import HeadSize
from drafthead.train.config import parse_run
from drafthead.train.estimate import PhaseEstimate, estimate_of, plan, render

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **SIZES, "head_dim": 16, "intermediate_size": 80, "vocab_size": 300}
BIGCODE = {"model_type": "gpt_bigcode", **SIZES, "n_inner": 80, "vocab_size": 300, "max_position_embeddings": 512}
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoraSettings(rank=4, alpha=8.0, dropout=0.05, targets=SEVEN, checkpointing=False)
HEAD = HeadSize(parameters=1000, trainable=1000, positions=1, draft_vocab_size=300)
PHASE = PhaseEstimate(name="pretrain", seq_len=64, micro_batch_size=2, grad_accum_steps=1, steps=10)
JOINT = replace(PHASE, name="joint", train_base=True)


def base_of(shape: dict[str, Any], dtype: str = "float32") -> BaseModel:
    config = BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype=dtype, prepack=False)
    return BaseModel.load(config)


def shape_of(base: BaseModel) -> ModelShape:
    return ModelShape.from_config(base.config.transformers_config())


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        (LLAMA, SEVEN),
        (LLAMA, ("q_proj", "down_proj")),
        ({**LLAMA, "tie_word_embeddings": False}, (*SEVEN, "lm_head")),
        (BIGCODE, ("c_attn", "c_proj", "c_fc")),
    ],
    ids=["seven", "two", "lm_head", "bigcode"],
)
def test_adapters_are_as_many_as_are_built(shape: dict[str, Any], targets: tuple[str, ...]) -> None:
    base, lora = base_of(shape), replace(LORA, targets=targets)
    parameters = LoraBase(base, lora).parameters().values()
    count = sum(parameter.numel() for parameter in parameters)
    assert all(parameter.dtype == torch.float32 for parameter in parameters)
    found = plan(shape_of(base), HEAD, [PHASE, JOINT], lora=lora)
    assert found.adapter_parameters == count
    assert found.trained == 1000 + count
    assert found.disk["one checkpoint"] == 12 * (1000 + count)
    warm, joint = found.memory["pretrain"], found.memory["joint"]
    assert warm["adapter weights"] == joint["adapter weights"] == 4 * count
    assert joint["gradients"] - warm["gradients"] == 4 * count
    assert joint["optimiser"] - warm["optimiser"] == 8 * count


def kept_by(base: BaseModel, lora: LoraSettings) -> int:
    """Bytes that autograd keeps of a pass through the tuned base, without weights, mask and rotation."""
    tuned = LoraBase(base, lora)
    tuned.train(True)
    weights = {tensor.untyped_storage().data_ptr() for tensor in tuned.model.state_dict().values()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape[-2:] != (64, 64):
            found[storage.data_ptr()] = storage
        return tensor

    rows = torch.arange(64).repeat(2, 1)
    batch = TrainBatch(
        input_ids=rows,
        position_ids=rows,
        document_ids=torch.zeros_like(rows),
        loss_mask=torch.ones_like(rows, dtype=torch.bool),
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tuned.hidden_states(batch)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_backpropagation_keeps_is_what_autograd_keeps(dtype: str) -> None:
    base, tokens, layers = base_of(LLAMA, dtype), PHASE.micro_batch_size * PHASE.seq_len, SIZES["num_hidden_layers"]
    shape = shape_of(base)
    a_layer = tokens * shape.kept_bytes(LORA, base.dtype.itemsize)
    # A CPU's dropout keeps its noise in float32, a GPU's one byte of it.
    noise = 3 * tokens * layers * sum(inputs for _, inputs, _ in shape.linears)
    assert 0.85 < kept_by(base, LORA) / (layers * a_layer + noise) < 1
    inputs = layers * tokens * SIZES["hidden_size"] * base.dtype.itemsize
    states = tokens * SIZES["hidden_size"] * 4
    assert inputs <= kept_by(base, replace(LORA, checkpointing=True)) <= inputs + 2 * states


def test_activations_of_the_joint_phase() -> None:
    base = base_of(LLAMA)
    shape = shape_of(base)
    whole, again = (
        plan(shape, HEAD, [PHASE, JOINT], lora=replace(LORA, checkpointing=on), base_bytes=2).memory for on in (0, 1)
    )
    tokens, wide, layer = 2 * 64, 48 * 2, shape.kept_bytes(LORA, 2)
    # Norms, heads' sums, attention and MLP, adapters on inputs of 48 (five times), 64 and 80.
    assert layer == 8 * 48 + 4 * 4 + 2 * (4 * 64 + 3 * 80) + 5 * (5 * 48 + 64 + 80) + 7 * 4 * 4
    mask, passing = 2 * 64**2 * 3, tokens * (shape.layer_width() * 2 + 5 * wide)
    assert whole["joint"]["base activations"] == 3 * tokens * layer + mask + passing
    assert again["joint"]["base activations"] == tokens * (3 * wide + layer) + mask + passing
    assert whole["pretrain"] == again["pretrain"]
    assert whole["pretrain"]["base activations"] == plan(shape, HEAD, [PHASE]).memory["pretrain"]["base activations"]


def test_the_output_heads_adapter_makes_whole_matrices() -> None:
    shape = shape_of(base_of(LLAMA))
    lora = replace(LORA, targets=(*SEVEN, "lm_head"))
    without, with_head = (plan(shape, HEAD, [JOINT], lora=each).memory["joint"] for each in (LORA, lora))
    assert with_head["base activations"] - without["base activations"] == 300 * 48 * (3 * 2 + 4)


def test_the_bases_loss_is_over_the_whole_vocabulary() -> None:
    head = replace(HEAD, draft_vocab_size=50)
    memory = plan(shape_of(base_of(LLAMA)), head, [PHASE, JOINT], lora=LORA).memory
    assert memory["joint"]["loss chunk"] == 6 * memory["pretrain"]["loss chunk"]


def test_a_target_that_the_base_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"the base has no linear layer 'c_attn' to put an adapter on; it has .*q_proj"):
        plan(shape_of(base_of(LLAMA)), HEAD, [JOINT], lora=replace(LORA, targets=("c_attn",)))
    with pytest.raises(ValueError, match="there are no adapters to train"):
        plan(shape_of(base_of(LLAMA)), HEAD, [JOINT])


def test_the_recipe_prints_it() -> None:
    """Rank 32 on the seven projections of 32 layers: the 83.9 million of Llama 3 8B."""
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        run = parse_run(compose("train", overrides=["recipe=medusa2_llama3"]))
    found = estimate_of(run, 8)
    assert found.adapter_parameters == 83_886_080
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(found))
    for wanted in ("adapters of the base", "83,886,080", "adapter weights", f"{found.trained:,}"):
        assert wanted in capture.get()
    assert "base, frozen" not in capture.get()
    assert found.memory_total("joint") > sum(
        found.memory["joint"][part] for part in ("base weights", "head weights", "adapter weights", "optimiser")
    )
