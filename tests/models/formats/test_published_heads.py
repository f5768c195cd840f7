"""Heads as other projects publish them: their config keys and tensor names at a tiny size, imported and drafted with.

The configs were read in the repositories that docs/reference/published_heads.md names; only numbers are smaller.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import all_formats, recognise
from drafthead.models.formats.gguf.gguf_files import read_gguf
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from plain_heads import deep_base, eagle, hydra, kangaroo, logits_of, mlp
from support import TINY, call, cases, random_base, randomised, refuses

D2T = torch.arange(1, 300, 3)
SIZES = {key: value for key, value in TINY.items() if key not in ("model_type", "num_hidden_layers")}
SIZES |= {"draft_vocab_size": 100, "emb_dim": 32, "num_target_layers": 6, "max_position_embeddings": 512}
LLAMA = """{"architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 128000, "eos_token_id": 128001,
"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
"max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
"num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": false,
"torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": true, "vocab_size": 128256,
"draft_vocab_size": 32000}"""
QWEN = """{"attention_bias": false, "attention_dropout": 0.0, "block_size": 16, "dtype": "bfloat16",
"eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
"intermediate_size": 12288, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 40960,
"max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 2,
"num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": null,
"rope_theta": 10000, "sliding_window": null, "tie_word_embeddings": false, "use_cache": true,
"use_sliding_window": false, "vocab_size": 151936}"""
MODELOPT = {
    "eagle_aux_hidden_state_layer_ids": [],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


def speculators(**layer: Any) -> dict[str, Any]:
    """Return a config as in speculators#1065, with other values of ``layer``."""
    shape = json.loads(LLAMA) | {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "mlp_bias": False}
    for key in ("architectures", "draft_vocab_size", "tie_word_embeddings", "torch_dtype", "transformers_version"):
        del shape[key]
    shape |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "pretraining_tp": 1}
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["Qwen3MoeForCausalLM"], "name_or_path": "/model/from_s3"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.8.0.dev0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": small(shape) | layer,
        "transformers_version": "5.5.3",
    }


def small(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: SIZES.get(key, value) for key, value in config.items()} | changes


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / name)
    return folder


def imported(folder: Path, base: BaseModel, **config: Any) -> tuple[DraftHead, str]:
    content = json.loads((folder / "config.json").read_text()) | config
    form = recognise(content, str(folder))
    checkpoint = form.read(folder, config)
    return form.attach(checkpoint, base), "; ".join(checkpoint.notes)


def weights(head: DraftHead, format_name: str, folder: Path) -> dict[str, Tensor]:
    all_formats()[format_name].export(head, folder)
    return load_file(next(folder.glob("*.safetensors")))


def eagle_weights(head: DraftHead, folder: Path, layer: str = "midlayer.", *without: str) -> dict[str, Tensor]:
    tensors = weights(head, "eagle3", folder)
    return {name.replace("midlayer.", layer): tensor for name, tensor in tensors.items() if name not in without}


def test_speculators(tmp_path: Path) -> None:
    """The size of the target is null, the layer is called layers.0, and the file has the base's embedding."""
    base = deep_base()
    norms = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
    head = eagle(base, D2T, layers=[2, 3, 5], **norms)
    tensors = eagle_weights(head, tmp_path / "ours", "layers.0.")
    folder = write(tmp_path / "s", small(speculators()), {**tensors, "embed_tokens.weight": base.embedding})
    again, notes = imported(folder, base)
    assert not notes and torch.equal(logits_of(base, again), logits_of(base, head))


@pytest.mark.parametrize("name", ["speculators", "eagle3"])
def test_the_window_that_speculators_gives_every_layer(tmp_path: Path, name: str) -> None:
    """Its training script's default is 2,048 tokens for all layers. An import computes the window, an export writes
    it."""
    base = deep_base()
    norms = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
    head = eagle(base, D2T, layers=[2, 3, 5], window=5, **norms)
    window = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    if name == "speculators":
        folder = write(tmp_path / "s", small(speculators(**window)), eagle_weights(head, tmp_path / "ours"))
    else:
        all_formats()[name].export(head, folder := tmp_path / "s")
        assert window.items() <= json.loads((folder / "config.json").read_text()).items()
    again, notes = imported(folder, base)
    assert not notes and again.config.window == 5 and torch.equal(logits_of(base, again), logits_of(base, head))
    assert not torch.equal(logits_of(base, head), logits_of(base, eagle(base, D2T, layers=[2, 3, 5], **norms)))
    refuses("sliding window.*head.window=null", all_formats()["gguf"].export, head, tmp_path / "gguf")


