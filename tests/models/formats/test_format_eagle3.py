"""EAGLE-3's published layouts (its authors', speculators, llama.cpp's GGUF) against plain loaders; bases as GGUF."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import all_formats
from drafthead.models.formats.eagle3 import LAYER_IDS
from drafthead.models.formats.format import Format
from drafthead.models.formats.gguf.gguf_files import read_gguf, write_base
from plain_heads import (
    LLAMACPP_NAMES,
    PlainLayer,
    check_round_trip,
    deep_base,
    eagle,
    eagle_chain,
    logits_of,
    over_all_ids,
    read_llamacpp,
    rewrite,
    states,
    unknown_tokenizer,
)
from support import TinyBase, cases, refuses

EAGLE, SPECULATORS, GGUF = all_formats()["eagle3"], all_formats()["speculators"], all_formats()["gguf"]
D2T = torch.arange(1, 300, 3)
THREE = {"layers": [2, 3, 5]}
NAMES = LLAMACPP_NAMES | {"attn_norm_2": "hidden_norm", "enc.output_norm": "input_norm"}


@torch.inference_mode()
def eagle_engine(folder: Path, base: BaseModel) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False and config["eagle_config"]["use_aux_hidden_state"] is True
    layer = PlainLayer(load_file(folder / "model.safetensors"), config, config["rope_theta"])
    outer, inner = config[LAYER_IDS], config["eagle_config"][LAYER_IDS]
    assert inner == [i - 1 for i in outer] and config["num_aux_hidden_states"] == len(outer)  # SGLang adds one
    assert config["norm_before_fc"] == config["eagle_config"]["norm_before_fc"]
    targets = torch.arange(config["draft_vocab_size"]) + layer.get("d2t")
    assert torch.equal(layer.get("t2d").nonzero()[:, 0], targets)
    return over_all_ids(eagle_chain(layer, base, [states(base)[i][0] for i in outer], config), base, targets)


@torch.inference_mode()
def speculators_engine(folder: Path, base: BaseModel) -> Tensor:
    """Read the layer's keys and those that vLLM copies from the top level, then load as to=eagle3."""
    config = json.loads((folder / "config.json").read_text())
    methods = config["speculators_config"]
    assert "model_type" not in config  # vLLM asks transformers for a model of that name
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
def llamacpp_engine(folder: Path, base: BaseModel) -> Tensor:
    """``head.gguf`` as llama.cpp's eagle3 graph reads it: pairs are rotated, d2t holds int64 target ids."""
    keys, config, tensors = read_llamacpp(folder, NAMES)
    assert keys["general.architecture"] == "eagle3" and keys["tokenizer.ggml.model"] == "no_vocab"
    assert len(keys["eagle3.target_layers"]) == 3 and keys["eagle3.block_count"] == 1
    targets = tensors.pop("d2t")
    assert targets.dtype == torch.int64
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    layer = PlainLayer(tensors, config, keys["eagle3.rope.freq_base"], pairs=True)
    settings = {key: keys[f"eagle3.{key}"] for key in ("norm_before_fc", "norm_before_residual")}
    taps = [states(base)[i][0] for i in keys["eagle3.target_layers"]]
    logits = eagle_chain(layer, base, taps, settings | {"norm_output": False, "fc_norm": False})
    return over_all_ids(logits, base, targets)


ENGINES = {"eagle3": eagle_engine, "speculators": speculators_engine, "gguf": llamacpp_engine}


