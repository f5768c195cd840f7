"""Shared code of the tests: packed rows, trained and random heads, distributions of answers, tiny runs."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TextIO, TypeVar

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from hypothesis import HealthCheck, settings
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafthead import cli
from drafthead.data.batch import HiddenStates, TrainBatch, pad_rows
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.errors import UserError
from drafthead.eval.lossless.equality import Equality
from drafthead.eval.lossless.self_check import fitted as fitted
from drafthead.eval.metrics.summary import summarise
from drafthead.eval.timing.interleaved import TimedResults
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, Drafter, Proposal, Session
from drafthead.models.decoding.growth import StepwiseSession
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.random_source import DRAFT, PerRowRng, RandomSource
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step import DecodeResult, StepRecord
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree
from drafthead.system.display import Display
from drafthead.train.config import RunConfig, parse_run
from drafthead.train.trainer.checkpoint import capture_rng, save_checkpoint

Head = TypeVar("Head", bound=DraftHead)
TinyBase = Callable[..., BaseModel]  # the fixture
Answers = dict[tuple[int, ...], float]  # probabilities of answers
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # weights large enough that greedy answers vary
LICENSE = Path(__file__).parent.parent / "LICENSE"
GOLDEN_TEXT = f"data.text.sources=[{{kind: text, name: {LICENSE}}}]"  # does not depend on the Python version


# Batches -----------------------------------------------------------------------------------------------------


def row_of(documents: Sequence[Sequence[int]], trained_from: int = 0, padding: int = 2) -> TrainBatch:
    return TrainBatch.of(documents, trained_from, padding)


def rows_of(texts: Sequence[Sequence[int]]) -> TrainBatch:
    """Return one padded row per text."""
    longest = max(map(len, texts)) + 1
    rows = [row_of([text], padding=longest - len(text)) for text in texts]
    return stacked(rows)


def stacked(rows: Sequence[TrainBatch]) -> TrainBatch:
    known = [key for key, value in vars(rows[0]).items() if value is not None]
    return TrainBatch(**{key: torch.cat([getattr(row, key) for row in rows]) for key in known})


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# Heads -------------------------------------------------------------------------------------------------------


def randomised(head: Head, size: float = 0.2) -> Head:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return head


def noisy_head(config: DraftHeadConfig, base: BaseModel, noise: float, d2t: Tensor | None = None) -> Any:
    torch.manual_seed(0)
    return randomised(config.build(base, d2t), noise).eval()


def assert_parity(
    head: DraftHead, reference: Callable[[list[int], Tensor], dict[tuple[int, int], Tensor]], rel: float = 1e-5
) -> None:
    """Compare the loss of a head over even ids with logits {(k, t): [W]} that ``reference`` computes per document.

    ``reference`` receives the document's ids and hidden states [T, D].
    """
    documents, trained_from = [random_ids(14, seed=3), random_ids(9, seed=1)], 4
    rows = [row_of(documents, trained_from), row_of(documents[::-1], trained_from)]
    batch = stacked(rows)
    out = head.loss(batch, head.base.hidden_states(batch, head.spec), LossConfig(decay=0.8))
    total, trained = 0.0, 0
    for ids in documents:
        alone = row_of([ids], padding=0)
        for (k, t), logits in reference(ids, head.base.hidden_states(alone, head.spec).final[0]).items():
            target = t + 1 + k
            if trained_from <= target < len(ids):
                trained += k == 1
                if ids[target] % 2 == 0:
                    total += 0.8**k * F.cross_entropy(logits, torch.tensor(ids[target] // 2)).item()
    assert int(out.tokens) == 2 * trained > 20
    assert float(out.loss_sum.detach()) == pytest.approx(2 * total, rel=rel)


def leaning(head: MedusaHead, texts: Iterable[tuple[list[int], int]], size: float, every: int = 2) -> MedusaHead:
    """Bias the projections of ``head`` towards the base's own answers (ids, boundary), so that it is often right."""
    with torch.no_grad():
        for ids, boundary in texts:
            hidden = head.base.forward(torch.tensor([ids]), head.base.new_cache(len(ids))).final[0]
            for k in range(head.depth):
                for t in range(boundary - 1, len(ids) - 2 - k, every):
                    head.projections.weights[k][ids[t + 2 + k]] += size * hidden[t] / (hidden[t] @ hidden[t])
    return head.eval()


