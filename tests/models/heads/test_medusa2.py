"""Medusa-2 against an independent reference, what its phases train, and what is saved of it."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from drafthead.data.batch import HiddenStates, HiddenStatesSpec, TrainBatch
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.medusa2 import Medusa2Config, Medusa2Head
from drafthead.models.heads.parts.loading import load_base_and_head, load_head
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.train.trainer.optim import OptimConfig, head_optimizers
from support import TinyBase, cases, randomised, refuses, row_of

DOCUMENTS = (list(range(20, 32)), list(range(100, 109)))
TRAINED_FROM = 4
SCHEDULES = {"constant": 1.0, "linear": 0.5, "sine": math.sqrt(0.5)}
"""Factor of the heads' loss halfway through the phase."""


def batch() -> TrainBatch:
    """One row, two documents, trained from their fifth token, padding."""
    return row_of(DOCUMENTS, TRAINED_FROM)


def tuned_head(base: BaseModel, size: float = 0.05, **settings: Any) -> Medusa2Head:
    """A head in its joint phase whose weights, adapters included, are not the initial ones."""
    defaults = {"num_draft_tokens": 2, "lora_rank": 4, "lora_alpha": 8.0, "lora_dropout": 0.0}
    head = Medusa2Config(**{**defaults, **settings}).build(base)
    head.train_base(now=True)

    return randomised(head, size).eval()


def reference(head: Medusa2Head, base: BaseModel, adapters: dict[str, torch.Tensor]) -> torch.Tensor:
    """The paper's equations on a stock model whose weights are W + alpha / r B A, document by document."""
    config = head.config
    stock = BaseModel.load(replace(base.config, prepack=False)).model
    weights = dict(stock.named_parameters())
    for name in [n for n in adapters if "lora_A" in n]:
        target = name.removeprefix("base_model-model-").split("-lora_A")[0].replace("-", ".") + ".weight"
        change = adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
        weights[target] = weights[target] + config.lora_alpha / config.lora_rank * change
    total = torch.zeros(())
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        call = {"input_ids": ids, "output_hidden_states": True}
        tuned = torch.func.functional_call(stock, weights, (), call)
        untouched = stock(**call)
        hidden = tuned.hidden_states[-1][0]
        for t in range(len(document)):
            for k in range(3):
                if t + 1 + k >= len(document) or t + 1 + k < TRAINED_FROM:
                    continue
                token = torch.tensor(document[t + 1 + k])
                if k == 0 and config.base_loss == "ce":
                    total = total + F.cross_entropy(tuned.logits[0, t], token)
                elif k == 0:
                    p, q = untouched.logits[0, t].log_softmax(-1), tuned.logits[0, t].log_softmax(-1)
                    total = total + (p.exp() * (p - q)).sum()
                else:
                    linear = head.blocks[k - 1][0].linear
                    x = hidden[t] + F.silu(linear(hidden[t]))
                    loss = F.cross_entropy(head.output_head(k - 1).weight @ x, token)
                    total = total + config.heads_weight * SCHEDULES[config.heads_schedule] * 0.8**k * loss
    return total


@cases(
    "base_loss, schedule, lm_head",
    ("ce", "constant", False),
    ("self_distillation", "linear", False),
    ("self_distillation", "sine", True),
)
def test_parity_with_a_few_line_reference(tiny_base: TinyBase, base_loss: str, schedule: str, lm_head: bool) -> None:
    """Value, gradients of adapters and heads, and both parts of the loss as metrics."""
    base = tiny_base()
    head = tuned_head(base, base_loss=base_loss, heads_schedule=schedule, lora_lm_head=lm_head, heads_weight=0.3)
    out = head.loss(batch(), base.hidden_states(batch(), HiddenStatesSpec()), LossConfig(ce=1.0, decay=0.8), 0.5)
    out.loss_sum.backward()
    actual = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()

    expected = reference(head, base, dict(head.adapter.items()))
    expected.backward()
    assert out.loss_sum.item() == pytest.approx(expected.item(), rel=1e-4)
    parts, share = out.ratios(), 0.3 * SCHEDULES[schedule]
    assert parts["heads_loss"].den == int(out.tokens)
    assert out.loss_sum.item() == pytest.approx(parts["base_loss"].num + share * parts["heads_loss"].num, rel=1e-5)
    assert parts["heads_loss"].value > parts["loss_1"].value > 0, "a sum over positions"
    assert len(head.adapter) == 2 * (7 * base.num_layers + lm_head)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-3, atol=1e-3, msg=f"gradient of {name}")
        assert actual[name].abs().sum() > 0, name


