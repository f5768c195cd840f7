"""A base that vLLM runs for a training: losses from its hidden states against ours, and tokens per second of answers.

    python benchmarks/vllm_base.py                                      both parts
    python benchmarks/vllm_base.py --part answers --prompts 24 --rounds 3

``losses`` trains two heads for --steps steps on the same answers, once from our hidden states and once from vLLM's.
``answers`` lets the same prompts be answered by the built-in decoding, by vLLM, and by vLLM that also writes the hidden
states, which are read and checked. The three take turns, so a drifting speed affects all.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import at_least, entry_point, listed, parser, print_table, save_record

from drafthead.data.answers.answer_config import SamplerConfig, ServerConfig
from drafthead.data.answers.server import Completions, ServerBackend
from drafthead.data.answers.store import Answer, ProcessGroup, Prompt
from drafthead.data.prompts.suites import load_suite
from drafthead.engines.server import LocalVllm
from drafthead.eval.engines.served import free_port
from drafthead.files.local import read_json_lines
from drafthead.models.base.base_config import EMBEDDED
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats.format import MOST_CONTEXT, vllm_options
from drafthead.models.heads.parts.loading import load_base
from drafthead.system.display import Display
from drafthead.train.corpora.built_in import BuiltInBackend
from drafthead.train.corpora.corpus_config import StatesConfig
from drafthead.train.corpora.served_base import ServedBase
from drafthead.train.original_base import OriginalBase

HEADS = {"EAGLE-3": "eagle3_smollm2_vllm", "Medusa": "medusa_smollm2_served"}
LAYERS = (0, 15, 27)  # that the EAGLE-3 head reads
CONCURRENCY = 8


def losses(heads: Sequence[str], steps: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return by head a row per step: its loss from our states and from vLLM's."""
    result = {}
    for head in heads:
        recipe, by_source = HEADS[head], []
        for source, more in (("ours", []), ("vllm", [f"data.states.url=http://127.0.0.1:{free_port()}"])):
            out = folder / f"{recipe}-{source}"
            settings = [f"recipe={recipe}", "~phases.pretrain", f"phases.distill.steps={steps}", "log_every=1"]
            settings += [f"out={out}", f"data.folder={out}/corpora", "stages=[corpora,train]", "tracker=none", *more]
            settings += ["data.states.serve=true", "validate_every=1000000"] if more else ["validate_every=1000000"]
            if not (out / "head").exists():
                subprocess.run([sys.executable, "-m", "drafthead", "train", *settings], check=True)
            by_source.append([row["loss"] for row in read_json_lines(out / "metrics.jsonl") if "loss" in row])
        result[head] = [{"ours": a, "vllm": b} for a, b in zip(*by_source, strict=True)]
    return result


@contextmanager
def backends(base: BaseModel, tokens: int, folder: Path) -> Iterator[dict[str, Callable[[list[Prompt]], int]]]:
    """Yield by name a function that answers prompts and returns the number of tokens."""
    sampler = SamplerConfig(max_new_tokens=tokens)
    completions = Completions(base.tokenizer, base.eos_ids, base.vocab_size, sampler)
    ports = free_port(), free_port()
    plain = LocalVllm(str(base.config.folder()), vllm_options(base), {}, ports[0])
    states = StatesConfig(url=f"http://127.0.0.1:{ports[1]}", serve=True)
    parts = base.parts()
    served = ServedBase(lambda: parts, states, folder / "served", lambda count: LAYERS, Display())
    longest = MOST_CONTEXT // 2

    def server(url: str, **more: Any) -> ServerBackend:
        config = ServerConfig(url=url, concurrency=CONCURRENCY)
        return ServerBackend(config, completions, base.name, longest, lambda answers: 1.0, **more)

    def answers(backend: BuiltInBackend | ServerBackend, prompts: list[Prompt]) -> list[Answer]:
        return [a for _, shard in backend.shards(prompts, set(), ProcessGroup(), lambda: None) for a in shard]

    def count(found: Sequence[Answer]) -> int:
        return sum(len(answer.input_ids) - answer.boundary for answer in found)

    def with_states(prompts: list[Prompt]) -> int:
        found = answers(extracting, prompts)
        assert all(served.kept(answer.ids) is not None for answer in found)
        return count(found)

    built_in = BuiltInBackend(OriginalBase.of(base), sampler, CONCURRENCY, False, longest)
    try:
        plain.start()
        served.start()
        extracting = server(states.url or "", more=served.WITH_ANSWER, on_answer=served.keep)
        only_answers = server(plain.url)
        yield {
            "built-in decoding": lambda prompts: count(answers(built_in, prompts)),
            "vLLM": lambda prompts: count(answers(only_answers, prompts)),
            "vLLM with states": with_states,
        }
    finally:
        served.close()
        plain.close()


def speeds(prompts: int, tokens: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return by method the tokens per second of each round."""
    base = load_base(EMBEDDED)
    suite = load_suite("spec_bench_like", prompts, 0, split="test")
    given = [(number, base.prompt_ids(prompt.messages)) for number, prompt in enumerate(suite)]
    measured: dict[str, list[float]] = {}
    with backends(base, tokens, folder) as methods:
        for number in range(rounds + 1):  # the first one warms up
            for name in random.Random(number).sample(list(methods), len(methods)):
                started = time.perf_counter()
                count = methods[name](given)
                if number:
                    measured.setdefault(name, []).append(count / (time.perf_counter() - started))
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts, print tables and write the record."""
    options = parser(__doc__)
    options.add_argument("--part", default="losses,answers")
    options.add_argument("--heads", default=",".join(HEADS))
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--prompts", type=int, default=16)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path, help="folder of the runs, from which an interrupted one resumes")
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "steps", "prompts", "tokens", "rounds")
    heads = listed("heads", arguments.heads, [*HEADS])
    parts, results = listed("part", arguments.part, ["losses", "answers"]), dict[str, Any]()
    with TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        if "losses" in parts:
            results["losses"] = found = losses(heads, arguments.steps, folder)
            rows = []
            for head, steps in found.items():
                off = [abs(row["vllm"] / row["ours"] - 1) for row in steps]
                rows.append({"head": head, "steps": len(steps), "largest difference": max(off), "median": median(off)})
            print_table("losses from vLLM's states against ours, relative", rows)
        if "answers" in parts:
            results["answers"] = by_method = speeds(arguments.prompts, arguments.tokens, arguments.rounds, folder)
            print_table(
                f"answers of {arguments.tokens} tokens, {CONCURRENCY} at a time, {torch.get_num_threads()} threads",
                [
                    {"method": name, "tokens/s": median(values), "from": min(values), "to": max(values)}
                    for name, values in by_method.items()
                ],
            )
    save_record(arguments, "vllm_base", results)


if __name__ == "__main__":
    entry_point(main)
