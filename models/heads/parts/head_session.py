"""The drafting side of a head: what it keeps of the rows being decoded, and its logits level by level.

Shape legend: B batch, K draft positions, F frontier nodes, D base width, W draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drafthead.data.batch import HiddenStates
from drafthead.models.decoding.drafter import DraftConfig, last_valid, take_rows
from drafthead.models.decoding.growth import StepwiseSession
from drafthead.models.heads.parts.draft_head import DraftHead, States
from drafthead.models.heads.parts.induction import InductionContext
from drafthead.models.heads.parts.layer_cache import LayerCache


class HeadSession(StepwiseSession):
    """What a head keeps of the rows being decoded: the base's last state, and the contexts of attention and parts."""

    drafter: DraftHead

    def __init__(self, head: DraftHead, rows: int) -> None:
        self.drafter, self.lengths = head, [0] * rows
        self.model = head.inference()
        """The inference copy of the head."""
        self.hidden: Tensor = head.target_lm_head.weight.new_full((rows, head.base.hidden_size), torch.nan)
        """[B, D] the base's ``h`` at the last position it has read."""
        self.copied = None if self.model.induction is None else InductionContext(self.model.induction, rows)
        self.context: LayerCache | None = None
        """Keys and values of the head's own attention layers, if it has any."""

    @torch.inference_mode()
    def commit(
        self, tokens: Tensor, counts: list[int], base_hidden: HiddenStates | None, nodes: Tensor | None = None
    ) -> None:
        if base_hidden is not None:
            self.hidden = last_valid(base_hidden.final, counts)
        if self.copied is not None:
            self.copied.append(tokens, counts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.lengths, self.hidden = [self.lengths[row] for row in rows], take_rows(self.hidden, rows)
        for context in (self.copied, self.context):
            if context is not None:
                context.select(rows)

    def source(self) -> Tensor:
        """Return the input [B, D] of ``first_states`` or ``all_inputs``."""
        return self.hidden

    def start(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        self._level = 0
        self.start_levels(last_token, draft_config)
        if self.copied is not None and (sinks := self.sink_states()) is not None:
            self.copied.start(sinks.to(self.model.dtype))

    def sink_states(self) -> Tensor | None:
        """Return the inputs of the induction sink's score, [B, levels, D]; None if ``level`` starts ``copied``."""
        return self.hidden[:, None]

    def start_levels(self, last_token: Tensor, draft_config: DraftConfig) -> None:
        """Prepare the first level; heads that do not read drafts compute all levels."""
        model, hidden, depth = self.model, self.source().to(self.model.dtype), draft_config.depth
        if model.reads_drafts:
            self._states = model.first_states(hidden[:, None])
            return

        def read(hidden: Tensor, last_token: Tensor) -> States:
            inputs = self.all_inputs(hidden, last_token, depth)
            return inputs, model.draft_logits(inputs, None)

        self._inputs, self._logits = self._graph(depth, read, hidden, last_token)

    def all_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        """Return the head's ``all_inputs``; a head that attends to the context overrides this method instead."""
        return self.model.all_inputs(hidden, last_token, depth)

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        k, self._level = self._level, self._level + 1
        self._input, logits = self.level(k, tokens, parents)
        self._added: Tensor | None = None
        if self.model.low_rank is None:
            return logits
        added = [self.model.markov_in(tokens)] if self.model.config.markov_rank else []
        if self.copied is not None:
            added.append(self.copied.read(tokens, parents))
        self._added = added[0] if len(added) == 1 else torch.cat(added, -1)
        scaled: Tensor = self.drafter.scaling.scale_and_cap(logits + self.model.low_rank(self._added))
        return scaled

    def level(self, k: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vocabulary projection's inputs and ``draft_logits`` of draft position k (0-based), [B, F, ...].

        F is 1 if the head does not read drafts: all nodes then share them. The arguments are those of ``expand``.
        """
        if not self.model.reads_drafts:
            return self._inputs[:, k, None], self._logits[:, k, None]

        def attend(x: Tensor) -> Tensor:
            assert self.context is not None
            return self.context.start(x) if k == 0 else self.context.expand(x, parents)

        def read(tokens: Tensor, parents: Tensor, *states: Tensor) -> States:
            if k:
                states = tuple(s.gather(1, parents[..., None].expand(-1, -1, s.shape[-1])) for s in states)
            x, below = self.model.advance(k, states, tokens, attend)
            return (x, self.model.draft_logits(x, k), *below)

        x, logits, *states = self._graph(k, read, tokens, parents, *self._states)
        self._states = tuple(states)
        return x, logits

    def confidence(self) -> Tensor:
        x = self._input
        if self._added is not None:
            x = torch.cat([x.expand(-1, self._added.shape[1], -1), self._added], -1)
        assert self.model.confidence is not None
        confidence: Tensor = self.model.confidence(x)[..., 0].sigmoid()
        return confidence

    def _graph(self, key: int, function: Callable[..., States], *inputs: Tensor) -> States:
        """Call ``function``, as a CUDA graph if the base uses graphs."""
        calls = self.drafter.static_calls
        return function(*inputs) if calls is None else calls(key, function, *inputs)