def test_before_its_joint_phase_it_is_medusa_1(tiny_base: TinyBase) -> None:
    base = tiny_base()
    base_hidden = base.hidden_states(batch(), HiddenStatesSpec())
    plain = MedusaConfig(num_draft_tokens=2).build(base)
    head = Medusa2Config(num_draft_tokens=2).build(base)
    head.train_base(now=False)
    head.load_state_dict({**head.state_dict(), **plain.state_dict()})
    out, expected = head.loss(batch(), base_hidden, LossConfig(), 0.5), plain.loss(batch(), base_hidden, LossConfig())
    assert out.names == expected.names and out.loss_sum.item() == expected.loss_sum.item()
    out.loss_sum.backward()
    assert all(p.grad is None and not p.requires_grad for p in head.adapter.values())
    assert {head.lr_mult(p) for p in head.parameters()} == {1.0}


def test_heads_learn_faster_than_adapters(tiny_base: TinyBase) -> None:
    head = tuned_head(tiny_base(), heads_lr_mult=4.0)
    (optimizer,) = head_optimizers(head, OptimConfig(lr=0.01, weight_decay=0.1))
    groups = optimizer.param_groups
    adapters = {id(p) for p in head.adapter.values()}
    assert sum(len(group["params"]) for group in groups) == len(list(head.parameters()))
    for group in groups:
        assert {id(p) in adapters for p in group["params"]} == {group["lr_mult"] == 1.0}


def test_dropout_only_while_the_base_is_trained(tiny_base: TinyBase) -> None:
    base = tiny_base()
    head = tuned_head(base, size=0.2, lora_dropout=0.5)
    base_hidden = base.hidden_states(batch(), HiddenStatesSpec())

    def loss() -> float:
        return head.loss(batch(), base_hidden, LossConfig(), 0.5).loss_sum.item()

    assert loss() == loss()
    head.train()
    assert loss() != loss()
    head.train_base(now=False)
    assert loss() == loss()


# Saving, loading, decoding -----------------------------------------------------------------------------------


def test_loaded_from_its_folder_it_drafts_for_the_tuned_base(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    head = tuned_head(base, size=0.1)
    head.save_pretrained(tmp_path / "head")
    assert not any(name.startswith("adapter") for name in load_file(tmp_path / "head" / "model.safetensors"))
    shutil.move(tmp_path / "head", tmp_path / "moved")
    tuned, loaded = load_base_and_head(tmp_path / "moved")
    assert tuned.fingerprint != base.fingerprint
    actual = loaded.candidate_ranks(batch(), tuned.hidden_states(batch(), HiddenStatesSpec()), 20)
    expected = head.candidate_ranks(batch(), HiddenStates(final=torch.full((1, 23, base.hidden_size), torch.nan)), 20)
    assert torch.equal(actual, expected)
    loaded.save_pretrained(tmp_path / "again")
    shutil.rmtree(tmp_path / "moved")
    assert load_base_and_head(tmp_path / "again")[0].fingerprint == tuned.fingerprint, "with its adapter"


def test_a_config_cannot_name_an_adapter_elsewhere(tiny_base: TinyBase, tmp_path: Path) -> None:
    tuned_head(tiny_base()).save_pretrained(tmp_path / "head")
    shutil.move(tmp_path / "head" / "adapter", tmp_path / "elsewhere")
    config = read_json(tmp_path / "head" / "config.json")
    config["base"]["recipe"]["adapter"] = str(tmp_path / "elsewhere")
    write_json(tmp_path / "head" / "config.json", config)
    refuses("no adapter in .*head/adapter", load_base_and_head, tmp_path / "head")


def test_saved_merged_it_is_a_whole_model_beside_the_heads(tiny_base: TinyBase, tmp_path: Path) -> None:
    tuned_head(tiny_base(), save_merged=True).save_pretrained(tmp_path)
    merged = BaseModel.load(replace(tiny_base().config, random=False, name=str(tmp_path / "merged"), shape={}))
    assert isinstance(load_head(tmp_path, merged), Medusa2Head)
    other, _ = load_base_and_head(tmp_path)
    expected, actual = (b.hidden_states(batch(), HiddenStatesSpec()).final for b in (other, merged))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_second_adapter_is_refused(tiny_base: TinyBase, tmp_path: Path) -> None:
    tuned_head(tiny_base()).save_pretrained(tmp_path)
    tuned, head = load_base_and_head(tmp_path)
    refuses("already has the adapter", head.train_base, now=True)
