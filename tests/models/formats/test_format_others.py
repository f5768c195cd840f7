"""The layouts of Hydra, MLPSpeculator and Kangaroo against plain loaders, wrong configs, and look-ups of formats."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models import formats
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import all_formats, format_for, format_named, recognise
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from plain_heads import (
    DRAFTED,
    PlainLayer,
    check_refused,
    check_round_trip,
    deep_base,
    eagle,
    hydra,
    kangaroo,
    logits_of,
    mlp,
    mlp_chain,
    rewrite,
    states,
)
from support import TinyBase, cases, refuses

HYDRA, MLP, KANGAROO = all_formats()["hydra"], all_formats()["mlp_speculator"], all_formats()["kangaroo"]


@torch.inference_mode()
def hydra_engine(folder: Path, base: BaseModel) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    layer = PlainLayer(load_file(folder / "hydra_lm_head.safetensors"), base.model.config.to_dict())
    hidden, dropouts = states(base)[-1][0], config["hydra_head_arch"] == "prefix-mlp"
    if dropouts:
        hidden = layer.decoder(hidden, "prefix_embeding_layer.layers.0.")
        hidden = layer.norm(hidden, "prefix_embeding_layer.norm")

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, layer.get(f"{name}.weight"), layer.get(f"{name}.bias"))

    logits = []
    for k in range(config["hydra_num_heads"]):
        x = torch.cat([hidden[-1], *(base.embedding[token] for token in DRAFTED[: k + 1])])
        for j in range(config["hydra_num_layers"]):
            name = f"hydra_mlp.{k}.{2 * j + 1 if dropouts else j}"
            x = (x if j else linear(x, f"{name}.res_connection")) + F.silu(linear(x, f"{name}.linear"))
        logits.append(linear(x, f"hydra_lm_head.{k}.1" if dropouts else f"hydra_lm_head.{k}"))
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return torch.stack(logits)


@torch.inference_mode()
def mlp_engine(folder: Path, base: BaseModel) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mlp_speculator" and config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    n = config["n_predict"]
    assert len(config["top_k_tokens_per_head"]) == n and config["inner_dim"] > 0 and config["base_model_name_or_path"]
    same = {key: config[key] for key in ("inner_dim", "tie_weights", "scale_input")}
    settings = MLPSpeculatorConfig(num_draft_tokens=n, **same)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("speculator.")
        ours = f"projections.weights.{name.split('.')[1]}" if name.startswith("head.") else f"cells.{name}"
        tensors[ours] = tensor
    layer = PlainLayer(tensors, base.model.config.to_dict())
    logits = mlp_chain(layer, settings, base, states(base)[-1][0, -1], [*DRAFTED, 7, 250])
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return torch.stack(logits)


@torch.inference_mode()
def kangaroo_engine(folder: Path, base: BaseModel) -> Tensor:
    """``norm(x + attention(norm(x)))`` over what leaves the exit layer, then the base's head."""
    config = json.loads((folder / "config.json").read_text())
    layer = PlainLayer(load_file(folder / "model.safetensors"), config, config["rope_theta"])
    x = states(base)[config["exit_layer"]][0].float()
    x = x + layer.attention(layer.norm(x, "layers.0.input_layernorm"), "layers.0.self_attn.")
    logits = F.linear(layer.norm(x, "norm"), base.lm_head.weight)
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return logits


Engine = Callable[[Path, BaseModel], Tensor]
Make = Callable[..., DraftHead]
eagle_of_50 = partial(eagle, d2t=torch.arange(50))


@cases(
    "engine, make, settings",
    (hydra_engine, hydra, {}),
    (hydra_engine, hydra, {"num_layers": 3, "prefix_layer": True, "dropout": 0.2}),
    (hydra_engine, hydra, {"num_layers": 3, "tie_blocks": True, "projection_bias": True}),
    (hydra_engine, hydra, {"num_layers": 2, "own_lm_head": False}),
    (mlp_engine, mlp, {"num_draft_tokens": 3}),
    (mlp_engine, mlp, {"num_draft_tokens": 4, "inner_dim": 24, "scale_input": True}),
    (mlp_engine, mlp, {"num_draft_tokens": 5, "inner_dim": 24, "tie_weights": True, "scale_input": True}),
    (mlp_engine, mlp, {"num_draft_tokens": 2, "tie_weights": True}),
    (kangaroo_engine, kangaroo, {}),
)
def test_engine_and_round_trip(tmp_path: Path, engine: Engine, make: Make, settings: dict[str, Any]) -> None:
    head = make(deep_base(), **settings)
    check_round_trip(all_formats()[head.config.head_type], engine, head, tmp_path)


