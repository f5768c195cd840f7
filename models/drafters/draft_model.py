"""An independent causal LM as drafter: speculative sampling (2211.17192, 2302.01318) or assisted decoding.

A top-k chain gives greedy assisted decoding, and a sampled chain gives speculative sampling. Other trees are those of
SpecInfer, Sequoia or EAGLE-2. ``early_exit`` drafts with the first layers of the target, without any added weight.
"""

import torch
from torch import nn

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import with_layers
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.decoding.node_cache import LMSession


class LMDrafter(Drafter):
    """Base class of drafters that use a causal LM with the target's tokenizer; a subclass defines ``open``."""

    def __init__(self, model: BaseModel, target: BaseModel | None, num_tokens: int) -> None:
        """Draft with ``model``, which must be on the target's device. Without ``target``, both vocabularies must have
        the same size. If the target's has more ids (padding), those are never drafted."""
        if num_tokens < 1:
            raise UserError(f"a draft model needs num_tokens of at least 1, got {num_tokens}")
        self.model, self.depth = model, num_tokens
        self.vocab_size: int = (target or model).vocab_size  # width of ``Proposal.probs``
        if model.vocab_size > self.vocab_size:
            what = f"the draft model {model.name} has {model.vocab_size} ids but the target has {self.vocab_size}"
            raise UserError(f"{what}; use a model with the target's tokenizer")

    def identity(self) -> tuple[object, ...]:
        return (type(self).__name__, self.depth, self.model.identity())


class ModelDrafter(LMDrafter):
    """A causal LM with the target's tokenizer that drafts for the target; usually a smaller model."""

    drafts_by_cost = True

    def __init__(self, model: BaseModel, target: BaseModel | None = None, *, num_tokens: int = 5) -> None:
        super().__init__(model, target, num_tokens)
        self.d2t = torch.arange(model.vocab_size, device=model.device)

    def open(self, rows: int, cache: TreeCache | None = None) -> LMSession:
        return LMSession(self, self.model, rows, self.model.logits)


def early_exit(base: BaseModel, layers: int, *, num_tokens: int = 5) -> ModelDrafter:
    """Return a drafter made of the first ``layers`` layers of ``base``, below their number, its final norm and output
    head. It shares the weights of ``base``, but has its own cache."""
    if not 1 <= layers < base.num_layers:
        raise UserError(f"an early exit from {base.name} needs 1 to {base.num_layers - 1} layers, got {layers}")
    stack = nn.ModuleList(list(base.model.model.layers)[:layers])
    return ModelDrafter(with_layers(base, stack), num_tokens=num_tokens)
