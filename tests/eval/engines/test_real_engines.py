"""Heads and corpora served by llama.cpp and vLLM themselves on the real base (``make test-engines``)."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mtp_checkpoint import checkpoint

from drafthead.data.answers.store import AnswerStore
from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.states.source import StatesSource
from drafthead.data.states.stored import StoredStates
from drafthead.data.text.documents import Documents
from drafthead.engines.environment import environment
from drafthead.engines.in_vllm import speculator
from drafthead.engines.server import counters
from drafthead.eval.config import EvalConfig, SuiteConfig
from drafthead.eval.engines.served import free_port
from drafthead.eval.evaluate import evaluate
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.files.local import read_manifest
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.dspark import DSparkConfig, DSparkHead
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.heads.mtp import MtpConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base, load_parts
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.corpora.corpus_config import DataConfig, StatesConfig
from drafthead.train.corpora.served_base import ServedBase
from support import Said, fitted, p_value_of_answers, probs_of_answers, rows_of

pytestmark = pytest.mark.engines
NEW, SAMPLES = 40, 300
LAYERS = (0, 15, 27)  # that recipe=eagle3_smollm2_vllm reads
PROMPTS = ["Why is the sky blue?", "Name three rivers in Africa.", "Write a short poem about snow.", "What is 12 + 30?"]


@cache
def base() -> BaseModel:
    return load_base("embedded:smollm2")


@cache
def answers() -> list[list[int]]:
    """The prompts with the base's own answers."""
    token_lists = []
    for prompt in PROMPTS:
        ids = base().prompt_ids([{"role": "user", "content": prompt}])
        token_lists.append(ids + decode(base(), None, ids, max_new_tokens=NEW).tokens)
    return token_lists


@cache
def draft_ids() -> torch.Tensor:
    """1,024 ids, the answers' among them."""
    used_ids = sorted({token for text in answers() for token in text})
    others = [token for token in range(40, 4096) if token not in set(used_ids)]
    return torch.tensor(sorted(used_ids + others[: 1024 - len(used_ids)]))


@cache
def eagle() -> Eagle3Head:
    """Drafts the prompts' answers well, from three layers."""
    config = Eagle3Config(num_draft_tokens=3, ttt_steps=3, own_lm_head=False, draft_vocab_size=1024)
    return fitted(config.build(base(), draft_ids()), rows_of(answers()), 60, lr=2e-3)


@cache
def copying(**norms: bool) -> Eagle3Head:
    """Starts as an induction head, which reads layer 0. Rounded copies would be chosen here and in vLLM apart."""
    settings = {"num_draft_tokens": 3, "ttt_steps": 3, "own_lm_head": False, "draft_vocab_size": 1024, **norms}
    settings["draft_dtype"] = None
    config = Eagle3Config(starts_copying=True, norm_before_residual=True, **settings)  # type: ignore[arg-type]
    return fitted(config.build(base(), draft_ids()), rows_of(answers()), 20, lr=2e-3)


@cache
def block(markov_rank: int) -> DSparkHead:
    """One layer that drafts blocks of three: DSpark with a Markov head, or DFlash.

    llama.cpp runs a shorter block where fewer tokens are wanted. A causal one drafts the same then.
    """
    dspark = bool(markov_rank)
    settings = {
        "causal": dspark,
        "num_layers": 1,
        "layers": [4, 12, 20],
        "anchor_predicts": dspark,
        "confidence": dspark,
    }
    config = DSparkConfig(num_draft_tokens=3, markov_rank=markov_rank, draft_vocab_size=1024, **settings)  # type: ignore[arg-type]
    return fitted(config.build(base(), draft_ids()), rows_of(answers()), 60, lr=2e-3)


@cache
def medusa() -> MedusaHead:
    """Has an induction head, which no format of an engine holds."""
    config = MedusaConfig(
        num_draft_tokens=3, own_lm_head=False, induction_rank=16, draft_vocab_size=1024, draft_dtype=None
    )
    return fitted(config.build(base(), draft_ids()), rows_of(answers()), 20, lr=2e-3)


