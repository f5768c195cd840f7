"""Recurrent layers over token trees: the stock functions with "is an ancestor of" in place of "is earlier".

A gated linear recurrence has a state S per head. Node i, after its parent p, computes ::

    S_i = exp(g_i) S_p + k_i u_i^T        out_i = q_i S_i

In Mamba-2, u is the input times its time step. In the delta rules, it is ``beta_i (v_i - k_i exp(g_i) S_p)``. A state
per node would be large, so a pass over a tree computes the outputs from the committed state S alone. With c_i, the sum
of g from the first node to node i, and F_ij = exp(c_i - c_j) if j is i or an ancestor of i, else 0::

    out = exp(c) Q S + ((Q K^T) F) U
    (I + strict(beta (K K^T) F)) U = beta (V - exp(c) K S)        delta rules; parents stand before their children

Each node keeps its *factors* g, k and u, from which a commit computes the state after the accepted path.

Layers of transformers call module-level functions, and ask a cache for their state. ``follow_trees`` wraps the
functions of a family. A wrapper uses the tree only if it is handed a ``TreeState`` or ``NodeInputs``, which our cache
returns; all other calls reach the stock function, or the kernels of a package that transformers has found.

Mamba-1 has a decay per channel and state entry, so the matrix F would be as large as the states of all nodes, which are
small. Its nodes keep their states.

Shape legend: B rows, N new nodes, P pending nodes (the new ones are the last), H heads, K key width, E value width,
C channels, W taps of a convolution, G 1 or K (a decay per head or per key channel).
"""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CONVOLUTION_ONLY = "conv"  # layer type without a recurrent state
BLOCK = 2**24  # most decays per pair of nodes and channel in memory at once


class Factors(NamedTuple):
    """What pending nodes keep of their update ``exp(gate) S + left right^T``. The products' order is the state's."""

    gates: Tensor  # [B, H, P, G] logarithm of the decay
    left: Tensor  # [B, H, P, ...] keys; in Mamba-2, whose states have values first, values
    right: Tensor  # [B, H, P, ...] the other

    def advance(self, state: Tensor, path_BN: Tensor, inside: Tensor | None) -> None:
        """Change ``state`` [B, H, ...] into that after each row's accepted path ``path_BN`` [B, N], in place.
        ``inside`` [B, N] is false for nodes after a row's path; None: all are in it."""
        gates, left, right = (take_nodes(factor, path_BN) for factor in self)
        if inside is not None:
            outside = ~inside[:, None, :, None]
            gates, left = gates.masked_fill(outside, 0), left.masked_fill(outside, 0)
        decays = gates.cumsum(2)
        total = decays[:, :, -1:]
        state.mul_(total.exp().transpose(2, 3))
        state.add_((left * (total - decays).exp()).transpose(2, 3) @ right)


class NodeStates(NamedTuple):
    """States after pending nodes of Mamba-1, which keep no factors."""

    states: Tensor  # [B, C, P, K] after each node

    def advance(self, state: Tensor, path_BN: Tensor, inside: Tensor | None) -> None:
        """Change ``state`` [B, C, K] as ``Factors.advance`` does."""
        before = state[:, :, None]
        accepted = torch.cat([before, take_nodes(self.states, path_BN)], 2)
        if inside is None:
            state.copy_(accepted[:, :, -1])
        else:
            state.copy_(take_nodes(accepted, inside.sum(1, keepdim=True))[:, :, 0])


@dataclass(eq=False)
class TreeState:
    """The state of a layer in a pass over tree nodes, which stock layers pass on in place of a tensor."""

    state: Tensor  # [B, H, ...] float32, after the committed tokens
    ancestors: Tensor  # [B or 1, P, P] bool
    factors: Factors | NodeStates | None  # of the pending nodes before the pass, then of all
    step_limits: tuple[float, float]
    """Limits of Mamba-2's time steps. transformers applies them when it reads a text, but not when it generates."""


@dataclass(frozen=True, eq=False)
class NodeInputs:
    """For each new node, the last inputs on its path, which a layer passes on to its convolution."""

    windows: Tensor  # [B, C, N, W]


class _Noted(threading.local):
    state: TreeState | None = None


_NOTED = _Noted()


def note(state: TreeState) -> None:
    """Hand ``state`` to this thread's next call of Mamba-1's function for texts, which gets none from its layer."""
    _NOTED.state = state


def can_follow(module: ModuleType, kinds: Collection[str]) -> bool:
    """Return True if the functions of a family's ``module`` are known, for its recurrent layer types ``kinds``."""
    needed = {_convolve} if set(kinds) == {CONVOLUTION_ONLY} else {_convolve, *STATES}
    known = {tree for name, tree in FUNCTIONS.items() if hasattr(module, name)}
    return _convolve in known and (needed == {_convolve} or bool(known & needed - {_convolve}))


def follow_trees(module: ModuleType) -> None:
    """Wrap the functions of a family's ``module``, once."""
    for name, tree in FUNCTIONS.items():
        stock = getattr(module, name, None)
        if stock is not None and not hasattr(stock, "follows_trees"):
            setattr(module, name, _wrapped(stock, tree))


