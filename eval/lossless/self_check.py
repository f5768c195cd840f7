"""A check of this machine: does a small head draft exactly, in every way of decoding?"""

from functools import partial
from typing import Any, TypeVar

import torch

from drafthead.data.batch import HiddenStates, TrainBatch
from drafthead.eval.lossless.equality import compare_outputs, draw_margin, equality_rate, logit_margin
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree

Head = TypeVar("Head", bound=DraftHead)
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=0.8, top_p=0.9)}
ANSWER = 32  # tokens of each answer that are compared with plain decoding


def fitted(
    head: Head, batch: TrainBatch, steps: int, lr: float = 0.02, base_hidden: HiddenStates | None = None
) -> Head:
    """Train ``head`` on one batch until it repeats it; ``base_hidden`` are by default the base's hidden states."""
    base_hidden = base_hidden or head.base_model.hidden_states(batch, head.spec)
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.0)
    head.train()
    for _ in range(steps):
        out = head.loss(batch, base_hidden, LossConfig())
        optimizer.zero_grad()
        torch.autograd.backward(out.loss_sum / out.tokens)
        optimizer.step()
    return head.eval()


def check_drafts(head: DraftHead) -> dict[str, Any]:
    """Fit ``head`` to an answer of its tiny base, and compare answers with and without its drafts. Return "ways", the
    ``equality_rate`` for greedy and sampled answers, each with a chain ("alone"), a tree and a batch of trees, and
    "accepted", the share of accepted drafts."""
    base, text = head.base_model, list(range(10, 19))
    text += decode(base, None, text, max_new_tokens=96, ignore_eos=True).tokens
    fitted(head, TrainBatch.of([text]), steps=40, lr=0.01)
    prompts = [text[:9], text[:20], text[:50]]  # continued by what the head was fitted to, so that it drafts well
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
