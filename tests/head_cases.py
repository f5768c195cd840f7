"""The heads that tests cover: every module of ``models/heads``, and the example head of docs/tutorials/new_head.md."""

import re
from collections.abc import Container, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from drafthead.models import heads
from drafthead.models.heads.parts.draft_head import DraftHeadConfig
from drafthead.models.heads.parts.loading import config_class, head_types

PAGE = Path(__file__).parent.parent / "docs" / "tutorials" / "new_head.md"
EXAMPLE = "my_head"
INDUCTION: dict[str, Any] = {"own_lm_head": False, "induction_rank": 6}
CONTEXT: dict[str, Any] = {"induction_rank": 6, "context_vocabulary": True, "draft_vocab_size": 150}
PARTS: dict[str, Any] = {"induction_rank": 6, "markov_rank": 4, "confidence": True}
TEST_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "hydra": {
        "hydra": {"num_layers": 2, "projection_bias": True},
        "hydra_pp": {"prefix_layer": True, "own_lm_head": False},
        "hydra_induction": INDUCTION,
        "hydra_bias_parts": {**PARTS, "projection_bias": True},
        "hydra_pp_induction": {**INDUCTION, "prefix_layer": True},
        "hydra_context": {**CONTEXT, "own_lm_head": False},
    },
    "mlp_speculator": {
        "mlp": {"inner_dim": 24},
        "lstm": {"cell": "lstm", "tie_weights": True, "scale_input": True},
        "mlp_on_base": {"inner_dim": 24, "own_embedding": False, "own_lm_head": False},
        "mlp_induction": {**INDUCTION, "own_embedding": False},
        "mlp_parts": {**PARTS, "inner_dim": 24},
        "mlp_context": {**CONTEXT, "own_embedding": False, "own_lm_head": False},
    },
    "medusa": {
        "medusa": {"num_layers": 2},
        "medusa_last": {"own_lm_head": False, "reads_last_token": True},
        "medusa_tied": {"num_layers": 3, "tie_blocks": True},
        "medusa_induction": {**INDUCTION, "reads_last_token": True},
        "medusa_own_parts": PARTS,
        "medusa_context": {**CONTEXT, "own_lm_head": False, "confidence": True},
    },
    "eagle3": {
        "eagle3": {"ttt_steps": 3},
        "eagle3_induction": {**INDUCTION, "ttt_steps": 2},
        "eagle3_context": {**CONTEXT, "own_lm_head": False, "ttt_steps": 2},
        "eagle3_own_parts": {**PARTS, "ttt_steps": 2, "tied_markov": False},
        "eagle3_late": {
            **{"ttt_steps": 2, "layers": [1, 2], "intermediate_size": 40},
            **{"norm_before_fc": True, "norm_output": True, "own_lm_head": False},
        },
        "eagle3_final": {"ttt_steps": 3, "layers": []},
        "eagle3_window": {"ttt_steps": 3, "window": 6, "induction_rank": 6},
        "eagle31": {
            **{"ttt_steps": 3, "fc_norm": True, "qk_norm": True},
            **{"norm_output": True, "norm_before_residual": True},
        },
        "p_eagle": {"ttt_steps": 3, "parallel": True, "num_layers": 2, "fc_norm": True},
        "p_eagle_parts": {**INDUCTION, **PARTS, "ttt_steps": 3, "parallel": True},
        "p_eagle_window": {"ttt_steps": 3, "parallel": True, "num_layers": 2, "window": 7, "full_layers": [1]},
    },
    "mtp": {
        "mtp": {},
        "mtp_before_norms": {"before_final_norm": True, "norm_output": False, "ttt_steps": 2},
        "mtp_parts": PARTS,
        "mtp_context": CONTEXT,
    },
    "dspark": {
        "dspark": {"markov_rank": 8},
        "dspark_gated": {"markov_rank": 4, "markov_gate": True},
        "dspark_causal": {"causal": True, "tied_markov": False, "markov_rank": 4, "confidence": False},
        "dspark_state": {"num_layers": 1, "copy_layers": False, "reads_state": True},
        "dspark_induction": {"markov_rank": 4, "induction_rank": 6},
        "dspark_context": {**CONTEXT, "markov_rank": 4, "confidence": True},
        "dflash": {"markov_rank": 0, "anchor_predicts": False, "layers": [1, 3]},
        "dflash_induction": {"markov_rank": 0, "induction_rank": 6, "anchor_predicts": False},
        "dflash_window": {"markov_rank": 0, "anchor_predicts": False, "window": 6},
        "dspark_window": {"markov_rank": 4, "window": 8, "full_layers": [0], "causal": "sliding"},
    },
    "medusa2": {"medusa2": {"num_layers": 2}},
    "kangaroo": {
        "kangaroo": {"exit_layer": 2, "confidence_threshold": 0.0},
        "kangaroo_parts": {"exit_layer": 2, "confidence_threshold": 0.0, **PARTS},
        "kangaroo_context": {"exit_layer": 2, "confidence_threshold": 0.0, **CONTEXT},
    },
    "draft_lm": {"draft_lm": {}, "draft_lm_parts": PARTS, "draft_lm_context": CONTEXT},
}
"""Head type -> name of a case -> settings; a type that is not listed is tested with its defaults."""


def example_blocks() -> dict[str, str]:
    """Return the example's files as the page shows them: path -> content."""
    blocks = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return dict(blocks)


_folder = TemporaryDirectory()
(Path(_folder.name) / f"{EXAMPLE}.py").write_text(example_blocks()[f"models/heads/{EXAMPLE}.py"])
heads.__path__.append(_folder.name)  # where head types are found

HEADS: dict[str, DraftHeadConfig] = {
    name: config_class(head_type)(**{"num_draft_tokens": 3, **settings})
    for head_type in head_types()
    for name, settings in TEST_SETTINGS.get(head_type, {head_type: {}}).items()
}
MAIN = {next(iter(TEST_SETTINGS.get(head_type, {head_type: {}}))) for head_type in head_types()}
"""One case per head type: the fast tests run every check on these, and the slow ones on all."""


def cases_of(values: tuple[str, ...], kinds: Iterable[str], fast: Container[str]) -> list[Any]:
    """Return parameter sets of ``values`` and each of ``kinds``; those that are not ``fast`` run as slow tests."""
    return [pytest.param(*values, kind, marks=() if kind in fast else pytest.mark.slow) for kind in kinds]


every_case = pytest.mark.parametrize("kind", HEADS)
every_head = pytest.mark.parametrize("kind", cases_of((), HEADS, fast=MAIN))