def _wrapped(stock: Callable[..., Any], tree: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def function(*args: Any, **options: Any) -> Any:
        if tree in (_mamba1, _mamba1_single):
            noted, _NOTED.state = _NOTED.state, None
            if noted is not None and tree is _mamba1:
                return tree(*args, state=noted, **options)
        ours = any(isinstance(value, TreeState | NodeInputs) for value in (*args, *options.values()))
        return (tree if ours else stock)(*args, **options)

    function.follows_trees = True  # type: ignore[attr-defined]
    return function


def _convolve(
    hidden_states: NodeInputs,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_options: Any,
) -> Tensor:
    """Return the convolution [B, C, N] at every new node, in float32 up to the last step."""
    windows = hidden_states.windows
    out = torch.einsum("bcnw,cw->bcn", windows.float(), weight.float())
    if bias is not None:
        out = out + bias.float()[:, None]
    if activation is not None:
        out = getattr(F, activation.replace("swish", "silu"))(out)
    return out.to(windows.dtype)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: TreeState,
    use_qk_l2norm_in_kernel: bool = False,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, N, H, E] of a gated delta rule, or of Kimi's, whose ``g`` has a decay per key channel."""
    dtype, repeats = query.dtype, value.shape[2] // key.shape[2]
    query, key, value, gates, betas = (x.float().transpose(1, 2) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (query, key))
    old = initial_state.factors
    assert not isinstance(old, NodeStates)
    gates = gates if gates.ndim == 4 else gates[..., None]
    new = Factors(gates, key, value)
    out, initial_state.factors = _masked(
        query * query.shape[-1] ** -0.5, new, old, initial_state.state, initial_state.ancestors, betas[..., None]
    )
    return out.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format), initial_state.state


def _mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, N, H, E] of Mamba-2 for inputs of this shape, in float32 as the stock function does."""
    tree: TreeState = initial_states
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    steps = (F.softplus(dt) if dt_softplus else dt).clamp(*tree.step_limits).float()
    inputs, repeats = hidden_states.float(), hidden_states.shape[2] // B.shape[2]
    keys, queries = (x.float().transpose(1, 2).repeat_interleave(repeats, 1) for x in (B, C))
    gates = (A.float() * steps).transpose(1, 2)[..., None]
    new = Factors(gates, keys, (inputs * steps[..., None]).transpose(1, 2))
    assert not isinstance(tree.factors, NodeStates)
    old = None if tree.factors is None else Factors(tree.factors.gates, tree.factors.right, tree.factors.left)
    out, factors = _masked(queries, new, old, tree.state.transpose(2, 3), tree.ancestors)
    tree.factors = Factors(factors.gates, factors.right, factors.left)
    out = out.transpose(1, 2)
    return (out if D is None else out + D[..., None] * inputs).contiguous(), tree.state


def _mamba2_single(
    state: TreeState,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_options: Any,
) -> Tensor:
    """Return Mamba-2's output [B, H, E] for one token, whose settings are repeated along the head width."""
    out, _state = _mamba2(
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        D=None if D is None else D[:, 0],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        initial_states=state,
        dt_softplus=dt_softplus,
    )
    out = out[:, 0] if z is None else out[:, 0] * F.silu(z)
    return out.to(hidden_states.dtype)


def _mamba1(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    state: TreeState,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    """Return Mamba-1's outputs [B, C, N] and the state after the last node. ``hidden_states`` and ``dt`` are [B, C, N],
    ``A`` [C, K], ``B`` and ``C`` [B, K, N]."""
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    steps = (F.softplus(steps) if delta_softplus else steps).float()
    inputs, old, new = hidden_states.float(), state.factors, hidden_states.shape[2]
    rows = torch.arange(len(inputs), device=inputs.device)
    # The state before a node: number 0 is the committed one, the others are those of the nodes.
    depths = state.ancestors.sum(-1)
    above = state.ancestors & (depths[:, None] == depths[:, :, None] - 1)  # [B or 1, P, P] the parent
    parents = torch.where(depths > 1, above.to(torch.int8).argmax(-1) + 1, 0).expand(len(inputs), -1)[:, -new:]
    before = state.state[:, :, None]
    known = before if old is None else torch.cat([before, old[0]], 2)
    states = torch.cat([known, known.new_empty(*known.shape[:2], new, known.shape[3])], 2)
    for node in range(new):
        decay = (steps[:, :, node, None] * A.float()).exp()
        added = (steps * inputs)[:, :, node, None] * B.float()[:, None, :, node]
        states[:, :, node - new] = decay * states[rows, :, parents[:, node]] + added
    state.factors = NodeStates(states[:, :, 1:])
    out = torch.einsum("bcnk,bkn->bcn", states[:, :, -new:], C.float())
    out = out if D is None else out + inputs * D[:, None]
    out = out if z is None else out * F.silu(z)
    return out.to(hidden_states.dtype), states[:, :, -1]


def _mamba1_single(
    state: TreeState,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_options: Any,
) -> Tensor:
    """Return Mamba-1's output [B, C] for one token."""
    hidden, step, left, right = (x[..., None] for x in (hidden_states, dt, B, C))
    gate = None if z is None else z[..., None]
    return _mamba1(hidden, step, A, left, right, D, gate, dt_bias, dt_softplus, state=state)[0][..., 0]


STATES = (_delta_rule, _mamba2, _mamba1)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_selective_state_update": _mamba2_single,
    "mamba_selective_scan": _mamba1,
    "mamba_selective_state_update": _mamba1_single,
}
"""Names in the modules of transformers' families -> the same over a tree. Some handle whole texts, some one token."""


