"""What the base reads, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.data.answers.config import SamplerConfig
from drafthead.data.batch import FeatureSpec, TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig, check_architecture
from drafthead.models.decoding.corpus import generate_answers
from drafthead.models.decoding.loop import decode

TinyBase = Callable[..., BaseModel]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_features_of_packed_documents_equal_each_alone(tiny_base: TinyBase, architecture: str) -> None:
    base = tiny_base(architecture)
    documents = [[3, 4, 5, 6, 7], [9, 8, 7], [1, 2, 3, 4]]
    flat = [i for d in documents for i in d]
    batch = TrainBatch(
        input_ids=torch.tensor([flat]),
        position_ids=torch.tensor([[p for d in documents for p in range(len(d))]]),
        document_ids=torch.tensor([[n for n, d in enumerate(documents) for _ in d]]),
        loss_mask=torch.ones(1, len(flat), dtype=torch.bool),
    )
    features = base.features(batch, FeatureSpec(layers=(0, 2)))
    start = 0
    for document in documents:
        ids = torch.tensor([document])
        alone = base.model(ids, output_hidden_states=True).hidden_states
        part = slice(start, start + len(document))
        torch.testing.assert_close(features.final[:, part], alone[-1], rtol=1e-4, atol=1e-5)
        assert features.layers is not None
        torch.testing.assert_close(features.layers[:, part], torch.cat([alone[0], alone[2]], -1), rtol=1e-4, atol=1e-5)
        start += len(document)


def test_batched_generation_equals_decoding_each_prompt(tiny_base: TinyBase) -> None:
    """Full slots, replaced rows, shared prefixes and shrinking change nothing; features are what reading gives."""
    base = tiny_base()
    generator = torch.Generator().manual_seed(0)
    prompts = [
        (n, [1, 2, 3, *torch.randint(5, 250, (3 + 5 * (n % 4),), generator=generator).tolist()]) for n in range(11)
    ]
    sampler = SamplerConfig(max_new_tokens=20)
    answers = list(
        generate_answers(base, prompts, sampler, batch_size=3, keep_hidden_states=True, max_prompt_tokens=40)
    )
    assert sorted(a.prompt_number for a in answers) == list(range(11))
    for answer in answers:
        prompt = prompts[answer.prompt_number][1]
        plain = decode(base, None, prompt, max_new_tokens=20)
        assert answer.input_ids.tolist() == prompt + plain.tokens
        assert answer.boundary == len(prompt)
        ids = torch.tensor([answer.input_ids.tolist()])
        wanted = base.forward(ids[:, :-1], base.new_cache(ids.shape[1])).final[0]
        torch.testing.assert_close(torch.from_numpy(answer.features).float(), wanted, rtol=2e-3, atol=2e-3)


def test_a_sampled_row_does_not_depend_on_its_batch(tiny_base: TinyBase) -> None:
    base = tiny_base()
    prompts = [(n, [7, 8, 9 + n]) for n in range(6)]
    sampler = SamplerConfig(temperature=1.0, top_k=20, top_p=0.9, max_new_tokens=15, seed=3)
    texts = [
        {
            a.prompt_number: a.input_ids.tolist()
            for a in generate_answers(base, prompts, sampler, batch_size=slots, max_prompt_tokens=16)
        }
        for slots in (1, 4)
    ]
    assert texts[0] == texts[1]


def test_samples_follow_the_truncated_distribution(tiny_base: TinyBase) -> None:
    """Chi-square of the first sampled token, after top-k and top-p, over 1500 seeds."""
    base = tiny_base()
    prompt = [5, 6, 7]
    logits = base.logits(base.forward(torch.tensor([prompt]), base.new_cache(4)).final[:, -1])[0]
    probs = (logits / 1.5).softmax(-1)
    kept, ids = probs.topk(8)
    kept = kept / kept.sum()
    before = kept.cumsum(0) - kept
    kept = torch.where(before < 0.8, kept, 0.0)
    kept = kept / kept.sum()
    sampler = SamplerConfig(temperature=1.5, top_k=8, top_p=0.8, max_new_tokens=1)
    drawn = [
        a.input_ids[-1]
        for a in generate_answers(
            base, [(n, prompt) for n in range(1500)], sampler, batch_size=50, max_prompt_tokens=16
        )
    ]
    counts = torch.tensor([sum(t == i for t in drawn) for i in ids.tolist()])
    assert counts.sum() == 1500 and bool((counts[kept == 0] == 0).all())
    support = kept > 0
    expected = 1500 * kept[support]
    statistic = float(((counts[support] - expected) ** 2 / expected).sum())
    assert statistic < 30, f"chi-square {statistic} with {int(support.sum()) - 1} degrees of freedom"


@pytest.mark.parametrize(
    ("model_type", "settings", "says"),
    [
        ("mamba", {}, "mamba models have"),
        ("jamba", {}, "jamba models have"),
        ("gemma2", {}, "gemma2 soft-caps its attention logits"),
        ("mistral", {"sliding_window": 64}, "sliding-window attention over 64 positions.*base.max_context=64"),
        ("deepseek_v3", {}, "deepseek_v3 uses multi-head latent attention"),
        ("t5", {}, "t5 models have no decoder-only self-attention"),
    ],
)
def test_refused_architectures(model_type: str, settings: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_architecture(AutoConfig.for_model(model_type, **settings), None)


@pytest.mark.parametrize(("model_type", "says"), [("gpt2", "gpt2 is not built like a Llama"), ("cohere", "its logits")])
def test_bases_that_would_be_wrong_are_refused(model_type: str, says: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = {"model_type": model_type, "vocab_size": 300, **(sizes if model_type != "gpt2" else {"n_embd": 32})}
    shape |= (
        {"logit_scale": 0.0625, "num_key_value_heads": 4} if model_type == "cohere" else {"n_layer": 2, "n_head": 4}
    )
    with pytest.raises(UserError, match=says):
        BaseModel.load(BaseConfig(random=True, shape=shape, tokenizer="builtin:tiny", dtype="float32"))


def test_a_window_as_long_as_the_context_is_accepted() -> None:
    check_architecture(AutoConfig.for_model("mistral", sliding_window=64), 64)


def test_bad_base_settings() -> None:
    with pytest.raises(ValueError, match="base.dtype must be one of"):
        BaseConfig(dtype="float8")
    with pytest.raises(UserError, match="model_type 'lama' is not known"):
        BaseConfig(shape={"model_type": "lama"}).transformers_config()


def test_a_base_with_missing_weights_is_refused(tiny_base: TinyBase, tmp_path: Path) -> None:
    """Where transformers goes on with random numbers."""
    shape = {key: value for key, value in tiny_base().config.shape.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape))
    model.save_pretrained(tmp_path)
    config = BaseConfig(name=str(tmp_path), tokenizer="builtin:tiny")
    assert BaseModel.load(config).num_layers == 3
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights, model.layers.1.mlp.up_proj.weight for one"):
        BaseModel.load(config)
