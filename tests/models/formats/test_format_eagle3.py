"""EAGLE-3's published layout against a plain loader: names as vLLM and SGLang ask for them.

The reference says the names, the config and that d2t holds offsets. The order of operations (embedding first, residual
on the feature, next step reads the output before the final norm) is as in the reference's account of the official code.
"""

import json
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
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from support import drafted_logits, randomised

TinyBase = Callable[..., BaseModel]
FORMAT = FORMATS["eagle3"]
IDS = [5, 17, 99, 42, 7, 250, 3]
DRAFTED = [8, 120, 64]
STEPS = 3


def trained(base: BaseModel, d2t: Tensor | None = None, **settings: Any) -> Eagle3Head:
    size = None if d2t is None else len(d2t)
    config = Eagle3Config(num_draft_tokens=STEPS, ttt_steps=2, draft_vocab_size=size, **settings)
    return randomised(config.build(base, d2t).eval())


def states(base: BaseModel) -> tuple[Tensor, ...]:
    out = base.model.model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    return (*out.hidden_states, out.last_hidden_state)


def logits_of(base: BaseModel, head: Eagle3Head) -> Tensor:
    """[K, W] after the text and then after given drafts."""
    found = states(base)
    features = Features(final=found[-1], layers=torch.cat([found[i] for i in head.spec.layers], -1))
    return drafted_logits(head, IDS, features, DRAFTED)


