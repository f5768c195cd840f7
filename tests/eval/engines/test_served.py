"""Engines as methods of an evaluation: a server that speaks vLLM's protocol and serves our exports, and its faults."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.engines.process import EngineError, EngineProcess
from drafthead.eval.config import EvalConfig
from drafthead.eval.engines.break_even import counts_of, needed_lengths
from drafthead.eval.engines.clients import EngineServer, LlamaCppServer, VllmServer, engine_result
from drafthead.eval.engines.load import measure_load
from drafthead.eval.engines.served import format_in_vllm, serve
from drafthead.eval.evaluate import evaluate, served_as_trained
from drafthead.eval.lossless.equality import Equality
from drafthead.eval.metrics.engine_comparison import engine_failures, engine_lines
from drafthead.eval.report.tables import console_lines, load_lines, load_table, markdown_table
from drafthead.eval.timing.interleaved import one_by_one, run_interleaved
from drafthead.eval.timing.methods import engine_methods
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.dspark import DSparkConfig
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.token_tree import TokenTree
from support import Said, TinyBase, cases, fitted, noisy_head, refuses, rows_of

NEW = 24
PROMPTS = ["why is the sky blue", "tell me a story", "what is two plus two", "name a river"]


@cache
def trained(base: BaseModel) -> Eagle3Head:
    """A head that drafts the base's own answers well, over every id but the last."""
    texts = []
    for prompt in PROMPTS:
        ids = base.prompt_ids([{"role": "user", "content": prompt}])
        texts.append(ids + decode(base, None, ids, max_new_tokens=NEW).tokens)
    config = Eagle3Config(num_draft_tokens=3, ttt_steps=3, layers=[1, 2], draft_vocab_size=290)
    return fitted(config.build(base, torch.arange(5, 295)), rows_of(texts), 40, lr=5e-3)


@pytest.fixture
def fake_vllm(completions_server: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's endpoints, answered by our engine with ``head``; None: plainly."""

    def make(base: BaseModel, head: Eagle3Head | None, wrong_token: bool = False) -> Any:
        drafts, generated = 'spec_decode_num_drafts_total{engine="0"}', 'generation_tokens_total{engine="0"}'
        accepted = [f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}' for position in range(3)]
        counts, started = dict.fromkeys((drafts, generated, *accepted), 0), time.time()

        def answer(prompt: list[int], body: dict[str, Any]) -> list[int]:
            assert body["temperature"] == 0 and body["return_token_ids"]
            plan = DraftConfig(tree=TokenTree.chain(3))
            result = decode(base, head, prompt, max_new_tokens=body["max_tokens"], draft_config=plan)
            for step in result.steps if head is not None else []:
                counts[drafts] += step.depth > 0
                for name in accepted[: step.accepted]:
                    counts[name] += 1
            counts[generated] += len(result.tokens)
            return [*result.tokens[:-1], 7] if wrong_token and head is not None else result.tokens

        def get(handler: BaseHTTPRequestHandler) -> None:
            content = json.dumps({"version": "9.9.9", "data": [{"id": "served"}]})
            if handler.path == "/metrics":
                content = f"# HELP\nprocess_start_time_seconds {started}\n"
                content += "".join(f"vllm:{name} {count}.0\n" for name, count in counts.items())
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content.encode())

        server = completions_server(answer, base.tokenizer, base.eos_ids)
        server._http.RequestHandlerClass.do_GET = get
        return server

    return make


def served(base: BaseModel, folder: Path, *, spec: Any, plain: Any) -> dict[str, Any]:
    suite = folder / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    config = EvalConfig(suite=str(suite), max_new_tokens=NEW, stock_baseline=False, engines=["vllm"])
    config.engine.vllm.url, config.engine.vllm.plain_url = spec.url, "" if plain is None else plain.url
    return evaluate(base, trained(base), config, folder, Said())


