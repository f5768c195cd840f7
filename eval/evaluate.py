"""Evaluate a head: calibrated tree, interleaved timing against both plain baselines, metrics, report."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from drafthead.data.chat import prompt_ids
from drafthead.data.contracts import DecodeResult, StepRecord, TokenTree
from drafthead.data.errors import UserError
from drafthead.data.files import write_json
from drafthead.eval.calibrate import Calibration, measured_with
from drafthead.eval.config import EvalConfig
from drafthead.eval.decode import decode
from drafthead.eval.latency import StepCosts
from drafthead.eval.report import write_report
from drafthead.eval.speed import Decoder, Equality, compare_outputs, run_interleaved, summarise
from drafthead.eval.suites import load_suite
from drafthead.models.base import BaseModel
from drafthead.models.draft_head import DraftHead, read_tree

Progress = Callable[[str, int, int], None]


def evaluate(
    base: BaseModel,
    head: DraftHead,
    config: EvalConfig,
    folder: Path,
    progress: Progress,
    *,
    calibration: Calibration | None = None,
    costs: StepCosts | None = None,
    training_log: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Decode a suite plainly (transformers and ours) and speculatively; write ``eval.json`` and the report.

    An interrupted evaluation continues: finished prompts are kept in ``eval-log-*.jsonl``.

    Returns:
        The contents of ``eval.json``.

    Raises:
        UserError: an unknown suite, a tree deeper than the head, no prompt that could be decoded.
    """
    tree = choose_tree(head, config.tree)
    suite = load_suite(config.suite, config.limit, config.seed)
    prompts = [(p, prompt_ids(base.tokenizer, p.messages)) for p in suite]
    results = run_interleaved(
        prompts,
        decoders(base, head, tree, config.max_new_tokens),
        folder / f"eval-log-{_digest(head, tree, config)}.jsonl",
        config.seed,
        lambda done, total: progress("decoding", done, total),
    )
    equalities = [
        _compare(base, ids, plain, speculative)
        for (_, ids), plain, speculative in zip(prompts, results["drafthead"], results["speculative"], strict=True)
    ]
    evaluation = summarise(suite, results, equalities)
    evaluation |= {
        "suite": config.suite,
        "max_new_tokens": config.max_new_tokens,
        "tree": {"nodes": len(tree), "choices": [list(p) for p in tree.paths[1:]]},
    }
    if calibration is not None:
        evaluation["calibration"] = calibration.to_json()
    if costs is not None:
        evaluation["costs"] = costs.to_json()
    write_json(folder / "eval.json", evaluation)
    latency = None if costs is None else sorted(costs.verify.items())
    write_report(folder, evaluation, latency=latency, tree=tree, training_log=training_log, title=folder.name)
    return evaluation


def _digest(head: DraftHead, tree: TokenTree, config: EvalConfig) -> str:
    """Hash of all that decides a finished prompt's result, so that a log continues only itself."""
    # The seed orders the decoders: with another order, a prompt that was cut off could be completed piecemeal.
    decided_by = (measured_with(head), tree.paths, config.suite, config.max_new_tokens, config.seed)
    return hashlib.sha256(repr(decided_by).encode()).hexdigest()[:8]


def choose_tree(head: DraftHead, name: str) -> TokenTree:
    """The tree that ``eval.tree`` names: ``head``, ``chain`` or a ``tree.json``.

    Raises:
        UserError: no such file, or a tree deeper than the head.
    """
    if name == "chain":
        return TokenTree.chain(head.depth)
    if name == "head":
        return head.tree or TokenTree.chain(head.depth)
    return read_tree(Path(name), head.depth)


def decoders(base: BaseModel, head: DraftHead, tree: TokenTree, max_new_tokens: int) -> dict[str, Decoder]:
    """The three timed ways to answer, under the names that ``summarise`` expects."""
    return {
        "transformers": lambda ids: transformers_generate(base, ids, max_new_tokens),
        "drafthead": lambda ids: decode(base, None, ids, max_new_tokens=max_new_tokens),
        "speculative": lambda ids: decode(base, head, ids, max_new_tokens=max_new_tokens, tree=tree),
    }


class _FirstToken(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when the first token was there, which ends the prefill."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.at = self.at or perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def transformers_generate(base: BaseModel, ids: list[int], max_new_tokens: int) -> DecodeResult:
    """Greedy ``generate`` of transformers over the same (prepacked) modules: the other plain baseline."""
    inputs = torch.tensor([ids], device=base.device)
    first = _FirstToken()
    own = base.model.generation_config
    greedy = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(base.eos_ids) or None,
        pad_token_id=min(base.eos_ids, default=0),
    )
    # What a call leaves open comes from the model's own settings, where a repetition penalty, say, would make this
    # another rule than plain greedy decoding.
    base.model.generation_config = greedy
    try:
        started = perf_counter()
        output = base.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), stopping_criteria=StoppingCriteriaList([first])
        )
        tokens = output[0, len(ids) :].tolist()
        total = perf_counter() - started
    finally:
        base.model.generation_config = own
    prefill = first.at - started
    # generate shows no single steps, so the decoding time is spread evenly over them.
    each = (total - prefill) / max(1, len(tokens) - 1)
    steps = [
        StepRecord(position=i, proposed=0, depth=0, accepted=0, committed=1, draft_s=0.0, verify_s=each, total_s=each)
        for i in range(1, len(tokens))
    ]
    return DecodeResult(tokens=tokens, steps=steps, prefill_s=prefill, total_s=total)


def _compare(base: BaseModel, ids: list[int], plain: DecodeResult, speculative: DecodeResult) -> Equality:
    def margin(position: int) -> float:
        """Distance of the target's logits of the two tokens, read one forward over the common prefix."""
        a, b = plain.tokens[position : position + 1], speculative.tokens[position : position + 1]
        if not a or not b:
            return float("inf")
        prefix = torch.tensor([ids + plain.tokens[:position]], device=base.device)
        hidden = base.read(prefix, base.new_cache(prefix.shape[1]))
        logits = base.logits(hidden[:, -1])[0]
        return abs(float(logits[a[0]] - logits[b[0]]))

    return compare_outputs(plain.tokens, speculative.tokens, margin)


def read_training_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``; empty when there is none. A last line torn by a kill is left out.

    Raises:
        UserError: another line is not JSON.
    """
    path = folder / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f"{path} line {number} is not JSON ({error}); remove that line") from None
    return rows
