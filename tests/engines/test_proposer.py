"""The proposer in a model runner with vLLM's interface, which computes with our base."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from head_cases import HEADS

from drafthead.data.batch import HiddenStatesSpec
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.engines.in_vllm.cpu_sampling import expand, repair
from drafthead.engines.in_vllm.proposer import Proposer, ProposerConfig, runner_of
from drafthead.engines.in_vllm.speculator import Speculator
from drafthead.engines.server import acceptance_line, counters
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.token_tree import TokenTree
from support import TINY, cases, fitted, p_value_of_answers, random_base, random_ids, refuses, rows_of

NEW, LONGEST = 24, 512


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[BaseModel, Path]:
    folder = tmp_path_factory.mktemp("base")
    random_base(TINY).stock().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return BaseModel.load(BaseConfig(name=str(folder), dtype="float32"), "cpu"), folder


def vllm_config(folder: Path, drafts: int, rows: int = 4, **extra: Any) -> Any:
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts,
        draft_load_config=SimpleNamespace(model_loader_extra_config=extra),
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace()),
    )
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(model=str(folder), revision=None),
    )


class Runner:
    """A model runner with the names that the proposer uses of vLLM's. It keeps no cache: it reads whole texts again."""

    def __init__(self, base: BaseModel, config: Any) -> None:
        self.base, self.config = base, config
        self.use_aux_hidden_state_outputs = False
        self.drafter = Proposer(config)
        model = SimpleNamespace(embed_tokens=base.input_embeddings, norm=base.final_norm)
        self.drafter.load_model(SimpleNamespace(model=model, lm_head=base.lm_head))
        self.requests: dict[str, list[int]] = {}  # the texts
        self.computed: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.accepted: dict[str, list[int]] = {}

    def add(self, request: str, ids: list[int], cached: int = 0) -> None:
        self.requests[request], self.computed[request], self.accepted[request] = list(ids), cached, []

    def preempt(self, request: str) -> None:
        self.computed[request] = 0
        self.drafts.pop(request, None)

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
    ) -> list[list[int]]:
        counts = np.array([len(self.requests[request]) for request in self.input_batch.req_ids])
        table = np.zeros((len(counts), LONGEST), np.int32)
        for row, request in enumerate(self.input_batch.req_ids):
            table[row, : counts[row]] = self.requests[request]
        return self.drafter.propose(sampled_token_ids, counts, table, slot_mappings=None)

    @torch.inference_mode()
    def step(self, batch: dict[str, int]) -> None:
        """Let the base read up to this many tokens of each request: a part of its prompt, or its drafts."""
        aux = getattr(
            self.config.speculative_config.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", ()
        )
        final, layers, sampled, before = [], [], [], []
        scheduled, verified = {}, {}
        for request, count in batch.items():
            text, start, drafts = self.requests[request], self.computed[request], self.drafts.pop(request, [])
            ids = [*text, *drafts][: start + count]
            out = self.base.forward(
                torch.tensor([ids]), self.base.new_cache(len(ids)), spec=HiddenStatesSpec(layers=tuple(aux))
            )
            best = self.base.logits(out.final)[0].argmax(-1).tolist()
            before.append(start)
            scheduled[request], self.computed[request] = len(ids) - start, len(ids)
            final.append(out.final[0, start:])
            layers.append([] if out.layers is None else list(out.layers[0, start:].chunk(len(aux), -1)))
            sampled.append([])
            if len(ids) >= len(text):
                drafts = ids[len(text) :]
                verified[request] = drafts
                right = next((n for n, d in enumerate(drafts) if best[len(text) - 1 + n] != d), len(drafts))
                sampled[-1] = [*drafts[:right], best[len(text) - 1 + right]]
                self.accepted[request] += [right] if drafts else []
                text += sampled[-1]
                self.computed[request] = len(text) - 1
        self.input_batch = SimpleNamespace(req_ids=[*batch], num_computed_tokens_cpu=np.array(before))
        output = SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=verified)
        states = [torch.cat(each) for each in zip(*layers, strict=True)] if aux else None
        proposed = self.propose_draft_token_ids(output, sampled, torch.cat(final), states)
        self.drafts |= dict(zip(batch, proposed, strict=True))

    def answer(self, prompts: dict[str, list[int]], chance: random.Random, preempted: float) -> None:
        """Read prompts in chunks and answer them, with pauses and preemptions."""
        for request, ids in prompts.items():
            self.add(request, ids)
        while active := [r for r in self.requests if len(self.requests[r]) < len(prompts[r]) + NEW]:
            batch = [request for request in active if chance.random() < 0.8]
            if batch and chance.random() < preempted:
                self.preempt(batch[0])
            left = {r: len(self.requests[r]) + len(self.drafts.get(r, [])) - self.computed[r] for r in batch}
            sizes = {r: count if count < 6 else chance.randint(1, count) for r, count in left.items()}
            if batch:
                self.step(sizes)