@pytest.mark.slow
def test_an_engine_that_drafts_alike_passes(tiny_base: TinyBase, tmp_path: Path, fake_vllm: Callable[..., Any]) -> None:
    base = tiny_base()
    evaluation = served(base, tmp_path, spec=fake_vllm(base, trained(base)), plain=fake_vllm(base, None))
    row = evaluation["engines"]["vllm"]
    assert not engine_failures(evaluation)
    assert row["version"] == "9.9.9" and row["drafts"] == 3 and row["prompts"] == 4 and row["format"] == "eagle3"
    ours, theirs = row["acceptance"]["ours"], row["acceptance"]["engine"]
    assert theirs["accepted"] == ours["accepted"] and theirs["steps"] == ours["steps"] and ours["accepted"][0] > 5
    assert theirs["mean_accepted_length"] == pytest.approx(ours["mean_accepted_length"])
    assert row["texts"]["same"] == row["texts"]["same_as_ours"] == 4
    assert row["texts"]["compared_with"] == "its own without drafts" and row["tokens_per_second"]["plain"] > 0
    assert set(evaluation["overall"]["methods"]) == {"speculative", "vllm", "vllm_plain"}, "speculative is chain:3"
    headline, line = engine_lines(evaluation)
    low, high = row["interval_95"]
    assert row["speedup"] == row["tokens_per_second"]["speculative"] / row["tokens_per_second"]["plain"]
    assert low < row["speedup"] < high
    says = f"{row['speedup']:.2f}x with the head over without it (95 %: {low:.2f} to {high:.2f}), "
    assert headline.startswith(f"in vLLM 9.9.9 (its dtype is not known): {says}")
    assert headline.endswith(f", tau {theirs['mean_accepted_length']:.2f}, on 4 prompts of suite")
    assert line.startswith("   eagle3, chain of 3: ") and "near-ties: 0" in line
    assert {headline, line} <= {*console_lines(evaluation)} and headline in markdown_table(evaluation)
    page = (tmp_path / "report.html").read_text()
    assert f"<b>{row['speedup']:.2f}x</b><span>with the head over without it in vLLM 9.9.9</span>" in page
    assert json.loads((tmp_path / "eval.json").read_text())["engines"]["vllm"]["failures"] == []


@pytest.mark.slow
def test_answers_of_a_server_that_was_replaced_are_not_used(
    tiny_base: TinyBase, tmp_path: Path, fake_vllm: Callable[..., Any]
) -> None:
    base = tiny_base()
    server = fake_vllm(base, trained(base))
    first = served(base, tmp_path, spec=server, plain=None)
    again = served(base, tmp_path, spec=server, plain=None)
    other = noisy_head(trained(base).config, base, 1.0, trained(base).d2t)
    assert (
        again["resumed"] == [4, 4] and again["engines"]["vllm"]["acceptance"] == first["engines"]["vllm"]["acceptance"]
    )
    replaced = served(base, tmp_path, spec=fake_vllm(base, other), plain=None)
    assert replaced["engines"]["vllm"]["acceptance"] != first["engines"]["vllm"]["acceptance"]
    assert engine_failures(replaced)


def compared(base: BaseModel, folder: Path, spec: Any, plain: Any, head: Eagle3Head | None = None) -> dict[str, Any]:
    """The engine's row of an evaluation, without the rest of one."""
    config = EvalConfig(max_new_tokens=NEW, engines=["vllm"], tree="dynamic:6")
    config.engine.vllm.url, config.engine.vllm.plain_url = spec.url, "" if plain is None else plain.url
    prompts = [EvalPrompt("chat", n, [{"role": "user", "content": text}]) for n, text in enumerate(PROMPTS)]
    with serve(base, head or trained(base), config, folder, lambda line: None) as engines:
        methods = {name: method.answer for name, method in engine_methods(base, engines, config).items()}
        methods["autoregressive"] = one_by_one(lambda ids: decode(base, None, ids, max_new_tokens=NEW))
        built = lambda prompt, answers: base.prompt_ids(prompt.messages)  # noqa: E731
        timed = run_interleaved(prompts, built, methods, None, 0, lambda *_: None)
    pairs = zip(timed.results["vllm"], timed.results["autoregressive"], strict=True)
    equalities = {"vllm": [Equality(same=one.tokens == other.tokens) for one, other in pairs]}
    return served_as_trained(base, engines, timed, equalities, config)["vllm"]


