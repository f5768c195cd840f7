"""Report speed and correctness on this machine, on one page to paste into an issue.

usage: drafthead doctor [key=value ...]

drafthead doctor > page.txt
drafthead doctor full=true                       # the GPU checklist: a JSON line per step, in doctor.jsonl
drafthead doctor 'train=[recipe=medusa_llama3]'  # step costs of another recipe's base and head

The page takes up to two minutes. full=true skips steps that this device cannot run, and prints why. The same command
resumes an interrupted checklist.
"""

import gc
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

import torch
from torch.profiler import profile

import drafthead
from drafthead.commands.command import command
from drafthead.data.batch import TrainBatch
from drafthead.errors import UserError, one_line
from drafthead.eval.lossless.equality import compare_outputs, draw_margin, equality_rate, logit_margin
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.files.local import cache_dir, read_json, read_json_lines
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.token_tree import TokenTree
from drafthead.settings.compose import say
from drafthead.settings.schema import settings
from drafthead.system.devices import accelerator_name, device_of, graphs_of, memory
from drafthead.system.machine import hardware, other_processes_line, versions
from drafthead.train.config import RunConfig, composed
from drafthead.train.estimate.memory import Estimate, size
from drafthead.train.trainer.optim import head_optimizer
from drafthead.train.trainer.step import train_step

CHECKOUT = Path(drafthead.__file__).resolve().parent.parent
Graphs = Literal["auto", "always", "never"]
Step = tuple[str, str, Callable[[], Any]]
"""A step of the checklist: its name, the reason to skip it (or an empty string), and the function that runs it."""
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=0.8, top_p=0.9)}
ANSWER = 32
"""Number of tokens per answer that is compared with plain decoding or profiled."""
CONTEXTS, ROWS = (200, 1000, 8000), (16, 64, 256, 1024)
"""Context lengths after which forward passes are timed; batch sizes of the timed generation."""
LIMIT_S = 110
"""Seconds for the whole page. The part that exceeds the limit is stopped, and later parts are not started."""
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Memory bandwidth in bytes per second of GPUs whose name contains the key."""


@settings(kw_only=True)
class DoctorConfig:
    """Settings of ``drafthead doctor``."""

    full: bool = False
    """Run the GPU checklist instead of printing the page."""
    out: str = "doctor.jsonl"
    """File for the results of the checklist, one JSON line per step."""
    train: list[str] = field(default_factory=lambda: ["recipe=medusa_smollm2"])
    """Settings of ``drafthead train`` that choose the base and the untrained head to time."""
    recipes: list[str] = field(default_factory=lambda: ["medusa_smollm2", "eagle3_smollm2", "medusa_llama3"])
    """Recipes whose estimated memory is compared with the device's free memory."""


