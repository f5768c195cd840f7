"""Families of bases compared with stock transformers: windows, sinks, scales, latent attention, composites.

``benchmarks/bases.py`` compares all of its configurations; here the ones that most heads are trained for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parity import DENSE, PASSED
from drafthead.models.base.windows import Window
from drafthead.models.decoding.loop import decode
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.draft_lm import DraftLMConfig
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.parts.targets import DraftTargets
from drafthead.models.kernels import attention
from support import TINY, Context, cases, chain_levels, random_ids, refuses, row_of

MOST_USED = "llama qwen3_moe mistral gemma2 gemma3 gemma4_e2b gpt_oss deepseek_v3 llama4_text_chunk qwen3_vl".split()
Script = Callable[[str], ModuleType]


def config_of(shape: dict[str, Any], dtype: str = "float32", **settings: Any) -> BaseConfig:
    return BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype=dtype, **settings)


@pytest.mark.parametrize("name", MOST_USED)
def test_the_families_most_heads_are_trained_for(name: str, script: Script) -> None:
    bases = script("bases")
    outcome = bases.outcome(bases.SHAPES[name], prompts=(60,), heads=False)
    assert outcome.passes, outcome.line(name)
    assert {key[1] for key in PASSED if key[0] == DENSE} <= {"DogeForCausalLM"}, "others need no dense masks"


def test_dspark_says_which_layers_it_cannot_copy(script: Script) -> None:
    """The base's first layer is dense, its last one has experts: the copy is of the last one's kind."""
    base = BaseModel.load(config_of(script("bases").SHAPES["deepseek_v3"]))
    with pytest.raises(UserError, match="which DeepseekV3DecoderLayer is not; set head.copy_layers=false"):
        DSparkConfig(num_draft_tokens=3, layers=[0, 1]).build(base)


@pytest.mark.slow
def test_a_real_base_computes_what_its_stock_model_does(script: Script) -> None:
    outcome = script("bases").real("embedded:smollm2")
    assert outcome.passes and not any(outcome.heads.values()), outcome.line("embedded:smollm2")


@pytest.mark.slow
def test_the_embedded_model_needs_no_other_setting_than_its_name() -> None:
    assert BaseConfig(name="embedded:smollm2").transformers_config().num_hidden_layers == 30


@pytest.mark.slow
def test_every_family_passes_or_is_refused_by_name(script: Script) -> None:
    bases = script("bases")
    outcomes = {name: bases.outcome(shape) for name, shape in bases.SHAPES.items()}
    tried = {name: o for name, o in outcomes.items() if not o.unbuilt}
    assert not [o.line(name) for name, o in tried.items() if o.raised or (o.loads and not o.passes)]
    assert not [o.line(name) for name, o in tried.items() if "RAISED" in o.line(name)]
    assert all("\n" not in o.refused for o in tried.values())
    assert sum(o.passes for o in tried.values()) >= 90


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("gemma4_e2b", marks=pytest.mark.slow), "llama4_text_chunk"])
def test_static_shapes_have_windows_too(name: str, script: Script) -> None:
    """Static passes, as CUDA graphs replay them, give the tokens of eager passes across the window's edge."""
    shape = script("base_shapes").SHAPES[name]
    prompt, lookup = random_ids(28), PromptLookup(num_tokens=4, max_ngram=1, matches=3)
    answers = []
    for graphs in ("never", "always"):
        base = BaseModel.load(config_of(shape, prepack=False, graphs=graphs))
        answers += [decode(base, d, prompt, max_new_tokens=30, ignore_eos=True).tokens for d in (None, lookup)]
    assert all(answer == answers[0] for answer in answers)


def test_unknown_keywords_of_attention_are_refused() -> None:
    states = torch.zeros(1, 1, 1, 4)
    attention.grouped_sdpa(torch.nn.Identity(), states, states, states, None, sliding_window=3, position_bias=None)
    with pytest.raises(UserError, match="position_bias"):
        attention.grouped_sdpa(torch.nn.Identity(), states, states, states, None, position_bias=states)


def one_further(self: Window, queries: Tensor, keys: Tensor) -> Tensor:
    return queries[:, :, None] - keys[:, None] <= self.size


def shift_logits(_module: torch.nn.Module, _inputs: Any, out: Any) -> None:
    out.logits = out.logits + 1.0


