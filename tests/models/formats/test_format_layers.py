"""Published layouts of EAGLE-3, Hydra, Kangaroo and MLPSpeculator against plain loaders, which read the folder alone.

Names and the order of operations are those of the engines and of the methods' authors (docs/formats.md says how sure
they are).
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafthead.data.batch import HiddenStates
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.formats import FORMATS, recognise
from drafthead.models.formats.contract import Format
from drafthead.models.formats.eagle3 import LAYER_IDS
from drafthead.models.formats.gguf_files import read_gguf, rope_factors, write_base
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig, KangarooHead
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from support import TINY, TinyBase, drafted_logits, randomised, row_of

EAGLE, HYDRA, KANGAROO, MLP = (FORMATS[name] for name in ("eagle3", "hydra", "kangaroo", "mlp_speculator"))
GGUF, SPECULATORS = FORMATS["gguf"], FORMATS["speculators"]
IDS = [5, 17, 99, 42, 7, 250, 3]
DRAFTED = [8, 120, 64]


@cache
def deep_base(model_type: str = "llama") -> BaseModel:
    """Six layers, so that three of them can be read below the last."""
    shape = {**TINY, "model_type": model_type, "num_hidden_layers": 6}
    return BaseModel.load(BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype="float32", seed=0))


def eagle(base: BaseModel, d2t: Tensor | None = None, **settings: Any) -> Eagle3Head:
    settings = {"layers": [1, 2], "draft_vocab_size": None if d2t is None else len(d2t), **settings}
    config = Eagle3Config(num_draft_tokens=3, ttt_steps=2, intermediate_size=64, **settings)
    return randomised(config.build(base, d2t).eval())


def hydra(base: BaseModel, **settings: Any) -> DraftHead:
    return randomised(HydraConfig(num_draft_tokens=3, **settings).build(base).eval())


def kangaroo(base: BaseModel) -> DraftHead:
    return randomised(KangarooConfig(exit_layer=1, num_draft_tokens=4, confidence_threshold=0.3).build(base).eval())


def mlp(base: BaseModel, **settings: Any) -> DraftHead:
    return randomised(MLPSpeculatorConfig(**settings).build(base).eval())


def states(base: BaseModel) -> tuple[Tensor, ...]:
    """What every layer puts out for the text, and last what the final norm does."""
    out = base.model.model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    return (*out.hidden_states, out.last_hidden_state)


def logits_of(base: BaseModel, head: DraftHead) -> Tensor:
    """[K, W] after the text, and then after given drafts; Kangaroo's first one, which needs no cache of the base."""
    found = states(base)
    layers = [found[i] for i in head.spec.layers]
    base_hidden = HiddenStates(final=found[-1], layers=torch.cat(layers, -1) if layers else None)
    if isinstance(head, KangarooHead):
        return head.output_head(0).logits(head.hidden_states(row_of([IDS], padding=0), base_hidden))[0].detach()
    chain = [*DRAFTED, 7, 250][: head.depth] if isinstance(head.config, MLPSpeculatorConfig) else DRAFTED
    return drafted_logits(head, IDS, base_hidden, chain)