def _masked(
    queries: Tensor, new: Factors, old: Factors | None, state: Tensor, ancestors: Tensor, betas: Tensor | None = None
) -> tuple[Tensor, Factors]:
    """Return the outputs [B, H, N, E] at the new nodes, and the factors of all nodes, with keys on the left.

    ``queries`` are [B, H, N, K] and ``state`` [B, H, K, E]. ``new`` has values in place of updates if the rule is a
    delta rule, which has ``betas`` [B, H, N, 1].
    """
    count, before = queries.shape[2], 0 if old is None else old.left.shape[2]
    gates, keys = (
        (new.gates, new.left) if old is None else (torch.cat(pair, 2) for pair in zip(old[:2], new[:2], strict=True))
    )
    reach = ancestors.to(gates.dtype)[:, None]
    # [B, H, P, G] logarithm of the decay from the committed state to each node
    decays = reach @ gates
    new_decays, seen = decays[:, :, before:], ancestors[:, None, before:]
    from_state, new_keys, updates = new_decays.exp(), new.left, new.right
    read = [queries] if betas is None else [queries, new_keys]
    by_query, *by_key = _scores(read, keys, new_decays, decays, seen)
    if betas is not None:
        (scores,) = by_key
        values = updates - (from_state * new_keys) @ state
        if old is not None:
            values = values - scores[..., :before] @ old.right
        system = betas * scores[..., before:]  # its diagonal is taken as 1
        updates = torch.linalg.solve_triangular(system, betas * values, upper=False, unitriangular=True)
    if old is not None:
        updates = torch.cat([old.right, updates], 2)
    out = (from_state * queries) @ state + by_query @ updates
    assert out.shape[2] == count
    return out, Factors(gates, keys, updates)


def _scores(read: list[Tensor], keys: Tensor, new_decays: Tensor, decays: Tensor, seen: Tensor) -> list[Tensor]:
    """Return the decayed products [B, H, N, P] of each of ``read`` [B, H, N, K] with the keys [B, H, P, K]: 0 for nodes
    that a node does not see. ``seen`` is [B or 1, 1, N, P]."""
    # Masked before the exponential, which would overflow for nodes that are not ancestors.
    if decays.shape[-1] == 1:
        factor = (new_decays - decays.transpose(2, 3)).masked_fill(~seen, -torch.inf).exp()
        return [(x @ keys.transpose(2, 3)) * factor for x in read]
    step = max(1, BLOCK // (decays.numel() or 1))
    parts: list[list[Tensor]] = [[] for _ in read]
    for start in range(0, new_decays.shape[2], step):
        rows = slice(start, start + step)
        pairs = new_decays[:, :, rows, None] - decays[:, :, None]  # [B, H, n, P, K]
        factor = pairs.masked_fill(~seen[:, :, rows, :, None], -torch.inf).exp()
        for part, x in zip(parts, read, strict=True):
            part.append(torch.einsum("bhnk,bhpk,bhnpk->bhnp", x[:, :, rows], keys, factor))
    return [torch.cat(part, 2) for part in parts]


def take_nodes(values: Tensor, nodes_BN: Tensor) -> Tensor:
    """Return ``values`` [B, ..., P, ...] with nodes along dimension 2 at ``nodes_BN`` [B, N] of each row."""
    index = nodes_BN.view(len(nodes_BN), 1, -1, *[1] * (values.ndim - 3))
    return values.gather(2, index.expand(-1, values.shape[1], -1, *values.shape[3:]))


def paths_to_inputs(ancestors: Tensor, depths: Tensor, new: int, taps: int) -> Tensor:
    """Return for the last ``new`` nodes the indices [B or 1, N, W] of the last ``taps`` inputs on each node's path, in
    the ``taps - 1`` inputs before the tree followed by those of all nodes.

    With 3 taps, a root (depth 0) and two children, the inputs are x y | root first second, and the indices ::

        root    x y root          0 1 2
        first   y root first      1 2 3
        second  y root second     1 2 4
    """
    own = depths[:, -new:]
    wanted = own[..., None] - torch.arange(taps - 1, -1, -1, device=depths.device)  # depths of the inputs, oldest first
    at_depth = ancestors[:, -new:, None] & (depths[:, None, None] == wanted[..., None])  # [B, N, W, P], at most one
    nodes = at_depth.to(torch.int8).argmax(-1)
    return torch.where(wanted < 0, taps - 1 + wanted, taps - 1 + nodes)