def without_sinks(*args: Any, **options: Any) -> Any:
    return GROUPED_SDPA(*args, **{**options, "s_aux": None})


GROUPED_SDPA = attention.grouped_sdpa


@cases(
    "place, fault, shape, says",
    ("models.base.windows.Window.sees", one_further, "mistral", r"mistral run in one pass differ .* [\d.]+%"),
    ("models.kernels.attention.grouped_sdpa", without_sinks, "gpt_oss_full", "gpt_oss run in one pass differ"),
    ("models.cache.kv_cache.TreeCache.positions", lambda _, depths: depths, "llama", "llama run in chunks differ"),
)
def test_a_base_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, script: Script, place: str, fault: Any, shape: str, says: str
) -> None:
    """The check at load finds a window that is one position too wide, missing sinks, and positions from 0.

    Configs that have passed in this process are not checked again, so these have contexts that no other test uses.
    """
    with monkeypatch.context() as patched:
        patched.setattr(f"drafthead.{place}", fault)
        attention.register()
        refuses(says, BaseModel.load, config_of(script("base_shapes").SHAPES[shape], max_context=111))
    attention.register()


def test_a_base_with_wrong_logits_is_refused(script: Script) -> None:
    shapes = script("base_shapes").SHAPES
    cohere = shapes["cohere"] | {"logit_scale": 0.3}
    base = BaseModel.load(config_of(cohere))
    assert base.lm_head.scale == 0.3
    model = base.stock()
    model.register_forward_hook(shift_logits)
    refuses("cohere computes its logits", BaseModel.wrap, model, base.tokenizer)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@cases(
    "model_type, settings, limit",
    (
        "phi3",
        {
            "rope_parameters": {
                **{"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
                **{"rope_theta": 10000.0, "original_max_position_embeddings": 40},
            },
            "original_max_position_embeddings": 40,
            "sliding_window": None,
        },
        40,
    ),
    ("llama", {"rope_parameters": DYNAMIC}, 256),
    ("llama", {"rope_parameters": {**DYNAMIC, "original_max_position_embeddings": 4096}}, 256),
    ("doge", {"keep_window_size": 40}, 40),
)
def test_changing_positions_limit_the_context(model_type: str, settings: dict[str, Any], limit: int) -> None:
    config = config_of(
        {**TINY, "model_type": model_type, "pad_token_id": 0, "max_position_embeddings": 256, **settings}
    )
    base = BaseModel.load(config)
    assert base.max_context == limit
    assert base.dense_masks == (model_type == "doge"), "only Doge computes with masks"
    prompt = random_ids(limit - 12)
    refuses(f"context of {limit}", decode, base, None, prompt, max_new_tokens=13)
    lookup = PromptLookup(num_tokens=4, max_ngram=1)
    plain = decode(base, None, prompt, max_new_tokens=12, ignore_eos=True).tokens
    assert decode(base, lookup, prompt, max_new_tokens=12, ignore_eos=True).tokens == plain
    config.max_context = limit + 1
    refuses(f"base.max_context={limit} or less", BaseModel.load, config)


def test_queries_are_scaled_by_positions_and_not_by_indices_in_a_row(script: Script) -> None:
    """Llama 4 scales by the index in a pass, which exceeds the positions in a row of several documents."""
    shape = script("base_shapes").SHAPES["llama4_text_scaled"] | {"floor_scale": 40}
    base = BaseModel.load(config_of(shape))
    documents = [random_ids(38, 1), random_ids(30, 2)]
    packed = base.hidden_states(row_of(documents, padding=0), HiddenStatesSpec()).final
    for start, document in ((0, documents[0]), (38, documents[1])):
        alone = base.forward(torch.tensor([document]), base.new_cache(40)).final
        torch.testing.assert_close(packed[:, start : start + len(document)], alone, rtol=1e-4, atol=1e-5)
    refuses("40 tokens exceeds the context of 39", base.hidden_states, row_of([random_ids(40)]), HiddenStatesSpec())


QUANTISED: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "compressed-tensors", "config_groups": {}},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
]


NOT_INSTALLED = "needs a package that is not installed here: .* Install it"