@torch.inference_mode()
def engine(folder: Path, base: BaseModel) -> Tensor:
    """[K, V] by a loader of a few lines; an id that cannot be drafted has -inf."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False and config["eagle_config"]["use_aux_hidden_state"] is True
    w = load_file(folder / "model.safetensors")
    layers = base.num_layers
    aux = torch.cat([states(base)[i][0] for i in (min(2, layers), layers // 2, max(0, layers - 3))], -1)

    def norm(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"])

    if config["eagle_config"]["norm_before_fc"]:
        aux = norm(aux, "input_norm")
    features = F.linear(aux, w["fc.weight"])
    tokens, size, logits = [*IDS[1:], DRAFTED[0]], config["head_dim"], []
    for step in range(STEPS):
        embedded = base.embedding[torch.tensor(tokens)]
        both = torch.cat([norm(embedded, "midlayer.input_layernorm"), norm(features, "midlayer.hidden_norm")], -1)
        time = len(tokens)
        q, k, v = (
            F.linear(both, w[f"midlayer.self_attn.{p}_proj.weight"]).view(time, -1, size).transpose(0, 1) for p in "qkv"
        )
        turns = torch.arange(time)[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        cos, sin = turns.cos().repeat(1, 2), turns.sin().repeat(1, 2)
        q, k = (t * cos + torch.cat([-t[..., size // 2 :], t[..., : size // 2]], -1) * sin for t in (q, k))
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        scores = q @ k.repeat_interleave(groups, 0).mT / size**0.5 + torch.full((time, time), -torch.inf).triu(1)
        mixed = (scores.softmax(-1) @ v.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
        hidden = features + F.linear(mixed, w["midlayer.self_attn.o_proj.weight"])
        read = norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(read, w[f"midlayer.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        hidden = hidden + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])
        normed = norm(hidden, "norm")
        drafted = F.linear(normed[-1], w["lm_head.weight"])
        targets = torch.arange(config["draft_vocab_size"]) + w["d2t"]
        logits.append(torch.full((config["vocab_size"],), -torch.inf).index_copy(0, targets, drafted))
        if step + 1 < STEPS:
            tokens.append(DRAFTED[step + 1])
            out = normed if config["norm_output"] else hidden
            features = torch.cat([features, out[-1:]])
    return torch.stack(logits)


@pytest.mark.parametrize(
    "settings", [{}, {"norm_before_fc": True}, {"norm_output": True}, {"own_lm_head": False}], ids=str
)
@pytest.mark.parametrize("reduced", [True, False])
def test_engine_and_round_trip_give_the_heads_logits(
    tiny_base: TinyBase, tmp_path: Path, settings: dict[str, Any], reduced: bool
) -> None:
    base = tiny_base()
    d2t = torch.arange(1, 300, 3) if reduced else None
    head = trained(base, d2t, **settings)
    FORMAT.export(head, tmp_path)
    wanted = logits_of(base, head)
    found = engine(tmp_path, base)
    assert torch.allclose(found[:, head.d2t], wanted, atol=1e-3, rtol=1e-3)
    assert int(found.isfinite().sum()) == wanted.numel()
    again = FORMAT.load(tmp_path, base)
    assert isinstance(again, Eagle3Head) and torch.equal(again.d2t, head.d2t)
    assert torch.equal(logits_of(base, again), wanted)
    assert (again.depth, again.config.trained_positions) == (3, 2)
    content = json.loads((tmp_path / "config.json").read_text())
    assert recognise(content, "x") is FORMAT
    assert ("SGLang" in FORMAT.loaded_by(head)) is not ("norm_before_fc" in settings or "norm_output" in settings)
    supports = {engine.name: engine.support for engine in FORMAT.engines_for(head)}
    later = [key for key in settings if key.startswith("norm")]
    assert supports["SGLang"] == (
        f"not established with {later[0]}; train with head.{later[0]}=false"
        if later
        else "loads it as EAGLE3 (llama_eagle3.py)"
    )
    assert supports["TensorRT-LLM"].startswith("not established"), "nobody has read its loader"
    marks = load_file(tmp_path / "model.safetensors")["t2d"]
    assert torch.equal(marks.nonzero()[:, 0], head.d2t) and len(marks) == 300


def test_names_are_all_that_engines_ask_for(tiny_base: TinyBase, tmp_path: Path) -> None:
    FORMAT.export(trained(tiny_base(), torch.arange(50)), tmp_path)
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": (32, 96),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (64, 32),
        "midlayer.mlp.up_proj.weight": (64, 32),
        "midlayer.mlp.down_proj.weight": (32, 64),
        "norm.weight": (32,),
        "lm_head.weight": (50, 32),
        "d2t": (50,),
        "t2d": (300,),
    }


def rewritten(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in {**content, **config}.items() if v is not None}))
    save_file(tensors, folder / "model.safetensors")


def test_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Prefixes, layers.0, an embedding of the target, no t2d, no keys of ours, SGLang's layer ids."""
    base = tiny_base()
    head = trained(base, torch.arange(0, 300, 4))
    FORMAT.export(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["t2d"]
    theirs = {
        name if name in ("lm_head.weight", "d2t") else "model." + name.replace("midlayer.", "layers.0."): value
        for name, value in tensors.items()
    }
    theirs["model.embed_tokens.weight"] = base.embedding.detach().clone()
    theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    ids = [layer - 1 for layer in head.spec.layers]
    gone = dict.fromkeys(("num_tokens", "ttt_steps", "target_hidden_size", "norm_output", "head_dim"))
    rewritten(
        tmp_path,
        theirs,
        architectures=["Eagle3LlamaForCausalLM"],
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids},
        **gone,
    )
    again = FORMAT.load(tmp_path, base)
    assert again.depth == 7
    assert torch.equal(logits_of(base, again), logits_of(base, head))  # type: ignore[arg-type]
    theirs["model.embed_tokens.weight"] += 1
    rewritten(tmp_path, theirs)
    with pytest.raises(UserError, match="has an embedding that is not random-llama's"):
        FORMAT.load(tmp_path, base)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"norm_before_residual": True}, "sets norm_before_residual"),
        ({"fc_norm": True}, "sets fc_norm"),
        ({"attention_bias": True}, "has a layer with attention_bias True"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, r"say which they are with config.layers="),
        ({"draft_vocab_size": 60}, r"of another shape \[lm_head.weight is \(50, 32\), not \(60, 32\)"),
        ({"target_hidden_size": 64}, r"fc.weight is \(32, 96\), not \(32, 192\)"),
        ({"vocab_size": 301}, "made for a base with vocab_size 301"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has a layer with rope_scaling"),
    ],
)
def test_what_would_draft_wrongly_is_refused(
    tiny_base: TinyBase, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    base = tiny_base()
    FORMAT.export(trained(base, torch.arange(50)), tmp_path)
    rewritten(tmp_path, load_file(tmp_path / "model.safetensors"), **config)
    with pytest.raises(UserError, match=says):
        FORMAT.load(tmp_path, base)


def test_layers_that_engines_do_not_read_are_refused(tiny_base: TinyBase, tmp_path: Path) -> None:
    for layers in ([], [1, 2, 3]):
        with pytest.raises(UserError, match=r"engines agree on \[2, 1, 0\] alone \(head.layers=null\)"):
            FORMAT.export(trained(tiny_base(), layers=layers), tmp_path)
