"""Results of a base, alone and in batches, and refused bases."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.text.chat import prompt_ids, user_turn
from drafthead.errors import UserError
from drafthead.models.base.base_config import BaseConfig, check_architecture, context_limit
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.corpus import SEED_STRIDE, generate_answers
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.train.corpora.built_in import user_opening
from support import TinyBase, cases, refuses, row_of, small_base


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_bigcode"])
def test_features_of_packed_documents_equal_each_alone(tiny_base: TinyBase, architecture: str) -> None:
    base, start = tiny_base(architecture), 0
    layers = (1, 2) if architecture == "gpt_bigcode" else (0, 2)  # it adds positions to its embedding
    documents = [[3, 4, 5, 6, 7], [9, 8, 7], [1, 2, 3, 4]]
    base_hidden = base.hidden_states(row_of(documents, padding=0), HiddenStatesSpec(layers=layers))
    for document in documents:
        alone = base.model(torch.tensor([document]), output_hidden_states=True).hidden_states
        positions = slice(start, start + len(document))
        torch.testing.assert_close(base_hidden.final[:, positions], alone[-1], rtol=1e-4, atol=1e-5)
        for n, layer in enumerate(layers):
            torch.testing.assert_close(base_hidden.layer(n)[:, positions], alone[layer], rtol=1e-4, atol=1e-5)
        start += len(document)


def test_states_beyond_float16_are_not_stored() -> None:
    base = BaseModel.load(small_base().config)  # not the one that other tests use
    with torch.no_grad():
        base.model.model.norm.weight.mul_(1e6)
    answers, prompts = partial(generate_answers, base, batch_size=1, max_prompt_tokens=8), [(0, [1, 2, 3])]
    assert len(list(answers(prompts, SamplerConfig(max_new_tokens=4)))) == 1
    with pytest.raises(UserError, match="65504.*store_hidden_states=false"):
        list(answers(prompts, SamplerConfig(max_new_tokens=4), keep_hidden_states=True))


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.5, "top_k": 20, "top_p": 0.8}], ids=["greedy", "sampled"])
def test_batched_generation_equals_decoding_each_prompt(tiny_base: TinyBase, drawn: dict[str, Any]) -> None:
    """Answers and hidden states do not depend on full slots, replaced rows, shared prefixes or shrinking."""
    base = tiny_base()
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(5, 250, (3 + 5 * (n % 4),), generator=generator) for n in range(11)]
    prompts = [(n, [1, 2, 3, *draw.tolist()]) for n, draw in enumerate(draws)]
    sampler = SamplerConfig(**drawn, max_new_tokens=20, seed=3)
    how: dict[str, Any] = {"batch_size": 3, "keep_hidden_states": True, "max_prompt_tokens": 40}
    answers = list(generate_answers(base, prompts, sampler, **how))
    assert sorted(a.prompt_number for a in answers) == list(range(11))
    for answer in answers:
        prompt = prompts[answer.prompt_number][1]
        seed = 3 * SEED_STRIDE + answer.prompt_number
        plain = decode(base, None, prompt, max_new_tokens=20, sampler=Sampler(**drawn), seed=seed)
        assert answer.input_ids.tolist() == prompt + plain.tokens
        assert answer.boundary == len(prompt)
        ids = torch.tensor([answer.input_ids.tolist()])
        expected = base.forward(ids[:, :-1], base.new_cache(ids.shape[1])).final[0]
        torch.testing.assert_close(torch.from_numpy(answer.hidden_states).float(), expected, rtol=2e-3, atol=2e-3)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 10000.0}


@cases(
    "model_type, settings, says",
    ("mamba", {}, r"mamba models have layers of type \['linear_attention'\].*recurrent state"),
    ("jamba", {}, r"jamba models have layers of type \['linear_attention'\].*recurrent state"),
    ("t5", {}, "t5 models have an encoder"),
    ("deepseek_v4", {}, "deepseek_v4 models have layers of unknown type"),
    (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "pad_token_id": 0},
        "longrope rotary embedding .* longer than 64 .*base.max_context=64 or",
    ),
    ("llama4_text", {"floor_scale": 80}, "attention is scaled .*base.max_context=79"),
    ("gpt_bigcode", {"n_positions": 90}, "learned positions ends at 90"),
    ("paligemma", {}, "paligemma .*use_bidirectional_attention"),
)
def test_refused_architectures(model_type: str, settings: dict[str, Any], says: str) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    with pytest.raises(UserError, match=says) as refusal:
        check_architecture(config, 100)
    assert "\n" not in str(refusal.value)
    if limit := context_limit(config):
        check_architecture(config, limit.positions)


@cases(
    "settings, says",
    ({"model_type": "opt"}, "opt is not built like a Llama"),
    ({"model_type": "falcon"}, "falcon has a special attention"),
    ({"model_type": "mistral", "sliding_window": 1}, "sliding_window=1, which must be at least 2"),
    ({"model_type": "llama", "return_dict": False}, "llama cannot be run by transformers' own code .AttributeErr"),
    ({"model_type": "llama", "is_causal": False}, "attention of llama uses 'is_causal=False', [^;]*; [^;]*$"),
)
def test_bases_that_cannot_be_read_are_refused(settings: dict[str, Any], says: str) -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, **settings}
    with pytest.raises(UserError, match=says):
        BaseModel.load(BaseConfig(random=True, shape=shape | {"num_attention_heads": 4}, tokenizer="builtin:tiny"))


def test_bad_base_settings() -> None:
    with pytest.raises(UserError, match="model_type 'lama' is not known"):
        BaseConfig(shape={"model_type": "lama"}).transformers_config()


def test_a_base_with_missing_weights_is_refused(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Refuse missing and misshapen weights, which transformers would initialise at random."""
    shape = {key: value for key, value in tiny_base().config.shape.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape))
    model.save_pretrained(tmp_path)
    config = BaseConfig(name=str(tmp_path), tokenizer="builtin:tiny")
    assert BaseModel.load(config).num_layers == 3
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuses(r"lacks 1 weights, .*layers.1.mlp.up_proj.weight", BaseModel.load, config)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(5, 4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuses(r"1 weights .*up_proj.weight: \[5, 4\] instead of", BaseModel.load, config)


def test_a_base_folder_that_needs_another_setting(tiny_base: TinyBase, tmp_path: Path) -> None:
    """The error names the setting instead of the first library's complaint."""
    model = BaseModel.load(replace(tiny_base().config, prepack=False)).stock()
    model.save_pretrained(tmp_path)
    config = BaseConfig(name=str(tmp_path), tokenizer="builtin:tiny")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    refuses("holds a base and an adapter; .*base.adapter", BaseModel.load, config)
    settings = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").unlink()
    refuses("is an adapter; .*base.adapter", BaseModel.load, config)
    (tmp_path / "config.json").write_text(settings[: len(settings) // 2])
    refuses("config.json.* is not a valid JSON", BaseModel.load, replace(config, tokenizer=None))
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    refuses("Python code.* base.trust_remote_code=true", BaseModel.load, config)


@pytest.mark.usefixtures("offline")
def test_a_base_that_is_not_there(tiny_base: TinyBase, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiny_base().model.config.save_pretrained(tmp_path / "folder")
    cases = {
        "/nowhere/x": "no base model at /nowhere/x: there is no such folder; correct base.name",
        "./nowhere": "no base model at ./nowhere: there is no such folder",
        str(tmp_path / "file"): "file: that is a file; correct base.name",
        str(tmp_path / "folder"): f"no tokenizer in {tmp_path / 'folder'}, .*base.tokenizer=",
        "nobody/nothing": "'nobody/nothing' is not a local folder .*debug=tiny",
    }
    for name, says in cases.items():
        with pytest.raises(UserError, match=says) as refusal:
            BaseModel.load(BaseConfig(name=name))
        assert "\n" not in str(refusal.value)
        if "folder" not in name:
            with pytest.raises(UserError, match=says):
                BaseConfig(name=name).transformers_config()
    folder = str(tmp_path / "folder")
    with pytest.raises(UserError, match="base.tokenizer=/nowhere could not be loaded: .* Name a folder"):
        BaseModel.load(BaseConfig(name=folder, tokenizer="/nowhere"))
    with pytest.raises(UserError, match=f"the base model in {folder} could not be loaded: .*save_pretrained"):
        BaseModel.load(BaseConfig(name=folder, tokenizer="builtin:tiny"))


def test_settings_of_the_chat_template_reach_prompts_and_saved_heads(tiny_base: TinyBase) -> None:
    config = replace(tiny_base().config, chat_template_kwargs={"add_note": True})
    base = BaseModel.load(config)
    template = base.tokenizer.chat_template
    base.tokenizer.chat_template = "{% if add_note %}note {% endif %}" + template
    plain = replace(config, chat_template_kwargs={})
    rendered = [prompt_ids(base.tokenizer, user_turn("hi"), c.chat_template_kwargs) for c in (config, plain)]
    with_note, without = map(base.tokenizer.decode, rendered)
    assert with_note == "note " + without
    assert base.tokenizer.decode(base.prompt_ids(user_turn("hi"))) == with_note
    assert base.tokenizer.decode(user_opening(base)).startswith("note ")
    assert config.saved()["chat_template_kwargs"] == {"add_note": True} and "chat_template_kwargs" not in plain.saved()


def test_a_saved_head_keeps_the_switches_of_the_chat_template(tiny_base: TinyBase, tmp_path: Path) -> None:
    variables = {"enable_thinking": False, "tools": "/etc/hostname"}
    base = BaseModel.load(replace(tiny_base().config, chat_template_kwargs=variables))
    MedusaConfig(num_draft_tokens=2).build(base).save_pretrained(tmp_path)
    loaded, _ = load_base_and_head(tmp_path)
    assert loaded.config.chat_template_kwargs == {"enable_thinking": False}, "no file that a downloaded config names"
    loaded, _ = load_base_and_head(tmp_path, BaseConfig(chat_template_kwargs={"enable_thinking": True}))
    assert loaded.config.chat_template_kwargs == {"enable_thinking": True}
