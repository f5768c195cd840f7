"""DSpark and DFlash as engines read them: in DeepSpec's and z-lab's layouts, and as llama.cpp's GGUF."""

import json
import re
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.gguf_config import llama3_factors
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.formats import all_formats
from drafthead.models.heads.dspark import DSparkConfig, DSparkHead
from drafthead.models.token_tree import TokenTree
from plain_heads import (
    LLAMACPP_NAMES,
    PlainLayer,
    check_refused,
    check_round_trip,
    deep_base,
    drafted_block,
    eagle,
    logits_of,
    over_all_ids,
    read_llamacpp,
    rewrite,
    unknown_tokenizer,
)
from support import TINY, cases, random_base, random_ids, randomised, refuses

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "generate.md"
DSPARK, DFLASH, GGUF = all_formats()["dspark"], all_formats()["dflash"], all_formats()["gguf_dspark"]
D2T = torch.arange(1, 300, 3)
FLASH = {"markov_rank": 0, "confidence": False, "anchor_predicts": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "own table": {"tied_markov": False, "confidence": False},
    "gated": {"markov_gate": True, "confidence": False},
    "dflash": FLASH,
    "jetspec": {**FLASH, "causal": True},
    "bonus anchor": {"anchor_predicts": False},
    "window": {**FLASH, "window": 5},
    "mixed layers": {"anchor_predicts": False, "window": 5, "full_layers": [1], "causal": "sliding"},
}
NAMES = LLAMACPP_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "enc.output_norm": "hidden_norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
}


def block_head(base: BaseModel, d2t: Tensor | None = None, **settings: Any) -> DSparkHead:
    settings = {"layers": [2, 3, 5], "markov_rank": 8, "mask_token": 9, "copy_layers": False, **settings}
    size = None if d2t is None else len(d2t)
    config = DSparkConfig(num_draft_tokens=3, intermediate_size=64, draft_vocab_size=size, **settings)
    return randomised(config.build(base, d2t).eval())


@torch.inference_mode()
def vllm_engine(folder: Path, base: BaseModel) -> Tensor:
    """``qwen3_dspark.py`` and ``qwen3_dflash.py`` of vLLM 0.32: offsets, layers by their outputs."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert config["num_hidden_layers"] == len(config["layer_types"]) and config["vocab_size"] == base.vocab_size
    inner = config["dflash_config"]
    offsets = tensors.pop("d2t", torch.zeros(base.vocab_size, dtype=torch.long))
    assert len(offsets) == config["draft_vocab_size"]
    if config["architectures"] == ["Qwen3DSparkModel"]:
        assert {key: config[key] for key in ("mask_token_id", "target_layer_ids")}.items() <= inner.items()
        assert config["markov_head_type"] in ("vanilla", "gated") and config["markov_rank"] > 0
        assert config["enable_confidence_head"] == ("confidence_head.proj.weight" in tensors)
        assert config["sample_from_anchor"] == (config["block_size"] == 3), "as many slots as drafts"
    else:
        assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 4
    block = {"layers": [i + 1 for i in inner["target_layer_ids"]], "mask": inner["mask_token_id"]}
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    if any(sliding):  # Qwen3's config drops the size otherwise
        assert config["use_sliding_window"] and config["sliding_window"] == inner["swa_window_size"]
    block["windows"] = [inner["swa_window_size"] if has_window else None for has_window in sliding]
    causal = config.get("is_causal", inner.get("causal", "sliding"))  # _dflash_layer_causal
    block |= {"causal": causal, "size": config["block_size"], "num_layers": config["num_hidden_layers"]}
    block["scale"] = config.get("logit_scale", 1.0)
    if config["rope_scaling"]:
        block["factors"] = llama3_factors(config["rope_scaling"], config["rope_theta"], config["head_dim"])
    layer = PlainLayer(tensors, config, config["rope_theta"])
    return over_all_ids(drafted_block(layer, base, block), base, offsets + torch.arange(len(offsets)))


@torch.inference_mode()
def llamacpp_engine(folder: Path, base: BaseModel) -> Tensor:
    """llama.cpp's ``dflash`` graph: layers by what goes into them, target ids, halves are rotated."""
    keys, config, tensors = read_llamacpp(folder, NAMES)
    assert keys["general.architecture"] == "dflash" and keys["tokenizer.ggml.model"] == "gpt2"
    targets = tensors.pop("d2t", torch.arange(base.vocab_size))
    assert targets.dtype == torch.int64
    block = {"layers": keys["dflash.target_layers"], "mask": keys["tokenizer.ggml.mask_token_id"]}
    block |= {"causal": keys["dflash.attention.causal"], "size": keys["dflash.block_size"]}
    block |= {"num_layers": keys["dflash.block_count"], "factors": tensors.pop("rope_freqs.weight", torch.ones(()))}
    if "markov_head.markov_w1.weight" in tensors:
        assert keys["dflash.sample_from_anchor"] == (block["size"] == 3), "as many slots as drafts"
        assert keys["dflash.has_confidence_head"] == ("conf_proj.weight" in tensors)
    logits = drafted_block(PlainLayer(tensors, config, keys["dflash.rope.freq_base"]), base, block)
    return over_all_ids(logits, base, targets)


