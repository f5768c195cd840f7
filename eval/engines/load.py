"""vLLM under load: tokens per second and latency of concurrent requests.

A round starts one server after another: without drafts, with the head, and with every other way to draft
(``engine.vllm.compare``). So each is alone on the machine, and a slow minute meets each of them in another round. A
server answers all prompts at each number of concurrent requests.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from drafthead.eval.config import EvalConfig
from drafthead.eval.engines.served import PLAIN, EngineStart, check_engines, publish, variants
from drafthead.files.local import digest, read_json, write_json
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.drafter import Drafter
from drafthead.system.display import Display

ENGINE = "vllm"
LOG = "load.json"  # the measured rounds, from which an interrupted evaluation resumes


def measure_load(
    base: BaseParts, drafter: Drafter, prompts: Sequence[list[int]], config: EvalConfig, folder: Path, display: Display
) -> list[dict[str, Any]]:
    """Return :func:`load_rows` of all rounds, in which every server answers the token ids ``prompts``, and their
    temperature; [] if ``engine.load`` names no numbers of requests."""
    if not config.engine.load.requests:
        return []
    from drafthead.eval.engines.clients import VllmServer  # loads the openai client, which takes half a second

    head, formats = check_engines(drafter, config)
    target, own, load = formats[ENGINE], config.engine.vllm, config.engine.load
    method, published = publish(head, target, own, folder)
    of = digest({"config": repr((asdict(config.engine), config.max_new_tokens)), "head": repr(head.identity())})
    of = digest({"of": of, "base": base.fingerprint, "prompts": [list(ids) for ids in prompts]})
    passes = _earlier(folder / LOG, of)
    done = {(one["method"], one["requests"], one["round"]) for one in passes}
    drafts = config.engine.drafts or min(head.config.trained_positions, head.depth)
    names = [ENGINE + variant for variant in variants(own)]
    total = len(names) * load.rounds * len(load.requests)
    for round_number in range(load.rounds):
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            left = [count for count in load.requests if (name, count, round_number) not in done]
            if not left:
                continue
            with ExitStack() as stack:
                most = max(load.requests)
                start = EngineStart(
                    stack, ENGINE, config.engine, base, published, method, drafts, most, load.fit_length
                )
                server = start.server(name.removeprefix(ENGINE))
                if not isinstance(server, VllmServer):  # no address
                    continue
                server.answer(prompts[0], config.max_new_tokens)  # the first answer includes set-up
                for count in left:
                    given = server.answer_at_once(prompts, config.max_new_tokens, count, load.temperature)
                    passes.append({"method": name, "requests": count, "round": round_number, **asdict(given)})
                    write_json(folder / LOG, {"of": of, "passes": passes})
                    display.progress("vLLM under load", len(passes), total)
    return [row | {"temperature": load.temperature} for row in load_rows(passes)]


def _earlier(path: Path, of: str) -> list[dict[str, Any]]:
    stored = read_json(path) if path.exists() else {}
    return list(stored["passes"]) if stored.get("of") == of else []


def load_rows(passes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every method and number of concurrent requests: tokens per second over all rounds, their ratio
    to those without drafts ("ratio", and "rounds" by round), the seconds of half and of 90 % of the requests, the time
    of a step, steps with drafts and accepted drafts by position, tau, and how many answers have the tokens of those
    without drafts ("same" of "of"; they may part at near-ties)."""
    rows = []
    for method, requests in dict.fromkeys((one["method"], one["requests"]) for one in passes):
        ours, plain = (
            {one["round"]: one for one in passes if (one["method"], one["requests"]) == (name, requests)}
            for name in (method, ENGINE + PLAIN)
        )
        both = sorted(ours.keys() & plain.keys())
        seconds = [value for one in ours.values() for value in one["seconds"]]
        steps = sum(one["steps"] for one in ours.values())
        accepted = np.sum([one["accepted"] for one in ours.values()], 0).tolist()
        pairs = [pair for n in both for pair in zip(ours[n]["answers"], plain[n]["answers"], strict=True)]
        rows.append(
            {
                "method": method,
                "requests": requests,
                "tokens_per_second": _speed(ours.values()),
                "ratio": _speed(ours[n] for n in both) / _speed(plain[n] for n in both) if both else None,
                "rounds": [_speed([ours[n]]) / _speed([plain[n]]) for n in both],
                "median_s": float(np.median(seconds)),
                "slowest_tenth_s": float(np.quantile(seconds, 0.9)),
                "step_s": _median([one["step_s"] for one in ours.values()]),
                "steps": steps,
                "accepted": accepted,
                "tau": 1 + sum(accepted) / steps if steps else None,
                "same": sum(a == b for a, b in pairs),
                "of": len(pairs),
            }
        )
    return rows


def lengths_by_requests(rows: Sequence[dict[str, Any]], method: str = ENGINE) -> list[tuple[int, int, int]]:
    """Return vLLM's ``num_speculative_tokens_per_batch_size`` for the head's own format: (from, to, drafts) by the
    number of concurrent requests. The length with the most expected tokens per second is taken, where the times between
    a step without drafts and one with all drafts are assumed to lie on a line."""
    lengths = list[tuple[int, int, int]]()
    by_method = {(row["method"], row["requests"]): row for row in rows}
    first = 1
    for requests in sorted({row["requests"] for row in rows}):
        ours, plain = by_method.get((method, requests)), by_method.get((ENGINE + PLAIN, requests))
        if not (ours and plain and ours["steps"] and ours["step_s"] and plain["step_s"]):
            continue
        most = len(ours["accepted"])
        gains = 1 + np.cumsum([0, *ours["accepted"]]) / ours["steps"]
        times = plain["step_s"] + (ours["step_s"] - plain["step_s"]) * np.arange(most + 1) / most
        best = int(np.argmax(gains / times))
        if lengths and lengths[-1][2] == best:
            lengths[-1] = (lengths[-1][0], requests, best)
        else:
            lengths.append((first, requests, best))
        first = requests + 1
    return lengths


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _speed(passes: Iterable[dict[str, Any]]) -> float:
    counted = [(sum(len(answer) for answer in one["answers"]), one["wall_s"]) for one in passes]
    return float(sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted))