def small_head(base: BaseModel, folder: Path, tree: TokenTree | None = None) -> Path:
    head = MedusaConfig(num_draft_tokens=2, draft_vocab_size=50).build(base, torch.arange(50))
    head.tree = tree
    head.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Context:
    """The committed tokens that a drafter has read, row by row; ``read`` leaves the context before as it was.

    Only this class calls the drafter's own methods, so that tests do not depend on their form.
    """

    drafter: Drafter
    rows: int
    cache: Any = None
    calls: tuple[Callable[[Session], None], ...] = ()

    @classmethod
    def of(cls, drafter: Drafter, rows: int = 1, cache: object = None) -> "Context":
        return cls(drafter, rows, cache)

    @cached_property
    def session(self) -> Session:
        session = self.drafter.open(self.rows, self.cache)
        for call in self.calls:
            call(session)
        return session

    def read(self, tokens: Tensor, base_hidden: HiddenStates | None = None, counts: Tensor | None = None) -> "Context":
        """Return the rows with ``tokens`` [B, T] appended, of which ``counts`` [B] count."""
        valid = [tokens.shape[1]] * len(tokens) if counts is None else counts.tolist()
        return self._after(lambda session: session.commit(tokens, valid, base_hidden))

    def select(self, rows: list[int]) -> "Context":
        return self._after(lambda session: session.select(rows))

    def _after(self, call: Callable[[Session], None]) -> "Context":
        return Context(self.drafter, self.rows, self.cache, (*self.calls, call))

    def draft(self, last: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        return self.session.draft(last, draft_config, rng)

    @torch.inference_mode()
    def logits(self, levels: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return logits [B, n, W] after the nodes of every level: tokens and parents [B, n], the root first."""
        assert isinstance(self.session, StepwiseSession)
        self.session.start(levels[0][0][:, 0], DraftConfig(tree=TokenTree.chain(len(levels))))
        return [self.session.expand(tokens, parents) for tokens, parents in levels]


def chain_levels(tokens: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor([[token]]), torch.tensor([[0]])) for token in tokens]


def drafted_logits(head: DraftHead, ids: list[int], base_hidden: HiddenStates, drafts: list[int]) -> Tensor:
    """Return logits [K, W] after ``ids`` and each token of ``drafts``, of which the first is committed."""
    context = Context.of(head).read(torch.tensor([ids]), base_hidden)
    return torch.cat(context.logits(chain_levels(drafts)), 1)[0]


@torch.inference_mode()
def assert_rows_are_independent(base: BaseModel, drafter: Drafter, draft_config: DraftConfig) -> None:
    """Check that rows wait, continue and start again by themselves: each drafts as a fresh session with its tokens."""
    texts, starts = [random_ids(40, seed) for seed in range(4)], [0, 0, 0]  # row 0 answers texts 0 and then 3
    ids = [list(text) for text in texts[:3]]
    states = [base.forward(torch.tensor([text]), base.new_cache(40), spec=drafter.spec) for text in texts]
    session = drafter.open(3)

    def commit(counts: list[int]) -> None:
        width, rows = max(counts), [3 if ids[0] is texts[3] else 0, 1, 2]
        spans = [(texts[row][s : s + width], states[row].span(s, width)) for row, s in zip(rows, starts, strict=True)]
        session.commit(torch.tensor([tokens for tokens, _ in spans]), counts, pad_rows([hidden for _, hidden in spans]))
        starts[:] = [start + count for start, count in zip(starts, counts, strict=True)]

    def drafted(rows: Session, last: list[int]) -> Tensor:
        rng = PerRowRng([7] * len(last), [9] * len(last), DRAFT, base.device)
        proposal = rows.draft(torch.tensor(last), draft_config, rng)
        return torch.cat([proposal.tokens, proposal.shape.parents.expand_as(proposal.tokens)], 1)

    commit([12, 0, 7])
    commit([1, 9, 0])
    drafted(session, [5, 6, 7])
    session.reset([0])
    ids[0], starts[0] = texts[3], 0
    commit([5, 2, 0])  # a prompt in row 0, while row 1 continues and row 2 waits
    commit([0, 1, 3])
    assert session.lengths == starts == [5, 12, 10]
    last = [text[start] for text, start in zip(ids, starts, strict=True)]
    together = drafted(session, last)
    fresh = drafter.open(3)
    prompts = pad_sequence([torch.tensor(text[:start]) for text, start in zip(ids, starts, strict=True)], True)
    hidden = pad_rows([states[row].span(0, start) for row, start in zip((3, 1, 2), starts, strict=True)])
    fresh.commit(prompts, starts, hidden)
    assert torch.equal(drafted(fresh, last), together)


def drafted_paths(proposal: Proposal, row: int) -> dict[int, tuple[int, ...]]:
    parents = proposal.shape.parents.expand(proposal.tokens.shape)[row].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, token in enumerate(proposal.tokens[row].tolist()):
        if node and parents[node] >= 0:
            paths[node] = (*paths[parents[node]], token)
    return paths


# Parametrized tests, and damaged and hostile files --------------------------------------------------------------------


def refuses(match: str, call: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Check that the call raises a ``UserError`` whose text has ``match``, a regular expression."""
    with pytest.raises(UserError, match=match):
        call(*args, **kwargs)


def cases(names: str, *values: object, **options: Any) -> Any:
    """Run a test once per value; ``names`` lists its arguments, separated by commas."""
    return pytest.mark.parametrize(names, values, **options)


def fuzz(examples: int) -> Callable[[Any], Any]:
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=slow)


def tiny_checkpoint(folder: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    state = {"phase": 0, "step": 3, "global_step": 3, "score": 1.5, "losses": [1.0, None]}
    made_by = {"text": {"base": {"name": "tiny", "fingerprint": "0f"}, "rows": [1, 2.5, None]}}
    moments = {"state.weight.exp_avg": torch.ones(2, 3)}
    save_checkpoint(folder, 3, state, layer.state_dict(), moments, rng=[capture_rng()], manifests=made_by)


# Distributions --------------------------------------------------------------------------------------------------------


def random_base(shape: dict[str, Any], device: str | None = None, **settings: Any) -> BaseModel:
    given = {"tokenizer": "builtin:tiny", "dtype": "float32", **settings}
    return BaseModel.load(BaseConfig(random=True, shape=shape, **given), device)


@cache
def small_base() -> BaseModel:
    """Return a base of one layer with flat probs, so that all answers of a few tokens can be enumerated."""
    sizes = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = TINY | sizes | {"head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3}
    return random_base(shape)


def hidden_and_probs(base: BaseModel, tokens: list[int], sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Return the base's ``h`` [D] after ``tokens`` and the probs [V] of the next token."""
    hidden = base.forward(torch.tensor([tokens]), base.new_cache(len(tokens))).final[0, -1:]
    return hidden[0], sampler.probs(base.logits(hidden), torch.tensor([tokens]))[0].double()


def probs_of_answers(base: BaseModel, prompt: Sequence[int], sampler: Sampler, length: int) -> Answers:
    answers: Answers = {(): 1.0}
    for _ in range(length):
        longer: Answers = {}
        for answer, chance in answers.items():
            _, following = hidden_and_probs(base, [*prompt, *answer], sampler)
            longer |= {(*answer, int(t)): chance * float(following[t]) for t in following.nonzero()[:, 0]}
        answers = longer
    return answers


def p_value(counts: Tensor, expected: Tensor) -> float:
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def p_value_of_answers(counts: Counter[tuple[int, ...]], expected: Answers) -> float:
    """Return the p-value of a chi-square test; answers expected fewer than 5 times share a cell."""
    total = counts.total()
    assert set(counts) <= set(expected), "an answer that autoregressive sampling cannot give"
    common = [answer for answer, chance in expected.items() if chance * total >= 5]
    cells = [(float(counts[answer]), expected[answer] * total) for answer in common]
    cells.append((total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells)))
    observed, means = torch.tensor([cell for cell in cells if cell[1] > 1], dtype=torch.float64).unbind(1)
    return p_value(observed, means)


def assert_distributed(
    base: BaseModel, drafter: Drafter, prompts: list[list[int]], copies: int, length: int, **options: Any
) -> None:
    """Check that ``copies`` answers to each prompt, decoded in one batch, have the autoregressive distribution."""
    results = decode_batch(base, drafter, prompts * copies, max_new_tokens=length, ignore_eos=True, **options)
    steps = [step for result in results for step in result.steps]
    accepted = sum(step.accepted for step in steps) / sum(step.depth for step in steps)
    assert 0.1 < accepted < 0.9, "drafts must be accepted and rejected"
    for row, prompt in enumerate(prompts):
        counts = Counter(tuple(result.tokens) for result in results[row :: len(prompts)])
        assert p_value_of_answers(counts, probs_of_answers(base, prompt, options["sampler"], length)) > 1e-4, prompt


def assert_same_in_any_batch(
    base: BaseModel,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sizes: Sequence[int | None] = (None, 2),
    **options: Any,
) -> None:
    """Check that a row's seed decides its answer, whatever the other rows of the batch, and which row it is."""
    seeds = [11, 2**40, -3, 7, *range(20, 20 + len(prompts))][: len(prompts)]
    alone = [
        decode(base, drafter, prompt, seed=seed, **options).tokens for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    for size in sizes:
        together = decode_batch(base, drafter, prompts, seeds=seeds, batch_size=size, **options)
        assert [result.tokens for result in together] == alone, f"{size} rows"


def lookup(probs: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda nodes: probs.gather(1, nodes[..., None].expand(-1, -1, probs.shape[-1]))


@st.composite
def token_trees(draw: st.DrawFn, largest: int = 14) -> TokenTree:
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, largest))):
        parent = draw(st.sampled_from([(), *[p for p in paths if len(p) < 3]]))
        paths.append((*parent, draw(st.integers(0, 2))))
    return TokenTree.from_paths(paths)


def summarised(
    prompts: list[EvalPrompt],
    results: dict[str, list[DecodeResult]],
    equalities: dict[str, list[Equality]],
    turns: list[int] | None = None,
) -> dict[str, Any]:
    turns = turns or [0] * len(prompts)
    timed = TimedResults(prompts=prompts, turns=turns, ids=[[1]] * len(prompts), results=results, order=[])
    return summarise(timed, equalities, len, torch.float32)


def task_results(speedup: float | None, same: int = 3) -> dict[str, Any]:
    method = {
        "mean_accepted_length": speedup and 1.8,
        "acceptance_per_depth": [0.5, 0.4, None] if speedup else [],
        "ctar": {str(w): speedup and 0.5 / w for w in range(1, 7)},
        "tokens_per_second": speedup and 10 * speedup,
        "decode_tokens_per_second": None,
        "spec_bench": {"speedup": None},
        "speedup": {
            "vs_transformers": speedup and 1.25 * speedup,
            "vs_autoregressive": speedup,
            "interval_95": [None, None] if speedup is None else [speedup - 0.1, speedup + 0.1],
        },
        "identical_outputs": {"same": same, "of": 3, "near_ties": [], "different": []},
    }
    return method | {
        "autoregressive_tokens_per_second": {"transformers": speedup and 8.0, "autoregressive": speedup and 10.0},
        "methods": {"speculative": method},
        "hardware": {
            **{"cpu": "Some <CPU>", "cores": 2, "torch_threads": 2, "ram_gb": 8.0, "gpu": None},
            **{"other_processes_cores": 0.9},
        },
        "versions": {"drafthead": "0.2.0", "torch": "2.13.0"},
    }


def evaluation_of(overall: dict[str, Any], **tasks: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {key: [] for key in ("failed", "by_position", "by_context", "by_entropy")}
    return empty | {
        "headline": "speculative",
        "suite": "/home/me/mine.jsonl",
        "max_new_tokens": 24,
        "rule": {"name": "exact", "lossless": True},
        "sampler": {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "eta": 0.0},
        "tree": {"spec": "/home/me/tree.json", "nodes": 5},
        "draft_sampling": "top_k",
        "speedup_breakdown": {"transformers": None, "autoregressive": None},
        "metrics": {"speculative": {"acceptance_per_depth_of_all": [0.5, 0.2, 0.0]}},
        "tasks": tasks,
        "overall": overall,
    }


def step_record(accepted: int, committed: int | None = None, depth: int = 3, **changes: float) -> StepRecord:
    total_s = changes.get("total_s", 1.0)
    values: dict[str, Any] = {"position": 0, "proposed": depth, "draft_s": 0.1 * total_s, "verify_s": 0.8 * total_s}
    count = accepted + 1 if committed is None else committed
    return StepRecord(**values | {"depth": depth, "accepted": accepted, "committed": count, "total_s": 1.0} | changes)


def steady_answer(tokens: int, total_s: float, committed: int = 1) -> DecodeResult:
    seconds = {"draft_s": 0.01, "verify_s": 0.1, "total_s": 0.12}
    steps = [
        step_record(committed - 1, depth=4, position=1 + n * committed, entropy=0.5 * n, **seconds)
        for n in range((tokens - 1) // committed)
    ]
    return DecodeResult(tokens=list(range(tokens)), steps=steps, prefill_s=0.1, total_s=total_s)


# Runs --------------------------------------------------------------------------------------------------------


class Said(Display):
    """A display that collects lines and steps of progress instead of printing them."""

    def __init__(self, lines: list[str] | None = None) -> None:
        super().__init__(enabled=False)
        self.lines = [] if lines is None else lines
        self.steps: list[tuple[str, int, int]] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, label: str, done: int, total: int, after: float = 0.0) -> None:
        self.steps.append((label, done, total))


def composed(folder: Path, *overrides: str) -> tuple[RunConfig, str]:
    folders = [f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}"]
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        cfg = compose("train", overrides=[*overrides, *folders])
    return parse_run(cfg, overrides), OmegaConf.to_yaml(cfg, resolve=True)


def run_together(commands: Sequence[Sequence[str]], *environments: dict[str, str], timeout_s: float = 600) -> None:
    path = os.pathsep.join(map(str, (Path(__file__).parent.parent, Path(__file__).parent)))
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen([sys.executable, *command], env=common | more, stderr=subprocess.PIPE, text=True)
        for command, more in zip(commands, environments or [{}] * len(commands), strict=True)
    ]
    try:
        for process in started:
            _, stderr = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, stderr[-4000:]
    finally:
        for process in started:
            process.kill()


def losses_of(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def join_threads(name: str) -> None:
    """Wait for the threads of executors that are no longer referenced."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(30)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Commands ----------------------------------------------------------------------------------------------------


def call(command: str, *arguments: str, stdin: TextIO | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", stdin or sys.stdin)
        patch.setattr("sys.argv", ["drafthead", command, *arguments])
        cli.main()


def call_fails(match: str, command: str, *arguments: str) -> None:
    """Check that the command ends with one line that has ``match``, a regular expression."""
    with pytest.raises(SystemExit, match=match) as stop:
        call(command, *arguments)
    assert "\n" not in str(stop.value)


def forget_after(run: Path, step: int) -> Path:
    """Restore the run folder to the state after the checkpoint of ``step``."""
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(run / "head")
    return run


def assert_same_run(run: Path, expected: Path, atol: float = 0.0) -> None:
    assert losses_of(run) == pytest.approx(losses_of(expected), rel=0, abs=atol)
    files = {str(path.relative_to(expected)) for path in (expected / "head").rglob("*.safetensors")}
    assert files == {str(path.relative_to(run)) for path in (run / "head").rglob("*.safetensors")}
    for name in files:
        weights, reference = load_file(run / name), load_file(expected / name)
        assert weights.keys() == reference.keys()
        assert all(torch.allclose(weights[k], reference[k], rtol=0, atol=atol) for k in weights)
