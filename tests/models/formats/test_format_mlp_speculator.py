"""MLPSpeculator's published layout against plain loaders of it.

Names, config keys and equations are the reference's; that vLLM skips what it does not know and builds shared modules
under the lowest index is from memory of its ``mlp_speculator.py``.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.batch import Features
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import FORMATS, recognise
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorHead
from support import drafted_logits, randomised

TinyBase = Callable[..., BaseModel]
FORMAT = FORMATS["mlp_speculator"]
TOKENS = [8, 120, 64, 7, 250]


def trained(base: BaseModel, **settings: Any) -> MLPSpeculatorHead:
    return randomised(MLPSpeculatorConfig(**settings).build(base).eval())


def logits_of(head: MLPSpeculatorHead, hidden: Tensor) -> Tensor:
    """[K, V] after ``hidden`` [D] and the first tokens of ``TOKENS``."""
    return drafted_logits(head, [1], Features(final=hidden[None, None]), TOKENS[: head.depth])


def engine(folder: Path, hidden: Tensor) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mlp_speculator" and config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    n, width = config["n_predict"], config["inner_dim"]
    assert len(config["top_k_tokens_per_head"]) == n and width > 0 and config["base_model_name_or_path"]
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
        z = of("emb", i)[TOKENS[i]]
        state = F.linear(state, of("proj", i)) + emb_weight / state_weight * z
        state = F.gelu(of("ln", i) * norm(state) + of("ln", i, "bias"))
        logits.append(F.linear(state, of("head", i)))
    assert not unread, f"nobody reads {sorted(unread)}"
    return torch.stack(logits)


CASES = [
    {"num_draft_tokens": 3},
    {"num_draft_tokens": 4, "inner_dim": 24, "scale_input": True},
    {"num_draft_tokens": 5, "inner_dim": 24, "tie_weights": True, "scale_input": True},
    {"num_draft_tokens": 2, "tie_weights": True},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_engine_and_round_trip_give_the_heads_logits(
    tiny_base: TinyBase, tmp_path: Path, settings: dict[str, Any]
) -> None:
    base = tiny_base()
    head = trained(base, **settings)
    FORMAT.export(head, tmp_path)
    hidden = torch.randn(base.hidden_size, generator=torch.Generator().manual_seed(2))
    wanted = logits_of(head, hidden)
    assert torch.allclose(engine(tmp_path, hidden), wanted, atol=1e-4)
    again = FORMAT.load(tmp_path, base)
    assert isinstance(again, MLPSpeculatorHead)
    assert torch.equal(logits_of(again, hidden), wanted)
    assert again.config.inner_dim == (head.config.inner_dim or base.hidden_size)
    assert recognise(json.loads((tmp_path / "config.json").read_text()), "x") is FORMAT
    assert FORMAT.loaded_by(head) == (["TGI"] if head.config.tie_weights else [])
    tgi = next(engine.support for engine in FORMAT.engines_for(head) if engine.name == "TGI")
    assert tgi.startswith("the tied variant" if head.config.tie_weights else "fails with untied weights")


def test_a_tied_file_has_what_tgi_reads(tiny_base: TinyBase, tmp_path: Path) -> None:
    FORMAT.export(trained(tiny_base(), num_draft_tokens=4, inner_dim=24, tie_weights=True), tmp_path)
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "speculator.emb.0.weight": (300, 24),
        "speculator.proj.0.weight": (24, 32),
        "speculator.proj.1.weight": (24, 24),
        "speculator.ln.0.weight": (24,),
        "speculator.ln.0.bias": (24,),
        "speculator.head.0.weight": (300, 24),
    }


def test_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Every name of a tied model, inner_dim 0, no prefix, vLLM's default of three entries."""
    base = tiny_base()
    head = trained(base, num_draft_tokens=4, tie_weights=True)
    FORMAT.export(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(1, 4):
        for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            tensors["speculator." + name.format(i)] = tensors["speculator." + name.format(0)].clone()
        if i > 1:
            tensors[f"speculator.proj.{i}.weight"] = tensors["speculator.proj.1.weight"].clone()
    content = json.loads((tmp_path / "config.json").read_text()) | {"inner_dim": 0, "top_k_tokens_per_head": [5, 4, 3]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file({name.removeprefix("speculator."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    checkpoint = FORMAT.read(tmp_path)
    assert checkpoint.notes == (
        "top_k_tokens_per_head is [5, 4, 3], and vLLM asserts one entry for each position: not used here",
    )
    hidden = torch.randn(base.hidden_size)
    again = FORMAT.attach(checkpoint, base)
    assert torch.equal(logits_of(again, hidden), logits_of(head, hidden))  # type: ignore[arg-type]
    tensors["speculator.proj.3.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="says tie_weights, but speculator.proj.3.weight is not the one"):
        FORMAT.read(tmp_path)


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
        FORMAT.export(trained(tiny_base(), **settings), tmp_path)
    reduced = MLPSpeculatorConfig(draft_vocab_size=50).build(tiny_base(), torch.arange(50))
    with pytest.raises(UserError, match=r"it drafts over 50 of 300 ids, .*\(head.draft_vocab_size=null\)"):
        FORMAT.export(reduced, tmp_path)
    says = "medusa holds a MedusaHead; an MLPSpeculatorHead is exported to=mlp_speculator"
    with pytest.raises(UserError, match=says):
        FORMATS["medusa"].export(reduced, tmp_path)


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
def test_what_is_no_such_speculator_is_refused(
    tiny_base: TinyBase, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    base = tiny_base()
    FORMAT.export(trained(base), tmp_path)
    with pytest.raises(UserError, match=says):
        FORMAT.attach(FORMAT.read(tmp_path, config), base)