class SlotRunner(Runner):
    """A model runner with the names that the ``Speculator`` uses of vLLM's V2 runner."""

    def __init__(self, base: BaseModel, config: Any) -> None:
        self.base, self.config = base, config
        model = SimpleNamespace(embed_tokens=base.input_embeddings, norm=base.final_norm)
        self.model = SimpleNamespace(model=model, lm_head=base.lm_head)
        extra = config.speculative_config.draft_load_config.model_loader_extra_config
        self.drafter = Speculator(config, self, ProposerConfig(**extra))
        head = load_head(extra["head"], base)
        config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = sorted(
            {*head.spec.layers}
        )
        self.requests, self.computed, self.drafts, self.accepted = {}, {}, {}, {}

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
    ) -> list[list[int]]:
        slots = {request: 3 - n for n, request in enumerate(self.requests)}
        texts, read, last = torch.zeros(4, LONGEST, dtype=torch.int32), torch.zeros(4), torch.zeros(4, 1).long()
        for request, slot in slots.items():
            text = self.requests[request]
            texts[slot, : len(text)], last[slot] = torch.tensor(text, dtype=torch.int32), text[-1]
            read[slot] = min(self.computed[request], len(text))
        self.req_states = SimpleNamespace(
            req_id_to_index=slots,
            all_token_ids=SimpleNamespace(gpu=texts),
            num_computed_tokens=SimpleNamespace(gpu=read),
        )
        batch, verified = self.input_batch.req_ids, scheduler_output.scheduled_spec_decode_tokens
        counts = [scheduler_output.num_scheduled_tokens[request] for request in batch]
        drafted = [len(verified.get(request, ())) for request in batch]
        sampled = [len(tokens) for tokens in sampled_token_ids]
        rejected = [d + 1 - n if n else 0 for d, n in zip(drafted, sampled, strict=True)]
        order = np.array([slots[request] for request in batch])
        given = SimpleNamespace(
            num_reqs=len(batch),
            req_ids=batch,
            idx_mapping=torch.tensor(order),
            idx_mapping_np=order,
            query_start_loc_np=np.cumsum([0, *counts]),
            num_draft_tokens_per_req=np.array(drafted),
        )
        counted = torch.tensor(sampled), torch.tensor(rejected), last, torch.zeros(1, 4), torch.zeros(4), torch.zeros(4)
        drafts = self.drafter.propose(given, {}, {}, hidden_states, aux_hidden_states, *counted)
        return [row if n else [] for row, n in zip(drafts.tolist(), sampled, strict=True)]