def test_speculators_with_qwen3_layers(tmp_path: Path) -> None:
    base = deep_base()
    head = eagle(base, D2T, layers=[2, 3, 5], norm_before_residual=True, qk_norm=True)
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in head.state_dict().items()}
    config = small(speculators(model_type="qwen3"), norm_before_fc=False, norm_output=False)
    tensors["d2t"] = D2T - torch.arange(100)
    again, _ = imported(write(tmp_path / "q", config, tensors), base)
    assert torch.equal(logits_of(base, again), logits_of(base, head))


@cases(
    "layer, says",
    ({"layer_types": ["sliding_attention"], "sliding_window": 3}, "head.window must be above .* got 3"),
    ({"layer_types": ["sliding_attention"]}, "layers with a window, but sliding_window None"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}, "has 2 layer_types, but 1 layers"),
    ({"layer_types": ["linear_attention"]}, "has layer_types 'linear_attention'"),
    ({"sliding_window": 4}, r"has sliding_window 4, .* set config.layer_types=\[sliding_attention\]"),
    ({"rope_theta": 5e5}, "rope_theta 500000.0 at the top level and 10000.0 in rope_parameters"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_scaling .*each type of layer"),
    ({"vocab_size": 301}, "made for a base with vocab_size 301"),
    ({"quantization_config": {"quant_method": "fp8"}}, "has quantization_config"),
)
def test_keys_that_change_the_drafts_are_refused_by_name(tmp_path: Path, layer: dict[str, Any], says: str) -> None:
    base = deep_base()
    head = eagle(base, D2T, layers=[2, 3, 5], norm_before_fc=True, norm_before_residual=True, norm_output=True)
    folder = write(tmp_path / "s", small(speculators(**layer)), eagle_weights(head, tmp_path / "ours"))
    refuses(says, imported, folder, base)


@cases(
    "config, notes",
    ({}, ["names no layers", "names no number of drafts"]),  # llama3-8B-eagle3.json
    ({"target_model_type": "gemma3_text", "sliding_window": 512, "use_sliding_window": False}, ["names no layers"]),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, "head_dim": 8}, ["no number of drafts"]),
    ({"eagle_config": MODELOPT, "head_dim": 8, "mlp_bias": False}, ["names no layers"]),  # vllm#50170
    ({"decoder_sparse_step": 1, "another": 2}, ["unknown keys, which are ignored: another, decoder_sparse_step"]),
)
def test_eagle3_of_specforge_and_modelopt(tmp_path: Path, config: dict[str, Any], notes: list[str]) -> None:
    """SpecForge's configs/*.json and ModelOpt's template. Without layers, 2, L // 2 and L - 3 are assumed."""
    base = deep_base()
    head = eagle(base, D2T, layers=[2, 3, 3])
    all_formats()["eagle3"].export(eagle(base, D2T, layers=[2, 3, 5]), tmp_path)
    tensors = {**head.state_dict(), "d2t": D2T - torch.arange(100)}
    again, said = imported(write(tmp_path / "x", small(json.loads(LLAMA), **config), tensors), base)
    assert torch.equal(logits_of(base, again), logits_of(base, head))
    assert all(note in said for note in notes)
    assert ("no layers" in said) is not (
        config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", []) != []
    )