class PlainLayer:
    """A Llama decoder layer in plain torch over the tensors of a file; notes which of them are read."""

    def __init__(self, w: dict[str, Tensor], config: Any, theta: float = 10000.0, pairs: bool = False) -> None:
        self.w, self.unread, self.pairs = w, set(w), pairs
        self.size, self.eps, self.theta = config["head_dim"], config["rms_norm_eps"], theta
        self.groups = config["num_attention_heads"] // config["num_key_value_heads"]

    def get(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self.w[name]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.get(f"{name}.weight") * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        time, size = len(x), self.size
        q, k, v = (
            F.linear(x, self.get(f"{prefix}{p}_proj.weight")).view(time, -1, size).transpose(0, 1) for p in "qkv"
        )
        turns = torch.arange(time)[:, None] * self.theta ** (-torch.arange(0, size, 2) / size)
        q, k = (self.rotated(t, turns.cos(), turns.sin()) for t in (q, k))
        scores = q @ k.repeat_interleave(self.groups, 0).mT / size**0.5
        mixed = (scores + torch.full((time, time), -torch.inf).triu(1)).softmax(-1) @ v.repeat_interleave(
            self.groups, 0
        )
        return F.linear(mixed.transpose(0, 1).flatten(1), self.get(f"{prefix}o_proj.weight"))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = (x[..., ::2], x[..., 1::2]) if self.pairs else x.chunk(2, -1)
        parts = a * cos - b * sin, b * cos + a * sin
        return torch.stack(parts, -1).flatten(-2) if self.pairs else torch.cat(parts, -1)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (F.linear(x, self.get(f"{prefix}{p}_proj.weight")) for p in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.get(f"{prefix}down_proj.weight"))


@torch.inference_mode()
def eagle_engine(folder: Path, base: BaseModel) -> Tensor:
    """[K, V]; an id that cannot be drafted has -inf."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False and config["eagle_config"]["use_aux_hidden_state"] is True
    layer = PlainLayer(load_file(folder / "model.safetensors"), config, config["rope_theta"])
    outer, inner = (
        config["eagle_aux_hidden_state_layer_ids"],
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
    )
    assert inner == [i - 1 for i in outer] and config["num_aux_hidden_states"] == len(outer)  # SGLang adds one
    taps = [states(base)[i][0] for i in outer]
    if config["fc_norm"]:
        taps = [layer.norm(tap, f"fc_norm.{n}") for n, tap in enumerate(taps)]
    aux = torch.cat(taps, -1)
    assert config["norm_before_fc"] == config["eagle_config"]["norm_before_fc"]
    if config["eagle_config"]["norm_before_fc"]:
        aux = layer.norm(aux, "input_norm")
    base_hidden = F.linear(aux, layer.get("fc.weight"))
    targets = torch.arange(config["draft_vocab_size"]) + layer.get("d2t")
    assert torch.equal(layer.get("t2d").nonzero()[:, 0], targets)
    return eagle_chain(layer, base, base_hidden, targets, config)


def eagle_chain(
    layer: "PlainLayer", base: BaseModel, base_hidden: Tensor, targets: Tensor, config: dict[str, Any]
) -> Tensor:
    """[K, V] from the features of the text [T, D]; ``targets`` [W] are the ids that can be drafted."""
    tokens, logits = [*IDS[1:], DRAFTED[0]], []
    for step in range(3):
        embedded = base.embedding[torch.tensor(tokens)]
        both = [layer.norm(embedded, "midlayer.input_layernorm"), layer.norm(base_hidden, "midlayer.hidden_norm")]
        residual = both[1] if config["norm_before_residual"] else base_hidden
        hidden = residual + layer.attention(torch.cat(both, -1), "midlayer.self_attn.")
        hidden = hidden + layer.mlp(layer.norm(hidden, "midlayer.post_attention_layernorm"), "midlayer.mlp.")
        normed = layer.norm(hidden, "norm")
        drafted = F.linear(normed[-1], layer.get("lm_head.weight"))
        logits.append(torch.full((base.vocab_size,), -torch.inf).index_copy(0, targets, drafted))
        if step < 2:
            tokens.append(DRAFTED[step + 1])
            base_hidden = torch.cat([base_hidden, (normed if config["norm_output"] else hidden)[-1:]])
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return torch.stack(logits)


LLAMACPP_NAMES = {
    "blk.0.attn_norm_2": "midlayer.hidden_norm",
    "blk.0.attn_norm": "midlayer.input_layernorm",
    "blk.0.ffn_norm": "midlayer.post_attention_layernorm",
    "blk.0.attn_output": "midlayer.self_attn.o_proj",
    "blk.0.attn_": "midlayer.self_attn.",
    "blk.0.ffn_": "midlayer.mlp.",
    "enc.output_norm": "input_norm",
    "output_norm": "norm",
    "output.": "lm_head.",
}


@torch.inference_mode()
def llamacpp_engine(folder: Path, base: BaseModel) -> Tensor:
    """``head.gguf`` as llama.cpp's eagle3 graph reads it: pairs are rotated, d2t holds int64 target ids."""
    reader = gguf.GGUFReader(folder / "head.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "eagle3" and keys["tokenizer.ggml.model"] == "no_vocab"
    assert len(keys["eagle3.target_layers"]) == 3 and keys["eagle3.block_count"] == 1
    tensors = {}
    for found in reader.tensors:
        name = found.name
        for theirs, ours in LLAMACPP_NAMES.items():
            if name.startswith(theirs):
                name = name.replace(theirs, ours)
                break
        for part in ("q", "k", "v", "gate", "up", "down"):
            name = name.replace(f"attn.{part}.", f"attn.{part}_proj.").replace(f"mlp.{part}.", f"mlp.{part}_proj.")
        tensors[name] = torch.from_numpy(np.array(found.data))
    assert tensors["d2t"].dtype == torch.int64
    sizes = {"head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
    sizes |= {"num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv"}
    config = {name: keys[f"eagle3.{key}"] for name, key in sizes.items()}
    layer = PlainLayer(tensors, config, keys["eagle3.rope.freq_base"], pairs=True)
    aux = torch.cat([states(base)[i][0] for i in keys["eagle3.target_layers"]], -1)
    settings = {"norm_output": False, "norm_before_residual": keys["eagle3.norm_before_residual"]}
    if keys["eagle3.norm_before_fc"]:
        aux = layer.norm(aux, "input_norm")
    base_hidden = F.linear(aux, layer.get("fc.weight"))
    return eagle_chain(layer, base, base_hidden, layer.get("d2t"), settings)


@torch.inference_mode()
def speculators_engine(folder: Path, base: BaseModel) -> Tensor:
    """As vLLM does: the layer's keys, then what its updater copies from the top level, then to=eagle3's loader."""
    config = json.loads((folder / "config.json").read_text())
    methods = config["speculators_config"]
    assert methods["proposal_methods"][0]["speculative_tokens"] == 2
    assert methods["verifier"]["name_or_path"] == base.name
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["num_aux_hidden_states"] == 3
    assert isinstance(config["norm_before_residual"], bool)  # its default is true
    copied = ("draft_vocab_size", "norm_before_fc", "norm_output", "norm_before_residual", "fc_norm", LAYER_IDS)
    rest = {"architectures": ["LlamaForCausalLMEagle3"]} | {key: config[key] for key in copied}
    inner = {"use_aux_hidden_state": True, "norm_before_fc": config["norm_before_fc"]}
    inner[LAYER_IDS] = [i - 1 for i in config[LAYER_IDS]]
    twin = folder / "twin"
    twin.mkdir()
    (twin / "model.safetensors").symlink_to(folder / "model.safetensors")
    (twin / "config.json").write_text(json.dumps({**layer, **rest, "eagle_config": inner}))
    return eagle_engine(twin, base)


@torch.inference_mode()
def hydra_engine(folder: Path, base: BaseModel) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    layer = PlainLayer(load_file(folder / "hydra_lm_head.safetensors"), base.model.config.to_dict())
    hidden, dropouts = states(base)[-1][0], config["hydra_head_arch"] == "prefix-mlp"
    if dropouts:
        prefix = "prefix_embeding_layer.layers.0."
        hidden = hidden + layer.attention(layer.norm(hidden, f"{prefix}input_layernorm"), f"{prefix}self_attn.")
        hidden = hidden + layer.mlp(layer.norm(hidden, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.")
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
def kangaroo_engine(folder: Path, base: BaseModel) -> Tensor:
    """``norm(x + attention(norm(x)))`` over what leaves the exit layer, then the base's head."""
    config = json.loads((folder / "config.json").read_text())
    layer = PlainLayer(load_file(folder / "model.safetensors"), config, config["rope_theta"])
    x = states(base)[config["exit_layer"]][0].float()
    x = x + layer.attention(layer.norm(x, "layers.0.input_layernorm"), "layers.0.self_attn.")
    logits = F.linear(layer.norm(x, "norm"), base.lm_head.weight)
    assert not layer.unread, f"nobody reads {sorted(layer.unread)}"
    return logits


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


D2T = torch.arange(1, 300, 3)
THREE = {"layers": [2, 3, 5]}
CASES = (
    [
        (form, engine, lambda base, a=arguments, s=settings: eagle(base, *a, **THREE, **s))
        for form, engine, cases in (
            (
                GGUF,
                llamacpp_engine,
                ({}, {"norm_before_fc": True}, {"own_lm_head": False}, {"norm_before_residual": True}),
            ),
            (SPECULATORS, speculators_engine, ({}, {"norm_before_fc": True}, {"norm_output": True, "fc_norm": True})),
        )
        for arguments in ((D2T,), ())
        for settings in cases
    ]
    + [
        (EAGLE, eagle_engine, lambda base, a=arguments, s=settings: eagle(base, *a, **s))
        for arguments in ((D2T,), ())
        for settings in (
            {},
            {"norm_before_fc": True},
            {"norm_output": True},
            {"own_lm_head": False},
            {"fc_norm": True, "norm_output": True},
            {"norm_before_residual": True},
        )
    ]
    + [
        (HYDRA, hydra_engine, lambda base, s=settings: hydra(base, **s))
        for settings in (
            {},
            {"num_layers": 3, "prefix_layer": True, "dropout": 0.2},
            {"num_layers": 3, "tie_blocks": True, "projection_bias": True},
            {"num_layers": 2, "own_lm_head": False},
        )
    ]
    + [
        (MLP, mlp_engine, lambda base, s=settings: mlp(base, **s))
        for settings in (
            {"num_draft_tokens": 3},
            {"num_draft_tokens": 4, "inner_dim": 24, "scale_input": True},
            {"num_draft_tokens": 5, "inner_dim": 24, "tie_weights": True, "scale_input": True},
            {"num_draft_tokens": 2, "tie_weights": True},
        )
    ]
)


@pytest.mark.parametrize(("form", "engine", "make"), [*CASES, (KANGAROO, kangaroo_engine, kangaroo)])
def test_engine_and_round_trip_give_the_heads_logits(
    tmp_path: Path, form: Format, engine: Callable[..., Tensor], make: Callable[..., DraftHead]
) -> None:
    base = deep_base()
    head = make(base)
    form.export(head, tmp_path)
    wanted, found = logits_of(base, head), engine(tmp_path, base)
    if found.shape != wanted.shape:
        assert int(found.isfinite().sum()) == wanted.numel()
        found = found[:, head.d2t]
    assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
    again = form.load(tmp_path, base)
    assert type(again) is type(head) and torch.equal(again.d2t, head.d2t)
    assert torch.allclose(logits_of(base, again), wanted, atol=1e-5)
    if getattr(head.config, "own_lm_head", True):
        assert again.config == (replace(head.config, inner_dim=again.config.inner_dim) if form is MLP else head.config)
    if form is not GGUF:
        assert recognise(json.loads((tmp_path / "config.json").read_text()), "x") is form


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        ({}, ["vLLM", "SGLang", "llama.cpp"]),
        ({"norm_before_fc": True}, ["vLLM", "llama.cpp"]),
        ({"norm_output": True}, ["vLLM", "SGLang"]),
        ({"layers": [2, 3]}, ["vLLM", "SGLang"]),
    ],
)
def test_no_engine_is_promised_that_ignores_a_setting(settings: dict[str, Any], engines: list[str]) -> None:
    head = eagle(deep_base(), **{"layers": [2, 3, 5], **settings})
    assert EAGLE.loaded_by(head) == engines
    said = {engine.name: engine.command("user/base", "out/eagle3", 3) for engine in EAGLE.engines_for(head)}
    assert '"model": "out/eagle3", "num_speculative_tokens": 3' in said["vLLM"] and "TGI" in said
    assert ("--speculative-num-draft-tokens 4" in said["SGLang"]) is ("SGLang" in engines)
    assert bool(said["llama.cpp"]) is ("llama.cpp" in engines) and not said["TGI"]


@pytest.mark.parametrize("layers", [[], [0, 1, 2], [3, 2, 1], [2, 2, 3], [2, 3, 6]])
def test_layers_that_engines_would_join_otherwise_are_refused(tmp_path: Path, layers: list[int]) -> None:
    with pytest.raises(UserError, match=r"engines join them in ascending order, of 1 to 5 \(head.layers=null\)"):
        EAGLE.export(eagle(deep_base(), layers=layers), tmp_path)


OUTER, INNER = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({**OUTER, "eagle_config": {}}, [1, 2, 4]),
        ({LAYER_IDS: None, "eagle_config": INNER}, [2, 3, 5]),
        ({LAYER_IDS: None, "eagle_config": None}, None),
        ({**OUTER, "eagle_config": INNER, "layers": [2, 3, 4]}, [2, 3, 4]),
    ],
)
def test_layer_ids_are_read_by_their_place(tmp_path: Path, config: dict[str, Any], layers: list[int] | None) -> None:
    """At the top level as they are, in eagle_config one more: the usual triple less one is another triple there."""
    EAGLE.export(eagle(deep_base(), layers=[2, 3, 5]), tmp_path)
    rewrite(tmp_path, **config)
    found = EAGLE.load(tmp_path, deep_base())
    assert list(found.spec.layers) == (layers or [2, 3, 3])


def test_layer_ids_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    EAGLE.export(eagle(deep_base(), layers=[2, 3, 5]), tmp_path)
    rewrite(tmp_path, **OUTER, eagle_config=INNER)
    with pytest.raises(
        UserError, match=r"the layers \[1, 2, 4\], and \[1, 2, 4\] in eagle_config, which is \[2, 3, 5\]"
    ):
        EAGLE.load(tmp_path, deep_base())
    rewrite(tmp_path, eagle_aux_hidden_state_layer_ids="2", eagle_config={})
    with pytest.raises(UserError, match="has eagle_aux_hidden_state_layer_ids '2', expected a list of whole numbers"):
        EAGLE.load(tmp_path, deep_base())


def rewrite(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> None:
    """Other tensors, and other keys (None: without it) of the config."""
    content = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    if tensors is not None:
        save_file(tensors, next(folder.glob("*.safetensors")))


def test_eagle3_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Prefixes, layers.0, an embedding of the target, no t2d, no keys of ours, SGLang's layer ids."""
    base = tiny_base()
    head = eagle(base, torch.arange(0, 300, 4))
    EAGLE.export(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["t2d"]
    theirs = {
        name if name in ("lm_head.weight", "d2t") else "model." + name.replace("midlayer.", "layers.0."): value
        for name, value in tensors.items()
    }
    theirs["model.embed_tokens.weight"] = base.embedding.detach().clone()
    theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    gone = dict.fromkeys(("num_tokens", "ttt_steps", "target_hidden_size", "norm_output", "head_dim"))
    ids = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.spec.layers]}
    gone["eagle_aux_hidden_state_layer_ids"] = None
    rewrite(tmp_path, theirs, architectures=["Eagle3LlamaForCausalLM"], eagle_config=ids, **gone)
    again = EAGLE.load(tmp_path, base)
    assert again.depth == 7 and torch.equal(logits_of(base, again), logits_of(base, head))
    theirs["model.embed_tokens.weight"] += 1
    rewrite(tmp_path, theirs)
    with pytest.raises(UserError, match="has an embedding that is not random-llama's"):
        EAGLE.load(tmp_path, base)


REFUSED = {
    "eagle3": [
        ({"fc_norm": True}, r"missing \[fc_norm.0.weight"),
        ({"attention_bias": True}, "has a layer with attention_bias True"),
        ({"draft_vocab_size": 60}, "says draft_vocab_size 60, but lm_head.weight has 50 rows"),
        ({"intermediate_size": 65}, "says intermediate_size 65, but midlayer.mlp.gate_proj.weight has 64 rows"),
        ({"target_hidden_size": 64}, "made for a base with hidden_size 64"),
        ({"vocab_size": 301}, "made for a base with vocab_size 301"),
        ({"layers": [0, 1, 2]}, r"fc.weight is \(32, 64\), not \(32, 96\)"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has a layer with rope_scaling"),
    ],
    "hydra": [
        ({"hydra_head_arch": "eagle-attn"}, "has hydra_head_arch 'eagle-attn'"),
        ({"grounded_heads": False}, "and grounded_heads False"),
        ({"hydra_num_heads": 4}, "missing .hydra_lm_head.3.1.bias"),
    ],
    "kangaroo": [
        ({"exit_layer": 3}, "must be below the base's 3 layers"),
        ({"rope_theta": 5e5}, "has a layer with rope_theta 500000.0, random-llama one with 10000.0"),
    ],
    "mlp_speculator": [
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "only MLPSpeculatorPreTrainedModel is read"),
        ({"n_predict": 4}, "missing .speculator.emb.3"),
        ({"n_predict": "3"}, "has '3' as n_predict, expected a positive whole number"),
        ({"inner_dim": 64}, "inner_dim 64, but speculator.proj.0.weight has 32 rows"),
        ({"emb_dim": 64}, "made for a base with hidden_size 64, but random-llama has 32"),
    ],
}


@pytest.mark.parametrize(("name", "config", "says"), [(name, *case) for name in REFUSED for case in REFUSED[name]])
def test_a_config_that_would_draft_wrongly_is_refused(
    tiny_base: TinyBase, tmp_path: Path, name: str, config: dict[str, Any], says: str
) -> None:
    base, form = tiny_base(), FORMATS[name]
    heads = {"eagle3": eagle(base, torch.arange(50)), "hydra": hydra(base, prefix_layer=True)}
    heads |= {"kangaroo": kangaroo(base), "mlp_speculator": mlp(base)}
    form.export(heads[name], tmp_path)
    with pytest.raises(UserError, match=says):
        form.attach(form.read(tmp_path, config), base)


def test_what_llamacpp_would_ignore_or_die_of_is_refused(tmp_path: Path) -> None:
    for settings, says in (
        ({**THREE, "norm_output": True}, r"the state before the norm on, without a word \(head.norm_output=false"),
        ({"layers": [2, 3]}, r"reads 2 layers, and llama.cpp reads exactly 3 \(head.layers=null"),
    ):
        with pytest.raises(UserError, match=says):
            GGUF.export(eagle(deep_base(), **settings), tmp_path)
    with pytest.raises(UserError, match="graph of gemma does not keep what goes into a layer, and aborts"):
        GGUF.export(eagle(deep_base("gemma"), **THREE), tmp_path)
    with pytest.raises(UserError, match="has no head.gguf"):
        GGUF.load(tmp_path, deep_base())
    (tmp_path / "head.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(UserError, match="is no GGUF file that can be read"):
        GGUF.load(tmp_path, deep_base())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gguf_head_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    head = eagle(deep_base(), D2T, **THREE, norm_before_fc=True)
    GGUF.export(head, tmp_path, dtype)
    again = GGUF.load(tmp_path, deep_base())
    assert torch.equal(again.fc.weight, head.fc.weight.to(dtype).float()) and torch.equal(again.d2t, head.d2t)
    assert torch.equal(again.norm.weight, head.norm.weight), "llama.cpp wants norms in float32"


def test_a_base_as_gguf_is_the_base(tmp_path: Path) -> None:
    """Names, rotated pairs and the tokenizer; a tokenizer or a type that is not known is refused by name."""
    with pytest.raises(UserError, match="how the tokenizer splits words is not known to be one of llama.cpp's ways"):
        write_base(deep_base(), tmp_path / "base.gguf", "f32", "tiny")
    tokenizer = tiny_tokenizer()
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    parts = [pre_tokenizers.Digits(individual_digits=True), words]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    base = BaseModel.wrap(deep_base().stock(), tokenizer)
    with pytest.raises(UserError, match="base_gguf must be one of f32, .*got 'q4_k'; llama.cpp's llama-quantize"):
        write_base(base, tmp_path / "base.gguf", "q4_k", "tiny")
    weights = base.stock().state_dict()
    for kind in ("f32", "q8_0"):
        write_base(base, tmp_path / "base.gguf", kind, "tiny")
        keys, tensors = read_gguf(tmp_path / "base.gguf")
        query = weights["model.layers.4.self_attn.q_proj.weight"]
        order = [head * 8 + half * 4 + i for head in range(4) for i in range(4) for half in (0, 1)]
        limit = 0.0 if kind == "f32" else float(query.abs().max()) / 100
        assert torch.allclose(tensors["blk.4.attn_q.weight"], query[order], atol=limit, rtol=0)
        embedding = weights["model.embed_tokens.weight"]
        assert torch.allclose(tensors["token_embd.weight"], embedding, atol=limit * 2, rtol=0)
        assert torch.equal(tensors["output_norm.weight"], weights["model.norm.weight"])
    assert keys["general.architecture"] == "llama" and keys["llama.block_count"] == 6
    assert keys["tokenizer.ggml.pre"] == "smollm" and len(keys["tokenizer.ggml.tokens"]) == 300
    assert keys["tokenizer.ggml.tokens"][257] == "<|im_start|>" and keys["tokenizer.ggml.token_type"][257] == 3
    assert keys["tokenizer.ggml.eos_token_id"] == base.tokenizer.eos_token_id


def test_llama3s_rotary_scaling_is_a_tensor() -> None:
    """The frequencies that transformers scales, against those that llama.cpp divides by the factors."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = rope_factors({"rope_scaling": scaling, "rope_theta": 5e5, "head_dim": 128})
    plain = 5e5 ** (-torch.arange(0, 128, 2) / 128)
    assert torch.allclose(plain / factors, scaled, rtol=1e-4)
    assert float(factors.max()) == 8 and float(factors.min()) == 1
    with pytest.raises(UserError, match="scaling of type yarn is not written as GGUF"):
        rope_factors({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e4, "head_dim": 8})


@pytest.mark.parametrize("tied", [True, False])
def test_tgi_loads_tied_mlp_speculators(tiny_base: TinyBase, tied: bool) -> None:
    head = mlp(tiny_base(), tie_weights=tied)
    assert MLP.loaded_by(head) == (["TGI"] if tied else [])
    tgi = next(engine.support for engine in MLP.engines_for(head) if engine.name == "TGI")
    assert tgi.startswith("the tied variant" if tied else "fails with untied weights")


def test_hydra_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Whatever their prefix layer is called, and with the embedding that nothing reads."""
    base = tiny_base()
    head = hydra(base, prefix_layer=True)
    HYDRA.export(head, tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    theirs = {name.replace("prefix_embeding_layer.", "prefix.model."): t for name, t in tensors.items()}
    theirs |= {"prefix.model.embed_tokens.weight": torch.ones(3), "prefix.model.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tmp_path, theirs)
    assert torch.equal(logits_of(base, HYDRA.load(tmp_path, base)), logits_of(base, head))


@pytest.mark.parametrize("prefix_layer", [False, True])
def test_hydra_modules_are_counted_with_dropouts_or_without(
    tiny_base: TinyBase, tmp_path: Path, prefix_layer: bool
) -> None:
    """Older code has no dropout modules, newer code may have them in all heads; some files have no biases."""
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
    with pytest.raises(UserError, match=r"reads embeddings of unit length, .*\(head.unit_embeddings=false\)"):
        HYDRA.export(hydra(base, unit_embeddings=True), tmp_path)
    scaled = hydra(base)
    scaled.target_lm_head = type(scaled.target_lm_head)(weight=scaled.target_lm_head.weight, scale=0.5)
    with pytest.raises(UserError, match="scales or caps its logits"):
        HYDRA.export(scaled, tmp_path)
    HYDRA.export(hydra(base, prefix_layer=True), tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    tensors["prefix_embeding_layer.layers.0.self_attn.k_proj.weight"] = torch.ones(32, 32)
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=r"k_proj.weight is \(32, 32\), not \(16, 32\)\]; name the base"):
        HYDRA.load(tmp_path, base)


def test_a_published_kangaroo_does_not_say_where_to_exit(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    KANGAROO.export(kangaroo(base), tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tmp_path, weights, **dict.fromkeys(("exit_layer", "num_tokens", "threshold")))
    with pytest.raises(UserError, match="has None as exit_layer"):
        KANGAROO.load(tmp_path, base)
    head = KANGAROO.attach(KANGAROO.read(tmp_path, {"exit_layer": 1, "rms_norm_eps": 9.9999999e-07}), base)
    assert head.config == KangarooConfig(exit_layer=1)


def test_more_heads_that_a_format_cannot_hold(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    for form, config in (
        (KANGAROO, KangarooConfig(exit_layer=1, draft_vocab_size=50)),
        (HYDRA, HydraConfig(draft_vocab_size=50)),
        (MLP, MLPSpeculatorConfig(draft_vocab_size=50)),
    ):
        head = config.build(base, torch.arange(50))
        says = f"{form.name} cannot hold this head: it drafts over 50 of 300 ids, .*\\(head.draft_vocab_size=null\\)"
        with pytest.raises(UserError, match=says):
            form.export(head, tmp_path)
    with pytest.raises(UserError, match="medusa holds a MedusaHead; an MLPSpeculatorHead is exported to=mlp_spec"):
        FORMATS["medusa"].export(head, tmp_path)


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