@pytest.mark.parametrize("runner_type", [Runner, SlotRunner])
@cases(
    "kind",
    "medusa_induction",
    "hydra_pp",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "dspark")),
)
def test_texts_and_acceptance_are_those_of_our_chain(
    saved: tuple[BaseModel, Path], tmp_path: Path, kind: str, runner_type: type[Runner]
) -> None:
    base, folder = saved
    prompts = {"a": random_ids(9, 1), "b": random_ids(14, 2), "c": random_ids(30, 3)}
    texts = [ids + decode(base, None, ids, max_new_tokens=NEW + 4, ignore_eos=True).tokens for ids in prompts.values()]
    fitted(HEADS[kind].build(base), rows_of(texts), 60, lr=0.01).save_pretrained(tmp_path)
    head, chain = load_head(tmp_path, base), DraftConfig(tree=TokenTree.chain(3))
    ours = {
        r: decode(base, head, p, max_new_tokens=NEW, draft_config=chain, ignore_eos=True) for r, p in prompts.items()
    }
    for preempted in (0.0, 0.2):
        runner = runner_type(base, vllm_config(folder, 3, head=str(tmp_path)))
        rows = runner.drafter._rows or runner.drafter._loaded()
        assert rows.drafters[0].base.embedding.data_ptr() == base.embedding.data_ptr(), "a second copy"
        runner.answer(prompts, random.Random(kind), preempted)
        for request, result in ours.items():
            assert runner.requests[request][len(prompts[request]) :][:NEW] == result.tokens
        accepted = sum(map(sum, runner.accepted.values()))
        if not preempted:  # a preempted request loses its drafts
            for request, result in ours.items():
                steps = [step.accepted for step in result.steps][:-1]
                assert runner.accepted[request][: len(steps)] == steps, "all but the last step, which may be longer"
        assert accepted > 20


def test_ended_requests_are_forgotten_and_waiting_ones_if_there_is_no_room(
    saved: tuple[BaseModel, Path], tmp_path: Path
) -> None:
    base, folder = saved
    HEADS["medusa"].build(base).save_pretrained(tmp_path)
    runner = Runner(base, vllm_config(folder, 3, rows=2, head=str(tmp_path), drafter="head+prompt_lookup:3"))
    rows = runner.drafter._rows
    for number in range(3):
        runner.add(f"r{number}", random_ids(20, number), cached=number)
    runner.step({"r0": 20})
    runner.step({"r1": 19})
    assert rows.requests == ["r0", "r1"]
    runner.step({"r2": 18})
    assert rows.requests == ["r1", "r2"], "two rows at most"
    del runner.requests["r1"]
    runner.step({"r2": 4})
    assert rows.requests == ["r2"]
    repeated = [*range(30, 50), *range(30, 40)]
    runner.add("copy", repeated)
    runner.step({"copy": 30})
    assert len(runner.drafts["copy"]) == 3


def test_what_vllm_cannot_do_is_refused_in_one_line(saved: tuple[BaseModel, Path], tmp_path: Path) -> None:
    base, folder = saved
    HEADS["draft_lm"].build(base).save_pretrained(tmp_path)
    refuses("draft_lm runs layers of its base", Runner, base, vllm_config(folder, 3, head=str(tmp_path)))
    refuses("cannot draft with early_exit:2; join", Runner, base, vllm_config(folder, 3, drafter="early_exit:2"))
    refuses("'head' stands for the command's head", Runner, base, vllm_config(folder, 3))
    refuses("no setting.*heads|heads", Runner, base, vllm_config(folder, 3, heads="x"))
    config = vllm_config(folder, 3, drafter="prompt_lookup")
    refuses("has no model runner with propose_draft_token_ids", runner_of, config)
    config.parallel_config.world_size = 2
    refuses("one device", Runner, base, config)

    class Other:
        use_aux_hidden_state_outputs = False

        def __init__(self) -> None:
            Proposer(vllm_config(folder, 3))

        def propose_draft_token_ids(self, hidden_states: torch.Tensor) -> None:
            pass

    refuses("the model runner of this engine lacks scheduler_output, aux_hidden_states; use vLLM 0.32 or 0.33", Other)