@pytest.mark.slow
def test_other_ways_to_draft_get_a_line(tiny_base: TinyBase, tmp_path: Path, fake_vllm: Callable[..., Any]) -> None:
    base = tiny_base()
    config = EvalConfig(max_new_tokens=NEW, engines=["vllm"])
    config.engine.vllm.url = fake_vllm(base, trained(base)).url
    prompts = [EvalPrompt("chat", n, [{"role": "user", "content": text}]) for n, text in enumerate(PROMPTS)]
    with serve(base, trained(base), config, tmp_path, lambda line: None) as engines:
        engines.methods["vllm:ngram"] = engines.methods["vllm"]
        methods = {name: method.answer for name, method in engine_methods(base, engines, config).items()}
        methods["autoregressive"] = one_by_one(lambda ids: decode(base, None, ids, max_new_tokens=NEW))
        methods["speculative"] = one_by_one(lambda ids: decode(base, trained(base), ids, max_new_tokens=NEW))
        built = lambda prompt, answers: base.prompt_ids(prompt.messages)  # noqa: E731
        timed = run_interleaved(prompts, built, methods, None, 0, lambda *_: None)
    equalities = {name: [Equality(same=True)] * len(PROMPTS) for name in methods}
    rows = served_as_trained(base, engines, timed, equalities, config)
    other = rows["vllm"]["compared"]["ngram"]
    assert other["acceptance"] == rows["vllm"]["acceptance"]["engine"] and other["texts"]["same"] == len(PROMPTS)
    lines = engine_lines({"engines": rows, "suite": "smoke", "failed": []})
    assert lines[2].startswith("   ngram: ") and f"tau {other['acceptance']['mean_accepted_length']:.2f}" in lines[2]
    config.engine.vllm.compare = ["ngram"]
    refuses("compare needs engines=.vllm. without an address", evaluate, base, trained(base), config, tmp_path, Said())


