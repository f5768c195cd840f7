"""Evaluate a head whose base is not loaded here: vLLM answers with the head and without it, interleaved."""

import math
from functools import partial
from pathlib import Path
from typing import Any

from drafthead.data.prompts.prompt import EvalPrompt, conversation_ids
from drafthead.data.prompts.suites import load_suite
from drafthead.errors import UserError
from drafthead.eval.config import METHOD, EvalConfig
from drafthead.eval.engines.load import measure_load
from drafthead.eval.engines.served import PLAIN, serve
from drafthead.eval.lossless.equality import compare_outputs
from drafthead.eval.metrics.summary import retokenised, summarise
from drafthead.eval.report.report import write_report
from drafthead.eval.timing.interleaved import one_by_one, run_interleaved
from drafthead.eval.timing.result_log import FailedDecode
from drafthead.files.local import write_json
from drafthead.models.decoding.loop import check_ids
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.system.display import Display

ENGINE = "vllm"


def evaluate_unloaded(
    head: DraftHead,
    config: EvalConfig,
    folder: Path,
    display: Display,
    training_log: list[dict[str, Any]],
    training_data: str | None = None,
) -> dict[str, Any]:
    """Answer a suite in vLLM; write ``eval.json`` and ``report.html`` as :func:`evaluate` does. The method
    "autoregressive" is vLLM without the head, "speculative" vLLM with it. Unlike there, differing answers are not
    explained, because nothing here knows their logits. Raises a ``UserError`` for a head that vLLM does not load."""
    base = head.base
    if not config.sampler.greedy:
        raise UserError("without the base's layers answers are greedy; set eval.sampler.temperature=0")

    def ids(prompt: EvalPrompt, answers: list[list[int]]) -> list[int]:
        tokens = conversation_ids(base.tokenizer, prompt, answers, base.config.chat_template_kwargs)
        check_ids(base, tokens, config.max_new_tokens, prompt.where(len(answers)))
        return tokens

    with serve(base, head, config, folder, lambda line: display.line(f"   {line}")) as served:
        if not {ENGINE, ENGINE + PLAIN} <= served.methods.keys():
            raise UserError("vLLM without the head is missing; set engine.vllm.plain_url too, or neither address")
        (plain, _), (drafting, mark) = served.methods[ENGINE + PLAIN], served.methods[ENGINE]
        timed = run_interleaved(
            load_suite(config.suite, config.limit, config.seed, config.tasks, config.split),
            ids,
            {"autoregressive": one_by_one(plain), METHOD: one_by_one(drafting)},
            folder / f"eval-log-{mark}-{config.max_new_tokens}.jsonl",
            config.seed,
            lambda done, total: display.progress("decoding in vLLM", done, total),
        )
    load = measure_load(base, head, timed.first_turns, config, folder, display)
    pairs = zip(timed.results["autoregressive"], timed.results[METHOD], strict=True)
    failed = [after for _, after in pairs if isinstance(after, FailedDecode)]
    if len(failed) == len(timed.ids):
        raise UserError(f"vLLM answered no prompt; the first error: {failed[0].error if failed else 'no prompts'}")
    equalities = [
        compare_outputs(before.tokens, after.tokens, lambda position: math.nan, None, base.rounding_dtype)
        for before, after in zip(timed.results["autoregressive"], timed.results[METHOD], strict=True)
    ]
    evaluation = summarise(timed, {METHOD: equalities}, partial(retokenised, base.tokenizer), base.dtype)
    evaluation |= {
        "suite": config.suite,
        "split": config.split,
        "max_new_tokens": config.max_new_tokens,
        "tree": {"nodes": served.drafts + 1, "spec": f"chain:{served.drafts}"},
        "draft_sampling": "top_k",
        "sampler": vars(config.sampler) | {"repetition_penalty": 1.0},
        "rule": {"name": "exact", "lossless": True},
        "prompt_order": timed.order,
        "seed": config.seed,
        "answered_by": served.facts[ENGINE],
        **({"load": load} if load else {}),
    }
    write_json(folder / "eval.json", evaluation)
    write_report(folder, evaluation, training_log, training_data)
    return evaluation | {"resumed": [timed.resumed, len(timed.prompts)]}
