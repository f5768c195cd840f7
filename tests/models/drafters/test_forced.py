"""Tokens that ``prefix_allowed_tokens_fn`` or a logits processor forces, drafted without a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import drafthead
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.cost_model import CostModel
from drafthead.models.decoding.cost_tree import AcceptanceModel, TreeCosts
from drafthead.models.decoding.loop import decode
from drafthead.models.drafters.expression import build_drafter, parse_drafter
from drafthead.models.heads.eagle3 import Eagle3Config
from support import TinyBase, cases, refuses

IDS = torch.tensor([[5, 17, 99, 42, 7, 23], [0, 0, 50, 60, 70, 80]])
MASK = (IDS != 0).long()
EOS = 3
ANY = -1  # a value of the schema, which the model chooses
SCHEMAS = [
    [40, 41, 42, 43, 44, ANY, 45, 46, ANY, ANY, 47, 48, 49, 50, 51, 52, 53, ANY, EOS],
    [60, 61, ANY, 62, 63, 64, 65, 66, 67, ANY, 68, 69, 70, EOS],
]
CALL: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": EOS}
VALUES = list(range(100, 130))


def allowed(row: int, ids: Tensor) -> list[int]:
    """Tool calls of a row's schema, whose names are fixed; refuses texts that no schema allows."""
    schema, answer = SCHEMAS[row], ids[IDS.shape[1] :].tolist()
    answer = [token for token in answer if token]  # finished rows are padded
    assert EOS not in answer[:-1]
    if answer[-1:] == [EOS]:
        return [0]
    assert all(token == name or (name == ANY and token in VALUES) for token, name in zip(answer, schema, strict=False))
    name = schema[len(answer)] if len(answer) < len(schema) else 0
    return VALUES if name == ANY else [name]


class Allowed(LogitsProcessor):
    """The same schema as a logits processor."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids):
            tokens = allowed(row, ids)
            masked[row, tokens] = scores[row, tokens]
        return masked


@pytest.fixture(scope="module")
def model(tiny_base: TinyBase) -> Any:
    return tiny_base().stock()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all trees that the base verifies, root included."""
    sizes: list[int] = []
    verify = BaseModel.verify_logits

    def count(self: BaseModel, tokens: Tensor, *rest: Any) -> Any:
        sizes.append(tokens.shape[1])
        return verify(self, tokens, *rest)

    monkeypatch.setattr(BaseModel, "verify_logits", count)
    return sizes


@pytest.mark.parametrize("drafter", ["forced", "prompt_lookup:2+forced", "head+forced:4", "head+forced", "head"])
@pytest.mark.parametrize("as_processor", [False, True], ids=["function", "processor"])
def test_the_answer_is_that_of_stock_generate(
    tiny_base: TinyBase, model: Any, monkeypatch: pytest.MonkeyPatch, drafter: str, as_processor: bool
) -> None:
    """Two rows with schemas of their own; forced runs take one step each, also in trees by cost (``head+forced``)."""
    head = Eagle3Config(num_draft_tokens=3, ttt_steps=3).build(tiny_base()).eval() if "head" in drafter else None
    if head is not None and drafter == "head+forced":
        verify = {1: 1.0, 8: 1.5, 32: 4.0}  # the seventh draft would not pay if it were as unsure as the first ones
        unsure = AcceptanceModel(weight=0.2, mean=[[0.1]])
        costs = CostModel(verify=verify, draft=0.1, overhead=0.0, context=8)
        head.tree_costs, head.prefers_cost = TreeCosts(costs={1: costs}, acceptance=unsure, lookup=unsure), True
    grammar: dict[str, Any] = {"prefix_allowed_tokens_fn": allowed}
    if as_processor:
        grammar = {"logits_processor": LogitsProcessorList([Allowed()])}
    for rows in ([0], [0, 1]):
        call = {**CALL, **grammar, "attention_mask": MASK[rows]}
        stock = model.generate(IDS[rows], **call)
        decode_with = drafthead.custom_generate(head, drafter=drafter)
        assert torch.equal(model.generate(IDS[rows], **call, custom_generate=decode_with), stock)
        assert stock[0, 6:].tolist()[-1] == EOS and len(stock[0]) == 6 + len(SCHEMAS[0])
        with monkeypatch.context() as patch:  # the first call has compared the model with stock transformers
            sizes = counted(patch)
            model.generate(IDS[rows], **call, custom_generate=decode_with)
        if rows == [0] and drafter == "head+forced":
            assert len(sizes) == 5
        elif rows == [0] and "head" not in drafter:
            # Runs of 4, 2 and 7 names, and of EOS; the model chooses the value after each, and one without a run.
            assert sizes == [1 + 4, 1 + 2, 1, 1 + 7, 1 + 1]
        elif rows == [0] and "forced" in drafter:
            # The run of 7 takes two steps. A head's chain of 3 fills the tree of up to 4 nodes, beside a run of 2.
            assert len(sizes) == 6 and max(sizes) == 1 + 4


@cases(
    "name, call, says",
    ("head", lambda base: drafthead.custom_generate(None), "drafter='head' needs a head"),
    ("both", lambda base: drafthead.custom_generate(drafter="head+forced"), "needs a head"),
    (
        "elsewhere",
        lambda base: decode(base, build_drafter(parse_drafter("forced"), base)[0], [5], max_new_tokens=4),
        "forced drafts the tokens that prefix_allowed_tokens_fn .*custom_generate",
    ),
)
def test_what_forced_tokens_need(tiny_base: TinyBase, name: str, call: Callable[[BaseModel], Any], says: str) -> None:
    refuses(says, call, tiny_base())
