"""Cases that run on the simulated accelerator, each compared with the CPU.

``pytest -p accelerator.simulated tests/accelerator/cases.py`` runs them.
``test_accelerator.py`` does so in a new process.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from head_cases import HEADS, MAIN, cases_of, every_head
from torch import Tensor

from accelerator import simulated
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.loop import DecodeLoop, DecodingSequence
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeConfig
from drafthead.models.drafters.custom_generate import custom_generate
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.heads.medusa2 import Medusa2Config, Medusa2Head
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.kernels import attention
from drafthead.models.kernels.packed import PackedMask
from drafthead.models.token_tree import TokenTree
from drafthead.system.devices import (
    accelerator_name,
    automatic_dtype,
    collective_backend,
    device_of,
    peak_allocated,
    pinned,
    rng_states,
    set_rng_states,
)
from drafthead.train.adapt import OnlineConfig, OnlineLearner, frozen_copy
from drafthead.train.trainer.optim import OptimConfig
from drafthead.train.trainer.step import train_step
from support import TINY, noisy_head, random_base, random_ids, refuses, row_of, stacked

DEVICES = ("cpu", "cuda")
STEP_WAITS = {"draft_lm": 2}
"""Waits per decode step by head type, if there are more than one; docs/design.md has the reasons."""
SAMPLED = Sampler(temperature=0.8, top_p=0.9)
WITH, WITHOUT = DraftSampling.WITH_REPLACEMENT, DraftSampling.WITHOUT_REPLACEMENT
WIDE, CHAIN = TokenTree.expansion([3, 2, 1]), TokenTree.chain(3)


@cache
def base_on(device: str, graphs: str = "never") -> BaseModel:
    return random_base(TINY, device, prepack=False, graphs=graphs)


@cache
def head_on(kind: str, device: str) -> DraftHead:
    folder = Path(mkdtemp())
    if device == "cpu":
        config = HEADS[kind]
        if isinstance(config, Medusa2Config):  # devices draw other random numbers
            config = replace(config, lora_dropout=0.0)
        return noisy_head(config, base_on("cpu"), 0.05, torch.arange(0, 300, 2))
    head_on(kind, "cpu").save_pretrained(folder)
    return load_head(folder, base_on(device)).eval()


def decoded(
    drafter: Drafter | None, device: str, config: DecodeConfig, rows: int = 1, tokens: int = 16
) -> tuple[list[list[int]], list[Counter[tuple[str, str]]]]:
    """Return the answers, and the waits of each step after the first three."""
    waits: list[Counter[tuple[str, str]]] = []
    last = Counter[tuple[str, str]]()

    prompts = [random_ids(9 + 4 * row, seed=row) for row in range(rows)]
    sequences = [DecodingSequence(number=n, prompt=ids, seed=n + 3) for n, ids in enumerate(prompts)]
    loop = DecodeLoop(
        base=base_on(device) if drafter is None or not hasattr(drafter, "base") else drafter.base,
        drafter=drafter,
        config=config,
        max_new_tokens=tokens,
        batch_size=rows,
        capacity=9 + 4 * rows + tokens,
    )
    for _ in loop.run(sequences, every_step=True):
        if max(len(row.steps) for row in sequences) > len(waits):  # all rows take a step together
            waits.append(simulated.waited - last)
            last = simulated.waited.copy()
    return [row.answer for row in sequences], waits[3:]


WAYS: dict[str, tuple[DecodeConfig, int]] = {
    name: (DecodeConfig(draft_config=draft_config, sampler=sampler, rule=rule, with_entropy=True), rows)
    for name, draft_config, sampler, rule, rows in [
        ("chain", DraftConfig(tree=CHAIN), Sampler(), AcceptanceRule(), 1),
        ("tree", DraftConfig(tree=WIDE), Sampler(), AcceptanceRule(), 1),
        ("batch", DraftConfig(tree=WIDE), Sampler(), AcceptanceRule(), 3),
        ("dynamic", DraftConfig(tree=DynamicTree(nodes=8, width=3, depth=3)), Sampler(), AcceptanceRule(), 2),
        ("sampled", DraftConfig(tree=WIDE), SAMPLED, AcceptanceRule(), 1),
        ("sampled_drafts", DraftConfig(tree=WIDE, draft_sampling=WITHOUT), SAMPLED, AcceptanceRule(), 2),
        ("typical", DraftConfig(tree=WIDE), SAMPLED, AcceptanceRule(name="typical"), 1),
        ("block", DraftConfig(tree=CHAIN, draft_sampling=WITH), SAMPLED, AcceptanceRule(name="block"), 1),
        ("threshold", DraftConfig(tree=CHAIN, confidence_threshold=0.01), Sampler(), AcceptanceRule(), 2),
        ("penalty", DraftConfig(tree=CHAIN), Sampler(repetition_penalty=1.3), AcceptanceRule(), 2),
    ]
}


def assert_few(waits: list[Counter[tuple[str, str]]], most: int, what: str) -> None:
    total = sum(waits, Counter[tuple[str, str]]())
    lines = "\n".join(f"{count:5} {operation} {line}" for (operation, line), count in total.most_common())
    worst = max((step.total() for step in waits), default=0)
    assert worst <= most and not any(simulated.DRAFTING in line for _, line in total), (
        f"{what}: up to {worst} waits per step, {most} allowed, none while drafting; in {len(waits)} steps\n{lines}"
    )


COMBINED = ("head+prompt_lookup:4:2", "head+suffix_memory:4:64", "relay:head@2+prompt_lookup@2")


@every_head
@pytest.mark.parametrize("way", cases_of((), WAYS, fast=("sampled_drafts",)))
def test_decoding(kind: str, way: str) -> None:
    config, rows = WAYS[way]
    expected, _ = decoded(head_on(kind, "cpu"), "cpu", config, rows)
    answers, waits = decoded(head_on(kind, "cuda"), "cuda", config, rows)
    assert answers == expected
    assert_few(waits, STEP_WAITS.get(HEADS[kind].head_type, 1), f"{kind} {way}")


@pytest.mark.parametrize("kind", cases_of((), sorted(MAIN), fast=("draft_lm", "hydra")))
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("sampler", [pytest.param(Sampler(), marks=pytest.mark.slow), SAMPLED])
@pytest.mark.parametrize("spec", cases_of((), COMBINED, COMBINED[:1]))
def test_decoding_with_prompt_lookup(kind: str, spec: str, sampler: Sampler, rows: int) -> None:
    results = []
    for device in DEVICES:
        head = head_on(kind, device)
        drafter, draft_config = build_drafter(parse_drafter(spec), head.base, head, DraftConfig(tree=WIDE))
        config = DecodeConfig(draft_config=draft_config, sampler=sampler, rule=AcceptanceRule())
        results.append(decoded(drafter, device, config, rows))
    (expected, _), (answers, waits) = results
    assert answers == expected
    if not spec.startswith("relay"):  # its second drafter is told how many tokens the first drafted
        remembers = "suffix_memory" in spec  # an answer that ends is copied to the device, before the next step drafts
        assert_few(waits, 2 + remembers, f"{kind} {spec}")


@every_head
@pytest.mark.parametrize("way", cases_of((), ("tree", "sampled"), ("tree",)))
def test_graphs(kind: str, way: str) -> None:
    config, _ = WAYS[way]
    expected, _ = decoded(head_on(kind, "cpu"), "cpu", config, tokens=24)
    folder = Path(mkdtemp())
    head_on(kind, "cpu").save_pretrained(folder)
    head = load_head(folder, base_on("cuda", "auto")).eval()
    before = simulated.operations().get("graph replays", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers, _ = decoded(head, "cuda", config, tokens=24)
    assert answers == expected
    # EAGLE-3 and Kangaroo read inner layers, which the graph of a verification leaves out.
    assert simulated.operations().get("graph replays", 0) > before or head.spec.layers


def wrong_device(logits: Tensor) -> Tensor:
    return logits + torch.zeros(logits.shape[-1], device="cpu")


def host_wait(logits: Tensor) -> Tensor:
    return logits if logits.isfinite().all() else -logits


def host_array(logits: Tensor) -> Tensor:
    return logits * float(logits.numpy().mean())


@pytest.mark.parametrize("fault", [wrong_device, host_wait, host_array])
def test_a_planted_fault_is_reported_with_its_line(fault: Callable[[Tensor], Tensor]) -> None:
    head = head_on.__wrapped__("hydra", "cuda")
    opened = head.open

    def with_fault(rows: int, cache: Any = None) -> Any:
        session = opened(rows, cache)
        expand = session.expand
        session.expand = lambda *level: fault(expand(*level))
        return session

    head.open = with_fault
    file, line = "tests/accelerator/cases.py", fault.__code__.co_firstlineno + 1
    with pytest.raises((RuntimeError, TypeError, AssertionError)) as raised:
        assert_few(decoded(head, "cuda", WAYS["tree"][0])[1], 1, "a planted wait")
    lines = [f"{entry.path}:{entry.lineno + 1}" for entry in raised.traceback]
    reported = f"{file}:{line} {fault.__name__}" in str(raised.value)
    assert reported or any(each.endswith(f"{file}:{line}") for each in lines)


Waits = list[Counter[tuple[str, str]]]
LOSS = LossConfig(kl=0.1, tv=0.1, decay="dpace")


def trained(kind: str, device: str, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor], Waits]:
    """Return losses and final weights of a few steps, and the waits of each step but the first."""
    torch.manual_seed(0)
    base = base_on(device)
    head = head_on.__wrapped__(kind, device).train()
    if isinstance(head, Medusa2Head):
        head.train_base(now=True)
        with torch.no_grad():
            for n, (_, parameter) in enumerate(sorted(head.adapter.items())):
                generator = torch.Generator().manual_seed(n)
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    optimizers = [torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-3)]
    rows = stacked([row_of([random_ids(20, 1), random_ids(11, 2)], 3), row_of([random_ids(31, 4)], 3)])
    losses, waits = [], []
    for _ in range(steps):
        with simulated.waits() as counted:
            result = train_step(
                head,
                optimizers,
                [(rows, base.hidden_states(rows, head.spec))],
                LOSS,
                lr=1e-3,
                clip_norm=1.0,
                reduce=lambda value: value,
            )
        losses.append(result.metrics()["loss"])
        waits.append(counted)
    return losses, {name: weight.cpu() for name, weight in head.state_dict().items()}, waits[1:]


@every_head
def test_training(kind: str) -> None:
    expected, weights, _ = trained(kind, "cpu")
    losses, moved, waits = trained(kind, "cuda")
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        # AdamW's first steps have the size of the learning rate (1e-3), so rounding shows where a gradient is nearly 0.
        torch.testing.assert_close(moved[name], weight, rtol=1e-4, atol=3e-4, msg=lambda text, name=name: name + text)
    assert_few(waits, 1, f"a training step of {kind}")


IDS = torch.arange(6).repeat_interleave(torch.tensor([300, 20, 5, 700, 9, 14])).view(2, -1)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    starts_of_keys: Tensor,
    longest: int,
    longest_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute what torch documents of ``varlen_attn``: (W, 0) sees W tokens before itself, (-1, 0) all of them."""
    assert torch.equal(starts, starts_of_keys) and starts.dtype == torch.int32
    edges, outputs = starts.tolist(), []
    assert longest == longest_keys == max(stop - start for start, stop in zip(edges, edges[1:], strict=False))
    for start, stop in zip(edges, edges[1:], strict=False):
        states = [x[start:stop].transpose(0, 1)[None].float() for x in (query, key, value)]
        distance = torch.arange(stop - start, device=query.device)
        distance = distance[:, None] - distance
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        out = torch.nn.functional.scaled_dot_product_attention(*states, seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out[0].transpose(0, 1).to(query.dtype))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, (64, False), (64, True)])
@pytest.mark.parametrize("kernel", ["absent", "documented"])
def test_packed_rows(window: tuple[int, bool] | None, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by the kernel for documents of different lengths, and without it after one warning, is a CPU's."""
    monkeypatch.setattr(attention, "_no_varlen", set())
    if kernel == "documented":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, heads, 524, 8, generator=generator).bfloat16() for heads in (4, 2, 2)]

    def attend(device: str) -> Tensor:
        mask = PackedMask.of(IDS, torch.device(device))
        mask = mask if window is None else mask.within(*window)
        return attention.packed_attention(*(x.to(device) for x in states), mask).float().cpu()

    expected = attend("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(attend("cuda"), expected, rtol=0.02, atol=0.02)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (kernel == "absent") and all("flash attention failed on cuda" in m for m in messages)


LEARNING = [kind for kind, config in HEADS.items() if not config.trains_base]


@pytest.mark.parametrize("kind", cases_of((), LEARNING, fast=("hydra",)))
def test_online_learning(kind: str) -> None:
    config = OnlineConfig(interval=2, steps=2, optim=OptimConfig(lr=1e-3, schedule="constant"))
    answers = []
    for device in DEVICES:
        learner = OnlineLearner(frozen_copy(head_on.__wrapped__(kind, device)), config)
        answers.append([learner.answer(random_ids(9, seed=n), max_new_tokens=12)[0].tokens for n in range(4)])
        assert learner.updates == 2
    assert answers[0] == answers[1]


def test_devices() -> None:
    device = device_of(None)
    assert device.type == "cuda" and accelerator_name() == "simulated" and peak_allocated() == 0
    assert pinned(torch.ones(2), device).is_pinned() and not pinned(torch.ones(2), torch.device("cpu")).is_pinned()
    assert automatic_dtype(device) == "bfloat16" and collective_backend(device) == "nccl"
    states = rng_states()
    drawn = torch.rand(3, device=device)
    set_rng_states(states)
    assert torch.equal(torch.rand(3, device=device).cpu(), drawn.cpu())
    refuses("device=mps", device_of, "mps")


def test_the_device_of_a_loaded_head(tmp_path: Path) -> None:
    head_on("medusa", "cpu").save_pretrained(tmp_path)
    for device in (None, *DEVICES):
        head = load_head(tmp_path, device=device)
        assert head.base.device.type == (device or "cuda")
        assert {parameter.device.type for parameter in head.parameters()} == {head.base.device.type}


def test_timing_waits_only_if_asked() -> None:
    config, _ = WAYS["tree"]
    counts = [decoded(head_on("medusa", "cuda"), "cuda", replace(config, timed=timed))[1] for timed in (False, True)]
    assert [{step.total() for step in steps} for steps in counts] == [{1}, {3}]


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3, "output_scores": True}, {"max_time": 60.0}])
def test_custom_generate(settings: dict[str, Any]) -> None:
    ids, mask = torch.tensor([random_ids(6), [0, 0, *random_ids(4, 1)]]), torch.ones(2, 6, dtype=torch.int64)
    mask[1, :2] = 0
    given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 299, "pad_token_id": 0, **settings}
    stock = base_on("cpu").stock().generate(ids, attention_mask=mask, **given)
    for place in DEVICES:
        drafts = custom_generate(head_on("medusa", "cuda"))
        inputs = {"inputs": ids.to(place), "attention_mask": mask.to(place)}
        out = base_on("cuda").stock().generate(**inputs, **given, custom_generate=drafts, return_dict_in_generate=True)
        assert out.sequences.device.type == place and torch.equal(out.sequences.cpu(), stock)
        assert out.scores is None or out.scores[0].device.type == place
