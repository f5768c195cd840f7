"""The base class of all draft heads: loss, drafting, optional parts, saving and loading.

A head is one file under ``models/heads/`` with a ``DraftHeadConfig`` and a ``DraftHead`` subclass, plus one YAML under
``recipes/head/``. Its type is the name of that file. It is a recurrence over draft positions, ``advance``, which
training runs along the true tokens of all anchors, and drafting along a tree.

Any head can have three parts, which only this file adds: an induction head, a Markov correction and a confidence.

Shape legend: B batch, T time, A anchors, K draft positions, F frontier nodes, n targets, D base width, V target
vocabulary, W draft vocabulary, r rank of the parts.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import disk_errors, file_digest, new_file, write_json
from drafthead.data.utils.settings import settings
from drafthead.models.base import adapter
from drafthead.models.base.base_config import ADAPTER
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import Drafter, Session
from drafthead.models.heads.parts.attention_layer import HeadDecoderLayer
from drafthead.models.heads.parts.head_folder import FORMAT, write_custom_generate, write_trees
from drafthead.models.heads.parts.induction import InductionHead
from drafthead.models.heads.parts.lm_heads import DraftLMHeads, TiedMarkov
from drafthead.models.heads.parts.losses import LossConfig, heads_loss, loss_output
from drafthead.models.heads.parts.targets import DraftTargets, rank_of
from drafthead.models.kernels.cuda_graphs import StaticCalls
from drafthead.models.kernels.linear import DRAFT_DTYPES, PackedCopies, inference_copy

DraftPositions = Annotated[int, Field(ge=1, le=16)]
"""Draft positions K: the most drafts on a path."""


@settings(kw_only=True)
class DraftHeadConfig(ABC):
    """Settings of a head. A module of ``models/heads/`` has one subclass, and recipes name it by ``head_type``."""

    num_draft_tokens: DraftPositions = 5
    """Draft positions: the largest number of drafts on a path."""
    draft_vocab_size: Annotated[int, Field(ge=16)] | None = None
    """Number of tokens that the head can draft, the most frequent of the answers. With null, the whole vocabulary."""
    draft_dtype: Literal["auto", "bfloat16", "int8"] | None = "auto"
    """Type of the weights for drafting. With ``bfloat16`` or ``int8``, drafting uses copies that are read in half or a
    quarter of the time. Verification does not use them, so exact rules stay exact; near-ties may be drafted
    differently. ``auto`` takes what was faster when the base was loaded. Null drafts with the trained weights, in
    float32."""
    induction_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of an induction head that all draft positions share (our addition; no format has it). 0 turns it off."""
    markov_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of a correction by the previous token (DSpark's Markov head), for heads that do not read their drafts. 0
    turns it off."""
    tied_markov: bool = True
    """Make the Markov table a projection [D, r] of the base's embedding. With false, it is a separate table [V, r]."""
    confidence: bool = False
    """Train a confidence head (DSpark), which ``prefix_threshold`` reads during decoding."""

    @property
    def low_rank(self) -> int:
        """Columns of what the Markov correction and the induction head add to the logits."""
        return self.markov_rank + self.induction_rank

    @property
    def head_type(self) -> str:
        """Name of the module under ``models/heads/``."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def depth(self) -> int:
        """Draft positions K."""
        return self.num_draft_tokens

    def inference_dtype(self, base: BaseModel) -> torch.dtype | None:
        """Return the dtype of the weights to draft with for ``base``, or None to draft with the trained weights."""
        if self.draft_dtype == "auto":
            return None if base.kernels is None else base.kernels.drafts_in
        return None if self.draft_dtype is None else DRAFT_DTYPES[self.draft_dtype]

    @property
    def trained_positions(self) -> int:
        """Draft positions that have a term in the loss; ``loss.depth_weights`` has one weight for each."""
        return self.depth

    def drafted_ids(self, vocab_size: int) -> int:
        """Return the size W of the draft vocabulary for a base of ``vocab_size`` ids."""
        return min(self.draft_vocab_size or vocab_size, vocab_size)

    def check_layers(self, num_layers: int) -> None:
        """Raise a UserError if the settings name a layer that a base of ``num_layers`` layers does not have."""
        layers = getattr(self, "layers", None) or []
        if not all(0 <= layer <= num_layers for layer in layers):
            raise UserError(f"head.layers must be in [0, {num_layers}], got {list(layers)}")

    @property
    def trains_base(self) -> bool:
        """True if the head can train its base too, through adapters."""
        return False

    @abstractmethod
    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "DraftHead":
        """Return the untrained head for ``base``; ``d2t`` ([W] int64) lists the draft vocabulary's target ids."""

    def without_weights(self, base: BaseModel) -> "DraftHead":
        """Return the head for a base without weights (``meta_base``), to count parameters and memory."""
        d2t = None if self.draft_vocab_size is None else torch.arange(self.drafted_ids(base.vocab_size))
        with torch.device("meta"):
            return self.build(base, d2t)


States = tuple[Tensor, ...]
"""State that a node passes on to its children: tensors [..., width], [B, F, width] while drafting."""
Attend = Callable[[Tensor], Tensor]
"""Runs the head's own attention layers over one more token of every path: inputs [..., I] -> [..., D]."""


class DraftHead(nn.Module, Drafter):
    """A draft head, attached to the frozen base that it drafts for."""

    config: DraftHeadConfig
    session: ClassVar[type[Any]]
    """Class of its sessions, called with the head and the number of rows: ``HeadSession`` unless ``open`` differs."""
    projections: DraftLMHeads
    """Projections to the vocabulary, made by ``lm_heads``."""
    reads_base = True
    reads_drafts = True
    """False: no position reads drafts, so that ``all_inputs`` computes all positions at once."""
    attends = False
    """True: the head's own layers attend to the context."""
    one_prediction = False
    """True: a token is predicted like any next token, whichever position drafts it. It is trained once."""
    low_rank_name = "induction_out"
    """Name of the low-rank projection in saved heads."""

    def __init__(self, config: DraftHeadConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.base = base
        self.base_identity = base.identity()
        self.batch_trees = {}
        self.packed = PackedCopies()
        self._copied_dtype: torch.dtype | None = None
        ids = torch.arange(base.vocab_size, device="cpu") if d2t is None else d2t.to("cpu", torch.int64)
        if len(ids) == 0 or int(ids.max()) >= base.vocab_size or int(ids.min()) < 0:
            raise UserError(f"the draft vocabulary must hold ids in [0, {base.vocab_size}), got {ids.tolist()[:4]}...")
        if (repeated := len(ids) - len(set(ids.tolist()))) > 0:
            raise UserError(f"the draft vocabulary must hold different ids, but {repeated} of {len(ids)} are repeated")
        self.d2t: Tensor
        self.register_buffer("d2t", ids.to(base.device))
        t2d = torch.full((base.vocab_size,), -1, dtype=torch.int64, device="cpu")
        t2d[ids] = torch.arange(len(ids), device="cpu")
        self.t2d: Tensor
        self.register_buffer("t2d", t2d.to(base.device), persistent=False)
        self.target_lm_head = base.lm_head if d2t is None else base.lm_head.rows(self.d2t)
        self._add_parts()

    def _add_parts(self) -> None:
        """Create the induction head, the Markov correction and the confidence that the settings ask for."""
        config, base, device = self.config, self.base, self.base.device
        self.induction = InductionHead(base, config.induction_rank) if config.induction_rank else None
        if config.markov_rank:
            if config.tied_markov:
                self.markov_in: nn.Module = TiedMarkov(base, config.markov_rank)
            else:
                self.markov_in = nn.Embedding(base.vocab_size, config.markov_rank, device=device)
            nn.init.normal_(self.markov_in.weight, std=base.hidden_size**-0.5 if config.tied_markov else 0.02)
        if config.low_rank:
            low_rank = nn.Linear(config.low_rank, len(self.d2t), bias=False, device=device)
            nn.init.zeros_(low_rank.weight)
            if self.induction is not None:
                start = self.induction.start_projection(self.d2t, self.scaling.scale)
                low_rank.weight.data[:, config.markov_rank :] = start
            self.add_module(self.low_rank_name, low_rank)
        self.confidence: nn.Linear | None = None
        if config.confidence:
            self.confidence = nn.Linear(self.projection_width + config.low_rank, 1, device=device)
            for parameter in self.confidence.parameters():
                nn.init.zeros_(parameter)

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def base_fingerprint(self) -> str:
        return self.base.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def says_confidence(self) -> bool:
        return self.confidence is not None

    def identity(self) -> tuple[object, ...]:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            # Compared as bytes, because NumPy has no bfloat16.
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return (type(self).__name__, self.config, self.config.inference_dtype(self.base), digest.hexdigest())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's weights; for an inference copy, that of the weights it was made from."""
        return self._copied_dtype or next(self.parameters()).dtype

    def inference(self) -> Self:
        """Return a copy with packed weights to draft with; the copy is renewed after training."""
        return self.packed.get("head", self._inference_copy)

    def _inference_copy(self) -> Self:
        twin: Self = inference_copy(self, self.config.inference_dtype(self.base))
        twin._copied_dtype = self.dtype
        return twin

    @property
    def static_calls(self) -> StaticCalls | None:
        """CUDA graphs of the head's passes, if the base uses graphs."""
        if not self.base.uses_graphs or self.attends:
            return None
        return self.packed.get("graphs", lambda: StaticCalls(self.base.device))

    def embed(self, tokens: Tensor, unit: bool = False) -> Tensor:
        """Return the base's embeddings, frozen, with ``unit`` at unit RMS: [...] int64 -> [..., D]."""
        embedded = F.embedding(tokens, self.base.embedding).to(self.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:]) if unit else embedded

    # The forward pass ------------------------------------------------------------------------------------------

    def first_states(self, hidden: Tensor) -> States:
        """Return the state before any token is read, from the base's ``h`` [..., D]."""
        return (hidden,)

    def advance(self, k: int, states: States, tokens: Tensor, attend: Attend) -> tuple[Tensor, States]:
        """Return the projection's input of position k (0-based), and the states after it.

        Args:
            k: draft position, from 0.
            states: states of the nodes' parents, [..., width].
            tokens: [...] int64 target ids; the last committed token for k = 0, then drafts.
            attend: runs the attention layers of a head with ``attends``.
        """
        raise NotImplementedError

    def all_inputs(self, hidden: Tensor, last_token: Tensor, depth: int) -> Tensor:
        """Return the projection's inputs of the first ``depth`` positions, [B, K, D], if none reads drafts.

        Args:
            hidden: [B, D] the session's ``anchor_hidden``.
            last_token: [B] int64.
            depth: K.
        """
        states, inputs = self.first_states(hidden), []
        for k in range(depth):
            x, states = self.advance(k, states, last_token, _no_attention)
            inputs.append(x)
        return torch.stack(inputs, 1)

    def anchor_hidden(self, batch: TrainBatch, base_hidden: HiddenStates) -> Tensor:
        """Return what ``first_states`` reads in training, at every position, [B, T, D]: the base's ``h`` by default."""
        return base_hidden.final

    def hidden_at_positions(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return the input of every position's projection for every target, without the parts, [K, n, width].

        It may be any finite value where ``draft_targets.valid`` is false.
        """
        # Each anchor is computed once, although the targets of up to K positions read it.
        anchors, index = draft_targets.anchors, torch.zeros_like(batch.input_ids.flatten())
        index[anchors] = torch.arange(len(anchors), device=index.device)
        hidden = self.anchor_hidden(batch, base_hidden).flatten(0, 1)[anchors]
        return self.unroll(hidden, anchors, index, batch, draft_targets, _no_attention)

    def unroll(
        self,
        hidden: Tensor,
        anchors: Tensor,
        index: Tensor,
        batch: TrainBatch,
        draft_targets: DraftTargets,
        attend: Attend,
    ) -> Tensor:
        """Run ``advance`` from all ``anchors`` along the true tokens; see ``hidden_at_positions``.

        Args:
            hidden: [..., D] inputs of ``first_states`` at the anchors.
            anchors: [...] int64 flat index of each anchor.
            index: [B * T] int64 index of each anchor in ``anchors``, flattened.
            batch: packed rows.
            draft_targets: targets of the batch.
            attend: the attention of draft positions at the anchors.
        """
        ids, outputs = batch.input_ids.flatten(), []
        states = self.first_states(hidden.to(self.dtype))
        for k, anchor_idx in enumerate(draft_targets.anchor_idx):
            x, states = self.advance(k, states, ids[(anchors + k + 1).clamp(max=len(ids) - 1)], attend)
            outputs.append(x.flatten(0, -2)[index[anchor_idx]])
        return torch.stack(outputs)

    # Projections and parts -------------------------------------------------------------------------------------

    def lm_heads(self, count: int, first: LMHead | None = None) -> DraftLMHeads:
        """Return ``count`` projections that start as ``first`` (None: the base's); 0: the base's, frozen and shared."""
        scaled, dtype = not self.config.low_rank, self.config.inference_dtype(self.base)
        return DraftLMHeads(first or self.target_lm_head, count, dtype, scaled=scaled)

    @property
    def scaling(self) -> LMHead:
        """The output head whose scale and soft-cap the logits have."""
        return self.target_lm_head

    def projection(self, k: int) -> LMHead:
        """Return the projection of position k (0-based) without the parts."""
        return self.projections.head(k) if len(self.projections.weights) else self.target_lm_head

    def draft_logits(self, x: Tensor, k: int | None) -> Tensor:
        """Return logits [..., W] of position k for inference; with None, of all positions of ``x`` [B, K, D].

        If parts add to the logits, they come before scale and soft-cap.
        """
        return self.projections.logits(x, k)

    @property
    def projection_width(self) -> int:
        """Width of the projection's input, without the parts."""
        return self.base.hidden_size

    @property
    def low_rank(self) -> nn.Linear | None:
        """The projection of the Markov and induction codes, [r] -> [W]."""
        return cast(nn.Linear | None, getattr(self, self.low_rank_name, None))

    def output_head(self, k: int) -> LMHead:
        """Return the vocabulary projection of draft position k (0-based), parts included."""
        head = self.projection(k)
        return head if self.low_rank is None else replace(head, low_rank=self.low_rank.weight)

    def sink_states(
        self, hidden: Tensor, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets
    ) -> list[Tensor]:
        """Return for each position the inputs [B, T, D] of the induction sink's score at the anchors."""
        return [base_hidden.final] * len(hidden)

    def position_hidden(self, batch: TrainBatch, base_hidden: HiddenStates, draft_targets: DraftTargets) -> Tensor:
        """Return the inputs of ``output_head`` for every target, [K, n, width + r]; see ``hidden_at_positions``."""
        hidden = self.hidden_at_positions(batch, base_hidden, draft_targets)
        inputs = [hidden]
        if self.config.markov_rank:
            before = self.markov_in(batch.input_ids.flatten()[draft_targets.target_idx - 1])
            inputs.append(before.expand(len(hidden), -1, -1))
        if self.induction is not None:
            states = self.sink_states(hidden, batch, base_hidden, draft_targets)
            inputs.append(self.induction.at_targets(batch, states, draft_targets).to(hidden.dtype))
        return hidden if len(inputs) == 1 else torch.cat(inputs, -1)

    def confidence_logits(self, hidden: Tensor) -> Tensor | None:
        """Return logits [K, n] of the drafts' acceptance from ``position_hidden``; None without a confidence head."""
        # Detached, so that the confidence loss cannot change the drafts.
        return None if self.confidence is None else self.confidence(hidden.detach())[..., 0]

    # Training --------------------------------------------------------------------------------------------------

    def trained_targets(self, draft_targets: DraftTargets) -> DraftTargets:
        """Return the targets of a training step; all by default."""
        return draft_targets

    def loss(
        self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig, progress: float = 1.0
    ) -> LossOutput:
        """Return the summed loss and metrics over the batch's trained tokens.

        ``progress`` is the share of the phase that is done after this step, in (0, 1].
        """
        weights = config.weights_of(self.config.trained_positions)
        # Positions that are not trained are only measured.
        depth = len(weights) if torch.is_grad_enabled() or self.one_prediction else self.depth
        decay = config.decay if config.depth_weights is None else 1.0  # explicit weights do not decay
        config = replace(config, depth_weights=weights + [0.0] * (depth - len(weights)), decay=decay)
        draft_targets = self.trained_targets(DraftTargets.of(batch, depth))
        hidden = self.position_hidden(batch, base_hidden, draft_targets)
        labels = draft_targets.labels(batch, base_hidden, self.t2d, self.target_lm_head)
        heads = [self.output_head(k) for k in range(depth)]
        loss_sum, stats = heads_loss(hidden, heads, labels, config, confidence=self.confidence_logits(hidden))
        if self.one_prediction:
            stats = stats.expand(self.depth, -1)
        return loss_output(loss_sum, stats, training=torch.is_grad_enabled())

    @torch.no_grad()
    def candidate_ranks(self, batch: TrainBatch, base_hidden: HiddenStates, top: int) -> Tensor:
        """Return the rank of the true token among the candidates of every draft position, for tree calibration.

        The tokens between the anchor and the target are the true ones. This is exact, because a node at depth k can
        only be accepted below a path of true tokens.

        Returns:
            [B, T, K] int64: 0 if the most likely candidate for ``x_{t+1+k}`` is right, ``top`` if the true token is
            not among the first ``top`` candidates, -1 if position k has no target.
        """
        draft_targets = DraftTargets.of(batch, self.depth)
        hidden = self.position_hidden(batch, base_hidden, draft_targets)
        target_ids = self.t2d[batch.input_ids.flatten()[draft_targets.target_idx]]
        count = batch.input_ids.numel()
        ranks = torch.full((count + 1, self.depth), -1, dtype=torch.int64, device=target_ids.device)
        for k, (valid, anchor_idx) in enumerate(zip(draft_targets.valid, draft_targets.anchor_idx, strict=True)):
            if k == 0 or hidden.stride(0):  # a head with one prediction repeats it
                at_targets = rank_of(hidden[k], self.output_head(k), target_ids, top)
            ranks[torch.where(valid, anchor_idx, count), k] = at_targets  # the last row is for what is not valid
        return ranks[:-1].view(*batch.input_ids.shape, self.depth)

    def checkpointable(self) -> list[tuple[nn.Module, str]]:
        """Return (module, method) pairs whose activations training may recompute; attention itself is left out."""
        return [(layer, method) for layer in self.decoder_layers for method in ("states", "add_mlp")]

    @property
    def decoder_layers(self) -> list[HeadDecoderLayer]:
        """The head's own decoder layers, in order."""
        return []

    def num_parameters(self) -> int:
        """Return the number of the head's own parameters; those shared with the base are not counted."""
        return sum(parameter.numel() for parameter in self.parameters())

    def train_base(self, now: bool) -> None:
        """Prepare to train the base; ``now``: in the next phase. The first call creates the adapters."""
        raise NotImplementedError

    def tuned_decoders(self) -> list[nn.Module]:
        """Return the base's layer stacks that have adapters, none before the adapters exist."""
        return []

    def lr_mult(self, parameter: nn.Parameter) -> float:
        """Return the factor on the phase's learning rate for a parameter."""
        return 1.0

    def open(self, rows: int, cache: TreeCache | None = None) -> Session:
        session: Session = self.session(self, rows)
        return session

    # Saving and loading --------------------------------------------------------------------------------------

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the tensors of ``model.safetensors``: the head's weights, without adapters of the base."""
        return self.state_dict()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config, weights, the code for transformers' ``custom_generate`` and, once calibrated, the trees."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.saved_weights()
        config = {
            "format": FORMAT,
            "head_type": self.config.head_type,
            "settings": asdict(self.config),
            "base": self.save_base(folder),
            "draft_vocab": None if len(self.d2t) == len(self.t2d) else len(self.d2t),
        }
        with disk_errors("the head", folder):
            with new_file(folder / "model.safetensors") as tmp_path:
                save_file({k: v.detach().contiguous().cpu() for k, v in weights.items()}, tmp_path)
                config["weights_sha256"] = file_digest(tmp_path)
            write_json(folder / "config.json", config)
            write_custom_generate(folder)
        write_trees(folder, self)

    def save_base(self, folder: Path) -> dict[str, Any]:
        """Copy the base's adapter, if any, into the head's folder; return the identity of the base to save."""
        identity = self.base_identity
        if self.base.config.adapter is None:
            return identity
        adapter.copy(Path(self.base.config.adapter), folder / ADAPTER)
        return {**identity, "recipe": {**identity["recipe"], "adapter": ADAPTER}}


def _no_attention(x: Tensor) -> Tensor:
    raise TypeError("a head whose layers attend to the context must set attends = True")