@command("doctor", DoctorConfig, __doc__)
def main(config: DoctorConfig) -> None:
    """Print the page, or run the checklist."""
    if config.full:
        run_steps(Path(config.out), checklist(config))
    else:
        lines = page(config)
        sys.stdout.write("\n".join(lines) + "\n")
        if failed := sum(" FAILED: " in line for line in lines):
            raise UserError(f"{failed} parts of the page failed; correct what these lines say, or report the page")


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Stop the block with a ``TimeoutError`` after ``seconds``, or raise it before the block if ``seconds`` <= 0.

    On Windows, a block that has started is not stopped.
    """

    def stop(*_: object) -> None:
        raise TimeoutError("time ran out; choose smaller models with train= or recipes=")

    if seconds <= 0:
        stop()
    if not hasattr(signal, "SIGALRM"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def page(config: DoctorConfig, limit_s: float = LIMIT_S) -> list[str]:
    """Return the lines of the page. A part that fails is replaced by a line with the error.

    All parts together have ``limit_s`` seconds: the part that exceeds them fails, and so do the later parts.
    """
    started, host, device = perf_counter(), hardware(), device_of(None)
    free, total = memory()

    def costs_lines() -> list[str]:
        _, base, head = loaded(config.train)
        costs = measure_costs(base, head, repeats=5, sizes=[1, 2, 4, 8, 16, 32, 64])
        return [
            f"kernels    {base.kernels or 'those of torch'}; graphs {'on' if base.uses_graphs else 'off'}",
            f"step of {base.name}, {str(base.dtype)[6:]}, {costs.context} tokens in the cache, {head.config.head_type}",
            "  nodes         " + "".join(f"{n:>8}" for n in costs.verify),
            "  pass, ms      " + "".join(f"{1e3 * seconds:>8.1f}" for seconds in costs.verify.values()),
            f"  draft, ms     {1e3 * costs.draft:>8.1f}\n  the rest, ms  {1e3 * costs.overhead:>8.1f}",
            f"  {other_processes_line(costs.other_processes_cores)}",
        ]

    def exactness_lines() -> list[str]:
        """Return a line per way to decode, with the number of answers that equal those without drafts."""
        result = exactness("eagle3_smollm2", "auto")
        title = f"exactness of a tiny eagle3 head on this device, {result['accepted']:.0%} of its drafts accepted"
        rates = result["ways"].items()
        return [
            title,
            *(f"  {way:<16}{r['same']} of {r['of']} as plain decoding{r['found'] or ''}" for way, r in rates),
        ]

    def memory_line(name: str) -> list[str]:
        """Return a line with the estimated memory of a recipe's training step."""
        estimate = Estimate(composed([f"recipe={name}"]), device=device.type)
        needed = max(estimate.total(phase) for phase in estimate.phases)
        fits = 1.1 * needed + 2**30 < free  # the margin that estimate/memory.py names
        return [f"  {name:<20}{size(needed):>10}  {'fits' if fits else 'does not fit'}"]

    lines = [
        f"versions   {', '.join(f'{name} {version}' for name, version in versions().items())}",
        f"device     {device}, {host['gpu'] or 'no accelerator'}, {size(free)} of {size(total)} free",
        f"cpu        {host['cpu']}, {host['cores']} cores, {host['torch_threads']} torch threads, {host['ram_gb']} GB",
        f"disk       {size(shutil.disk_usage(Path.cwd()).free)} free in {Path.cwd()}",
    ]
    parts = {"exactness of a tiny head": exactness_lines, "costs of a step": costs_lines}
    for name, lines_of in (parts | {name: partial(memory_line, name) for name in config.recipes}).items():
        say(f"{name} ...")
        try:
            with at_most(limit_s - (perf_counter() - started)):
                lines += lines_of()
        except Exception as error:  # the page is most useful on a machine where something fails
            lines.append(f"{name} FAILED: {type(error).__name__}: {one_line(error)}")
        if name == "costs of a step":
            lines.append("memory of a training step, estimated; others: drafthead train recipe=NAME mode=estimate")
    return [f"drafthead doctor, {perf_counter() - started:.0f} s", *lines]


def loaded(overrides: Sequence[str], graphs: Graphs = "auto") -> tuple[RunConfig, BaseModel, DraftHead]:
    """Return settings, base and an untrained head of a recipe, which ``overrides`` choose as for ``drafthead train``.

    If the recipe gives the base's ``shape``, the base is not downloaded but gets random weights, except for SmolLM2 if
    it is on disk. ``graphs`` is the base's setting for CUDA graphs.
    """
    run = composed(overrides)
    stored = run.base.name == EMBEDDED and any(cache_dir().glob("smollm2-*/manifest.json"))
    if run.base.shape and not stored:  # times do not depend on the weights
        run = replace(run, base=replace(run.base, random=True, tokenizer="builtin:tiny"))
    base, config = BaseModel.load(replace(run.base, graphs=graphs)), run.head_config()
    torch.manual_seed(0)
    d2t = torch.arange(config.drafted_ids(base.vocab_size)) if config.draft_vocab_size else None
    return run, base, config.build(base, d2t).eval()


def train(run: RunConfig, head: DraftHead, ids: list[int], steps: int, lr: float) -> None:
    """Train ``head`` for ``steps`` steps on the token ids ``ids``, by loss and optimiser of the run's last phase."""
    phase = list(run.phases.values())[-1]
    batch = TrainBatch.of([ids]).to(head.base.device)
    optimizer = head_optimizer(head.train(), phase.optim)
    for _ in range(steps):
        batches = [(batch, head.base_model.hidden_states(batch, head.spec))]
        train_step(head, optimizer, batches, phase.loss, lr=lr, clip_norm=1.0)
    head.eval()