HEADS: dict[str, tuple[str, Callable[[], DraftHead]]] = {
    "eagle3 in llama.cpp": ("llamacpp", eagle),
    "dspark in llama.cpp": ("llamacpp", partial(block, 16)),
    "dflash in llama.cpp": ("llamacpp", partial(block, 0)),
    "copying eagle3 in llama.cpp": ("llamacpp", partial(copying, norm_before_fc=True)),
    "medusa, by drafthead's code in vLLM": ("vllm", medusa),
    "copying eagle3, by drafthead's code in vLLM": ("vllm", partial(copying, fc_norm=True, norm_output=True)),
    "copying eagle3 in vLLM": ("vllm", partial(copying, fc_norm=True, norm_output=True)),
}


def require(engine: str) -> None:
    if not (environment().exists() if engine == "vllm" else find_spec("xllamacpp")):
        pytest.skip(f"no {engine} here; make test-engines installs it")


@pytest.mark.parametrize("case", HEADS)
def test_a_head_is_served_as_it_was_trained(tmp_path: Path, case: str) -> None:
    engine, head = HEADS[case]
    require(engine)
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    # One more token: engines also count drafts behind the end of an answer, which a head that is always right has.
    config = EvalConfig(suite=str(suite), max_new_tokens=NEW + 1, stock_baseline=False, engines=[engine])
    config.engine.vllm.proposer = "drafthead's code" in case
    config.engine.start_timeout_s = config.engine.answer_timeout_s = 900.0  # two cores may be busy
    row: dict[str, Any] = evaluate(base(), head(), config, tmp_path, Said())["engines"][engine]
    assert row["acceptance"]["ours"]["accepted"][0] > 30, "our own chain accepts too little to tell"
    assert row["texts"]["same_as_ours"] + row["texts"]["near_ties_with_ours"] == len(PROMPTS)
    assert row["failures"] == []
    assert row["texts"]["compared_with"] == "its own without drafts"
    assert row["tokens_per_second"]["plain"] > 0


def test_an_mtp_layer_is_served_in_the_checkpoint_of_its_base(tmp_path: Path, script: Callable[[str], Any]) -> None:
    """vLLM feeds GLM-4.5's layer its output before the last norm."""
    require("vllm")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 320}
    glm = checkpoint(script("base_shapes").SHAPES["glm4_moe"] | sizes, tmp_path / "base")
    config = EvalConfig(suite="builtin", max_new_tokens=NEW + 1, stock_baseline=False, engines=["vllm"])
    config.engine.start_timeout_s, config.engine.tolerance = 900.0, 0.1  # vLLM counts drafts behind an answer's end
    texts = [answer.ids for answer in base_answers(glm, SuiteConfig(suite="builtin", max_new_tokens=NEW + 1))]
    head = fitted(MtpConfig(norm_output=False).build(glm), rows_of(texts), 150, lr=5e-3)
    row: dict[str, Any] = evaluate(glm, head, config, tmp_path, Said())["engines"]["vllm"]
    assert row["format"] == "mtp" and row["acceptance"]["ours"]["mean_accepted_length"] > 3
    assert row["texts"]["same"] == row["texts"]["same_as_ours"] == len(texts) and row["failures"] == []