def test_eagle3_of_its_authors(tmp_path: Path) -> None:
    """The config has the base's architecture and no theta: the layer rotates with 10,000, its base with 500,000."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    base = random_base(TINY | {"num_hidden_layers": 6, "rope_parameters": rope})
    head = eagle(base, D2T, layers=[2, 3, 3], rope_theta=10000.0)
    marks = torch.zeros(300, dtype=torch.bool).index_fill(0, D2T, True)
    tensors = {**head.state_dict(), "d2t": D2T - torch.arange(100), "t2d": marks}
    folder = write(tmp_path / "e", small(json.loads(LLAMA), architectures=["LlamaForCausalLM"]), tensors)
    again, notes = imported(folder, base)
    assert "names no layers" in notes and torch.equal(logits_of(base, again), logits_of(base, head))
    assert not torch.equal(logits_of(base, head), logits_of(base, eagle(base, D2T, layers=[2, 3, 3])))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(r"pytorch_model.bin: pickles", imported, folder, base)


@cases(
    "config, says",
    ({}, "no rope_theta, so 10000 is assumed without scaling; the base's rope_theta is 500000"),
    ({"rope_theta": 20000.0}, "its layer rotates by rope_theta 20000 without scaling; the base's rope_theta is 500000"),
    ({"rope_theta": 500000.0}, None),
)
def test_an_import_says_that_a_layer_rotates_unlike_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], says: str | None
) -> None:
    shape = TINY | {"num_hidden_layers": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    head = eagle(random_base(shape), D2T, layers=[2, 3, 3])
    tensors = {**head.state_dict(), "d2t": D2T - torch.arange(100)}
    folder = write(tmp_path / "e", small(json.loads(LLAMA), **config), tensors)
    base = ["base.random=true", f"base.shape={json.dumps(shape)}", "base.tokenizer=builtin:tiny"]
    call("import", f"from={folder}", *base, f"out={tmp_path / 'head'}")
    said = capsys.readouterr()
    assert ("rope_theta" in said.out + said.err) is (says is not None) and (says or "") in said.out + said.err


def block(base: BaseModel, **settings: Any) -> DraftHead:
    shape = {"layers": [2, 3, 5], "mask_token": 9, "copy_layers": False, "intermediate_size": 64, "num_layers": 2}
    return randomised(DSparkConfig(num_draft_tokens=3, **shape, **settings).build(base).eval())


SWA: dict[str, Any] = {"use_swa": True, "swa_window_size": 5}  # XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}  # gemma-4-31B's


@cases(
    "inner, outer, settings",
    ({}, {}, {}),
    (SWA, {}, {"window": 5}),
    ({}, MIXED, {"window": 5, "full_layers": [1], "causal": "sliding"}),
    ({"causal": False}, MIXED, {"window": 5, "full_layers": [1]}),
    ({"projector_type": "domino"}, {}, None),
)
def test_dflash_of_z_lab(
    tmp_path: Path, inner: dict[str, Any], outer: dict[str, Any], settings: dict[str, Any] | None
) -> None:
    base = deep_base()
    head = block(base, markov_rank=0, confidence=False, anchor_predicts=False, **(settings or {}))
    ids = {"mask_token_id": 9, "target_layer_ids": [1, 2, 4]}
    names = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    config = small(json.loads(QWEN), **names, dflash_config={**ids, **inner}, block_size=4, **outer)
    folder = write(tmp_path / "z", config, weights(head, "dflash", tmp_path / "ours"))
    if settings is None:
        refuses("has projector_type ", imported, folder, base)
        return
    again, notes = imported(folder, base)
    assert not notes and torch.equal(logits_of(base, again), logits_of(base, head))


@cases(
    "edit, says",
    ({}, ""),
    ({"markov_head_type": "rnn"}, "has markov_head_type 'rnn'"),
    ({"num_target_layers": 36}, "made for a base of 36 layers"),
    ({"dflash_config": {"target_layer_ids": [1, 2, 3]}}, r"target_layer_ids \[1, 2, 4\] at the top level and"),
    ({"dflash_config": {"causal": True}, "is_causal": False}, "says is_causal False, causal True"),
)
def test_dspark_of_deepspec(tmp_path: Path, edit: dict[str, Any], says: str) -> None:
    base = deep_base()
    head = block(base, markov_rank=8, confidence=True, tied_markov=False)
    keys = {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 9, "target_layer_ids": [1, 2, 4], "block_size": 3}
    keys |= {"num_anchors": 512, "enable_confidence_head": True, "confidence_head_with_markov": True}
    keys |= {"markov_rank": 8, "markov_head_type": "vanilla", "num_target_layers": 6, **edit}
    copies = {"embed_tokens.weight": base.embedding, "lm_head.weight": base.lm_head.weight}
    tensors = {**weights(head, "dspark", tmp_path / "ours"), **copies}
    folder = write(tmp_path / "d", {**small(json.loads(QWEN)), **keys}, tensors)
    if says:
        refuses(says, imported, folder, base)
        return
    again, notes = imported(folder, base)
    assert not notes and torch.equal(logits_of(base, again), logits_of(base, head))


HYDRA = {"base_model_name_or_path": "lmsys/vicuna-13b-v1.3", "grounded_heads": True, "hidden_state_offset": 0}
HYDRA |= {"hydra_head_arch": "prefix-mlp", "hydra_num_heads": 3, "hydra_num_layers": 4}
IBM = {"architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": 4096, "inner_dim": 24, "n_candidates": 5}
IBM |= {"model_type": "mlp_speculator", "n_predict": 4, "top_k_tokens_per_head": [4, 3, 2, 2], "torch_dtype": "float16"}
IBM |= {"vocab_size": 128256}
VICUNA = {**json.loads(LLAMA), "architectures": ["LlamaForCausalLM"]}
del VICUNA["draft_vocab_size"]


PUBLISHED: dict[str, tuple[Callable[..., DraftHead], dict[str, Any], dict[str, Any]]] = {
    "hydra": (lambda base: hydra(base, num_layers=4, prefix_layer=True), HYDRA, {}),
    "mlp_speculator": (lambda base: mlp(base, num_draft_tokens=4, inner_dim=24), IBM, {}),
    "kangaroo": (kangaroo, VICUNA, {"exit_layer": 1}),
}


@pytest.mark.parametrize("form", PUBLISHED)
def test_heads_without_many_keys(tmp_path: Path, form: str) -> None:
    """ankner/hydra-vicuna-13b-v1.3, ibm-fms/llama3-8b-accelerator, Kangaroo; test_format_medusa.py has Medusa."""
    make, config, override = PUBLISHED[form]
    base = deep_base()
    head = make(base)
    tensors = weights(head, form, tmp_path / "ours")
    folder = write(tmp_path / "x", small(config), tensors, all_formats()[form].weights_file)
    again, notes = imported(folder, base, **override)
    assert not notes and torch.equal(logits_of(base, again), logits_of(base, head))
    if override:
        refuses("EAGLE-1 or EAGLE-2 head .or a Kangaroo adapter.*config.exit_layer=N", imported, folder, base)


@cases(
    "config, kind",
    ({"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}, "a P-EAGLE head"),
    ({"architectures": ["DominoDraftModel"], "model_type": "qwen3"}, "a Domino head"),
    ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, "an EAGLE-1 or EAGLE-2 head"),
    ({"speculators_model_type": "mtp"}, r"a head for multi-token prediction \(MTP\)"),
)
def test_kinds_that_are_not_supported_are_named(config: dict[str, Any], kind: str) -> None:
    refuses(f"x/config.json .* is {kind}.*, which drafthead cannot import", recognise, config, "x")


def test_maps_of_the_vocabulary_must_agree(tmp_path: Path) -> None:
    base, ids, form = deep_base(), torch.arange(100, 140), all_formats()["eagle3"]
    form.export(eagle(base, ids, layers=[2, 3, 5]), tmp_path / "some")
    config, tensors = (tmp_path / "some" / "config.json").read_text(), load_file(tmp_path / "some/model.safetensors")
    for d2t, says in ((ids, "d2t holds target ids, where offsets are expected"), (ids - 99, "copy the folder again")):
        write(tmp_path / "x", json.loads(config), {**tensors, "d2t": d2t})
        refuses(f"d2t and t2d mark different target ids: {says}", imported, tmp_path / "x", base)
    form.export(eagle(base, layers=[2, 3, 5]), tmp_path / "all")
    config, tensors = (tmp_path / "all" / "config.json").read_text(), load_file(tmp_path / "all/model.safetensors")
    tensors["d2t"] = torch.arange(299, -1, -1) - torch.arange(300)
    with pytest.raises(UserError, match="reorders or exceeds the vocabulary of 300"):
        imported(write(tmp_path / "x", json.loads(config), tensors), base)
    without = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    again, _ = imported(write(tmp_path / "x", json.loads(config), without), base)
    assert torch.equal(again.output_head(0).weight, base.lm_head.weight), "engines use the target's output head"


@cases(
    "edit, says",
    ({"eagle_config": {"use_aux_hidden_state": False}}, "has use_aux_hidden_state False"),
    ({"eagle_config": 3}, "eagle_config 3, expected an object"),
    ({"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, "norm_before_fc False at the top level"),
    ({"num_aux_hidden_states": 4}, r"num_aux_hidden_states 4, but names the layers \[2, 3, 5\]"),
)
def test_eagle3_configs_that_contradict_themselves_or_drafthead(
    tmp_path: Path, edit: dict[str, Any], says: str
) -> None:
    base = deep_base()
    all_formats()["eagle3"].export(eagle(base, D2T, layers=[2, 3, 5]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | edit
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(says, imported, tmp_path, base)


def test_an_export_has_the_limits_of_the_base_and_not_of_the_run(tmp_path: Path) -> None:
    short = random_base(TINY | {"num_hidden_layers": 6}, max_context=64)
    head = eagle(short, D2T, layers=[2, 3, 5])
    for name in ("eagle3", "speculators", "gguf"):
        all_formats()[name].export(head, tmp_path / name)
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    layer = json.loads((tmp_path / "speculators" / "config.json").read_text())["transformer_layer_config"]
    keys, _ = read_gguf(tmp_path / "gguf" / "head.gguf")
    limits = {config["max_position_embeddings"], layer["max_position_embeddings"], keys["eagle3.context_length"]}
    assert limits == {512}
