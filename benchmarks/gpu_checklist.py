"""Check and time everything that a GPU changes: a JSON line per step, in the order in which to read them.

    python benchmarks/gpu_checklist.py --log gpu.jsonl [key=value ...]

The settings at the end choose the base and the head as for `drafthead train` (by default recipe=medusa_smollm2). Steps
that this device cannot run are skipped, with the reason. The same command resumes: it runs the steps that failed or
that the log lacks.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from common import entry_point, generated, parser
from rich.console import Console
from torch.profiler import profile

from drafthead.data.batch import TrainBatch
from drafthead.errors import UserError, one_line
from drafthead.eval.lossless.self_check import check_drafts, fitted
from drafthead.eval.trees.cost_model import measure_costs
from drafthead.files.local import read_json, read_json_lines
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.system.devices import accelerator_name, device_of, graphs_of
from drafthead.system.machine import hardware, versions
from drafthead.train.config import composed
from drafthead.train.estimate.hours import GPUS, base_for_times, untrained_head

CHECKOUT = Path(__file__).resolve().parent.parent
Step = tuple[str, str, Callable[[], Any]]
"""A step of the checklist: its name, the reason to skip it (or an empty string), and the function that runs it."""
CONTEXTS, ROWS = (200, 1000, 8000), (16, 64, 256, 1024)
"""Context lengths after which forward passes are timed; batch sizes of the timed generation."""


def main(given: Sequence[str] | None = None) -> None:
    """Run the steps that the log lacks."""
    options = parser(__doc__)
    options.add_argument("--log", type=Path, default=Path("gpu.jsonl"))
    options.add_argument("settings", nargs="*", metavar="key=value", default=["recipe=medusa_smollm2"])
    arguments = options.parse_args(given)
    run_steps(arguments.log, checklist(arguments.settings))


def checklist(overrides: list[str]) -> list[Step]:
    """Return the steps in order."""
    device = device_of(None)
    gpu = "" if device.type != "cpu" else "needs a GPU; this machine computes on its CPU"
    graphs = "" if graphs_of(device) else f"{device.type} has no graphs"
    files = (resources.files("drafthead.recipes") / "recipe").iterdir()
    recipes = sorted(file.name[:-5] for file in files if file.name.endswith("_smollm2.yaml"))
    large, rest = ["recipe=medusa_llama3"], [item for item in overrides if not item.startswith("recipe=")]
    return [
        ("machine", "", lambda: {"hardware": hardware(), "versions": versions()}),
        ("tests marked gpu", gpu, partial(python, "-m", "pytest", "-q", "-m", "gpu", "tests")),
        *((f"equality of {name}", "", partial(equality, name, "never")) for name in recipes),
        *((f"equality of {name}, graphs", graphs, partial(equality, name, "always")) for name in recipes),
        *((f"passes after {n} tokens", gpu if n > 1000 else "", partial(passes, overrides, n)) for n in CONTEXTS),
        *((f"passes of 8B after {n} tokens", gpu, partial(passes, large, n)) for n in CONTEXTS),
        *((f"drafts of {name}", "", partial(passes, [f"recipe={name}", *rest], 200)) for name in recipes),
        ("drafts of 8B", gpu, partial(passes, ["recipe=eagle3_llama3"], 200)),
        ("training step", "", partial(benchmark, "train_step", "--steps", "2", *overrides)),
        ("training step of 8B", gpu, partial(benchmark, "train_step", *large)),
        *((f"generation of {n} rows", gpu if n > 16 else "", partial(generation, overrides, n)) for n in ROWS),
        ("every head for five minutes", gpu, partial(benchmark, "heads", "--minutes", "5")),
        ("profile", "", partial(profiled, overrides)),
    ]


def run_steps(path: Path, steps: Sequence[Step]) -> None:
    """Run the steps that the log ``path`` lacks or that failed, and append a line for each."""
    device, console = accelerator_name() or hardware()["cpu"], Console(stderr=True, highlight=False)
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
        console.print(f"{name}: {row.get('error') or reason or 'done'}, {row['seconds']} s", markup=False)
    if failed:
        raise UserError(f"{failed} steps failed; {path} has the errors, and the same command tries these steps again")


def head_of(overrides: Sequence[str], **changes: Any) -> DraftHead:
    """Return the untrained head that ``overrides`` choose, on its base or one of the same shape."""
    run = composed(overrides)
    torch.manual_seed(0)
    return untrained_head(run, base_for_times(run, **changes)).eval()


def equality(recipe: str, graphs: str) -> dict[str, Any]:
    """Compare answers with and without drafts, for the recipe's head on a tiny base."""
    return check_drafts(head_of([f"recipe={recipe}", "debug=tiny", "head.draft_vocab_size=null"], graphs=graphs))


def benchmark(name: str, *arguments: str) -> Any:
    """Run ``benchmarks/NAME.py`` with ``arguments``, and return the JSON record that it writes."""
    with TemporaryDirectory(prefix="gpu-checklist-") as folder:
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
    """Time a decoding step with a chain after ``context`` tokens.

    "bandwidth_share" is, by the number of tokens of a pass, the share of the GPU's memory bandwidth that it reaches;
    None on a GPU of unknown bandwidth.
    """
    head = head_of(overrides)
    base, costs = head.base_model, measure_costs(head.base_model, head, context)
    size_read = sum(p.numel() * p.element_size() for p in base.model.parameters())
    if base.embedding.data_ptr() != base.lm_head.weight.data_ptr():  # only a few rows of the table are read
        size_read -= base.embedding.numel() * base.embedding.element_size()
    gpu = next((gpu for word, gpu in GPUS.items() if word in (accelerator_name() or "")), None)
    step = costs.step(head.depth + 1, head.depth)
    return {
        "costs": costs.to_json(),
        "draft_share": costs.draft_at(head.depth) / step,
        "loop_share": costs.overhead / step,
        "bandwidth_share": gpu and {n: size_read / gpu.bandwidth / 1e9 / s for n, s in costs.verify.items()},
    }


def generation(overrides: Sequence[str], rows: int) -> dict[str, float]:
    """Return tokens per second of ``rows`` prompts in one batch, by our loop and by transformers' ``generate``."""
    base = base_for_times(composed(overrides))
    new, generator = (16 if base.device.type == "cpu" else 128), torch.Generator().manual_seed(0)
    ids = torch.randint(1, base.vocab_size, (rows, 64), generator=generator).tolist()  # without the padding id 0
    work: dict[str, Callable[[], object]] = {
        "ours": partial(decode_batch, base, None, ids, max_new_tokens=new, ignore_eos=True),
        "generate": partial(generated, base.stock(), ids, new),
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
    """Return the milliseconds of the ten slowest operations of torch, by name, in "decoding" and in "training"."""
    head = head_of(overrides)
    base = head.base_model
    ids = [n % base.vocab_size for n in range(512)]
    work: dict[str, Callable[[], object]] = {
        "decoding": partial(decode, base, head, ids[:64], max_new_tokens=32, ignore_eos=True),
        "training": partial(fitted, head, TrainBatch.of([ids]), steps=2, lr=0.0),
    }
    key, costs = f"self_{'cpu' if base.device.type == 'cpu' else 'device'}_time_total", {}
    for name, function in work.items():
        function()
        with profile() as profiler:
            function()
        times = {event.key: round(getattr(event, key) / 1e3, 3) for event in profiler.key_averages()}
        costs[name] = dict(sorted(times.items(), key=lambda item: -item[1])[:10])
    return costs


if __name__ == "__main__":
    entry_point(main)
