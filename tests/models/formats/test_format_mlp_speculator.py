"""MLPSpeculator's published layout against a plain loader, which reads the folder alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import FORMATS
from plain_heads import DRAFTED, check_refused, check_round_trip, deep_base, logits_of, mlp, rewrite, states
from support import TinyBase

MLP = FORMATS["mlp_speculator"]


@torch.inference_mode()
def mlp_engine(folder: Path, base: BaseModel) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mlp_speculator" and config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    n, width = config["n_predict"], config["inner_dim"]
    assert len(config["top_k_tokens_per_head"]) == n and width > 0 and config["base_model_name_or_path"]
    hidden, tokens = states(base)[-1][0, -1], [*DRAFTED, 7, 250]
    w = {name.replace("speculator.", ""): t for name, t in load_file(folder / "model.safetensors").items()}
    unread = set(w)

    def of(part: str, i: int, name: str = "weight") -> Tensor:
        shared = min(i, 1) if part == "proj" else 0
        key = f"{part}.{shared if config['tie_weights'] else i}.{name}"
        unread.discard(key)
        return w[key]

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    state_weight = 0.5 ** (0.5 / n)
    emb_weight = math.sqrt((1 - state_weight**2) * (width / 2))
    state, logits = (norm(hidden) / math.sqrt(2) if config["scale_input"] else hidden), []
    for i in range(n):
        z = of("emb", i)[tokens[i]]
        state = F.linear(state, of("proj", i)) + emb_weight / state_weight * z
        state = F.gelu(of("ln", i) * norm(state) + of("ln", i, "bias"))
        logits.append(F.linear(state, of("head", i)))
    assert not unread, f"nobody reads {sorted(unread)}"
    return torch.stack(logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_draft_tokens": 3},
        {"num_draft_tokens": 4, "inner_dim": 24, "scale_input": True},
        {"num_draft_tokens": 5, "inner_dim": 24, "tie_weights": True, "scale_input": True},
        {"num_draft_tokens": 2, "tie_weights": True},
    ],
)
def test_engine_and_round_trip_give_the_heads_logits(tmp_path: Path, settings: dict[str, Any]) -> None:
    check_round_trip(MLP, mlp_engine, mlp(deep_base(), **settings), tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_tgi_loads_tied_mlp_speculators(tiny_base: TinyBase, tied: bool) -> None:
    head = mlp(tiny_base(), tie_weights=tied)
    assert MLP.loaded_by(head) == (["TGI"] if tied else [])
    tgi = next(engine.support for engine in MLP.engines_for(head) if engine.name == "TGI")
    assert tgi.startswith("the tied variant" if tied else "fails with untied weights")


def test_mlp_speculators_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Every name of a tied model, inner_dim 0, no prefix, vLLM's default of three entries."""
    base = tiny_base()
    head = mlp(base, num_draft_tokens=4, tie_weights=True)
    MLP.export(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(1, 4):
        for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            tensors["speculator." + name.format(i)] = tensors["speculator." + name.format(0)].clone()
        if i > 1:
            tensors[f"speculator.proj.{i}.weight"] = tensors["speculator.proj.1.weight"].clone()
    theirs = {name.removeprefix("speculator."): t for name, t in tensors.items()}
    rewrite(tmp_path, theirs, inner_dim=0, top_k_tokens_per_head=[5, 4, 3])
    checkpoint = MLP.read(tmp_path)
    assert checkpoint.notes == (
        "top_k_tokens_per_head is [5, 4, 3], and vLLM asserts one entry for each position: not used here",
    )
    assert torch.equal(logits_of(base, MLP.attach(checkpoint, base)), logits_of(base, head))
    tensors["speculator.proj.3.weight"] += 1
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match="says tie_weights, but speculator.proj.3.weight is not the one"):
        MLP.read(tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cell": "lstm", "tie_weights": True}, r"it has LSTM cells, .*\(head.cell=rnn\)"),
        (
            {"own_embedding": False, "own_lm_head": False},
            r"reads the base's embedding, .*\(head.own_embedding=true\); it uses .*\(head.own_lm_head=true\)",
        ),
    ],
)
def test_what_ibm_lacks_is_refused(tiny_base: TinyBase, tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        MLP.export(mlp(tiny_base(), **settings), tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "only MLPSpeculatorPreTrainedModel is read"),
        ({"n_predict": 4}, "missing .speculator.emb.3"),
        ({"n_predict": "3"}, "has '3' as n_predict, expected a positive whole number"),
        ({"inner_dim": 64}, "inner_dim 64, but speculator.proj.0.weight has 32 rows"),
        ({"emb_dim": 64}, "made for a base with hidden_size 64, but random-llama has 32"),
    ],
)
def test_a_config_that_would_draft_wrongly_is_refused(
    tiny_base: TinyBase, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    check_refused(MLP, mlp(tiny_base()), tmp_path, config, says)
