"""Bases with merged adapters, refused adapters, and the trainable copy of a base."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.batch import HiddenStatesSpec
from drafthead.errors import UserError
from drafthead.files.local import read_json, same_base, write_json
from drafthead.models.base.adapter import CONFIG, WEIGHTS
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lora import LoraBase
from drafthead.models.drafters.custom_generate import custom_generate
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.loading import load_head
from support import TinyBase, cases, refuses, row_of

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DOCUMENTS = row_of([list(range(20, 32)), list(range(100, 109))])


def adapted(base: BaseModel, *more: str, checkpointing: bool = False) -> LoraBase:
    return LoraBase(base, [*ALL_LINEAR, *more], checkpointing, r=4, lora_alpha=8, lora_dropout=0.0)


def nudge(tuned: LoraBase, size: float = 0.1) -> LoraBase:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters().values():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return tuned


def unpacked(base: BaseModel) -> BaseModel:
    return BaseModel.load(replace(base.config, prepack=False))


@pytest.fixture
def saved(tiny_base: TinyBase, tmp_path: Path) -> Path:
    nudge(adapted(tiny_base())).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("prepack", [True, False])
def test_the_copy_is_the_base_until_it_is_tuned(tiny_base: TinyBase, model_type: str, prepack: bool) -> None:
    base = tiny_base(model_type) if prepack else unpacked(tiny_base(model_type))
    tuned = adapted(base)
    before = base.hidden_states(DOCUMENTS, HiddenStatesSpec()).final
    torch.testing.assert_close(tuned.hidden_states(DOCUMENTS), before, rtol=1e-4, atol=1e-4)
    nudge(tuned)
    assert not torch.allclose(tuned.hidden_states(DOCUMENTS), before, atol=1e-2)
    assert torch.equal(base.hidden_states(DOCUMENTS, HiddenStatesSpec()).final, before)


def test_weights_that_are_not_packed_are_shared(tiny_base: TinyBase) -> None:
    base = unpacked(tiny_base())
    tuned = adapted(base)
    ours = {p.data_ptr() for p in base.model.parameters()}
    frozen = [p for name, p in tuned.model.named_parameters() if "lora_" not in name]
    assert frozen and all(p.data_ptr() in ours and not p.requires_grad for p in frozen)


def test_recomputed_activations_give_the_same_gradients(tiny_base: TinyBase) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        tuned = nudge(adapted(tiny_base(), checkpointing=checkpointing))
        tuned.train(True)
        assert tuned.model.model.layers[0].gradient_checkpointing == checkpointing
        tuned.hidden_states(DOCUMENTS).square().sum().backward()
        gradients.append([p.grad for p in tuned.parameters().values()])
        assert not tiny_base().model.get_input_embeddings()(torch.tensor([1])).requires_grad, (
            "the embedding is the base's"
        )
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("more", [(), ("lm_head",)])
def test_merged_at_load_it_is_the_tuned_copy(tiny_base: TinyBase, tmp_path: Path, more: tuple[str, ...]) -> None:
    base = tiny_base()
    tuned = nudge(adapted(base, *more))
    fingerprint = tuned.save(tmp_path)
    merged = BaseModel.load(replace(base.config, adapter=str(tmp_path)))
    assert merged.prepacked == base.prepacked
    hidden = tuned.hidden_states(DOCUMENTS)
    torch.testing.assert_close(merged.hidden_states(DOCUMENTS, HiddenStatesSpec()).final, hidden, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(merged.logits(hidden), tuned.output_head().logits(hidden), rtol=1e-3, atol=1e-3)
    assert same_base(merged.fingerprint, fingerprint) and not same_base(merged.fingerprint, base.fingerprint)
    assert merged.identity()["recipe"]["adapter"] == str(tmp_path)
    assert "adapter" not in base.identity()["recipe"]


def test_the_scale_counts(saved: Path, tiny_base: TinyBase) -> None:
    """Another alpha with the same weights is another base."""
    config = replace(tiny_base().config, adapter=str(saved))
    before = BaseModel.load(config).fingerprint
    configure(saved, lora_alpha=16)
    assert BaseModel.load(config).fingerprint != before


@pytest.mark.parametrize("layer", [0, 1])
def test_a_base_is_told_from_a_fine_tune_that_kept_its_ends(tiny_base: TinyBase, tmp_path: Path, layer: int) -> None:
    """Change one layer only, as peft's merge_and_unload may: norms, embedding and output head stay the original's."""
    base = tiny_base()
    MedusaConfig(num_draft_tokens=2).build(base).save_pretrained(tmp_path / "head")
    tuned = base.stock()
    with torch.no_grad():
        tuned.model.layers[layer].self_attn.v_proj.weight += 0.01
    for part in (tuned, base.tokenizer):
        part.save_pretrained(tmp_path / "tuned")
    other = BaseModel.load(BaseConfig(name=str(tmp_path / "tuned"), dtype="float32"))
    assert other.fingerprint[:16] == base.fingerprint[:16]
    refuses("was trained for", load_head, tmp_path / "head", other)


def test_equal_weights_are_one_base(saved: Path, tiny_base: TinyBase, tmp_path: Path) -> None:
    """A head of ``base.adapter`` fits the adapter merged elsewhere, saved or not, and live; and the other way round."""
    base = tiny_base()
    adapted = BaseModel.load(replace(base.config, adapter=str(saved)))

    def live() -> PeftModel:
        return PeftModel.from_pretrained(base.stock(), str(saved))

    merged = live().merge_and_unload()
    for part in (merged, base.tokenizer):
        part.save_pretrained(tmp_path / "merged")
    reloaded = BaseModel.load(BaseConfig(name=str(tmp_path / "merged"), dtype="float32"))
    for trained, others in ((adapted, [merged, live(), reloaded]), (reloaded, [adapted])):
        folder = tmp_path / trained.fingerprint[:5]
        MedusaConfig(num_draft_tokens=2).build(trained).save_pretrained(folder)
        for other in others:
            if isinstance(other, BaseModel):
                load_head(folder, other)
            else:
                other.generate(torch.tensor([[5, 6]]), max_new_tokens=2, custom_generate=custom_generate(folder))
    refuses("was trained for", load_head, folder, base)


def test_a_head_of_an_earlier_version_names_half_of_the_fingerprint(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    MedusaConfig(num_draft_tokens=2).build(base).save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    config["base"]["fingerprint"] = base.fingerprint[:16]
    write_json(tmp_path / "config.json", config)
    load_head(tmp_path, base)
    config["base"]["fingerprint"] = base.fingerprint[:15]
    write_json(tmp_path / "config.json", config)
    refuses("was trained for", load_head, tmp_path, base)


@cases(
    "trained_on, warns",
    ("org/Sibling", True),
    ("/models/sibling/", True),
    ("org/Mine", False),
    ("/elsewhere/mine", False),
    (None, False),
)
def test_an_adapter_of_another_base_is_named(
    saved: Path, tiny_base: TinyBase, tmp_path: Path, trained_on: str | None, warns: bool
) -> None:
    """Sibling fine-tunes have equal shapes, so the adapter merges without an error."""
    base = tiny_base()
    for part in (base.stock(), base.tokenizer):
        part.save_pretrained(tmp_path / "mine")
    configure(saved, base_model_name_or_path=trained_on)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        BaseModel.load(BaseConfig(name=str(tmp_path / "mine"), adapter=str(saved), dtype="float32"))
    expected = f"was trained on {trained_on}, but is merged into {tmp_path / 'mine'}"
    assert [expected in str(item.message) for item in caught if "adapter in" in str(item.message)] == [True] * warns


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def configure(folder: Path, **changes: object) -> None:
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), **changes})


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / CONFIG).unlink(), "no adapter in .*adapter_config.json"),
    (pickle_weights, "no adapter in .*adapter_model.safetensors"),
    (lambda folder: (folder / WEIGHTS).write_bytes(bytes(100)), "adapter_model.safetensors cannot be read"),
    (
        lambda folder: rewrite(folder, lambda w: {name: w[name] for name in sorted(w)[1:]}),
        r"does not fit the base: 1 tensors are missing in the adapter, such as base_model\S+lora_A",
    ),
    (
        lambda folder: rewrite(folder, lambda w: {name.replace(".1.", ".7."): value for name, value in w.items()}),
        r"does not fit the base: 14 tensors belong to layers that the base does not have, such as \S+layers.7.",
    ),
    (
        lambda folder: rewrite(folder, lambda w: {name: value * torch.nan for name, value in w.items()}),
        "with the adapter .* computes logits that are not finite",
    ),
    (
        lambda folder: rewrite(folder, lambda w: {name: value[:, 1:].contiguous() for name, value in w.items()}),
        r"does not fit the base: size mismatch: \S+ is \[32, 3\] in the adapter, but \[32, 4\] would fit; set base",
    ),
    (lambda folder: configure(folder, peft_type="LOHA"), "adapter of type LOHA"),
    (lambda folder: configure(folder, megatron_config={"a": 1}, megatron_core="antigravity"), "megatron_config"),
    (lambda folder: configure(folder, rank_pattern={"(a+)+!": 4}), "rank_pattern with '.*', a regular expression"),
    (lambda folder: configure(folder, init_lora_weights="pissa_niter_9"), "init_lora_weights='pissa_niter_9'"),
    (lambda folder: configure(folder, target_modules=["query_key_value"]), "does not fit .*query_key_value"),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILED, ids=[says[-25:] for _, says in SPOILED])
def test_misfitting_adapters(saved: Path, tiny_base: TinyBase, spoil: Callable[[Path], object], says: str) -> None:
    spoil(saved)
    refuses(says, BaseModel.load, replace(tiny_base().config, adapter=str(saved)))


def test_a_rank_above_that_of_the_file_takes_no_memory(
    saved: Path, tiny_base: TinyBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = set()

    def initialise(weight: Tensor, **_: Any) -> None:
        devices.update([weight.device.type] * (weight.numel() >= 10**6))

    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", initialise)
    configure(saved, r=10**6)
    with pytest.raises(UserError, match=r"size mismatch: \S+ is \[.*\] in the adapter"):
        BaseModel.load(replace(tiny_base().config, adapter=str(saved)))
    assert devices == {"meta"}


def test_a_regular_expression_is_replaced_by_the_layers_of_the_file(saved: Path, tiny_base: TinyBase) -> None:
    """This one would be tried without end."""
    config = replace(tiny_base().config, adapter=str(saved))
    expected = BaseModel.load(config).model.state_dict()
    configure(saved, target_modules="(([a-z_.0-9]+)+)+!")
    actual = BaseModel.load(config).model.state_dict()
    assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)


@cases(
    "model_type, target, says",
    ("llama", "c_attn", "no linear layer 'c_attn' .*q_proj"),
    ("gemma", "lm_head", "shares its output head with its embedding"),
)
def test_target_layers_without_an_adapter(tiny_base: TinyBase, model_type: str, target: str, says: str) -> None:
    refuses(says, adapted, tiny_base(model_type), target)