def exactness(recipe: str, graphs: Graphs) -> dict[str, Any]:
    """Train the head of ``recipe`` on a tiny random base, and compare answers with and without its drafts.

    ``graphs`` is the base's setting for CUDA graphs.

    Returns:
        "ways": for greedy and sampled answers, each with a chain ("alone"), a tree and a batch of trees: the number of
            equal answers and the causes of differences, from ``equality_rate``.
        "accepted": the share of drafts that were accepted.
    """
    run, base, head = loaded([f"recipe={recipe}", "debug=tiny", "head.draft_vocab_size=null"], graphs)
    text = list(range(10, 19))
    text += decode(base, None, text, max_new_tokens=96, ignore_eos=True).tokens
    train(run, head, text, steps=40, lr=0.01)
    prompts = [text[:9], text[:20], text[:50]]  # continued by what the head was trained on, so that it drafts well
    tree = DraftConfig(tree=TokenTree.expansion([3, 2, 1][: head.depth]))
    ways = {"alone": DraftConfig(tree=TokenTree.chain(head.depth)), "tree": tree, "batch": tree}
    rates, accepted, drafted = {}, 0, 0
    for name, sampler in SAMPLERS.items():
        answer: Any = partial(decode_batch, base, sampler=sampler, max_new_tokens=ANSWER, ignore_eos=True)
        plain = [answer(None, [ids], seeds=[row])[0].tokens for row, ids in enumerate(prompts)]
        for way, draft_config in ways.items():
            equalities = []
            for rows in [[0, 1, 2]] if way == "batch" else [[0], [1], [2]]:
                results = answer(head, [prompts[row] for row in rows], seeds=rows, draft_config=draft_config)
                for row, result in zip(rows, results, strict=True):
                    accepted += sum(step.accepted for step in result.steps)
                    drafted += sum(step.depth for step in result.steps)
                    answers = (prompts[row], plain[row], result.tokens)
                    margin = partial(logit_margin, base, *answers)
                    if not sampler.greedy:
                        margin = partial(draw_margin, base, sampler, row, *answers)
                    equalities.append(compare_outputs(plain[row], result.tokens, margin, dtype=base.rounding_dtype))
            rates[f"{name}, {way}"] = equality_rate(equalities, base.rounding_dtype)
    return {"ways": rates, "accepted": accepted / drafted}


def checklist(config: DoctorConfig) -> list[Step]:
    """Return the steps of ``full=true`` in order. Each name starts with the number of what it checks, from 0 to 9."""
    device = device_of(None)
    gpu = "" if device.type != "cpu" else "needs a GPU; this machine computes on its CPU"
    source = "" if (CHECKOUT / "benchmarks").exists() else "needs a checkout of the repository"
    graphs = "" if graphs_of(device) else f"{device.type} has no graphs"
    files = (resources.files("drafthead.recipes") / "recipe").iterdir()
    recipes = sorted(file.name[:-5] for file in files if file.name.endswith("_smollm2.yaml"))
    overrides, large = config.train, ["recipe=medusa_llama3"]
    rest = [override for override in overrides if not override.startswith("recipe=")]
    return [
        ("0 machine", "", machine),
        ("1 tests marked gpu", gpu or source, partial(python, "-m", "pytest", "-q", "-m", "gpu", "tests")),
        *((f"2 equality of {name}", "", partial(exactness, name, "never")) for name in recipes),
        *((f"2 equality of {name}, graphs", graphs, partial(exactness, name, "always")) for name in recipes),
        *((f"3 passes after {n} tokens", gpu if n > 1000 else "", partial(passes, overrides, n)) for n in CONTEXTS),
        *((f"3 passes of 8B after {n} tokens", gpu, partial(passes, large, n)) for n in CONTEXTS),
        *((f"4, 5 draft and loop of {name}", "", partial(passes, [f"recipe={name}", *rest], 200)) for name in recipes),
        ("4, 5 draft and loop of 8B", gpu, partial(passes, ["recipe=eagle3_llama3"], 200)),
        ("6 training step", source, partial(benchmark, "train_step", "--steps", "2", *overrides)),
        ("6 training step of 8B", gpu or source, partial(benchmark, "train_step", *large)),
        *((f"7 generation of {n} rows", gpu if n > 16 else "", partial(generation, overrides, n)) for n in ROWS),
        ("8 every head for five minutes", gpu or source, partial(benchmark, "heads", "--minutes", "5")),
        ("9 profile", "", partial(profiled, overrides)),
    ]


def run_steps(path: Path, steps: Sequence[Step]) -> None:
    """Run the steps that the log ``path`` lacks or that failed, and append a line for each.

    At the end, raise a ``UserError`` if any step failed.
    """
    device = accelerator_name() or hardware()["cpu"]
    rows = [row for row in read_json_lines(path) if row.get("device") == device]
    done = {(row["step"], row.get("skipped", "")) for row in rows if "error" not in row}
    failed = 0
    for name, reason, work in steps:
        if (name, reason) in done:
            continue
        started, row = perf_counter(), {"step": name, "device": device}
        try:
            row |= {"skipped": reason} if reason else {"result": work()}
        except Exception as error:  # one fault must not hide the results of the other steps
            row["error"] = f"{type(error).__name__}: {one_line(error)}"
            failed += 1
        gc.collect()  # the next step needs the device's memory, maybe in another process
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        row["seconds"] = round(perf_counter() - started, 2)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        say(f"{name}: {row.get('error') or reason or 'done'}, {row['seconds']} s")
    if failed:
        raise UserError(f"{failed} steps failed; {path} has the errors, and the same command tries these steps again")
    say(f"the results of all steps are in {path}")