@cases(
    "quantisation, says",
    *((quantisation, NOT_INSTALLED) for quantisation in QUANTISED),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8, llama"),  # rounds by the others in a pass
)
def test_quantised_folders_are_one_line(
    quantisation: dict[str, Any], says: str, tmp_path: Path, script: Script
) -> None:
    bases = script("bases")
    bases.stored(bases.SHAPES["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = quantisation
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=says) as refusal:
        BaseModel.load(BaseConfig(name=str(tmp_path), tokenizer="builtin:tiny"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "gemma4_e2b"])
def test_rounding_in_16_bits_is_no_reason_to_refuse(name: str, script: Script) -> None:
    shape = script("base_shapes").SHAPES[name]
    assert BaseModel.load(config_of(shape, "bfloat16")).vocab_size


@cases(
    "name, head, says",
    ("gemma4_e2b", "kangaroo", "a layer of gemma4_text reads a separate embedding"),
    ("longcat_flash", "kangaroo", "a layer of longcat_flash has several attentions"),
    ("nanochat", "kangaroo", "nanochat after the first 1 give another result"),
    ("gemma3n_text", "eagle3", "the layers of gemma3n_text return several streams per token"),
    ("gpt2", "hydra_pp", "gpt2 has no rotary embedding"),
)
def test_heads_that_cannot_work_on_a_base_are_refused(name: str, head: str, says: str, script: Script) -> None:
    bases = script("bases")
    base = BaseModel.load(config_of(bases.SHAPES[name]))
    with pytest.raises(UserError, match=says):
        decode(base, bases.head_configs()[head].build(base), random_ids(24), max_new_tokens=2)


@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3"])
def test_copied_layers_keep_their_type(name: str, script: Script) -> None:
    """Copy a layer with a window and one without, or a dense one and a mixture, into a draft LM."""
    shape = script("base_shapes").SHAPES[name]
    base = BaseModel.load(config_of(shape))
    head = DraftLMConfig(num_layers=2, from_layers=[0, 3], num_draft_tokens=3).build(base).eval()
    prompt = random_ids(40)
    plain = decode(base, None, prompt, max_new_tokens=8, ignore_eos=True).tokens
    assert decode(base, head, prompt, max_new_tokens=8, ignore_eos=True).tokens == plain
    row = row_of([[*prompt, 7]], padding=0)
    trained = head.hidden_at_positions(row, base.hidden_states(row, head.spec), DraftTargets.of(row, 1))
    (drafted,) = Context.of(head).read(row.input_ids[:, :-2]).logits(chain_levels(prompt[-1:]))
    torch.testing.assert_close(head.output_head(0).logits(trained[:, -1:]), drafted, rtol=1e-4, atol=1e-4)
    stock = base.stock().model.layers
    for copied, source in zip(head.layers, (0, 3), strict=True):
        expected = dict(stock[source].named_parameters())
        for key, weight in copied.named_parameters():
            torch.testing.assert_close(weight, expected.pop(key), rtol=1e-6, atol=1e-6)
        assert not expected


def test_only_the_language_model_of_a_composite_checkpoint_is_loaded(tmp_path: Path, script: Script) -> None:
    bases, lines = script("bases"), []
    bases.stored(bases.SHAPES["gemma3"], tmp_path)
    base = BaseModel.load(BaseConfig(name=str(tmp_path), tokenizer="builtin:tiny"), progress=lines.append)
    assert "only its language model is loaded" in lines[0]
    assert not [name for name, _ in base.model.named_modules() if "vision" in name]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in base.stock().parameters()) < sum(p.numel() for p in stock.parameters())


@pytest.mark.parametrize(("top", "inner"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_composite_checkpoint_may_state_its_tie_anywhere(tmp_path: Path, top: bool, inner: bool) -> None:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(**size, vocab_size=300, tie_word_embeddings=inner),
        vision_config=CLIPVisionConfig(**size, image_size=8, patch_size=4),
        tie_word_embeddings=top,
        image_token_index=299,
    )
    stock = LlavaForConditionalGeneration(config)
    stock.save_pretrained(tmp_path)
    base = BaseModel.load(BaseConfig(name=str(tmp_path), tokenizer="builtin:tiny"))
    torch.testing.assert_close(base.lm_head.weight, stock.lm_head.weight.detach())
    assert (base.lm_head.weight.data_ptr() == base.embedding.data_ptr()) == (top or inner)
    # What is saved later in the process keeps its names.
    LlamaForCausalLM(config.text_config).save_pretrained(tmp_path / "llama")
    with safe_open(tmp_path / "llama" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "language_model" in name]