def test_two_requests_at_once_by_the_command(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    require("vllm")
    medusa().save_pretrained(tmp_path / "head")
    url, log = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "log"
    settings = [f"head={tmp_path / 'head'}", f"port={port}", "requests=2", "fit_length=false"]
    settings += ["drafter=head+prompt_lookup:3:1"]
    with log.open("w") as out:
        command = subprocess.Popen([sys.executable, "-m", "drafthead", "serve", *settings], stdout=out, stderr=out)
    request.addfinalizer(command.kill)  # vLLM ends with its command
    wait_until(lambda: is_up(port), command)

    def ask(prompt: str, **more: Any) -> list[list[int]]:
        ids = base().prompt_ids([{"role": "user", "content": prompt}])
        body = {"model": "embedded:smollm2", "prompt": ids, "max_tokens": NEW, "temperature": 0, **more}
        body |= {"return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        sent = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(sent, timeout=600) as answer:
            return [[*ids, *choice["token_ids"]] for choice in json.load(answer)["choices"]]

    with ThreadPoolExecutor(2) as pool:
        texts = [text for (text,) in pool.map(ask, PROMPTS)]
    assert sum(text == ours for text, ours in zip(texts, answers(), strict=True)) >= len(PROMPTS) - 1, "a near-tie"
    wait_until(lambda: "tokens per step that drafted" in log.read_text(), command)
    counted = counters(urllib.request.urlopen(f"{url}/metrics").read().decode())
    steps, accepted = (counted[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    assert accepted > 0.3 * steps > 10
    drawn = ask(PROMPTS[2], n=SAMPLES, max_tokens=4, seed=0, ignore_eos=True, temperature=0.7, top_k=2)
    answered = Counter(tuple(text[-4:]) for text in drawn)
    expected = probs_of_answers(base(), drawn[0][:-4], Sampler(temperature=0.7, top_k=2), 4)
    assert answered.total() == SAMPLES and p_value_of_answers(answered, expected) > 1e-3
    command.terminate()
    assert command.wait(60) == 0 and not is_up(port)
    assert "stopped" in log.read_text() and "--speculative-config" in log.read_text()


def test_every_planted_fault_is_noticed(tmp_path: Path, script: Callable[[str], Any]) -> None:
    """Texts stay equal, so only the checks notice: the importer, the export check, or the acceptance in vLLM."""
    require("vllm")
    script("planted_faults").main(["--json", str(tmp_path / "faults.json")])
    faults = json.loads((tmp_path / "faults.json").read_text())["faults"]
    unharmed = faults.pop("none")
    noticed = lambda row: [bool(row[check]) for check in ("import", "export check", "eval engines=")]  # noqa: E731
    assert not any(noticed(unharmed)) and unharmed["engine"]["accepted"][0] > 100
    assert len(faults) >= 10 and all(any(noticed(row)) for row in faults.values())
    answered = [row["texts"] for row in faults.values() if row["texts"]]
    assert len(answered) >= 8 and all(texts["same"] + texts["near_ties"] == texts["of"] for texts in answered)


# A corpus written by a vLLM server that is killed and restarted under way, as is the run that asks it -----------------


ANSWERS, CORPUS_TOKENS = 24, 24
START_S = 900


def wait_until(found: Callable[[], bool], process: "subprocess.Popen[bytes]", timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert process.poll() is None and time.monotonic() < deadline, "it ended, or takes too long"
        time.sleep(0.1)


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def serving(port: int, *settings: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start vLLM with a recipe's layers; kill it as if this machine had lost power."""
    require("vllm")
    command = [sys.executable, "-m", "drafthead", "serve", *settings, f"data.states.url=http://127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_up(port), process)
        yield process
    finally:
        process.kill()  # vLLM ends with it
        process.wait()


def test_killed_with_its_server_every_prompt_is_answered_once_with_its_states(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "corpora" / "answers"
    script = (
        "import drafthead.data.answers.server as s; s.SHARD_ROWS = 3; from drafthead.commands.data import main; main()"
    )
    settings = ["sources=[{kind: embedded, name: questions}]", f"prompts={ANSWERS}", "self_prompted=0"]
    settings += ["precomputed=null", f"sampler.max_new_tokens={CORPUS_TOKENS}", "server.concurrency=4"]
    run = ["recipe=eagle3_smollm2_vllm", "~phases.pretrain", f"data.folder={folder.parent}"]
    run += [f"data.answers.{setting}" for setting in settings]
    command = [sys.executable, "-c", script, *run, f"out={tmp_path / 'run'}"]
    command += [f"data.states.url=http://127.0.0.1:{port}"]

    def shards() -> int:
        return len(list(folder.glob("shard-*.parquet")))

    with serving(port, *run):
        client = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        wait_until(lambda: shards() >= 2, client)
        client.kill()
        assert client.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        kept = shards()
        client = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        wait_until(lambda: shards() > kept, client)
    client.kill()
    client.wait()
    assert shards() < ANSWERS // 3, "the server was killed after the last answer"
    with serving(port, *run):
        subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    corpus = list(AnswerStore(folder).read())
    numbers = sorted(answer.prompt_number for answer in corpus)
    assert numbers == list(range(len(corpus))) and len(corpus) > 20, "all but prompts that a suite has, too"
    prompts = [answer.ids[: answer.boundary] for answer in corpus]
    again = [decode(base(), None, ids, max_new_tokens=CORPUS_TOKENS).tokens for ids in prompts]
    same = [answer.ids[answer.boundary :] == tokens for answer, tokens in zip(corpus, again, strict=True)]
    assert sum(same) >= len(corpus) - 2, "but for near-ties, vLLM's greedy answers are the base's"
    (path,) = (folder.parent / "states").glob("answers-*")
    manifest = read_manifest(path)
    sizes, lengths = manifest.pop("store"), np.array([len(answer.input_ids) for answer in corpus])
    compare_states(StoredStates(path, lengths, sizes["width"], sizes["dtype"], manifest), [a.ids for a in corpus])


def compare_states(states: StoredStates | StatesSource, texts: Sequence[list[int]]) -> None:
    """Compare states with the base's but at the last token, which an answer's states lack. They are in float16."""
    spec = HiddenStatesSpec(layers=LAYERS)
    for ids, stored in zip(texts, states.read(range(len(texts))), strict=True):
        own = base().hidden_states(TrainBatch.of([ids]), spec)
        assert own.layers is not None
        for actual, expected in zip(stored.float().chunk(4, -1), [own.final, *own.layers.chunk(3, -1)], strict=True):
            assert (actual - expected[0])[:-1].abs().max() < 1e-3 * expected.abs().max()


# Hidden states from vLLM ----------------------------------------------------------------------------------------------


def test_vllm_computes_the_states_of_the_base_and_ends_with_its_command(tmp_path: Path) -> None:
    require("vllm")
    port, folder = free_port(), tmp_path / "corpora"
    data = DataConfig(folder=str(folder), states=StatesConfig(url=f"http://127.0.0.1:{port}"))
    with serving(port, "recipe=eagle3_smollm2_vllm", f"data.folder={folder}"):
        parts, documents = load_parts("embedded:smollm2"), Documents.of([np.array(ids, np.int32) for ids in answers()])
        served = ServedBase(lambda: parts, data.states, data.served_folder, lambda count: LAYERS, Said())
        states = Corpora(served, data, 0, Said()).states("text", documents, HiddenStatesSpec(layers=LAYERS))
        states.prepare(range(len(documents)))
        compare_states(states, answers())
        assert not [*(folder / "served").iterdir()]
    deadline = time.monotonic() + 30
    while is_up(port):
        assert time.monotonic() < deadline, "vLLM outlives `drafthead serve`"
        time.sleep(0.2)


def test_the_speculator_has_the_interface_of_vllms_v2_runner() -> None:
    script = """if True:
        import inspect
        import drafthead_proposer
        from drafthead.engines.in_vllm.speculator import Speculator
        from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator as Base

        names = [name for name in vars(Base) if not name.startswith("_")]
        assert len(names) > 3 and not [name for name in names if not hasattr(Speculator, name)], names
        for name in Base.__abstractmethods__:
            ours, wanted = (inspect.signature(getattr(each, name)).parameters.values() for each in (Speculator, Base))
            assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in wanted], name
    """
    folder = Path(speculator.__file__).parent
    done = subprocess.run(
        [environment() / "bin" / "python", "-c", script],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