@cases(
    "make, config, says",
    (hydra, {"hydra_head_arch": "eagle-attn"}, "has hydra_head_arch 'eagle-attn'"),
    (mlp, {"n_predict": "3"}, "has '3' as n_predict, expected a positive whole number"),
    (mlp, {"inner_dim": 64}, "inner_dim 64, but speculator.proj.0.weight has 32 rows"),
    (eagle_of_50, {"target_hidden_size": 64}, "made for a base with hidden_size 64"),
    (eagle_of_50, {"layers": [0, 1, 2]}, r"fc.weight is \(32, 64\), not \(32, 96\)"),
    (eagle_of_50, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has a layer with rope_scaling"),
    (kangaroo, {"exit_layer": 3}, "must be below the base's 3 layers"),
    (kangaroo, {"rope_scaling": "x"}, "has rope_scaling 'x', expected an object"),
    (hydra, {"hydra_num_heads": 10**12}, "expected a positive whole number up to 1,048,576"),
    (kangaroo, {"rope_theta": 5e5}, "rope_theta 500000.0, but random-llama has 10000.0"),
)
def test_wrong_configs(tiny_base: TinyBase, tmp_path: Path, make: Make, config: dict[str, Any], says: str) -> None:
    head = make(tiny_base(), **({"prefix_layer": True} if make is hydra else {}))
    check_refused(all_formats()[head.config.head_type], head, tmp_path, config, says)


def test_hydra_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Import any name of the prefix layer, and its unused embedding."""
    base = tiny_base()
    head = hydra(base, prefix_layer=True)
    HYDRA.export(head, tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    theirs = {name.replace("prefix_embeding_layer.", "prefix.model."): t for name, t in tensors.items()}
    theirs |= {"prefix.model.embed_tokens.weight": torch.ones(3), "prefix.model.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tmp_path, theirs)
    assert torch.equal(logits_of(base, HYDRA.load(tmp_path, base)), logits_of(base, head))


@pytest.mark.parametrize("prefix_layer", [False, True])
def test_hydra_modules_with_and_without_dropouts(tiny_base: TinyBase, tmp_path: Path, prefix_layer: bool) -> None:
    """Import files with and without dropout modules, and without biases."""
    base = tiny_base()
    head = hydra(base, num_layers=3, prefix_layer=prefix_layer)
    HYDRA.export(head, tmp_path)

    def other(name: str) -> str:
        kind, k, *rest = name.split(".")
        if kind == "hydra_mlp":
            number = (int(rest[0]) - 1) // 2 if prefix_layer else 2 * int(rest[0]) + 1
            return ".".join([kind, k, str(number), *rest[1:]])
        if kind == "hydra_lm_head":
            return ".".join([kind, k, rest[-1]] if prefix_layer else [kind, k, "1", rest[-1]])
        return name

    tensors = {other(n): t for n, t in load_file(tmp_path / "hydra_lm_head.safetensors").items()}
    rewrite(tmp_path, {n: t for n, t in tensors.items() if not (n.startswith("hydra_lm") and n.endswith("bias"))})
    assert torch.equal(logits_of(base, HYDRA.load(tmp_path, base)), logits_of(base, head))


def test_hydra_refusals(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    refuses("head.unit_embeddings=false", HYDRA.export, hydra(base, unit_embeddings=True), tmp_path)
    scaled = hydra(base)
    scaled.target_lm_head = type(scaled.target_lm_head)(weight=scaled.target_lm_head.weight, scale=0.5)
    refuses("scales or caps its logits", HYDRA.export, scaled, tmp_path)
    HYDRA.export(hydra(base, prefix_layer=True), tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    tensors["prefix_embeding_layer.layers.0.self_attn.k_proj.weight"] = torch.ones(32, 32)
    rewrite(tmp_path, tensors)
    refuses(r"k_proj.weight is \(32, 32\), not \(16, 32\)", HYDRA.load, tmp_path, base)


@pytest.mark.parametrize("tied", [True, False])
def test_tgi_loads_tied_mlp_speculators(tiny_base: TinyBase, tied: bool) -> None:
    head = mlp(tiny_base(), tie_weights=tied)
    assert [engine.name for engine in MLP.engines_for(head) if engine.current] == (["TGI"] if tied else [])
    tgi = next(engine.support for engine in MLP.engines_for(head) if engine.name == "TGI")
    assert tgi.startswith("the tied variant" if tied else "fails with untied weights")


def test_mlp_speculators_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Import copies of tied tensors, inner_dim 0, no prefix, and vLLM's default of three entries."""
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
    assert ["top_k_tokens_per_head is [5, 4, 3]" in note for note in checkpoint.notes] == [True]
    assert torch.equal(logits_of(base, MLP.attach(checkpoint, base)), logits_of(base, head))
    tensors["speculator.proj.3.weight"] += 1
    rewrite(tmp_path, tensors)
    refuses("tie_weights, but speculator.proj.3.weight", MLP.read, tmp_path)


@cases(
    "settings, says",
    ({"cell": "lstm", "tie_weights": True}, "LSTM.*head.cell=rnn"),
    ({"own_embedding": False, "own_lm_head": False}, "head.own_embedding=true.*head.own_lm_head=true"),
)
def test_what_ibm_lacks_is_refused(tiny_base: TinyBase, tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    refuses(says, MLP.export, mlp(tiny_base(), **settings), tmp_path)


def test_a_published_kangaroo_does_not_say_where_to_exit(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    KANGAROO.export(kangaroo(base), tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tmp_path, weights, **dict.fromkeys(("exit_layer", "num_tokens", "threshold")))
    refuses("has None as exit_layer", KANGAROO.load, tmp_path, base)
    head = KANGAROO.attach(KANGAROO.read(tmp_path, {"exit_layer": 1, "rms_norm_eps": 9.9999999e-07}), base)
    assert head.config == KangarooConfig(exit_layer=1)


def test_more_heads_that_a_format_cannot_hold(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    for form, config in (
        (KANGAROO, KangarooConfig(exit_layer=1, draft_vocab_size=50)),
        (all_formats()["hydra"], HydraConfig(draft_vocab_size=50)),
        (all_formats()["mlp_speculator"], MLPSpeculatorConfig(draft_vocab_size=50)),
    ):
        head = config.build(base, torch.arange(50))
        refuses(f"{form.name} .*50 of 300 ids.*head.draft_vocab_size=null", form.export, head, tmp_path)
    with pytest.raises(UserError, match="of the type medusa, .* of the type mlp_speculator"):
        all_formats()["medusa"].export(head, tmp_path)


# Registry -------------------------------------------------------------------------------------------------------------


TOY = """
from drafthead.models.formats.kangaroo import KangarooFormat

class ToyFormat(KangarooFormat):
    name = "toy"
"""


def test_a_new_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(all_formats())
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    discovered = all_formats.__wrapped__()
    assert discovered["toy"].title == all_formats()["kangaroo"].title
    assert set(discovered) == {"toy", *known} and len(known) == 14


def test_look_ups() -> None:
    assert format_for("kangaroo", KangarooConfig) is format_named("kangaroo") is all_formats()["kangaroo"]
    refuses("type hydra, .*type medusa: export it to=medusa or to=tgi_medusa", format_for, "hydra", MedusaConfig)
    refuses("unknown format 'onnx'; choose one of .*medusa", format_named, "onnx")
    refuses("x/config.json .* matches none of dspark", recognise, {"model_type": "llama"}, "x")
    with pytest.raises(UserError, match="x holds a head that drafthead does not support"):
        recognise({"model_type": "mlp_speculator", "architectures": 5}, "x")