def sampler_module(works: bool) -> SimpleNamespace:
    """A stand-in for vLLM's module ``rejection_sampler``."""

    def broken(x: torch.Tensor, cu: torch.Tensor, count: int, *replaced: int) -> torch.Tensor:
        return expand(x, cu, count, *replaced) if works else x.new_full((count,), 7.0)

    class RejectionSampler:
        def sampler(self, logits: torch.Tensor, sampling_metadata: object) -> str:
            return "sampled"

        def forward(self, metadata: object, draft_probs: None, logits: torch.Tensor, sampling_metadata: object) -> str:
            return "verified"

    return SimpleNamespace(expand_batch_to_tokens=broken, RejectionSampler=RejectionSampler)


@cases("works", True, False)
def test_sampling_with_drafts_is_repaired_if_it_does_not_work(works: bool) -> None:
    sampler = sampler_module(works)
    assert repair(sampler) is not works
    numbers = torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 3], dtype=torch.int32), 3, 0, 1
    assert sampler.expand_batch_to_tokens(*numbers).tolist() == pytest.approx([0.7, 0.7, 1.5])
    assert expand(torch.tensor([2, 0]), torch.tensor([1, 2]), 2, 0, 9).tolist() == [2, 9]
    verifier = sampler.RejectionSampler()
    for drafts, done in ([2, 0], "verified"), ([0, 0], "sampled"):
        assert verifier.forward(SimpleNamespace(num_draft_tokens=drafts), None, torch.zeros(2, 5), None) == done


def test_the_token_after_a_rejected_draft_has_the_distribution_without_it() -> None:
    repair(sampler := sampler_module(True))
    torch.manual_seed(0)
    vocabulary, draws, drafts = 700, 30_000, torch.tensor([0, 699, 255], dtype=torch.int32)
    probs = torch.rand(3, vocabulary).pow(8)
    probs[1, 600:] = 0  # the last block has no probable id
    probs /= probs.sum(1, keepdim=True)
    rows, before = probs.repeat_interleave(draws, 0), probs.repeat_interleave(draws, 0)

    def recovered(seed: int) -> torch.Tensor:
        metadata = SimpleNamespace(generators={n: torch.Generator().manual_seed(seed + n) for n in (0, 2)})
        counts, ends = [draws, 0, 2 * draws], torch.tensor([draws, draws, 3 * draws])
        given = drafts.repeat_interleave(draws), None, rows, metadata, rows.device
        tokens: torch.Tensor = sampler.sample_recovered_tokens(draws, counts, ends, *given)
        return tokens

    tokens = recovered(1)
    assert tokens.dtype == torch.int32 and torch.equal(rows, before)
    assert torch.equal(tokens, recovered(1)), "a request's seed decides"
    assert not torch.equal(tokens, recovered(4))
    for row, draft in enumerate(drafts.tolist()):
        counted = Counter((token,) for token in tokens[row * draws : (row + 1) * draws].tolist())
        others = probs[row].double().index_fill(0, torch.tensor(draft), 0.0)
        expected = {(token,): float(others[token] / others.sum()) for token in others.nonzero()[:, 0].tolist()}
        assert p_value_of_answers(counted, expected) > 1e-3


def test_acceptance_is_told_between_two_readings_of_the_counters() -> None:
    def page(steps: int, first: int, second: int, tokens: int) -> dict[str, float]:
        name = "vllm:spec_decode_num_"
        return counters(
            f'# HELP\n{name}drafts_total{{engine="0"}} {steps}.0\n{name}accepted_tokens_total {first + second}.0\n'
            f'{name}accepted_tokens_per_pos_total{{position="0"}} {first}.0\nvllm:generation_tokens_total {tokens}.0\n'
            f'{name}accepted_tokens_per_pos_total{{position="1"}} {second}.0\n'
        )

    line = acceptance_line(page(10, 5, 1, 16), page(30, 15, 5, 50), 4.0)
    assert line == "8.5 tokens/s, 1.70 tokens per step that drafted, accepted by position 50 / 20 %"
    assert acceptance_line(page(10, 5, 1, 16), page(10, 5, 1, 16), 4.0) == ""
