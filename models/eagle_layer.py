"""EAGLE-3's decoder layer (2503.01840): unrolled over the training-time test, and packed for drafting.

The layer reads two vectors per position, the embedding of a token and the feature of the position before it, each
normed by itself. Its residual stream is the feature.

Shape legend: B batch, T time, S places that are drafted from, F frontier nodes, H query heads, G key/value heads,
R = H / G, E head width, D width, i own steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.data.contracts import NO_DOCUMENT
from drafthead.models.base import BaseModel
from drafthead.models.fused import FusedMLP, FusedRMSNorm
from drafthead.models.head_attention import HeadAttention, HeadMLP, HeadRMSNorm, norm_eps
from drafthead.models.kv_cache import KVCache, RaggedCache
from drafthead.models.reading import Reading


class EagleLayer(nn.Module):
    """Attention over [norm(embedding); norm(feature)], MLP, both added to the feature; names as in checkpoints."""

    def __init__(self, base: BaseModel, inner: int | None) -> None:
        """For ``base``, with an MLP of width ``inner`` or the base's.

        Raises:
            UserError: the base has no rotary embedding.
        """
        super().__init__()
        width, eps, device = base.hidden_size, norm_eps(base), base.device
        self.self_attn = HeadAttention(base, 2 * width)
        # Only now: a base without rotary embedding may say nothing of its MLP.
        self.mlp = HeadMLP(width, inner or base.model.config.intermediate_size, device)
        self.input_layernorm = HeadRMSNorm(width, eps, device)
        self.hidden_norm = HeadRMSNorm(width, eps, device)
        self.post_attention_layernorm = HeadRMSNorm(width, eps, device)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):  # an untrained layer adds nothing to the feature
            nn.init.zeros_(last.weight)

    def unroll(
        self,
        feature: Tensor,
        embedded: Callable[[int, Tensor], Tensor],
        positions: Tensor,
        mask: Tensor,
        places: Tensor,
        steps: int,
        between: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """The training-time test: what the layer puts out when it drafts ``steps`` tokens from every place.

        Step 0 is causal attention over the text. Step i reads the true token and the layer's own output of step
        i - 1, one position later; besides the text up to its place it sees only the steps of its own place, which
        are diagonals of keys and values.

        Args:
            feature: [B, T, D] of the text.
            embedded: (i, places [B, S]) -> [B, S, D], embedding of the token that step i reads at these places.
            positions: [B, T] int64.
            mask: [B, 1, T, T] additive.
            places: [B, S] int64 the positions to draft from; keys and values of the text are made for all T.
            steps: at least 1.
            between: [B, S, D] output of a step -> the feature that the next one reads.

        Returns:
            ``steps`` tensors [B, S, D].
        """
        rows = torch.arange(len(places), device=places.device)[:, None]
        everywhere = torch.arange(feature.shape[1], device=places.device).expand(len(places), -1)
        states = self.step_states(embedded(0, everywhere), feature, positions)
        query, text_key, text_value = states
        seen = mask[:, 0][rows, places][:, None]
        query = query.transpose(1, 2)[rows, places].transpose(1, 2)
        attended = self.self_attn.output(query, text_key, text_value, seen)
        found = [self.behind(feature[rows, places], attended)]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(1, steps):
            feature = between(found[-1])
            query, key, value = self.step_states(embedded(step, places), feature, positions[rows, places] + step)
            own.append((key, value))
            keys, values = (torch.stack(part) for part in zip(*own, strict=True))
            # Without recomputing its scores every step would keep a matrix of S times T for each head.
            out: Tensor = checkpoint(attend_own, query, text_key, text_value, seen, keys, values, use_reentrant=False)
            attended = self.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            found.append(self.behind(feature, attended))
        return found

    def step_states(self, embedded: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``HeadAttention.states`` of pairs [B, T, D] at ``positions`` [B, T]."""
        return self.self_attn.states(
            torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1), positions
        )

    def behind(self, feature: Tensor, attended: Tensor) -> Tensor:
        """What a step puts out, of its feature and what attention adds to it: [B, S, D]."""
        hidden = feature + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def attend_own(
    query: Tensor, text_key: Tensor, text_value: Tensor, mask: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attention to the text, and of every query to the drafted positions of its own place: [B, H, S, E].

    Args:
        query: [B, H, S, E].
        text_key: [B, G, T, E].
        text_value: [B, G, T, E].
        mask: [B, 1, S, T] additive, of the text.
        keys: [i, B, G, S, E]; query s sees the i keys at s.
        values: [i, B, G, S, E].
    """
    groups, time = text_key.shape[1:3]
    rows, heads, count, width = query.shape
    query = query.reshape(rows, groups, -1, width) * width**-0.5  # [B, G, R * S, E]
    grouped = (rows, groups, heads // groups, count)
    to_text = (query @ text_key.transpose(2, 3)).view(*grouped, time) + mask[:, :, None]
    to_own = torch.einsum("bgrse,ibgse->bgrsi", query.view(*grouped, width), keys)
    weights = torch.cat([to_text, to_own], -1).float().softmax(-1).to(query.dtype)
    out = (weights[..., :time].flatten(2, 3) @ text_value).view(*grouped, width)
    out += torch.einsum("bgrsi,ibgse->bgrse", weights[..., time:], values)
    return out.flatten(1, 2)


class PackedEagleLayer:
    """An ``EagleLayer`` for drafting: copies of its weights in few, large products. Inference only."""

    def __init__(self, layer: EagleLayer, dtype: torch.dtype | None) -> None:
        self._norms = FusedRMSNorm(layer.input_layernorm, layer.hidden_norm)
        self._attention = layer.self_attn.inference(dtype)
        self._post_norm = FusedRMSNorm(layer.post_attention_layernorm)
        self._mlp = FusedMLP(layer.mlp, dtype)

    def __call__(self, inputs: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | RaggedCache) -> Tensor:
        """[B, F, 2 D] embeddings and features, side by side -> [B, F, D]; ``cache`` is open for these F positions."""
        batch, new, width = inputs.shape
        halves = inputs.view(batch, new, 2, width // 2)
        normed = self._norms(halves).view(batch, new, width)
        hidden = halves[:, :, 1] + self._attention(normed, positions, mask, cache)
        found: Tensor = hidden + self._mlp(self._post_norm(hidden))
        return found


def followed(documents: Tensor) -> Tensor:
    """[B, T] bool: another token of the same document follows."""
    found = torch.zeros_like(documents, dtype=torch.bool)
    found[:, :-1] = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] != NO_DOCUMENT)
    return found


def drafting_places(reading: Reading, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where any position drafts from: [B, S] places in the rows, and for every flat place its flat place in there."""
    rows, time = ids.shape
    used = torch.zeros(rows * time, dtype=torch.bool, device=ids.device)
    used[reading.sources[reading.valid]] = True
    used = used.view(rows, time)
    most = int(used.sum(1).max())
    places = used.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    slots = torch.zeros_like(used, dtype=torch.int64)
    slots.scatter_(1, places, torch.arange(rows * most, device=ids.device).view(rows, most))
    return places, slots.flatten()
