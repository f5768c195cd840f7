"""Results of a base, alone and in batches, refused bases, and parts of a base."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.data.answers.answer_config import SamplerConfig
from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.text.chat import prompt_ids, user_turn
from drafthead.errors import UserError
from drafthead.models.base.base_config import (
    BaseConfig,
    check_architecture,
    checkpoint_tensors,
    context_limit,
    load_weights,
    meta_model,
)
from drafthead.models.base.base_model import BaseModel, PartialForward
from drafthead.models.base.layer_by_layer import layers_output
from drafthead.models.base.parts import BaseParts
from drafthead.models.base.structure import attention_sizes
from drafthead.models.decoding.corpus import SEED_STRIDE, generate_answers
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.draft_model import early_exit
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.loading import load_base_and_head
from drafthead.models.token_tree import TokenTree
from drafthead.train.corpora.built_in import user_opening
from support import TINY, TinyBase, cases, random_ids, refuses, row_of, small_base


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
    ("rwkv", {}, "rwkv models have no self-attention"),
    ("minimax", {}, r"minimax models have layers of type \['linear_attention'\], whose state drafthead cannot compute"),
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


# GPT-BigCode: other names, learned positions, one key/value head, biases, an MLP without a gate -----------------------


@pytest.mark.parametrize("multi_query", [True, False])
def test_the_cache_holds_what_attention_makes(tiny_base: TinyBase, multi_query: bool) -> None:
    """GPT-BigCode ignores num_key_value_heads and head_dim."""
    config = tiny_base("gpt_bigcode").config
    base = BaseModel.load(replace(config, shape=config.shape | {"multi_query": multi_query, "head_dim": 3}))
    assert attention_sizes(base.model.config) == (1 if multi_query else 4, 8)
    assert base.new_cache(7).keys.shape == (3, 1, 1 if multi_query else 4, 7, 8)


def test_parts_of_the_stack(tiny_base: TinyBase) -> None:
    """An early exit drafts with the first layers, and the last layers continue from their output."""
    base = tiny_base("gpt_bigcode")
    shallow = early_exit(base, 2)
    assert len(shallow.model.model.transformer.h) == 2 and len(base.model.transformer.h) == 3
    plain = decode(base, None, [5, 6, 7] * 4, max_new_tokens=14, ignore_eos=True)
    drafted = decode(base, shallow, [5, 6, 7] * 4, max_new_tokens=14, ignore_eos=True)
    assert drafted.tokens == plain.tokens and sum(step.accepted for step in drafted.steps) > 0
    ids = torch.arange(40, 70)[None]
    with torch.inference_mode():
        states = base.model(ids, output_hidden_states=True).hidden_states
        done = PartialForward(layers=2, hidden=states[2])
        chain = TokenTree.chain(ids.shape[1] - 1).shape
        hidden = base.verify(ids, chain, base.new_cache(40), partial_forward=done).final
        torch.testing.assert_close(hidden, states[-1], rtol=1e-4, atol=1e-5)


def test_second_names_are_not_registered(tiny_base: TinyBase) -> None:
    """Registered twice, weights would be saved, adapted and packed twice."""
    base = tiny_base("gpt_bigcode")
    for model in (base.model, early_exit(base, 2).model.model):
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        assert names and not [name for name in names if name.startswith("model") or ".layers" in name]


# Parts of a base ------------------------------------------------------------------------------------------------------


Script = Callable[[str], ModuleType]


class CountingFile:
    """A safetensors file that counts the bytes of the tensors and rows that are read from it."""

    total = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = safe_open(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self._file.get_slice(name))


class CountingSlice:
    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, rows: Any) -> Any:
        read = self._stored[rows]
        CountingFile.total += read.nbytes
        return read


@pytest.fixture
def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountingFile]]:
    monkeypatch.setattr(CountingFile, "total", 0)
    monkeypatch.setattr("drafthead.models.base.checkpoint_tensors.safe_open", CountingFile)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", CountingFile)
    yield CountingFile


SHAPES: dict[str, dict[str, Any]] = {"untied": TINY, "tied": {**TINY, "tie_word_embeddings": True}}


def save(name: str, folder: Path, script: Script, shard_size: str = "5GB") -> BaseConfig:
    """Save a random stock checkpoint of one of ``SHAPES`` or of ``benchmarks/base_shapes.py``; return its settings."""
    bases = script("bases")
    bases.stored(SHAPES.get(name) or bases.SHAPES[name], folder).save_pretrained(folder, max_shard_size=shard_size)
    return BaseConfig(name=str(folder), tokenizer="builtin:tiny", dtype="float32")


@pytest.mark.parametrize("name", ["untied", "tied", "gemma3", "qwen3_moe", "mixtral"])
def test_tensors_of_a_checkpoint_are_those_of_the_stock_model(
    name: str, tmp_path: Path, script: Script, count_bytes: type[CountingFile]
) -> None:
    """Shards, composites, tied heads and experts that transformers stacks."""
    config = save(name, tmp_path, script, "50KB")
    model, _ = load_weights(config, torch.device("cpu"))
    bare, count_bytes.total = meta_model(config, config.transformers_config()), 0
    tensors = checkpoint_tensors(config, bare)
    assert count_bytes.total == 0
    for key, expected in model.state_dict().items():
        assert torch.equal(tensors.read(key), expected)
        assert torch.equal(tensors.read(key, slice(1, 3)), expected[1:3])
    table = model.get_input_embeddings().weight
    count_bytes.total = 0
    tensors.read("model.embed_tokens.weight", slice(5, 9))
    assert count_bytes.total == 4 * table.shape[1] * table.itemsize


def test_tensors_that_cannot_be_read_are_named(tmp_path: Path, script: Script) -> None:
    config = save("untied", tmp_path, script)
    path, key = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    stored = load_file(path)
    bare = meta_model(config, config.transformers_config())
    faults = {"lacks the weight": None, "F8_E4M3": stored[key].to(torch.float8_e4m3fn), "instead of": stored[key][:8]}
    for says, fault in faults.items():
        save_file({k: v for k, v in (stored | {key: fault}).items() if v is not None}, path)
        with pytest.raises(UserError, match=f"{key}.*{says}|{says}.*{key}"):
            checkpoint_tensors(config, bare).read(key)


@pytest.mark.parametrize("name", ["untied", "tied", "gemma3", "qwen3_moe", "olmo", "cohere"])
def test_parts_made_in_three_ways_are_those_of_the_model(
    name: str, tmp_path: Path, script: Script, count_bytes: type[CountingFile]
) -> None:
    """Shards, composites, experts, a norm without weights, scaled logits; only the parts and eight rows are read."""
    config = save(name, tmp_path, script, "50KB")
    base = BaseModel.load(config, "cpu")
    layers = [m for m in base.stock().model.layers.modules() if isinstance(m, torch.nn.Linear)]
    count_bytes.total = 0
    parts = BaseParts.of_checkpoint(config, "cpu")
    ends = {base.embedding.data_ptr(): base.embedding.nbytes, base.lm_head.weight.data_ptr(): base.embedding.nbytes}
    norm = next(base.final_norm.parameters(), None)
    rows = sum(4 * layer.in_features * min(8, layer.out_features) for layer in layers)
    first = 4 * layers[0].in_features * min(64, layers[0].out_features)
    assert count_bytes.total == sum(ends.values()) + rows + (first if norm is None else norm.nbytes)
    table = torch.cat([base.embedding, torch.zeros(4, base.hidden_size)])  # an engine pads its vocabulary
    head = None if parts.embedding is parts.output_layer.weight else torch.cat([base.lm_head.weight, table[:4]])
    given = BaseParts.of_tensors(config, embedding=table, lm_head=head, norm=norm)
    assert given.embedding.data_ptr() == table.data_ptr()
    assert given.lm_head.weight.data_ptr() == (table if head is None else head).data_ptr()
    states = torch.randn(1, 3, base.hidden_size)
    for other in (parts, given):
        assert other.identity() == base.identity() and other.eos_ids == base.eos_ids
        torch.testing.assert_close(other.embedding, base.embedding, rtol=0, atol=0)
        torch.testing.assert_close(other.final_norm(states), base.final_norm(states), rtol=0, atol=0)
        torch.testing.assert_close(other.lm_head.logits(states), base.lm_head.logits(states), rtol=0, atol=0)
        rotations = [
            each.rotary.state_dict(keep_vars=True) | dict(each.rotary.named_buffers()) for each in (other, base)
        ]
        torch.testing.assert_close(*rotations, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["untied", "gemma3", "qwen3_moe", "cohere"])
def test_layers_alone_compute_what_the_whole_model_does(
    name: str, tmp_path: Path, script: Script, count_bytes: type[CountingFile]
) -> None:
    """Windows, experts and scaled embeddings; the weights of other layers are not read."""
    config = save(name, tmp_path, script, "50KB")
    base, parts, ids = BaseModel.load(config, "cpu"), BaseParts.of_checkpoint(config, "cpu"), random_ids(40)
    last = base.num_layers
    states = base.hidden_states(TrainBatch.of([ids]), HiddenStatesSpec(layers=(1, last - 1, last))).layers
    assert states is not None
    first, before, final = states[0].chunk(3, -1)
    embedded = parts.input_embeddings(torch.tensor(ids))
    torch.testing.assert_close(layers_output(parts, 0, 1, [embedded])[0], first, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layers_output(parts, 1, last - 1, [first])[0], before, rtol=1e-3, atol=1e-4)
    count_bytes.total = 0
    torch.testing.assert_close(layers_output(parts, last - 1, last, [before])[0], final, rtol=1e-3, atol=1e-4)
    count = count_bytes.total
    layer = load_weights(config, torch.device("cpu"))[0].model.layers[-1]
    assert count == sum(each.nbytes for each in layer.parameters())


def test_parts_tell_a_fine_tune_from_its_original(tmp_path: Path, script: Script) -> None:
    config, path = save("untied", tmp_path, script), tmp_path / "model.safetensors"
    original, key = BaseParts.of_checkpoint(config, "cpu").fingerprint, "model.layers.2.mlp.up_proj.weight"
    save_file(load_file(path) | {key: load_file(path)[key] * 1.1}, path)
    tuned = BaseParts.of_checkpoint(config, "cpu").fingerprint
    assert tuned[:16] == original[:16] and tuned != original
    assert tuned == BaseModel.load(config, "cpu").fingerprint


def test_a_random_base_gives_its_parts_too() -> None:
    config = BaseConfig(random=True, shape=TINY, tokenizer="builtin:tiny", prepack=False)
    parts, base = BaseParts.of_checkpoint(config, "cpu"), BaseModel.load(config, "cpu")
    assert parts.identity() == base.identity() and torch.equal(parts.embedding, base.embedding)
    refuses("engine's tensors for a random", BaseParts.of_tensors, config, embedding=base.embedding)
