"""Initial weights with which an EAGLE-3 layer copies: attention starts as an induction head (2209.11895).

EAGLE-3's layer reads pairs: at position j, the embedding of ``x_{j+1}`` next to a feature of the states at j. To copy,
a query at position t looks for the positions j whose token ``x_j`` equals its own newest token, and drafts the token
that followed there, ``x_{j+1}``. This needs no training, because a pair has all three parts::

    query  at t:  the embedding of the newest token          (embedding half of the pair)
    key    at j:  x_j, which the base's layer 0 contains      (feature half)
    value  at j:  the embedding of x_{j+1}                    (embedding half)

Transformers learn such heads only after many steps. Here, they are there at step 0, and training refines them. Deeper
drafts copy, too, since their queries have the newest draft's embedding.

Shape legend: D width, W draft tokens, C numbers of a token's code.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthead.models.base.parts import BaseParts
from drafthead.models.heads.parts.attention_layer import HeadAttention, norm_scale

SAMPLE = 16384  # draft tokens from which the directions are computed; they are evenly spaced
SHARE = 1 / 3  # of the width, for what is copied: the number of key heads that copy times their width
NEAR = 64
"""Keys and queries use rotary channels that turn by less than a radian in this number of tokens. The others would
change the score of a match with its distance."""
SCORE = 10.0  # attention score of a match, approximately; those of other tokens are distributed around 0
COPY = 2.0  # size of the copied token in the layer's output
DEEP_SIZE = 100.0  # size of a deep layer's states, in that of embeddings; the order of magnitude is enough


@torch.no_grad()
def start_copying(
    attention: HeadAttention,
    fc: nn.Linear,
    base: BaseParts,
    lm_rows: Tensor,
    d2t: Tensor,
    layers: Sequence[int],
    norms: str | None,
) -> None:
    """Set the weights of ``attention`` and ``fc``.

    Args:
        attention: its inputs [..., 2 D] are the normalised embedding and the normalised feature.
        fc: maps the concatenated states of ``layers``, which include layer 0, to the feature.
        base: the base; only its embedding and its final norm are read.
        lm_rows: [W, D] output projection of the draft tokens.
        d2t: [W] ids of the draft tokens.
        layers: numbers of the layers whose states ``fc`` reads.
        norms: what is normalised before ``fc``: ``each`` layer's states, ``all`` of them together, or None.
    """
    if base.device.type == "meta":
        return
    width, size = base.hidden_size, attention.head_dim
    every = -(-len(d2t) // SAMPLE)
    embedding = base.embedding[d2t[::every]].float()
    unit, rows = F.rms_norm(embedding, (width,)), lm_rows[::every].float() * norm_scale(base)
    mean = unit.mean(0)
    spread, rows = unit - mean, rows - rows.mean(0)

    # A token's code: its coordinates along the directions in which embeddings differ most, each of variance 1, and
    # without the part that all tokens share. Every key head gets other directions, so their false matches differ.
    channels = _slow_channels(attention)
    groups = min(attention.kv_heads, max(1, int(SHARE * width / size)))
    count = len(channels) * groups
    variances, directions = torch.linalg.eigh(spread.T @ spread / len(spread))
    scales = variances[-count:].clamp(min=1e-3 * variances[-1].item()).rsqrt()
    code = (directions[:, -count:] * scales).T.flip(0)  # [C, D]
    code -= (code @ mean)[:, None] * mean / mean.dot(mean)

    # The feature keeps the code where the output projection hardly reads, and the deepest state elsewhere.
    unread = torch.linalg.eigh(rows.T @ rows)[1][:, :count]  # [D, C]
    rest = torch.eye(width, device=unread.device) - unread @ unread.T
    of_zero, of_deepest = 1.0, 1.0  # sizes of these states where ``fc`` reads them
    if norms == "all":
        of_zero = 1 / DEEP_SIZE
    elif norms is None:
        of_zero = embedding.square().mean().sqrt().item()
        of_deepest = DEEP_SIZE * of_zero
    zero, deepest = (layers.index(n) * width for n in (0, max(layers)))
    fc.weight.zero_()
    fc.weight[:, deepest : deepest + width] = rest / of_deepest
    fc.weight[:, zero : zero + width] = unread @ code / of_zero

    # What is copied: the parts of an embedding that tell most about the output projection's row of the same token.
    to_row, _, from_embedding = torch.linalg.svd(rows.T @ spread)
    q, k, v, out = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    match = SCORE * size**0.5 / len(channels)  # a code has ``len(channels)`` numbers of variance 1 for each key head
    queries = len(q) // len(k)  # query heads of a key head, of which the first one copies
    for group in range(groups):
        key, query = group * size, group * queries * size
        for weight, first in ((k, key), (v, key), (q, query)):
            weight[first : first + size] = 0
        k[key + channels, width:] = unread[:, group::groups].T
        q[query + channels, :width] = match * code[group::groups]
        parts = slice(group, groups * size, groups)
        v[key : key + size, :width] = from_embedding[parts]
        out[:, query : query + size] = COPY * to_row[:, parts]


def _slow_channels(attention: HeadAttention) -> Tensor:
    """Return the indices of the channels of an attention head that turn by less than 1 / NEAR radians per token."""
    weight = attention.q_proj.weight
    cos, sin = attention.rotation(weight[None, :1], torch.ones(1, 1, dtype=torch.int64, device=weight.device))
    return (torch.atan2(sin, cos)[0, 0].abs() < 1 / NEAR).nonzero()[:, 0]
