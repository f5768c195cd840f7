"""Heads served by llama.cpp and vLLM themselves on the real base (``make test-engines``)."""

import json
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.eval.config import EvalConfig
from drafthead.eval.engines.environment import environment
from drafthead.eval.evaluate import evaluate
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.loop import decode
from drafthead.models.heads.dspark import DSparkConfig, DSparkHead
from drafthead.models.heads.eagle3 import Eagle3Config, Eagle3Head
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base
from support import Said, fitted, rows_of

pytestmark = pytest.mark.engines
NEW = 40
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


HEADS: dict[str, Callable[[], DraftHead]] = {"eagle3": eagle, "dspark": partial(block, 16), "dflash": partial(block, 0)}


def row(folder: Path, head: DraftHead) -> dict[str, Any]:
    """Return an evaluation's row about llama.cpp."""
    if find_spec("xllamacpp") is None:
        pytest.skip("no xllamacpp here; make test-engines installs it")
    suite = folder / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    config = EvalConfig(suite=str(suite), max_new_tokens=NEW, stock_baseline=False, engines=["llamacpp"])
    config.engine.start_timeout_s = config.engine.answer_timeout_s = 900.0  # two cores may be busy
    engines: dict[str, Any] = evaluate(base(), head, config, folder, Said())["engines"]["llamacpp"]
    assert engines["acceptance"]["ours"]["accepted"][0] > 30, "our own chain accepts too little to tell"
    assert engines["texts"]["same_as_ours"] + engines["texts"]["near_ties_with_ours"] == len(PROMPTS)
    return engines


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_served_as_it_was_trained(tmp_path: Path, kind: str) -> None:
    engine_row = row(tmp_path, HEADS[kind]())
    assert engine_row["failures"] == []
    assert engine_row["texts"]["compared_with"] == "its own without drafts"
    assert engine_row["tokens_per_second"]["plain"] > 0


def test_every_planted_fault_is_noticed(tmp_path: Path, script: Callable[[str], Any]) -> None:
    """Texts stay equal, so only the checks notice: the importer, the export check, or the acceptance in vLLM."""
    if not environment().exists():
        pytest.skip("no vLLM here; make test-engines installs it")
    script("planted_faults").main(["--json", str(tmp_path / "faults.json")])
    faults = json.loads((tmp_path / "faults.json").read_text())["faults"]
    unharmed = faults.pop("none")
    noticed = lambda row: [bool(row[check]) for check in ("import", "export check", "eval engines=")]  # noqa: E731
    assert not any(noticed(unharmed)) and unharmed["engine"]["accepted"][0] > 100
    assert len(faults) >= 10 and all(any(noticed(row)) for row in faults.values())
    answered = [row["texts"] for row in faults.values() if row["texts"]]
    assert len(answered) >= 8 and all(texts["same"] + texts["near_ties"] == texts["of"] for texts in answered)