@pytest.mark.slow
def test_load_is_measured_and_resumes(tiny_base: TinyBase, tmp_path: Path, fake_vllm: Callable[..., Any]) -> None:
    base = tiny_base()
    config = EvalConfig(max_new_tokens=NEW, engines=["vllm"])
    config.engine.load.requests, config.engine.load.rounds = [1, 2], 2
    spec, plain = fake_vllm(base, trained(base)), fake_vllm(base, None)
    config.engine.vllm.url, config.engine.vllm.plain_url = spec.url, plain.url
    prompts = [base.prompt_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    rows = measure_load(base, trained(base), prompts, config, tmp_path, Said())
    assert [(row["method"], row["requests"]) for row in rows] == [
        (name, count) for name in ("vllm", "vllm_plain") for count in (1, 2)
    ]
    chain = DraftConfig(tree=TokenTree.chain(3))
    ours = [decode(base, trained(base), ids, max_new_tokens=NEW, draft_config=chain) for ids in prompts]
    steps = [step for answer in ours for step in answer.steps if step.depth]
    for row in rows:
        assert row["same"] == row["of"] == 2 * len(PROMPTS) and len(row["rounds"]) == 2
        assert 0 < row["median_s"] <= row["slowest_tenth_s"]
        tau = 1 + sum(step.accepted for step in steps) / len(steps) if row["method"] == "vllm" else None
        assert row["tau"] == (tau and pytest.approx(tau)) and (tau or row["ratio"] == 1)
    shown = load_table({"load": rows}).markdown()
    outputs = f"{2 * len(PROMPTS)} of {2 * len(PROMPTS)}"
    assert outputs in shown and "sampled" not in shown
    assert outputs not in load_table({"load": [row | {"temperature": 0.7} for row in rows]}).markdown()
    lengths = load_lines({"load": [row | {"step_s": 1.0 + (row["tau"] is not None)} for row in rows]})
    assert lengths[0].endswith('"num_speculative_tokens_per_batch_size": [[1, 2, 0]]')
    cheap = load_lines({"load": [row | {"step_s": 1.0} for row in rows]})
    assert re.search(r"\[\[1, 2, [123]\]\]$", cheap[0])
    asked = len(spec.bodies)
    assert measure_load(base, trained(base), prompts, config, tmp_path, Said()) == rows and len(spec.bodies) == asked
    config.max_new_tokens = 4
    assert measure_load(base, trained(base), prompts, config, tmp_path, Said()) != rows


def test_the_length_that_pays_for_a_larger_pass() -> None:
    counts = counts_of([1, 4], [1, 3])
    assert counts == [1, 2, 3, 4, 6, 8, 12, 16]
    times = dict.fromkeys(counts[:4], 1.0) | {6: 2.0, 8: 1.9, 12: 4.0, 16: 4.0}
    assert needed_lengths(times, 1, [1, 3]) == [1, 1] and needed_lengths(times, 4, [1, 3]) == [2, 4]


FAULTS: dict[str, Callable[[Eagle3Head], None]] = {
    "layers off by one": lambda head: setattr(head, "spec", type(head.spec)(layers=(0, 1))),
    "offsets for ids": lambda head: head.d2t.sub_(torch.arange(len(head.d2t))),
    "a norm left out": lambda head: head.midlayer.hidden_norm.weight.data.fill_(1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_an_engine_reads_wrongly_is_caught_by_its_acceptance_alone(
    tiny_base: TinyBase, tmp_path: Path, fake_vllm: Callable[..., Any], fault: str
) -> None:
    """The engine's texts stay right, as they do in real ones."""
    base = tiny_base()
    good, head = (trained(base).config.build(base, trained(base).d2t.clone()) for _ in range(2))
    for one in (good, head):
        one.load_state_dict(trained(base).state_dict())
        one.eval()
        if fault == "a norm left out":  # whose weights say something
            one.midlayer.hidden_norm.weight.data.copy_(torch.linspace(0.5, 2.0, base.hidden_size))
    FAULTS[fault](head)
    row = compared(base, tmp_path, fake_vllm(base, head), fake_vllm(base, None), good)
    assert row["texts"]["same"] == row["texts"]["same_as_ours"] == 4
    assert any("tokens per step, our decoder" in failure for failure in row["failures"])
    assert any("accepts draft 1 in" in failure for failure in row["failures"])


def test_other_texts_are_a_failure(tiny_base: TinyBase, tmp_path: Path, fake_vllm: Callable[..., Any]) -> None:
    base = tiny_base()
    row = compared(base, tmp_path, fake_vllm(base, trained(base), wrong_token=True), None)
    assert row["failures"] == ["4 of 4 answers of vLLM differ from our autoregressive ones, beyond near-ties"]
    evaluation = {"engines": {"vllm": row}, "suite": "smoke", "failed": []}
    assert "not measured without it" in engine_lines(evaluation)[0]
    assert "of our decoder (chain:3, with the exported weights)" in engine_lines(evaluation)[1]


def test_counts_become_steps() -> None:
    result = engine_result(list(range(12)), steps=4, accepted=[3, 2, 0], prefill_s=1.0, total_s=3.0)
    drafted = [step for step in result.steps if step.depth]
    assert [step.accepted for step in drafted] == [2, 2, 1, 0] and all(step.depth == 3 for step in drafted)
    assert sum(step.committed for step in result.steps) == 11 and len(result.steps) == 6, "two steps drafted nothing"
    assert sum(step.total_s for step in result.steps) == pytest.approx(2.0)
    steps = engine_result(list(range(12)), steps=4).steps
    assert sum(step.committed for step in steps) == 11 and len(steps) == 4


def gone(group: int, within_s: float = 10.0) -> bool:
    """Wait until no process of the group is left; killed ones may remain for a moment."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def stub(folder: Path, script: str) -> str:
    """An interpreter that ignores what it is asked to run."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_an_engine_that_is_absent_dies_or_hangs_is_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    absent = EngineProcess("llama.cpp", sys.executable, ["vllm", "1"], {"PYTHONPATH": ""})
    with pytest.raises(EngineError, match="No module named 'vllm'"):
        absent.wait_until(lambda: False, 20)
    absent.close()
    dying = EngineProcess("vLLM", stub(tmp_path, "echo 'ValueError: no such model' >&2; kill -6 $$"), [], {})
    with pytest.raises(EngineError, match=r"^vLLM ended \(signal 6, SIGABRT\): ValueError: no such model$"):
        dying.wait_until(lambda: False, 20)
    dying.close()
    silent = EngineProcess("vLLM", stub(tmp_path, "sleep 60"), [], {})
    with pytest.raises(EngineError, match="did not start within 0.3 s"):
        silent.wait_until(lambda: False, 0.3)
    silent.close()
    assert gone(silent._process.pid)
    with pytest.raises(EngineError, match="cannot be started with /no/python"):
        EngineProcess("vLLM", "/no/python", [], {})


def test_an_engine_does_not_outlive_a_killed_evaluation(tmp_path: Path) -> None:
    """The runner ends its group when standard input ends, which no signal to us can prevent."""
    (tmp_path / "xllamacpp.py").write_text("import time\ntime.sleep(600)\n")
    script = (
        "import sys, time; from drafthead.engines.process import EngineProcess\n"
        f"p = EngineProcess('x', sys.executable, ['llamacpp', '{{}}'], {{'PYTHONPATH': {str(tmp_path)!r}}})\n"
        "print(p._process.pid, flush=True); time.sleep(600)"
    )
    ours = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    group = int(ours.stdout.readline())
    assert not gone(group, within_s=0.1)
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    assert gone(group)


def test_a_server_that_is_not_there_and_one_that_hangs() -> None:
    assert not LlamaCppServer("http://127.0.0.1:9", frozenset(), 1.0).is_ready()
    with pytest.raises(EngineError, match="llama.cpp at http://127.0.0.1:9"):
        LlamaCppServer("http://127.0.0.1:9", frozenset(), 1.0).version()
    quiet = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # listens, and nobody accepts
    with pytest.raises(EngineError, match="engine.answer_timeout_s"):
        LlamaCppServer(f"http://127.0.0.1:{quiet.server_address[1]}", frozenset(), 0.2).version()
    quiet.server_close()


@cases(
    "fault, says",
    ("drips", r"within 0.3 s \(engine.answer_timeout_s\)"),
    ("endless", "more than 1 MiB"),
    ("redirect", "redirects to http://other"),
)
def test_a_hostile_engine(completions_server: Any, fault: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthead.data.answers.http_client.MAX_RESPONSE", 1 << 20)
    server = completions_server(lambda *_: [1], None, frozenset())
    server.fault, server.elsewhere = lambda number, body: fault, "http://other"
    engine = LlamaCppServer(server.url, frozenset(), 0.3)
    with pytest.raises(EngineError, match=says):
        engine._send("/v1/completions", {"prompt": [1]})
    engine.close()


@pytest.mark.parametrize("kind", [LlamaCppServer, VllmServer])
@pytest.mark.parametrize("sent", [{}, [], "hello", None])
def test_a_server_of_another_kind(kind: type[EngineServer], sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = kind("http://127.0.0.1:9", frozenset(), 1.0)
    monkeypatch.setattr(engine, "_send", lambda *_: sent)
    with pytest.raises(EngineError, match=f"127.0.0.1:9 does not answer as {kind.name} does .*check the address"):
        engine.answer([1], 1)
    engine.close()


@pytest.mark.slow
def test_what_no_engine_serves_is_said_before_anything_starts(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    config = EvalConfig(suite="smoke", engines=["vllm"])
    head = MedusaConfig(num_draft_tokens=2, reads_last_token=True).build(base)
    config.engine.vllm.proposer = False
    refuses("vllm_medusa: .*last", evaluate, base, head, config, tmp_path, Said())
    for settings, says in (
        ({"markov_rank": 0}, "dflash: it has a Markov or a confidence head .* format dspark: it has no Markov head"),
        ({}, "vLLM drafts with DSpark heads on GPUs only; .* train a DFlash head"),
    ):
        block = DSparkConfig(num_draft_tokens=3, layers=[1, 2], **settings).build(base)  # type: ignore[arg-type]
        refuses(says, evaluate, base, block, config, tmp_path, Said())
    config.engine.drafts = 2
    refuses("engine.drafts=2.* 3", evaluate, base, block, config, tmp_path, Said())
    config.engine.drafts = None
    config.engines = ["llamacpp"]
    refuses("llamacpp.*MedusaHead.*gguf", evaluate, base, head, config, tmp_path, Said())
    config.engine.vllm.proposer = True
    kangaroo = KangarooConfig(exit_layer=1).build(base)
    refuses("KangarooHead runs the base's layers", format_in_vllm, kangaroo, config.engine.vllm)
    config.engine.vllm.proposer = None
    assert format_in_vllm(head, config.engine.vllm) is None, "no format of vLLM has it"
    assert format_in_vllm(trained(base), config.engine.vllm).name == "eagle3"
    config.engines, config.engine.vllm.python = ["vllm"], "/no/python"
    refuses("/no/python.*install=vllm", evaluate, base, trained(base), config, tmp_path, Said())
    adapted = copy(base)
    adapted.config = replace(base.config, adapter="mine")
    refuses("adapter mine.*merged", evaluate, adapted, trained(adapted), config, tmp_path, Said())
    with pytest.raises(ValueError, match="engines"):
        EvalConfig(engines=["tgi"])