@pytest.mark.parametrize("d2t", [D2T, None], ids=["reduced", "whole"])
@cases(
    "form, settings",
    (EAGLE, {}),
    (EAGLE, {"norm_before_fc": True}),
    (EAGLE, {"norm_output": True}),
    (EAGLE, {"own_lm_head": False}),
    (EAGLE, {"fc_norm": True, "norm_output": True}),
    (EAGLE, {"norm_before_residual": True}),
    (EAGLE, {"rope_theta": 500.0}),
    (SPECULATORS, {}),
    (SPECULATORS, {"norm_before_fc": True}),
    (SPECULATORS, {"norm_output": True, "fc_norm": True}),
    (GGUF, {}),
    (GGUF, {"norm_before_fc": True}),
    (GGUF, {"own_lm_head": False}),
    (GGUF, {"rope_theta": 500.0}),
    (GGUF, {"norm_before_residual": True}),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_engine_and_round_trip(tmp_path: Path, form: Format, settings: dict[str, Any], d2t: Tensor | None) -> None:
    layers = {} if form is EAGLE else THREE
    check_round_trip(form, ENGINES[form.name], eagle(deep_base(), d2t, **layers, **settings), tmp_path)


@cases(
    "settings, engines",
    ({}, ["vLLM", "SGLang", "llama.cpp"]),
    ({"norm_before_fc": True}, ["vLLM", "llama.cpp"]),
    ({"norm_output": True}, ["vLLM", "SGLang"]),
    ({"layers": [2, 3]}, ["vLLM", "SGLang"]),
    ({"window": 64}, ["vLLM"]),
)
def test_no_engine_is_promised_that_ignores_a_setting(settings: dict[str, Any], engines: list[str]) -> None:
    head = eagle(deep_base(), **{"layers": [2, 3, 5], **settings})
    assert [engine.name for engine in EAGLE.engines_for(head) if engine.current] == engines
    said = {engine.name: engine.command("user/base", "out/eagle3", 3, "float32") for engine in EAGLE.engines_for(head)}
    assert '"model": "out/eagle3", "num_speculative_tokens": 3' in said["vLLM"] and "TGI" in said
    assert all("--dtype float32 " in said[name] for name in {"vLLM", "SGLang"} & {*engines}), "served as measured"
    folder = 'a b\'s "é"'
    quoted = shlex.split(EAGLE.engines_for(head)[0].command("a b", folder, 3, "float32"))
    assert quoted[2] == "a b" and json.loads(quoted[-1])["model"] == folder
    assert ("--speculative-num-draft-tokens 4" in said["SGLang"]) is ("SGLang" in engines)
    assert bool(said["llama.cpp"]) is ("llama.cpp" in engines) and not said["TGI"]


@pytest.mark.parametrize("layers", [[3, 2, 1], [2, 3, 6], None])
def test_layers_that_engines_cannot_join_are_refused(tmp_path: Path, layers: list[int] | None) -> None:
    """The published default repeats a layer on a base of six, so the advice names layers that pass."""
    refuses(r"head.layers=\[1,3,5\]", EAGLE.export, eagle(deep_base(), layers=layers), tmp_path)
    EAGLE.export(eagle(deep_base(), layers=[1, 3, 5]), tmp_path)


def test_sglang_is_named_for_no_head_that_reads_the_embedding() -> None:
    support = {engine.name: engine.current for engine in EAGLE.engines_for(eagle(deep_base(), layers=[0, 2, 3]))}
    assert support["vLLM"] and support["llama.cpp"] and not support["SGLang"]


def test_the_default_layers_are_advised_where_engines_can_join_them() -> None:
    deep = BaseModel.load(replace(deep_base().config, shape={**deep_base().config.shape, "num_hidden_layers": 8}))
    reasons = dict(EAGLE.unsupported(eagle(deep, layers=[3, 2, 1])))
    assert list(reasons.values()) == ["head.layers=null"] and not list(EAGLE.unsupported(eagle(deep, layers=None)))


OUTER = INNER = {LAYER_IDS: [1, 2, 4]}


@cases(
    "config, layers",
    ({**OUTER, "eagle_config": {}}, [1, 2, 4]),
    ({LAYER_IDS: None, "eagle_config": INNER}, [2, 3, 5]),
    ({LAYER_IDS: None, "eagle_config": None}, None),
    ({**OUTER, "eagle_config": INNER, "layers": [2, 3, 4]}, [2, 3, 4]),
)
def test_layer_ids_follow_their_config_key(tmp_path: Path, config: dict[str, Any], layers: list[int] | None) -> None:
    """Ids at the top level count from 1, those in eagle_config from 0."""
    EAGLE.export(eagle(deep_base(), layers=[2, 3, 5]), tmp_path)
    rewrite(tmp_path, **config)
    head = EAGLE.load(tmp_path, deep_base())
    assert list(head.spec.layers) == (layers or [2, 3, 3])


def test_layer_ids_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    EAGLE.export(eagle(deep_base(), layers=[2, 3, 5]), tmp_path)
    rewrite(tmp_path, **OUTER, eagle_config=INNER)
    refuses(r"layers \[1, 2, 4\].*layers \[2, 3, 5\]", EAGLE.load, tmp_path, deep_base())
    rewrite(tmp_path, eagle_aux_hidden_state_layer_ids="2", eagle_config={})
    refuses(f"{LAYER_IDS} '2'", EAGLE.load, tmp_path, deep_base())


def test_eagle3_files_of_others(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Import prefixes, layers.0, the target's embedding, no t2d, none of our keys, SGLang's layer ids."""
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
    ids = {LAYER_IDS: [layer - 1 for layer in head.spec.layers]}
    gone[LAYER_IDS] = None
    rewrite(tmp_path, theirs, architectures=["Eagle3LlamaForCausalLM"], eagle_config=ids, **gone)
    again = EAGLE.load(tmp_path, base)
    assert again.depth == 7 and torch.equal(logits_of(base, again), logits_of(base, head))
    theirs["model.embed_tokens.weight"] += 1
    rewrite(tmp_path, theirs)
    refuses("embed_tokens.weight that is not random-llama's", EAGLE.load, tmp_path, base)


@cases(
    "damage, said",
    (lambda weight: weight.fill_(torch.nan), "has numbers in fc.weight that are not finite"),
    (lambda weight: weight.to(torch.int8), "fc.weight as int8"),
)
def test_damaged_weights_are_refused(tmp_path: Path, damage: Callable[[Tensor], Tensor], said: str) -> None:
    EAGLE.export(eagle(deep_base(), None), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o444 == 0o444  # a server may be another user
    save_file({**weights, "fc.weight": damage(weights["fc.weight"].clone())}, tmp_path / "model.safetensors")
    refuses(said, EAGLE.read, tmp_path, {})


def test_what_a_file_leaves_open_or_says_twice(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    EAGLE.export(eagle(base, torch.arange(50)), tmp_path)
    assert not EAGLE.read(tmp_path).notes
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors, eagle_config=None, **{LAYER_IDS: None})
    assert ["config.layers" in note for note in EAGLE.read(tmp_path).notes] == [True]
    del tensors["t2d"]
    tensors["d2t"][7] -= 1
    rewrite(tmp_path, tensors, layers=[1, 2])
    refuses(f"{tmp_path}: the draft vocabulary .* 1 of 50", EAGLE.load, tmp_path, base)


def test_what_llamacpp_refuses_and_its_command(tmp_path: Path) -> None:
    refuses("head.norm_output=false", GGUF.export, eagle(deep_base(), **THREE, norm_output=True), tmp_path)
    refuses(r"exactly 3 \(head.layers=null", GGUF.export, eagle(deep_base(), layers=[2, 3]), tmp_path)
    refuses("graph of gemma .*aborts", GGUF.export, eagle(deep_base("gemma"), **THREE), tmp_path)
    refuses("has no head.gguf", GGUF.load, tmp_path, deep_base())
    (tmp_path / "head.gguf").write_bytes(b"GGUF no more")
    refuses("head.gguf cannot be read", GGUF.load, tmp_path, deep_base())
    llamacpp = next(engine for engine in GGUF.engines if engine.current)
    assert " -m out/base.gguf -md out/head.gguf " in llamacpp.command("user/base", "out", 3, "q8_0", "out/base.gguf")
    line = llamacpp.command("user/base", "out", 3, "float32")
    assert " -m BASE.gguf -md out/head.gguf " in line and " -ctk f32 -ctv f32 " in line


@pytest.mark.parametrize("key", ["attention.sliding_window", "attention.other"])
def test_keys_of_a_gguf_file_that_change_the_drafts(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = type(GGUF).keys
    monkeypatch.setattr(type(GGUF), "keys", lambda self, config: written(self, config) | {key: 4})
    GGUF.export(eagle(deep_base(), **THREE), tmp_path)
    if key == "attention.other":
        assert "unknown keys, which are ignored: eagle3.attention.other" in GGUF.read(tmp_path).notes[0]
        return
    refuses("has sliding_window 4", GGUF.read, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gguf_head_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    head = eagle(deep_base(), D2T, **THREE, norm_before_fc=True)
    GGUF.export(head, tmp_path, dtype)
    again = GGUF.load(tmp_path, deep_base())
    assert torch.equal(again.fc.weight, head.fc.weight.to(dtype).float()) and torch.equal(again.d2t, head.d2t)
    assert torch.equal(again.norm.weight, head.norm.weight), "llama.cpp wants norms in float32"


def test_a_base_as_gguf_is_the_base(tmp_path: Path) -> None:
    base = deep_base()
    with pytest.raises(UserError, match="the tokenizer splits words"):
        write_base(BaseModel.wrap(base.stock(), unknown_tokenizer()), tmp_path / "base.gguf", "f32")
    with pytest.raises(UserError, match="base_gguf must be one of f32, .*got 'q4_k'; llama.cpp's llama-quantize"):
        write_base(base, tmp_path / "base.gguf", "q4_k")
    weights = base.stock().state_dict()
    for kind in ("f32", "q8_0"):
        write_base(base, tmp_path / "base.gguf", kind)
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