@pytest.mark.parametrize("d2t", [D2T, None], ids=["reduced", "whole"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_engine_and_round_trip(tmp_path: Path, variant: str, d2t: Tensor | None) -> None:
    head = block_head(deep_base(), d2t, **VARIANTS[variant])
    layout = DSPARK if head.config.markov_rank else DFLASH
    if head.config.markov_gate:
        assert not any(e.current for e in layout.engines_for(head) if e.name != "SGLang")
    only_vllm = head.config.markov_gate or head.config.window
    for form, engine in ((layout, vllm_engine), (GGUF, llamacpp_engine))[: 1 if only_vllm else 2]:
        check_round_trip(form, engine, head, tmp_path / form.name)
        again = form.load(tmp_path / form.name, deep_base())
        if head.confidence is not None:
            assert torch.equal(again.state_dict()["confidence.weight"], head.confidence.weight)


@pytest.mark.parametrize("model_type", ["llama", "granite"])
def test_bases_that_scale(tmp_path: Path, model_type: str) -> None:
    """Scale the rotation (Llama 3) and the logits (Granite); an engine without either silently drafts badly."""
    llama3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    scaled = {"llama": {"rope_parameters": llama3}, "granite": {"logits_scaling": 4.0}}[model_type]
    base = random_base(TINY | {"model_type": model_type, "num_hidden_layers": 6, **scaled})
    head = block_head(base, D2T)
    forms = [(DSPARK, vllm_engine), (GGUF, llamacpp_engine)][: 2 if model_type == "llama" else 1]
    for form, engine in forms:
        form.export(head, tmp_path / form.name)
        expected = logits_of(base, head)
        assert torch.allclose(engine(tmp_path / form.name, base)[:, head.d2t], expected, atol=1e-3, rtol=1e-3)
        assert torch.allclose(logits_of(base, form.load(tmp_path / form.name, base)), expected, atol=1e-5)
    converter = next(engine for engine in DSPARK.engines_for(head) if engine.name == "llama.cpp")
    assert ("leaves out the scaling of the rotation" in converter.support) == (model_type == "llama")


@pytest.mark.parametrize(
    ("form", "settings", "says"), [(DSPARK, {}, "dspark-block-size 3"), (DFLASH, FLASH, "dflash-block-size 4")]
)
def test_the_command_for_sglang(tmp_path: Path, form: Any, settings: dict[str, Any], says: str) -> None:
    base = deep_base()
    sglang = next(e for e in form.engines_for(block_head(base, None, **settings)) if e.name == "SGLang")
    line = sglang.command("org/base", "out", 3, "bfloat16")
    assert line.endswith(f"--speculative-draft-model-path out --speculative-{says} --dtype bfloat16")
    reduced = next(e for e in form.engines_for(block_head(base, D2T, **settings)) if e.name == "SGLang")
    assert reduced.current == (form is DFLASH)
    for causal in (False, True):
        form.export(block_head(base, D2T, **{**settings, "causal": causal}), tmp_path / str(causal))
        assert ("is_causal" in json.loads((tmp_path / str(causal) / "config.json").read_text())) == causal


def test_heads_that_a_layout_cannot_express_are_refused(tmp_path: Path) -> None:
    base = deep_base()
    reads_state = {"reads_state": True, "copy_layers": False}
    for form, settings, says in (
        (DSPARK, reads_state, "head.reads_state=false"),
        (DSPARK, {"layers": [3, 6]}, r"layers \[3, 6\], .* of 1 to 5 \(head.layers=null"),
        (DSPARK, FLASH, "head.markov_rank=64; or to=dflash"),
        (DFLASH, {}, "or to=dspark.*head.anchor_predicts=false"),
        (GGUF, {"markov_rank": 0}, "head.markov_rank=0 head.confidence=false"),
    ):
        refuses(says, form.export, block_head(base, **settings), tmp_path / "refused")
    refuses("graph of gemma .*aborts", GGUF.export, block_head(deep_base("gemma")), tmp_path / "refused")
    base = copy(base)  # others share it
    base.tokenizer = unknown_tokenizer()
    refuses(r"the tokenizer splits words.*\(export to=dspark", GGUF.export, block_head(base), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@cases(
    "config, says",
    ({"num_attention_heads": 2}, "num_attention_heads 2, but"),
    ({"target_layer_ids": [-2, 2]}, r"has target_layer_ids \[-2, 2\], expected a list of layers"),
    ({"mask_token_id": 10**6}, "has mask_token_id 1000000, expected a token's id below"),
    ({"logit_scale": 0.5}, "scales its logits by 0.5, .* by 1.0; name the base"),
    ({"draft_vocab_size": 99}, "config.json says draft_vocab_size 99, but d2t has 100 rows"),
)
def test_a_config_that_says_something_else_is_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    check_refused(DSPARK, block_head(deep_base(), D2T), tmp_path, config, says)


def test_files_of_other_projects(tmp_path: Path) -> None:
    base, head = deep_base(), block_head(deep_base())
    DSPARK.export(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    copies = {"embed_tokens.weight": base.embedding.clone(), "lm_head.weight": head.target_lm_head.weight.clone()}
    marks = {"t2d": torch.ones(base.vocab_size, dtype=torch.bool), "confidence_head.proj.weight": torch.ones(1, 32)}
    rewrite(tmp_path, {**tensors, **copies, **marks}, confidence_head_with_markov=False)
    assert not DSPARK.load(tmp_path, base).config.confidence
    copies["lm_head.weight"] += 1
    rewrite(tmp_path, {**tensors, **copies}, confidence_head_with_markov=True)
    refuses("lm_head.weight that is not", DSPARK.load, tmp_path, base)
    DFLASH.export(block_head(base, **FLASH), tmp_path / "jetspec")
    inner = {"mask_token_id": 9, "target_layer_ids": [1, 2, 4], "causal_head": True}
    rewrite(tmp_path / "jetspec", dflash_config=inner)
    assert DFLASH.load(tmp_path / "jetspec", base).config.causal, "as JetSpec's own files say it"
    (tmp_path / "jetspec" / "mask_embedding.pt").touch()
    refuses("mask_embedding.pt", DFLASH.load, tmp_path / "jetspec", base)


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    GGUF.export(block_head(deep_base()), tmp_path)
    with pytest.raises(UserError, match=r"dflash, expected eagle3 \(format=gguf_dspark"):
        all_formats()["gguf"].load(tmp_path, deep_base())
    all_formats()["gguf"].export(eagle(deep_base(), layers=[2, 3, 5]), tmp_path)
    refuses(r"eagle3, expected dflash \(format=gguf\)", GGUF.load, tmp_path, deep_base())
    refuses("no head.gguf; .*to=gguf_dspark", GGUF.load, tmp_path / "nothing", deep_base())


def test_transformers_drafts_with_the_exported_assistant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the page, on a tiny model: the tokens are the model's own, and every draft is ours."""
    base = deep_base()
    head = block_head(base, **FLASH)
    all_formats()["transformers"].export(head, tmp_path / "assistant")
    base.stock().save_pretrained(tmp_path / "BASE")
    pairs = list[tuple[list[int], list[int]]]()

    @torch.inference_mode()
    def compared(self: Any, input_ids: Tensor, *arguments: Any, **options: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, *arguments, **options)
        if logits is not None:
            length, session = input_ids.shape[1], head.open(1)
            hidden = base.forward(input_ids[:, :-1], base.new_cache(length), spec=head.spec)
            session.commit(input_ids[:, :-1], [length - 1], hidden)
            proposal = session.draft(input_ids[:, -1], DraftConfig(tree=TokenTree.chain(3)))
            pairs.append((candidates[0, length:].tolist(), proposal.tokens[0, 1:].tolist()))
        return candidates, logits

    get_candidates = DFlashTokenCandidateGenerator.get_candidates
    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", compared)
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(from transformers import AutoModel, .*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"inputs": {"input_ids": torch.tensor([random_ids(9)])}}
    assert code
    exec(code[1], names)
    assert len(pairs) > 4 and all(theirs == ours for theirs, ours in pairs)
    plain = base.stock().generate(**names["inputs"], max_new_tokens=24)
    assert names["tokens"].tolist() == plain.tolist()


def test_transformers_has_no_other_blocks(tmp_path: Path) -> None:
    base = deep_base()
    for settings, message in (({"causal": True}, "head.causal=false"), ({"markov_rank": 8}, "head.markov_rank=0")):
        with pytest.raises(UserError, match=message):
            all_formats()["transformers"].export(block_head(base, **{**FLASH, **settings}), tmp_path / "x")
    with pytest.raises(UserError, match="head.draft_vocab_size=null"):
        all_formats()["transformers"].export(block_head(base, D2T, **FLASH), tmp_path / "x")
    head = block_head(base, **FLASH)
    all_formats()["transformers"].export(head, tmp_path / "x")
    again = all_formats()["transformers"].load(tmp_path / "x", base)
    assert isinstance(again, DSparkHead) and torch.equal(logits_of(base, again), logits_of(base, head))
