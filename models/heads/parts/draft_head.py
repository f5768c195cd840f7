"""The base class of all draft heads. To write a head, read down to the line "What some heads override".

A head is one file under ``models/heads/`` with a ``DraftHeadConfig`` and a ``DraftHead`` subclass, plus one YAML under
``recipes/head/``. The file's name is the head's type. A head is a recurrence over draft positions: ``advance`` computes
one position. Training calls it along the true tokens after every anchor (a position from which drafts are made), and
drafting calls it along the levels of a token tree. ``HeadSession`` is the drafting side.

Any head can have three optional parts, which this file adds: an induction head, which copies what followed earlier
occurrences of the last tokens; a Markov correction of the logits by the previous token; and a confidence head, which
predicts how likely each draft is accepted.

Shape legend: B batch, T time, K draft positions, F nodes of a tree level, n targets, D base width, I input width, V
target vocabulary, W draft vocabulary, r rank of the optional parts.
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from drafthead.data.answers.draft_vocab import SMALLEST
from drafthead.data.batch import HiddenStates, HiddenStatesSpec, LossOutput, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base import adapter
from drafthead.models.base.base_config import ADAPTER
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.parts import BaseParts
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import Drafter, Session
from drafthead.models.heads.parts.attention_layer import HeadDecoderLayer
from drafthead.models.heads.parts.context_ids import BatchIds
from drafthead.models.heads.parts.head_folder import check_draft_ids, write_head, write_trees
from drafthead.models.heads.parts.induction import InductionHead
from drafthead.models.heads.parts.losses import LossConfig, heads_loss, loss_output
from drafthead.models.heads.parts.targets import DraftTargets, rank_of
from drafthead.models.kernels.linear import DRAFT_DTYPES, PackedCopies, inference_copy, inference_linear
from drafthead.settings.schema import settings

DraftPositions = Annotated[int, Field(ge=1, le=16)]
"""Number K of draft positions: the most tokens that a head drafts one after the other."""


@settings(kw_only=True)
class DraftHeadConfig:
    """Base class of heads' settings. Each module under ``models/heads/`` has one subclass and one ``DraftHead``."""

    num_draft_tokens: DraftPositions = 5
    """Number of draft positions: the most tokens that the head drafts one after the other."""
    draft_vocab_size: Annotated[int, Field(ge=SMALLEST)] | None = None
    """Size of the draft vocabulary: the most frequent tokens of the training answers, and those that end a turn. With
    null, the base's whole vocabulary."""
    context_vocabulary: bool = False
    """Let the induction head also copy ids of the context that the draft vocabulary lacks, such as those of names.
    Their logits come from the base's output head, so ``own_lm_head`` must be false. It has no effect without an
    induction head or a draft vocabulary."""
    draft_dtype: Literal["auto", "bfloat16", "int8"] | None = "auto"
    """Dtype of the weights for drafting. With ``bfloat16`` or ``int8``, drafting reads copies of half or a quarter of
    the size. Verification does not, so exact acceptance rules stay exact; near-ties may be drafted differently. With
    null, drafting uses the trained weights, in float32. ``auto`` takes the dtype that was fastest on this CPU when the
    base was loaded; on an accelerator, it equals null."""
    induction_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of an induction head, which copies what followed earlier occurrences of the last two tokens. All draft
    positions share it. It is our addition, which no export format has. 0 turns it off."""
    markov_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of a correction of the logits by the previous token (DSpark's Markov head). It is for heads that do not
    read their drafts. 0 turns it off."""
    tied_markov: bool = True
    """Compute the Markov table [V, markov_rank] from the base's embedding by a trained matrix. With false, train the
    whole table."""
    markov_gate: bool = False
    """Multiply the previous token's vector by a gate (DSpark's gated Markov head). The gate is the sigmoid of a linear
    map of the draft position's state and of that vector."""
    confidence: bool = False
    """Train a confidence head (DSpark), which predicts how likely each draft is accepted. ``eval.prefix_threshold`` can
    then stop drafting after unlikely ones."""
    one_prediction: ClassVar[bool] = False  # a token's logits do not depend on its draft position, so the loss has one
    can_have_more_positions: ClassVar[bool] = True  # a trained head can, and its former positions keep their weights
    trains_base: ClassVar[bool] = False  # can train its base, too, through LoRA adapters (Medusa-2)
    needs_layers: ClassVar[bool] = False  # runs or trains the base's layers, so cannot be built for parts of a base

    @property
    def starts_from_layers(self) -> bool:
        """True if an untrained head starts from copies of the base's layers."""
        return False

    def build(self, base: BaseParts, d2t: Tensor | None = None, start: bool = True) -> "DraftHead":
        """Return a head for ``base``, of the ``DraftHead`` class in the same module as these settings. ``d2t`` [W]
        int64 maps draft ids to the base's ids (None: the whole vocabulary). With ``start`` false, ``initialise`` is not
        called, because the caller loads trained weights."""
        copies = start and self.starts_from_layers
        if (self.needs_layers or copies) and not isinstance(base, BaseModel):
            what = "starts as a copy of" if copies else "runs"
            given = f"a head of type {self.head_type} {what} layers of its base"
            raise UserError(f"{given}, but {base.name} was loaded without them; load the whole base with load_base")
        module = vars(sys.modules[type(self).__module__])
        classes = [v for v in module.values() if isinstance(v, type) and issubclass(v, DraftHead)]
        (head,) = (kind for kind in classes if kind.__module__ == module["__name__"])
        built = head(self, base, d2t)
        built.check_defined()
        if start:
            built.initialise()
        return built

    @property
    def trained_positions(self) -> int:
        """Number of draft positions that the loss trains; ``loss.depth_weights`` has one weight for each."""
        return 1 if self.one_prediction else self.num_draft_tokens

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose states the head reads in addition to the final state, of ``num_layers`` layers."""
        return ()

    def check_layers(self, num_layers: int) -> None:
        """Raise a UserError if the settings name a layer that a base of ``num_layers`` layers does not have."""
        layers = getattr(self, "layers", None) or []
        if not all(0 <= layer <= num_layers for layer in layers):
            what = f"head.layers must be in [0, {num_layers}], where 0 is the base's embedding"
            raise UserError(f"{what}, got {list(layers)}")

    # What every head's settings get ----------------------------------------------------------------------------------

    @property
    def low_rank(self) -> int:
        """Rank of the low-rank term that Markov correction and induction head add to the logits."""
        return self.markov_rank + self.induction_rank

    @property
    def drafts_context(self) -> bool:
        """True if the ids of the context can be drafted, too."""
        return self.context_vocabulary and self.induction_rank > 0 and self.draft_vocab_size is not None

    @property
    def head_type(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def inference_dtype(self, base: BaseParts) -> torch.dtype | None:
        """Return the dtype of the weights' copies for drafting (None: that of the trained weights)."""
        if self.draft_dtype == "auto":
            return None if base.kernels is None else base.kernels.draft_dtype
        return None if self.draft_dtype is None else DRAFT_DTYPES[self.draft_dtype]

    def drafted_ids(self, vocab_size: int) -> int:
        """Return the size W of the draft vocabulary."""
        return min(self.draft_vocab_size or vocab_size, vocab_size)

    def without_weights(self, base: BaseParts) -> "DraftHead":
        """Return the head on torch's meta device, to count its parameters; ``base`` comes from ``meta_base``."""
        d2t = None if self.draft_vocab_size is None else torch.arange(self.drafted_ids(base.vocab_size))
        with torch.device("meta"):
            return self.build(base, d2t)


