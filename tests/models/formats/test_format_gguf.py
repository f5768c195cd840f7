"""GGUF files as llama.cpp reads them: the drafter, the base, rotary scaling."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import FORMATS
from drafthead.models.formats.gguf.gguf_files import read_gguf, rope_factors
from plain_heads import (
    LLAMACPP_NAMES,
    PlainLayer,
    check_round_trip,
    deep_base,
    eagle,
    eagle_chain,
    known_tokenizer,
    over_all_ids,
    read_llamacpp,
    states,
)

GGUF = FORMATS["gguf"]
D2T = torch.arange(1, 300, 3)
THREE = {"layers": [2, 3, 5]}
NAMES = LLAMACPP_NAMES | {"attn_norm_2": "hidden_norm", "enc.output_norm": "input_norm"}


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


@pytest.mark.parametrize("d2t", [D2T, None], ids=["reduced", "whole"])
@pytest.mark.parametrize(
    "settings", [{}, {"norm_before_fc": True}, {"own_lm_head": False}, {"norm_before_residual": True}]
)
def test_engine_and_round_trip_give_the_heads_logits(
    tmp_path: Path, settings: dict[str, Any], d2t: Tensor | None
) -> None:
    check_round_trip(GGUF, llamacpp_engine, eagle(deep_base(), d2t, **THREE, **settings), tmp_path)


def test_settings_that_llamacpp_ignores_or_aborts_on_are_refused(tmp_path: Path) -> None:
    for settings, says in (
        ({**THREE, "norm_output": True}, r"head.norm_output=false"),
        ({"layers": [2, 3]}, r"exactly 3 \(head.layers=null"),
    ):
        with pytest.raises(UserError, match=says):
            GGUF.export(eagle(deep_base(), **settings), tmp_path)
    with pytest.raises(UserError, match="graph of gemma .*aborts"):
        GGUF.export(eagle(deep_base("gemma"), **THREE), tmp_path)
    with pytest.raises(UserError, match="has no head.gguf"):
        GGUF.load(tmp_path, deep_base())
    (tmp_path / "head.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(UserError, match="head.gguf cannot be read"):
        GGUF.load(tmp_path, deep_base())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gguf_head_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    head = eagle(deep_base(), D2T, **THREE, norm_before_fc=True)
    GGUF.export(head, tmp_path, dtype)
    again = GGUF.load(tmp_path, deep_base())
    assert torch.equal(again.fc.weight, head.fc.weight.to(dtype).float()) and torch.equal(again.d2t, head.d2t)
    assert torch.equal(again.norm.weight, head.norm.weight), "llama.cpp wants norms in float32"


def test_a_base_as_gguf_is_the_base(tmp_path: Path) -> None:
    """Compare names, rotated pairs and the tokenizer; refuse an unknown tokenizer or weight type."""
    with pytest.raises(UserError, match="the tokenizer splits words"):
        GGUF.write_base(deep_base(), tmp_path / "base.gguf", "f32")
    base = BaseModel.wrap(deep_base().stock(), known_tokenizer())
    with pytest.raises(UserError, match="base_gguf must be one of f32, .*got 'q4_k'; llama.cpp's llama-quantize"):
        GGUF.write_base(base, tmp_path / "base.gguf", "q4_k")
    weights = base.stock().state_dict()
    for kind in ("f32", "q8_0"):
        GGUF.write_base(base, tmp_path / "base.gguf", kind)
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


def test_a_rotary_scaling_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(UserError, match="scaling of type yarn"):
        rope_factors({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e4, "head_dim": 8})


def test_the_command_names_the_base_that_was_written() -> None:
    llamacpp = next(engine for engine in GGUF.engines if engine.current)
    assert GGUF.base_file == "base.gguf"
    assert " -m out/base.gguf -md out/head.gguf " in llamacpp.command("user/base", "out", 3, "out/base.gguf")
    assert (
        " -m BASE.gguf -md out/head.gguf " in (line := llamacpp.command("user/base", "out", 3)) and "base_gguf" in line
    )
