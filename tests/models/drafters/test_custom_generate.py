"""``model.generate(..., custom_generate=...)`` against stock ``generate``: the rows of ``docs/guides/generate.md``."""

import copy
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextGenerationPipeline,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer

import drafthead
from drafthead.errors import UserError
from drafthead.files.local import read_json, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import AdaptiveLength, DraftConfig, DraftSampling
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.kernels.private_apis import CACHE
from drafthead.models.token_tree import TokenTree
from support import TinyBase, cases, leaning, p_value_of_answers, refuses, small_head

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "generate.md").read_text()
IDS = torch.tensor([[5, 17, 99, 42, 7, 23], [0, 0, 0, 8, 9, 10], [0, 50, 60, 70, 80, 90]])
MASK = (IDS != 0).long()
NEW = 24
TREE = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
GREEDY = {"attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def rows_of(section: str) -> list[str]:
    lines = PAGE.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    return [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:]


def stock_model(tiny_base: TinyBase) -> Any:
    model = tiny_base().stock().requires_grad_(True)
    assert model.config._attn_implementation == "sdpa"
    return model


shared_model = pytest.fixture(scope="module", name="model")(stock_model)  # for tests that leave the model unchanged
changed_model = pytest.fixture(name="own_model")(stock_model)


@pytest.fixture(scope="module")
def head(tiny_base: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved head with a tree, which is right for about every second draft of greedy answers."""
    base = tiny_base()
    settings = {**GREEDY, "max_new_tokens": 40, "eos_token_id": None}
    answers = base.stock().generate(IDS, **settings)
    texts = [(row.tolist()[6 - int(mask.sum()) :], int(mask.sum())) for row, mask in zip(answers, MASK, strict=True)]
    head = leaning(MedusaConfig(num_draft_tokens=3).build(base), texts, size=30)
    head.tree = TREE
    folder = tmp_path_factory.mktemp("head")
    head.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(model: Any) -> Tensor:
    return model.generate(IDS, **{**GREEDY, "eos_token_id": None})


def with_head(model: Any, head: Path, *args: Any, **arguments: Any) -> Any:
    return model.generate(*args, **arguments, custom_generate=drafthead.custom_generate(head))


def compared(model: Any, head: Path, **arguments: Any) -> Tensor:
    stock: Tensor = model.generate(IDS, **{**GREEDY, **arguments})
    assert torch.equal(with_head(model, head, IDS, **{**GREEDY, **arguments}), stock)
    return stock


def by_name(head: Path) -> dict[str, Any]:
    return {"custom_generate": str(head), "trust_remote_code": True}


class Even(LogitsProcessor):
    """Every row may write its own residues only; writes into its argument, as many processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(len(input_ids)):
            scores[row, (int(input_ids[row, -1]) + row) % 3 :: 3] = -torch.inf
        return scores


class Counting(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Following(LogitsProcessor):
    """A grammar that follows the answer, and cannot go back."""

    length = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.length:
            raise RuntimeError("not a continuation")
        self.length = input_ids.shape[1]
        return scores


class Recorded(StoppingCriteria):
    """Has state, records its calls, and stops a row after a token that depends on the row."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append(input_ids.tolist())
        return (input_ids[:, -1] % 7 == 3) & (input_ids.shape[1] > 10)


class Failing(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        raise KeyboardInterrupt


class Put(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def only_near(batch: int, ids: Tensor) -> list[int]:
    return list(range(int(ids[-1]) % 50 + batch, 300, 7))


GREEDY_CASES: dict[str, dict[str, Any]] = {
    "batches with left padding": {},
    "`max_length`": {"max_new_tokens": None, "max_length": 19},
    "`max_new_tokens`": {"max_new_tokens": 5},
    "`max_time`": {"max_time": 0.0},
    "`min_length`": {"min_length": 20, "eos": 2},
    "`min_new_tokens`": {"min_new_tokens": 12, "eos": 2},
    "one `eos_token_id`": {"eos": 1},
    "several `eos_token_id`": {"eos": 2},
    "`repetition_penalty`": {"repetition_penalty": 1.3},
    "`encoder_repetition_penalty`": {"encoder_repetition_penalty": 1.7},
    "`no_repeat_ngram_size`": {"no_repeat_ngram_size": 2},
    "`encoder_no_repeat_ngram_size`": {"encoder_no_repeat_ngram_size": 1},
    "`bad_words_ids`": {"bad": 3},
    "`sequence_bias`": {"bias": 3},
    "`suppress_tokens`": {"suppress": 2},
    "`begin_suppress_tokens`": {"begin": 1},
    "`forced_bos_token_id`": {"forced_bos_token_id": 9},
    "`forced_eos_token_id`": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "`exponential_decay_length_penalty`": {"exponential_decay_length_penalty": (3, 1.3), "eos": 1},
    "`prefix_allowed_tokens_fn`": {"prefix_allowed_tokens_fn": only_near},
    "`remove_invalid_values`": {"remove_invalid_values": True},
    "`watermarking_config`": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "`use_cache`": {"use_cache": False},
    "own logits processors without state": {"logits_processor": LogitsProcessorList([Even()])},
    "the argument `generation_config`": {
        "generation_config": GenerationConfig(repetition_penalty=1.2, max_new_tokens=9, do_sample=False, pad_token_id=0)
    },
}


def settings_of(case: dict[str, Any], stock: Tensor) -> dict[str, Any]:
    """Replace numbers by tokens that stock ``generate`` writes early, so that a setting has an effect."""
    settings = {"eos_token_id": None, **case}
    early = list(dict.fromkeys(stock[:, 8:16].T.flatten().tolist()))
    pairs = [[int(a), int(b)] for a, b in zip(stock[:, 7], stock[:, 8], strict=True)]
    if count := settings.pop("eos", 0):
        settings["eos_token_id"] = early[:count] if count > 1 else early[0]
    if count := settings.pop("bad", 0):
        settings["bad_words_ids"] = [*pairs, *([token] for token in early[:count])]
    if count := settings.pop("bias", 0):
        settings["sequence_bias"] = [[pair, -20.0] for pair in pairs] + [[[token], 3.0] for token in early[:count]]
    if count := settings.pop("suppress", 0):
        settings["suppress_tokens"] = early[:count]
    if settings.pop("begin", 0):
        settings["begin_suppress_tokens"] = stock[:, 6].tolist()
    return settings


@pytest.mark.parametrize("name", GREEDY_CASES)
def test_greedy_answers_are_those_of_stock_generate(model: Any, head: Path, plain: Tensor, name: str) -> None:
    settings = settings_of(GREEDY_CASES[name], plain)
    answers = compared(model, head, **settings)
    harmless = "batches with left padding", "`remove_invalid_values`", "`use_cache`", "`encoder_no_repeat_ngram_size`"
    one_prompt = "`forced_bos_token_id`"  # only for prompts of one token
    assert torch.equal(answers, plain) == (name in harmless or name == one_prompt)
    if name == one_prompt:
        single = {**GREEDY, **settings, "attention_mask": None}
        stock = model.generate(IDS[:, :1] + 5, **single)
        assert torch.equal(with_head(model, head, IDS[:, :1] + 5, **single), stock) and (stock[:, 1] == 9).all()


@pytest.mark.parametrize("seed", range(4))
def test_combinations_of_settings(model: Any, head: Path, plain: Tensor, seed: int) -> None:
    names = random.Random(seed).sample([name for name in GREEDY_CASES if "argument" not in name], 5)
    merged: dict[str, Any] = {}
    for name in names:
        eos = merged.get("eos_token_id")
        merged |= settings_of(GREEDY_CASES[name], plain)
        merged["eos_token_id"] = eos if merged["eos_token_id"] is None else merged["eos_token_id"]
    compared(model, head, **merged)


def test_drafts_are_accepted(model: Any, head: Path) -> None:
    """The other comparisons would pass with a head that is never right."""
    passes: list[Any] = []
    with_head(model, head, IDS, **GREEDY)  # the checks of a first call run the model
    hook = model.model.register_forward_hook(lambda *call: passes.append(call))
    with_head(model, head, IDS[:1], **{**GREEDY, "attention_mask": None, "eos_token_id": None})
    hook.remove()
    assert len(passes) < NEW - 3


def test_a_head_named_by_its_folder(model: Any, head: Path, plain: Tensor) -> None:
    settings = {**GREEDY, "eos_token_id": None, "inputs": IDS}
    assert torch.equal(model.generate(**settings, **by_name(head)), plain)
    refuses("no draft head at nowhere", drafthead.custom_generate, "nowhere")
    refuses("the head of this call is unknown", drafthead.generate_with_head, model, inputs=IDS)


def test_trees_by_name(model: Any, head: Path, plain: Tensor) -> None:
    refuses("names neither a tree nor a file", drafthead.custom_generate, head, tree="cots")
    refuses("give one of them", drafthead.custom_generate, head, tree="static", draft_config=DraftConfig(tree=TREE))
    passes = Counter[str]()
    for tree in ("head", "static", "chain:1"):
        drafts = drafthead.custom_generate(head, tree=tree)
        for _ in range(2):  # the checks of a first call run the model
            hook = model.model.register_forward_hook(lambda *_, tree=tree: passes.update([tree]))
            passes[tree] = 0
            assert torch.equal(model.generate(IDS, **{**GREEDY, "eos_token_id": None}, custom_generate=drafts), plain)
            hook.remove()
    assert passes["head"] == passes["static"] < passes["chain:1"]


@pytest.mark.parametrize("eos", [0, 2])
def test_own_stopping_criteria_see_every_token(model: Any, head: Path, plain: Tensor, eos: int) -> None:
    settings = {**GREEDY, **settings_of({"eos": eos}, plain), "max_new_tokens": 40}
    results = []
    for more in ({}, {"custom_generate": drafthead.custom_generate(head)}):
        recorded = Recorded()
        criteria = StoppingCriteriaList([recorded])
        results.append((model.generate(IDS, stopping_criteria=criteria, **settings, **more).tolist(), recorded.calls))
    assert results[0] == results[1] and len(results[0][1]) > 3


def test_stop_strings(model: Any, head: Path, plain: Tensor, tiny_base: TinyBase) -> None:
    tokenizer = tiny_base().tokenizer
    text = [tokenizer.decode([token]) for token in plain[0, 8:20].tolist()]
    stop = next(piece for piece in text if piece.isascii() and piece.isprintable() and piece.strip())
    compared(model, head, stop_strings=[stop], tokenizer=tokenizer, eos_token_id=None)  # finished rows continue
    stopped = compared(model, head, stop_strings=[stop], tokenizer=tokenizer, eos_token_id=299)
    assert not torch.equal(stopped, plain)
    refuses("stop_strings needs the model's tokenizer", with_head, model, head, IDS, stop_strings=[stop], **GREEDY)


def test_streamers(model: Any, head: Path) -> None:
    puts = []
    for more in ({}, {"custom_generate": drafthead.custom_generate(head)}):
        streamer = Put()
        model.generate(IDS, streamer=streamer, **GREEDY, **more)
        puts.append(streamer.values)
    assert puts[0] == puts[1] and puts[0][-1] == "end" and len(puts[0]) > 10


@pytest.mark.parametrize("processed", [{}, {"repetition_penalty": 1.3}])
def test_scores_and_logits(model: Any, head: Path, plain: Tensor, processed: dict[str, Any]) -> None:
    settings = {**GREEDY, **settings_of({"eos": 1}, plain), **processed, "return_dict_in_generate": True}
    settings |= {"output_scores": True, "output_logits": True}
    stock, ours = model.generate(IDS, **settings), with_head(model, head, IDS, **settings)
    assert type(ours) is type(stock) and torch.equal(ours.sequences, stock.sequences)
    assert len(ours.scores) == len(stock.scores) == len(ours.logits) == stock.sequences.shape[1] - IDS.shape[1]
    eos = settings["eos_token_id"]
    for step, (a, b, c, d) in enumerate(zip(ours.scores, stock.scores, ours.logits, stock.logits, strict=True)):
        going = ~(stock.sequences[:, 6 : 6 + step] == eos).any(1)
        torch.testing.assert_close(a[going], b[going], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(c[going], d[going], atol=1e-4, rtol=1e-4)
        assert not c[~going].any() and a.dtype == torch.float32
        a += 1  # not a tensor of inference mode
    transitions = [model.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (ours, stock)]
    torch.testing.assert_close(transitions[0][1], transitions[1][1], atol=1e-4, rtol=1e-4)
    without = with_head(model, head, IDS, **{**settings, "output_scores": False, "output_logits": False})
    assert without.scores is without.logits is None and torch.equal(without.sequences, stock.sequences)


def test_the_generation_config_of_the_model(own_model: Any, head: Path) -> None:
    model = own_model
    plain = model.generate(IDS, **GREEDY)
    model.generation_config.update(repetition_penalty=1.5, suppress_tokens=[7], max_new_tokens=11)
    settings = {"attention_mask": MASK, "pad_token_id": 0}
    stock = model.generate(IDS, **settings)
    assert torch.equal(with_head(model, head, IDS, **settings), stock) and not torch.equal(stock, plain[:, :17])


def test_pipeline(model: Any, head: Path, tiny_base: TinyBase) -> None:
    pipe = TextGenerationPipeline(model=model, tokenizer=tiny_base().tokenizer)
    pipe.tokenizer.pad_token_id = 0
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    prompts: list[Any] = [["hello there", "a"], [{"role": "user", "content": "Why?"}]]
    for prompt, batch_size in ((prompts[0], 1), (prompts[1], 1), (prompts[0], 2)):
        stock = pipe(prompt, **settings, batch_size=batch_size)
        assert pipe(prompt, **settings, batch_size=batch_size, **by_name(head)) == stock


SAMPLED_CASES: dict[str, dict[str, Any]] = {
    "`num_return_sequences`": {"top_k": 4},
    "`temperature`, `top_k`, `top_p`": {"temperature": 0.8, "top_k": 6, "top_p": 0.8},
    "`min_p`, `typical_p`, `epsilon_cutoff`, `eta_cutoff`, `top_h`": {
        **{"min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_h": 0.7},
        "renormalize_logits": True,
        "temperature": 0.4,
    },
    "`do_sample` with `repetition_penalty`": {"repetition_penalty": 1.4, "top_k": 4, "no_repeat_ngram_size": 2},
}


@cases(
    "name, draft_sampling, coupled",
    *((name, DraftSampling.WITHOUT_REPLACEMENT, False) for name in SAMPLED_CASES),
    ("`temperature`, `top_k`, `top_p`", DraftSampling.TOP_K, False),
    ("`temperature`, `top_k`, `top_p`", DraftSampling.TOP_K, True),
)
def test_sampled_answers_are_stock_distributed(
    model: Any, head: Path, name: str, draft_sampling: DraftSampling, coupled: bool
) -> None:
    """Exact probabilities of all continuations of three tokens, from stock scores, against counts."""
    rows, new = 600, 3
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None, **SAMPLED_CASES[name]}
    expected = {(): 1.0}
    for _ in range(new):
        ids = torch.tensor([IDS[0].tolist() + list(text) for text in expected])
        out = {"return_dict_in_generate": True, "output_scores": True}
        scores = model.generate(ids, **settings, **out, max_new_tokens=1).scores[0]
        expected = {
            (*text, token): weight * p
            for (text, weight), row in zip(expected.items(), scores.softmax(-1).tolist(), strict=True)
            for token, p in enumerate(row)
            if p > 0
        }
    draft_config = DraftConfig(tree=TREE, draft_sampling=draft_sampling)
    decode = drafthead.custom_generate(head, draft_config=draft_config, coupled=coupled)
    torch.manual_seed(0)
    sampled = model.generate(IDS[:1], **settings, max_new_tokens=new, num_return_sequences=rows, custom_generate=decode)
    counts = Counter(tuple(row) for row in sampled[:, 6:].tolist())
    assert len(expected) > 3 and p_value_of_answers(counts, expected) > 1e-4


def test_a_seed_gives_the_same_answer(model: Any, head: Path) -> None:
    settings = {**GREEDY, "do_sample": True, "max_new_tokens": 10, "eos_token_id": None}

    def sample(seed: int, **more: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        return with_head(model, head, IDS, **settings, **more).tolist()

    first = sample(1)
    assert sample(1) == first != sample(2)
    state = torch.get_rng_state()
    with_head(model, head, IDS, **GREEDY)
    assert torch.equal(torch.get_rng_state(), state), "greedy decoding draws nothing"
    coupled = []
    for drafter in ("head", "prompt_lookup:3", "head+prompt_lookup:3"):
        torch.manual_seed(1)
        decode = drafthead.custom_generate(head, drafter=drafter, coupled=True)
        coupled.append(model.generate(IDS, **settings, custom_generate=decode).tolist())
    assert coupled[0] == coupled[1] == coupled[2] != first


TESTED_ELSEWHERE = {
    "own stopping criteria": test_own_stopping_criteria_see_every_token,
    "`stop_strings`": test_stop_strings,
    "`streamer`": test_streamers,
    "`return_dict_in_generate` with `output_scores` and `output_logits`": test_scores_and_logits,
    "the model's `generation_config`": test_the_generation_config_of_the_model,
    '`pipeline("text-generation")`': test_pipeline,
    "the seed of torch's generator": test_a_seed_gives_the_same_answer,
}


def test_every_supported_row_of_the_page_is_a_test() -> None:
    assert set(rows_of("Supported")) == {*GREEDY_CASES, *SAMPLED_CASES, *TESTED_ELSEWHERE}
    assert set(rows_of("Rejected")) == {*REJECTED, *REJECTED_MODELS}


def filled_cache(model: Any) -> DynamicCache:
    return model(IDS[:, :2], use_cache=True)[CACHE]


REJECTED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "`num_beams`": (lambda model: {"num_beams": 2}, "num_beams"),
    "`assistant_model`": (lambda model: {"assistant_model": copy.deepcopy(model)}, "assistant_model"),
    "`prompt_lookup_num_tokens`": (lambda model: {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "`use_mtp`": (lambda model: {"use_mtp": True}, "use_mtp"),
    "`penalty_alpha` with `top_k`": (lambda model: {"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    "`dola_layers`": (lambda model: {"dola_layers": "low"}, "dola_layers"),
    "`guidance_scale`": (lambda model: {"guidance_scale": 1.5}, "guidance_scale"),
    "`past_key_values`, `cache` since 5.24": (lambda model: {CACHE: filled_cache(model)}, f"support {CACHE};"),
    "`cache_implementation`": (lambda model: {"cache_implementation": "static"}, "cache_implementation"),
    "`inputs_embeds`": (lambda model: {"inputs_embeds": model.get_input_embeddings()(IDS)}, "inputs_embeds"),
    "`output_attentions`": (lambda model: {"output_attentions": True}, "output_attentions"),
    "`output_hidden_states`": (lambda model: {"output_hidden_states": True}, "output_hidden_states"),
    "`token_healing`": (lambda model: {"token_healing": True}, "token healing"),
    "`position_ids` that do not count from 0": (
        lambda model: {"position_ids": torch.arange(6).expand(3, -1)},
        "position_ids",
    ),
    "padding on the right": (lambda model: {"attention_mask": MASK.flip(1)}, "padding_side='left'"),
    "a logits processor with state": (
        lambda model: {"logits_processor": LogitsProcessorList([Counting()])},
        "Counting has state",
    ),
    "a longer answer than the model's context": (lambda model: {"max_new_tokens": 510}, "context of 512"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_by_name_before_any_work(model: Any, head: Path, name: str) -> None:
    arguments, message = REJECTED[name]
    given = {**GREEDY, **arguments(model)}
    passes: list[Any] = []
    with_head(model, head, IDS, **GREEDY)  # the checks of a first call run the model
    hooks = [each.register_forward_hook(lambda *call: passes.append(call)) for each in (model, model.model)]
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        with_head(model, head, IDS, **given)
    for hook in hooks:
        hook.remove()
    assert name == "`token_healing`" or isinstance(raised.value, UserError)  # transformers rejects it first
    assert "\n" not in str(raised.value) and not passes and model.config._attn_implementation == "sdpa"


def test_processors_that_follow_the_answer_are_rejected(model: Any, head: Path) -> None:
    with pytest.raises(UserError, match="Following has state .*not a continuation"):
        with_head(model, head, IDS, **GREEDY, logits_processor=LogitsProcessorList([Following()]))
    with pytest.raises(UserError, match="one prompt at a time"):
        config = DraftConfig(tree=TREE, adaptive=AdaptiveLength())
        model.generate(IDS, **GREEDY, custom_generate=drafthead.custom_generate(head, draft_config=config))


REJECTED_MODELS: dict[str, tuple[Callable[[Any, TinyBase], Any], str]] = {
    "a head for another base": (lambda model, tiny_base: tiny_base(seed=1).stock(), "was trained for"),
    "a model that drafthead already drives": (
        lambda model, _: BaseModel.wrap(model, None).model,
        "already the base of a drafthead.BaseModel",
    ),
    "a model on several devices": (
        lambda model, _: setattr(model, "hf_device_map", {"model": 0, "lm_head": "cpu"}),
        "the whole model on one device, but it is on 2",
    ),
    "a model on the meta device": (lambda model, _: model.to("meta"), 'on "meta", which holds no values'),
    "a model in 8 bits (`load_in_8bit`)": (
        lambda model, _: setattr(model.config, "quantization_config", {"load_in_8bit": True}),
        "8-bit",
    ),
}


@pytest.mark.parametrize("name", REJECTED_MODELS)
def test_rejected_models(own_model: Any, head: Path, tiny_base: TinyBase, name: str) -> None:
    prepare, message = REJECTED_MODELS[name]
    model = prepare(own_model, tiny_base) or own_model
    with pytest.raises(UserError, match=message) as raised:
        with_head(model, head, IDS, **GREEDY)
    assert "\n" not in str(raised.value)


def test_loaded_heads(own_model: Any, head: Path, tiny_base: TinyBase) -> None:
    model = own_model
    stock = model.generate(IDS, **GREEDY)
    equal = drafthead.load_head(head, tiny_base())
    assert torch.equal(model.generate(IDS, **GREEDY, custom_generate=drafthead.custom_generate(equal)), stock)
    half = tiny_base().stock().bfloat16()
    with pytest.raises(UserError, match="in torch.float32, but the model is on cpu in torch.bfloat16"):
        half.generate(IDS, **GREEDY, custom_generate=drafthead.custom_generate(equal))
    assert half.config._attn_implementation == "sdpa"
    base = BaseModel.wrap(model, tiny_base().tokenizer)
    own = drafthead.load_head(head, base)
    assert torch.equal(model.generate(IDS, **GREEDY, custom_generate=drafthead.custom_generate(own)), stock)
    with pytest.raises(UserError, match="the draft head was loaded for another base"):
        tiny_base(seed=1).stock().generate(IDS, **GREEDY, custom_generate=drafthead.custom_generate(equal))


def test_the_model_is_left_unchanged(own_model: Any, head: Path, tmp_path: Path) -> None:
    model = own_model.train()
    model.model.layers[1].eval()
    model.lm_head.weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def facts() -> list[Any]:
        modules = [(name, module.training, type(module)) for name, module in model.named_modules()]
        return [modules, [(n, p.requires_grad) for n, p in model.named_parameters()], model.config.to_dict()]

    expected = facts()
    failing = StoppingCriteriaList([Failing()])
    for criteria in (failing, StoppingCriteriaList(), failing):
        if criteria:
            with pytest.raises(KeyboardInterrupt):
                with_head(model, head, IDS, **GREEDY, stopping_criteria=criteria)
        else:
            with_head(model, head, IDS, **GREEDY)
        assert facts() == expected
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    twin = copy.deepcopy(model).eval()
    assert torch.equal(with_head(twin, head, IDS, **GREEDY), model.eval().generate(IDS, **GREEDY))
    model(IDS, labels=IDS).loss.backward()
    model.save_pretrained(tmp_path / "saved")


def test_the_model_is_refused_to_other_threads_meanwhile(model: Any, head: Path) -> None:
    refused: list[BaseException] = []

    class Elsewhere(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            def call() -> None:
                try:
                    model.generate(IDS, **GREEDY)
                except UserError as error:
                    refused.append(error)

            thread = Thread(target=call)
            thread.start()
            thread.join()
            return torch.ones(len(input_ids), dtype=torch.bool)

    with_head(model, head, IDS, **GREEDY, stopping_criteria=StoppingCriteriaList([Elsewhere()]))
    assert "another thread drafts with this model" in str(refused[0])
    model.generate(IDS, **GREEDY)


def test_changed_weights_are_read_again(own_model: Any, head: Path, tiny_base: TinyBase, tmp_path: Path) -> None:
    model = own_model
    with_head(model, head, IDS, **GREEDY)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # in place, as training does
    stock = model.generate(IDS, **GREEDY)
    assert torch.equal(with_head(model, head, IDS, **GREEDY), stock)
    model.load_state_dict(tiny_base(seed=1).stock().state_dict(), assign=True)
    folder = Path(shutil.copytree(head, tmp_path / "head"))
    config = read_json(folder / "config.json")
    config["base"]["recipe"]["adapter"] = "lora"
    write_json(folder / "config.json", config)
    refuses("was trained for .* with the adapter lora .* without an adapter", with_head, model, folder, IDS, **GREEDY)
    other = small_head(tiny_base(seed=1), folder, TokenTree.chain(2))
    assert torch.equal(with_head(model, other, IDS, **GREEDY), model.generate(IDS, **GREEDY))


@pytest.mark.parametrize("architecture", ["qwen3", "gemma", "gpt_bigcode", "mistral"])
def test_architectures(tiny_base: TinyBase, tmp_path: Path, architecture: str) -> None:
    settings = {"sliding_window": 8} if architecture == "mistral" else {}
    base = tiny_base(architecture, **settings)
    model, folder = base.stock(), small_head(base, tmp_path / "head", TokenTree.chain(2))
    compared(model, folder, eos_token_id=None, max_new_tokens=20)
    compared(model, folder, eos_token_id=None, max_new_tokens=20, repetition_penalty=1.2)