def machine() -> dict[str, Any]:
    """Return hardware, versions, and the driver and clocks of NVIDIA GPUs."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    gpus = subprocess.check_output(query, text=True).splitlines() if shutil.which("nvidia-smi") else []
    return {"hardware": hardware(), "versions": versions(), "gpus": gpus}


def benchmark(name: str, *arguments: str) -> Any:
    """Run ``benchmarks/NAME.py`` with ``arguments``, and return the JSON record that it writes."""
    with TemporaryDirectory(prefix="drafthead-doctor-") as folder:
        record = Path(folder) / "record.json"
        python(f"benchmarks/{name}.py", "--json", str(record), *arguments)
        return read_json(record)


def python(*arguments: str) -> str:
    """Run ``python ...`` in a new process in the checkout, and return its output."""
    done = subprocess.run([sys.executable, *arguments], cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        name = arguments[1] if arguments[0] == "-m" else arguments[0]
        raise UserError(f"{name} failed: {' | '.join((done.stdout + done.stderr).splitlines()[-5:])}")
    return done.stdout


def passes(overrides: Sequence[str], context: int) -> dict[str, Any]:
    """Time a decoding step with a chain after ``context`` tokens, for the recipe that ``overrides`` choose.

    Returns:
        "costs": the fields of the ``CostModel``.
        "draft_share", "loop_share": the shares of the step's time that drafting and the code outside the models take.
        "bandwidth_share": for each number of tokens of a forward pass, the share of the device's memory bandwidth that
            the pass reaches. None on devices that ``BANDWIDTH`` lacks.
    """
    _, base, head = loaded(overrides)
    costs = measure_costs(base, head, context)
    size_read = sum(p.numel() * p.element_size() for p in base.model.parameters())
    if base.embedding.data_ptr() != base.lm_head.weight.data_ptr():  # only a few rows of the table are read
        size_read -= base.embedding.numel() * base.embedding.element_size()
    shape = base.cache_shape
    widths = sum(heads * width for sizes in shape.layers if sizes for heads, width in sizes)
    size_read += costs.context * widths * shape.dtype.itemsize
    bandwidth = next((rate for word, rate in BANDWIDTH.items() if word in (accelerator_name() or "")), None)
    step = costs.step(head.depth + 1, head.depth)
    return {
        "costs": costs.to_json(),
        "draft_share": costs.draft_at(head.depth) / step,
        "loop_share": costs.overhead / step,
        "bandwidth_share": bandwidth and {n: size_read / bandwidth / seconds for n, seconds in costs.verify.items()},
    }


def generation(overrides: Sequence[str], rows: int) -> dict[str, float]:
    """Return tokens per second of ``rows`` prompts in one batch, by our loop and by transformers' ``generate``.

    The base is that of the recipe that ``overrides`` choose. No drafts are used.
    """
    _, base, _ = loaded(overrides)
    new, generator = (16 if base.device.type == "cpu" else 128), torch.Generator().manual_seed(0)
    ids = torch.randint(1, base.vocab_size, (rows, 64), generator=generator)  # without the padding id 0
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    work: dict[str, Callable[[], object]] = {
        "ours": partial(decode_batch, base, None, ids.tolist(), max_new_tokens=new, ignore_eos=True),
        "generate": partial(base.stock().generate, ids.to(base.device), **options),
    }
    speeds = {}
    for name, decoder in work.items():
        for _ in range(2):  # the first one warms up
            base.synchronise()
            started = perf_counter()
            decoder()
            base.synchronise()
            speeds[name] = rows * new / (perf_counter() - started)
    return speeds


def profiled(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the milliseconds of the ten slowest operations of torch, by name, in "decoding" and in "training".

    Base and head are those of the recipe that ``overrides`` choose. The time of an operation excludes the operations
    that it calls.
    """
    run, base, head = loaded(overrides)
    ids = [n % base.vocab_size for n in range(512)]
    work: dict[str, Callable[[], object]] = {
        "decoding": partial(decode, base, head, ids[:64], max_new_tokens=ANSWER, ignore_eos=True),
        "training": partial(train, run, head, ids, steps=2, lr=0.0),
    }
    key, costs = f"self_{'cpu' if base.device.type == 'cpu' else 'device'}_time_total", {}
    for name, function in work.items():
        function()
        with profile() as profiler:
            function()
        times = {event.key: round(getattr(event, key) / 1e3, 3) for event in profiler.key_averages()}
        costs[name] = dict(sorted(times.items(), key=lambda item: -item[1])[:10])
    return costs
