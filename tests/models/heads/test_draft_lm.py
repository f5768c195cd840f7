"""A draft model of the base's layers: numbers equal to the base's, positions of labels, and a run."""

import pytest
import torch
from torch import nn

from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.kernels.fused import copy_weights, fresh_copy, fuse_modules
from support import TinyBase, random_ids, row_of

PROMPT = [5, 6, 7] * 4
DOCUMENTS = row_of([random_ids(10), random_ids(11, seed=1)])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_all_layers_make_the_base(tiny_base: TinyBase, architecture: str) -> None:
    """Weights read back from packed layers, masks and positions: any fault shows."""
    base = tiny_base(architecture)
    head = DraftLMConfig(num_layers=3).build(base).eval()
    hidden = base.hidden_states(DOCUMENTS, HiddenStatesSpec())
    targets = DraftTargets.of(DOCUMENTS, 1)
    actual = head.hidden_at_positions(DOCUMENTS, hidden, targets)[0]
    torch.testing.assert_close(actual, hidden.final[0, targets.last_read[0]], rtol=1e-4, atol=1e-4)
    result = decode(base, head, PROMPT, max_new_tokens=31, ignore_eos=True)
    assert [step.accepted for step in result.steps] == [5] * 5


def test_packed_weights_are_read_back_exactly(tiny_base: TinyBase) -> None:
    settings = tiny_base("qwen2").model.config
    stock = fresh_copy(tiny_base("qwen2").model.model.layers[1], settings, 0)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_()  # norms and biases too, which start as ones and zeros
    expected = {name: parameter.detach().clone() for name, parameter in stock.named_parameters()}
    fused = nn.ModuleList([stock])
    assert fuse_modules(fused) == 7
    again = fresh_copy(tiny_base("qwen2").model.model.layers[0], settings, 0)
    copy_weights(fused[0], again)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-6 if "norm" in name else 0.0, atol=0.0)


def test_width_of_the_mlp(tiny_base: TinyBase) -> None:
    """More channels change nothing at first, and fewer keep the largest. Both draft exactly and train."""
    base = tiny_base()
    hidden = base.hidden_states(DOCUMENTS, HiddenStatesSpec())
    whole = DraftLMConfig(num_layers=2).build(base).eval()
    wider = DraftLMConfig(num_layers=2, intermediate_size=96).build(base).eval()
    targets = DraftTargets.of(DOCUMENTS, 1)
    actual, expected = (head.hidden_at_positions(DOCUMENTS, hidden, targets) for head in (wider, whole))
    torch.testing.assert_close(actual, expected)
    narrow = DraftLMConfig(num_layers=2, intermediate_size=48).build(base).eval()
    every, narrowed = (
        mlp.down_proj.weight.norm(dim=0) * mlp.up_proj.weight.norm(dim=1) * mlp.gate_proj.weight.norm(dim=1)
        for mlp in (whole.layers[0].mlp, narrow.layers[0].mlp)
    )
    torch.testing.assert_close(narrowed.sort().values, every.sort().values[-48:])
    plain = decode(base, None, PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    for head in (wider, narrow):
        assert decode(base, head, PROMPT, max_new_tokens=20, ignore_eos=True).tokens == plain
        out = head.loss(DOCUMENTS, hidden, LossConfig())
        torch.autograd.backward(out.loss_sum)
        assert all(parameter.grad is not None for parameter in head.layers.parameters())
    with pytest.raises(UserError, match="gated MLPs without biases"):
        DraftLMConfig(intermediate_size=48).build(tiny_base("mixtral"))