States = tuple[Tensor, ...]
"""A head's recurrent state, tensors [..., width], which ``advance`` returns for the next draft position. ``advance``
computes several paths at once, and [...] is their shape: [B, F] for the F nodes of a tree level, [B] in ``all_inputs``
(one path per row), and the shape of the anchors in training."""
Attend = Callable[[Tensor], Tensor]
"""Runs the head's own attention layers over one more token per path, which attends to the committed tokens and to its
path: [..., I] -> [..., D]."""


class DraftHead(nn.Module, Drafter):
    """Base class of draft heads. A head is attached to the frozen base that it drafts for.

    A subclass defines ``__init__``, which sets ``projections``. It also sets ``session_class`` and defines ``advance``.
    A head whose layers attend to the context instead defines ``hidden_at_positions`` and ``open``, with a session of
    its own, and needs ``advance`` only if these call it.
    """

    config: DraftHeadConfig
    base: BaseParts
    vocab_size: int
    session_class: ClassVar[type[Any]]
    """The class that ``open`` creates, usually ``HeadSession``. A head that overrides ``open`` does not need it."""
    projections: "DraftLMHeads"  # to the draft vocabulary; ``__init__`` sets it to a result of ``lm_heads``
    reads_base = True  # False: the head does not read the base's hidden states (a draft LM)
    reads_drafts = True
    """False: no position reads the drafts before it, so drafting computes all positions in one pass, by ``all_inputs``
    or, if ``attends``, by the session's ``block_inputs``."""
    attends = False
    """True: draft positions attend to the context, by ``attend`` or by the session's ``block_inputs``."""
    low_rank_name = "induction_out"  # name of the layer ``low_rank`` in saved heads

    def __init__(self, config: DraftHeadConfig, base: BaseParts, d2t: Tensor | None) -> None:
        super().__init__()
        config.check_layers(base.num_layers)
        self.config = config
        self.base = base
        self.spec = HiddenStatesSpec(layers=config.read_layers(base.num_layers))
        self.base_identity, self.base_fingerprint = base.identity(), base.fingerprint
        self.depth, self.vocab_size = config.num_draft_tokens, base.vocab_size
        self.batch_trees = {}
        self.drafts_by_cost = True
        self.packed = PackedCopies()
        self._copied_dtype: torch.dtype | None = None
        ids = torch.arange(base.vocab_size, device="cpu") if d2t is None else d2t.to("cpu", torch.int64)
        check_draft_ids(ids, base.vocab_size)
        self.d2t: Tensor
        self.register_buffer("d2t", ids.to(base.device))
        t2d = torch.full((base.vocab_size,), -1, dtype=torch.int64, device="cpu")
        t2d[ids] = torch.arange(len(ids), device="cpu")
        self.t2d: Tensor
        self.register_buffer("t2d", t2d.to(base.device), persistent=False)
        self.target_lm_head = base.lm_head if d2t is None else base.lm_head.rows(self.d2t)
        self._add_parts()

    @property
    def base_model(self) -> BaseModel:
        """The base with its layers; reject a head that is attached to parts of it."""
        if not isinstance(self.base, BaseModel):
            raise UserError(f"{self.base.name} was loaded without layers; load the head with the base of load_base")
        return self.base

    def check_defined(self) -> None:
        """Raise a ``UserError`` that names what a subclass must define and has not, or a setting that it excludes."""
        kind = type(self)
        trains = kind.advance is not DraftHead.advance or kind.hidden_at_positions is not DraftHead.hidden_at_positions
        needed = {
            "the method advance": trains,
            "session_class = HeadSession": hasattr(kind, "session_class") or kind.open is not DraftHead.open,
            "self.projections = self.lm_heads(...) in __init__": hasattr(self, "projections"),
        }
        if missing := [what for what, defined in needed.items() if not defined]:
            raise UserError(f"{kind.__name__} must define {', '.join(missing)}; docs/tutorials/new_head.md shows how")
        if self.config.drafts_context and self.projection(0).weight is not self.target_lm_head.weight:
            what = "head.context_vocabulary=true needs the base's output head"
            raise UserError(f"{what}; set head.own_lm_head=false, or head.context_vocabulary=false")

    def embed(self, tokens: Tensor, unit: bool = False) -> Tensor:
        """Return the base's frozen embeddings of ``tokens``, [...] int64 -> [..., D]; ``unit`` scales each to RMS 1."""
        embedded = F.embedding(tokens, self.base.embedding).to(self.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:]) if unit else embedded

    def lm_heads(self, count: int, first: LMHead | None = None) -> "DraftLMHeads":
        """Return the projections of the draft positions to the draft vocabulary.

        Args:
            count: number of trained projections; with 0, all positions share the base's frozen projection.
            first: initial weight, scale and soft-cap of each trained projection; None: those of the base's.
        """
        scaled, dtype = not self.config.low_rank, self.config.inference_dtype(self.base)
        if first is not None and len(first.weight) != len(self.d2t):
            what = f"lm_heads(first=...) has {len(first.weight)} rows, but the draft vocabulary has {len(self.d2t)}"
            raise UserError(f"{what}; self.target_lm_head is the base's output head with these rows")
        return DraftLMHeads(first or self.target_lm_head, count, dtype, scaled=scaled)

    def first_states(self, hidden: Tensor) -> States:
        """Return the recurrent states before position 0, given the ``hidden`` state [..., D] at the anchors. ``hidden``
        comes from ``anchor_hidden`` in training, and from the session's ``draft_hidden`` in drafting."""
        return (hidden,)

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        """Compute one draft position: return the input of its projection, [..., width], and its states.

        Args:
            k: draft position, from 0.
            states: the states that the position before returned, [..., width]; for k = 0 those of ``first_states``.
            tokens: [...] int64 target ids of the tokens before the draft: the last committed token for k = 0, then
                drafts (in training the true tokens). If ``reads_drafts`` is false, read them only for k = 0.
            attend: runs the head's own attention layers, if ``attends`` is true.
        """
        raise NotImplementedError

    def all_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        """Return the inputs of the projections of ``depth`` = K positions, [B, K, D], for drafting.

        Drafting calls this method instead of ``advance`` if ``reads_drafts`` is false. A head may override it by a
        faster, equal computation. ``hidden`` [B, D] is the session's ``draft_hidden``, and ``last_token`` [B] int64 the
        last committed token of each row.
        """
        states, inputs = self.first_states(hidden), []
        for k in range(depth):
            x, states = self.advance(k, states, last_token, _no_attention)
            inputs.append(x)
        return torch.stack(inputs, 1)

    def open(self, rows: int, cache: TreeCache | None = None) -> Session:
        return cast(Session, self.session_class(self, rows))

    # What some heads override -----------------------------------------------------------------------------------------

    def anchor_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return the input of ``first_states`` in training at every position, [B, T, D]: the base's final state. A head
        that overrides it needs a session whose ``draft_hidden`` returns the same for drafting."""
        return base_hidden.final

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Run the forward pass of training: return the inputs of the K projections at all A anchors, [K, A, width].
        Entries of predictions that are not trained are ignored, but must be finite."""
        hidden = self.anchor_hidden(batch, base_hidden, draft_targets).flatten(0, 1)[draft_targets.anchors]
        return self.unroll(hidden, batch, draft_targets, _no_attention)

    def unroll(self, hidden: Tensor, batch: TrainBatch, draft_targets: DraftTargets, attend: Attend) -> Tensor:
        """Return the result of ``hidden_at_positions`` by calling ``advance`` once per draft position. Each call
        computes all A anchors at once, from ``hidden`` [A, D], and reads the true token after each anchor's path.
        ``attend`` runs the head's own attention layers at the anchors, [A, I] -> [A, D]."""
        states, outputs = self.first_states(hidden.to(self.dtype)), []
        for k, tokens in enumerate(batch.input_ids.flatten()[draft_targets.last_read]):
            result = self.advance(k, states, tokens, attend)
            x, states = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            if not (isinstance(x, Tensor) and x.shape[-1] == self.projection_width and isinstance(states, tuple)):
                returned = result if isinstance(result, tuple) else (result,)
                shapes = [f"tensor {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in returned]
                what = f"{type(self).__name__}.advance({k}, ...) must return a tensor [..., {self.projection_width}]"
                raise UserError(f"{what} and a tuple of states, but returned {', '.join(shapes)}")
            outputs.append(x)
        return torch.stack(outputs)

    def sink_states(self, hidden: Tensor, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return the states at the anchors from which the induction head decides not to copy, [K or 1, A, D]; by
        default the base's final ones. ``hidden`` [K, A, D] is from ``hidden_at_positions``. Drafting uses the session's
        ``draft_sinks``."""
        return base_hidden.final.flatten(0, 1)[None, draft_targets.anchors]

    def projection(self, k: int) -> LMHead:
        """Return the projection of draft position k (0-based), without optional parts; the base's if untrained."""
        return self.projections.head(k)

    @property
    def scaling(self) -> LMHead:
        """An ``LMHead`` with the scale and soft-cap to apply to the head's logits; its weight is not read."""
        return self.target_lm_head

    @property
    def projection_width(self) -> int:
        """Width of the projections' input, without the optional parts."""
        return self.base.hidden_size

    @property
    def anchor_limit(self) -> int | None:
        """Largest number of anchors that a training step uses, drawn at random; None: all."""
        return None

    def initialise(self) -> None:
        """Set initial weights that are expensive to compute. It is not called if trained weights are loaded."""

    @property
    def decoder_layers(self) -> list[HeadDecoderLayer]:
        return []

    # What every head gets; not needed to write one -------------------------------------------------------------------

    def _add_parts(self) -> None:
        """Create induction head, Markov correction and confidence head, if the settings ask for them."""
        config, base, device = self.config, self.base, self.base.device
        self.induction = InductionHead(base, config.induction_rank) if config.induction_rank else None
        if config.markov_rank:
            if config.tied_markov:
                self.markov_in: nn.Module = TiedMarkov(base, config.markov_rank)
            else:
                self.markov_in = nn.Embedding(base.vocab_size, config.markov_rank, device=device)
            nn.init.normal_(self.markov_in.weight, std=base.hidden_size**-0.5 if config.tied_markov else 0.02)
        self.markov_gate: nn.Linear | None = None
        if config.markov_gate and config.markov_rank:
            self.markov_gate = nn.Linear(self.projection_width + config.markov_rank, config.markov_rank, device=device)
            for parameter in self.markov_gate.parameters():
                nn.init.zeros_(parameter)
        if config.low_rank:
            low_rank = nn.Linear(config.low_rank, len(self.d2t), bias=False, device=device)
            nn.init.zeros_(low_rank.weight)
            if self.induction is not None:
                start = self.induction.projection(self.d2t, self.scaling.scale)
                low_rank.weight.data[:, config.markov_rank :] = start.detach()
            self.add_module(self.low_rank_name, low_rank)
        self.confidence: nn.Linear | None = None
        self.has_confidence = config.confidence
        if config.confidence:
            self.confidence = nn.Linear(self.projection_width + config.low_rank, 1, device=device)
            for parameter in self.confidence.parameters():
                nn.init.zeros_(parameter)

    def identity(self) -> tuple[object, ...]:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            # Compared as bytes, because NumPy has no bfloat16.
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return (type(self).__name__, self.config, self.config.inference_dtype(self.base), digest.hexdigest())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the trained weights, also on an inference copy, whose weights may have another dtype."""
        return self._copied_dtype or next(self.parameters()).dtype

    def inference(self) -> Self:
        """Return the head's copy with packed weights for drafting; ``train``, ``eval`` and ``to`` discard the copy."""
        return self.packed.get("head", self._inference_copy)

    def _inference_copy(self) -> Self:
        twin: Self = inference_copy(self, self.config.inference_dtype(self.base))
        twin._copied_dtype = self.dtype
        return twin

    def num_parameters(self) -> int:
        """Return the number of the head's own parameters, without those of the base."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def low_rank(self) -> nn.Linear | None:
        """The layer that maps the r inputs of Markov correction and induction head to logits, [..., r] -> [..., W];
        None without either."""
        return cast(nn.Linear | None, getattr(self, self.low_rank_name, None))

    def output_head(self, k: int) -> LMHead:
        """Return the projection of draft position k (0-based) for the loss, with the low-rank parts."""
        head = self.projection(k)
        return head if self.low_rank is None else replace(head, low_rank=self.low_rank.weight)

    def widened(self, ids: Tensor) -> LMHead:
        """Return the projection of all draft positions for the loss, with rows for the target ids ``ids`` [C] after
        those of the draft vocabulary. Only if ``drafts_context``."""
        head, rows = self.output_head(0), self.context_rows(ids)
        assert head.low_rank is not None and rows.low_rank is not None
        low_rank = torch.cat([head.low_rank, rows.low_rank.to(head.low_rank.dtype)])
        return replace(head, weight=torch.cat([head.weight, rows.weight]), low_rank=low_rank)

    def context_rows(self, ids: Tensor) -> LMHead:
        """Return a projection to the target ids ``ids`` [C]: rows of the base's output head, and copied codes."""
        assert self.induction is not None
        codes = self.induction.projection(ids, self.scaling.scale)
        return replace(self.base.lm_head.rows(ids), low_rank=F.pad(codes, (self.config.markov_rank, 0)))

    def markov_inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the Markov correction's inputs [..., r] after ``tokens`` [...], at draft positions whose projections
        read ``hidden`` [..., width]."""
        vectors: Tensor = self.markov_in(tokens)
        if self.markov_gate is None:
            return vectors
        gate: Tensor = self.markov_gate(torch.cat([hidden, vectors.to(hidden.dtype)], -1)).sigmoid()
        return vectors * gate

    def projection_inputs(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return the inputs of ``output_head`` at all A anchors, [K, A, width + r]: the result of
        ``hidden_at_positions`` and the r inputs of Markov correction and induction head."""
        hidden = self.hidden_at_positions(batch, base_hidden, draft_targets)
        inputs = [hidden]
        if self.config.markov_rank:
            inputs.append(self.markov_inputs(batch.input_ids.flatten()[draft_targets.last_read], hidden))
        if self.induction is not None:
            states = self.sink_states(hidden, base_hidden, draft_targets)
            inputs.append(self.induction.at_anchors(batch, states, draft_targets).to(hidden.dtype))
        return hidden if len(inputs) == 1 else torch.cat(inputs, -1)

    def confidence_logits(self, hidden: Tensor) -> Tensor | None:
        """Map ``projection_inputs`` to logits [K, A] of acceptance; None without a confidence head."""
        # Detached, so that the confidence loss cannot change the drafts.
        return None if self.confidence is None else self.confidence(hidden.detach())[..., 0]

    def loss(
        self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig, share_done: float = 1.0
    ) -> LossOutput:
        """Return the loss and the metrics, summed over the trained tokens of the batch. ``share_done`` is the share of
        the training phase that is done after this step, in (0, 1], for Medusa-2.

        The calls, in order::

            DraftTargets.of            targets.py     which anchor predicts which target
            projection_inputs          here           the inputs of all projections, at the anchors
              hidden_at_positions      here, a head   ``anchor_hidden``, then ``unroll``: ``advance`` once per position
            output_head                here           each position's projection, see the end of this file
            heads_loss                 losses.py      loss and metrics in chunks, with gradients written by hand
        """
        weights = config.weights_of(self.config.trained_positions)
        # On held-out answers (without gradients), metrics also cover the positions that are not trained, with weight 0.
        depth = len(weights) if torch.is_grad_enabled() or self.config.one_prediction else self.depth
        weights += [0.0] * (depth - len(weights))
        device = self.base.device
        draft_targets = DraftTargets.of(batch, depth, device, self.anchor_limit)
        if batch.weights is not None:
            draft_targets = draft_targets.weighted(batch.weights.to(device), self.config.one_prediction)
        batch = batch.to(device)
        hidden = self.projection_inputs(batch, base_hidden, draft_targets)
        seen = BatchIds.of(batch, self.t2d) if self.config.drafts_context else None
        heads = [self.output_head(k) for k in range(depth)] if seen is None else [self.widened(seen.ids)] * depth
        target_lm_head = self.target_lm_head if seen is None else replace(heads[0], low_rank=None)
        labels = draft_targets.labels(batch, base_hidden, self.t2d, target_lm_head, seen)
        confidence = self.confidence_logits(hidden)
        loss_sum, stats = heads_loss(hidden, heads, labels, config, confidence=confidence, position_weights=weights)
        if self.config.one_prediction:
            stats = stats.expand(self.depth, -1)
        return loss_output(loss_sum, stats, training=torch.is_grad_enabled())

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, base_hidden: HiddenStates, top: int) -> Tensor:
        """Return the rank of the true token among each draft position's candidates, [B, T, K] int64, for tree
        calibration.

        Column k - 1 has position k (from 1): 0 if its likeliest candidate for ``x_{t+1+k}`` is right, ``top`` if the
        true token is not among the first ``top``, -1 without a target. Positions read the true tokens before their
        target. That is exact, because a draft can only be accepted after accepted drafts.
        """
        draft_targets, batch = DraftTargets.of(batch, self.depth, self.base.device), batch.to(self.base.device)
        hidden = self.projection_inputs(batch, base_hidden, draft_targets)
        seen = BatchIds.of(batch, self.t2d) if self.config.drafts_context else None
        heads = [self.output_head(k) for k in range(self.depth)]
        targets = draft_targets.target_idx
        target_ids, unseen = self.t2d[batch.input_ids.flatten()[targets]], None
        if seen is not None:
            heads = [self.widened(seen.ids)] * self.depth
        count = batch.input_ids.numel()
        ranks = torch.full((count + 1, self.depth), -1, dtype=torch.int64, device=target_ids.device)
        for k, (valid, anchor_idx) in enumerate(zip(draft_targets.valid, draft_targets.anchor_idx, strict=True)):
            anchors = draft_targets.anchors[anchor_idx]
            if seen is not None:
                target_ids = seen.draft_ids(self.t2d, len(self.d2t), targets, anchors)
                unseen = seen.unseen(anchors)
            # The low-rank terms of markov and induction depend on the draft position, also if the state does not.
            if k == 0 or not self.config.one_prediction or self.config.low_rank:
                at_targets = rank_of(hidden[k, anchor_idx], heads[k], target_ids, top, unseen)
            ranks[torch.where(valid, anchors, count), k] = at_targets  # the last row collects invalid targets
        return ranks[:-1].view(*batch.input_ids.shape, self.depth)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config, weights, ``custom_generate`` code, the base's adapter if any and, once calibrated, trees."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.saved_weights()
        config = {
            "head_type": self.config.head_type,
            "settings": asdict(self.config),
            "base": self.save_base(folder),
            "draft_vocab": None if len(self.d2t) == len(self.t2d) else len(self.d2t),
        }
        write_head(folder, config, weights)
        write_trees(folder, self)

    # Training the base (Medusa-2 only) -------------------------------------------------------------------------------

    def train_base(self, now: bool) -> None:
        """Create the base's adapters if there are none; ``now``: the next phase trains them. Only for
        ``trains_base``."""
        raise NotImplementedError

    def tuned_decoders(self) -> list[nn.Module]:
        """Return the decoders (the base without output head) whose layers have adapters."""
        return []

    def lr_mult(self, parameter: nn.Parameter) -> float:
        """Return the factor of the phase's learning rate for ``parameter``."""
        return 1.0

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the tensors of ``model.safetensors``, without the base's adapters."""
        return self.state_dict()

    def save_base(self, folder: Path) -> dict[str, Any]:
        """Copy the base's LoRA adapter, if any, into ``folder``; return the base's identity for ``config.json``."""
        identity = self.base_identity
        if self.base.config.adapter is None:
            return identity
        adapter.copy(Path(self.base.config.adapter), folder / ADAPTER)
        return {**identity, "recipe": {**identity["recipe"], "adapter": ADAPTER}}


def _no_attention(x: Tensor) -> Tensor:
    raise TypeError("a head whose layers attend to the context must set attends = True")


class DraftLMHeads(nn.Module):
    """Projections of the draft positions to the draft vocabulary: ``count`` trained ones, or the base's frozen one.
    Position k (0-based) uses projection k, or the last one."""

    def __init__(self, target_lm_head: LMHead, count: int, draft_dtype: torch.dtype | None, scaled: bool) -> None:
        """Create ``count`` trained projections, which start as ``target_lm_head``; with 0, all positions share it.
        ``draft_dtype`` is that of the packed copies for drafting (None: the trained dtype). With ``scaled`` false,
        ``logits`` applies no scale and soft-cap, because the session first adds other terms."""
        super().__init__()
        self._draft_dtype, self._scaled = draft_dtype, scaled
        weight = target_lm_head.weight.detach().float()
        self.weights = nn.ParameterList(nn.Parameter(weight.clone()) for _ in range(count))
        self._target_lm_head = target_lm_head
        self.packed = PackedCopies()

    def head(self, k: int) -> LMHead:
        """Return the projection of draft position k (0-based) for the loss."""
        if not len(self.weights):
            return self._target_lm_head
        return replace(self._target_lm_head, weight=self.weights[min(k, len(self.weights) - 1)])

    def logits(self, hidden: Tensor, k: int | None = 0) -> Tensor:
        """Return the logits of draft position k (0-based), [..., D] -> [..., W]; with k None, of positions 0 to K - 1,
        [B, K, D] -> [B, K, W]."""
        if k is None and len(self.weights) > 1:
            return torch.stack([self.logits(hidden[:, n], n) for n in range(hidden.shape[1])], 1)
        k = min(k or 0, max(0, len(self.weights) - 1))  # None is left if all positions share one projection
        weight = self.head(k).weight
        linear = self.packed.get(k, lambda: inference_linear(weight, dtype=self._draft_dtype))
        product: Tensor = linear(hidden.to(weight.dtype))
        return self._target_lm_head.scale_and_cap(product) if self._scaled else product


class TiedMarkov(nn.Linear):
    """The Markov correction's input: a trained projection of the base's embedding, scaled to RMS 1, to r numbers.
    Drafting uses the table [V, r] of all tokens, computed once."""

    def __init__(self, base: BaseParts, rank: int) -> None:
        super().__init__(base.hidden_size, rank, bias=False, device=base.device)
        self._embedding = (base.embedding,)  # the base's: in a tuple, so that it is not a parameter of this module

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens, self._embedding[0]).to(self.weight.dtype)
        return super().forward(F.rms_norm(embedded, embedded.shape[-1:]))

    @torch.no_grad()
    def inference(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """Return the outputs for all V token ids as an embedding."""
        ids = torch.arange(len(self._embedding[0]), device=self.weight.device)
        table = torch.cat([self(chunk) for chunk in torch.split(ids, 8192)])
        return nn.Embedding(len(table), table.shape[1], _weight=table)
