"""What a base must compute as transformers does, compared once when it is loaded.

The stock modules with the model's own default attention read a few texts, whole and without a cache. The base then
reads them whole, in chunks, as a tree, as rows of lengths of their own and as packed documents. Windows that are longer
than these texts are shortened on both sides meanwhile, so that their edges are crossed.

Shape legend: R rows, T tokens, N tree nodes, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.utils.errors import UserError, one_line
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.windows import shortened, windows_of
from drafthead.models.cache.kv_cache import KVCache, RaggedCache
from drafthead.models.kernels import attention
from drafthead.models.token_tree import TokenTree

if TYPE_CHECKING:
    from drafthead.models.base.base_model import BaseModel

WINDOW = 8
"""Windows are shortened to so many positions."""
PREFIX, LENGTH = 12, 16
"""Tokens before the tree, and of a text."""
TREE = TokenTree.from_paths([(0,), (1,), (0, 0), (1, 0)])
"""The root, two children, a child of each: two paths of three nodes."""
TOLERANCE = {torch.float32: 1e-3}
"""Largest difference of two logits over the largest logit. Wrong masks give 0.1 to 1."""
HALF_TOLERANCE = 0.25
"""In 16 bits, where random weights differ by about 0.1 between passes of different shapes."""
READING = "reading"
_passed: set[tuple[str, ...]] = set()


@dataclass(frozen=True)
class Expected:
    """What the stock model computes."""

    tokens: Tensor
    """[R, T] int64: two texts that agree in their first ``PREFIX`` tokens and the one after, and another one."""
    logits: Tensor
    """[R, T, V]."""
    final: Tensor
    """[1, T, D] hidden states of the first text."""
    known: bool
    """Whether a base of this config has passed; then there is the start of one text only."""

    @classmethod
    def of(cls, base: "BaseModel") -> "Expected":
        """Of a base whose modules are still the stock ones."""
        model, config = base.model, base.model.config
        tokens = torch.randint(3, min(base.vocab_size, 300), (3, LENGTH), generator=torch.Generator().manual_seed(0))
        tokens[1, : PREFIX + 1] = tokens[0, : PREFIX + 1]
        tokens[1, PREFIX + 1 :] = tokens[0, PREFIX + 1 :].flip(0)
        known = has_passed(base, READING)
        tokens = (tokens[:1, :4] if known else tokens).to(base.device)
        states: list[Tensor] = []
        hook = model.model.register_forward_hook(lambda *call: states.append(call[2].last_hidden_state[:1]))
        edges = shortened(config, WINDOW) if base.windows is not None else nullcontext()
        try:
            model.set_attn_implementation(model.get_correct_attn_implementation(None))
            with in_one_line(config, "cannot be read by transformers' own code"), torch.inference_mode(), edges:
                logits = model(input_ids=tokens, use_cache=False).logits.float()
        finally:
            model.set_attn_implementation(attention.register())
            hook.remove()
        if not logits.isfinite().all():
            adapter_note = f" with the adapter {base.config.adapter}" if base.config.adapter else ""
            raise UserError(f"{base.name}{adapter_note} computes logits that are not finite; copy its weights again")
        return cls(tokens, logits, states[0], known)


@contextmanager
def in_one_line(config: PreTrainedConfig, what: str) -> Iterator[None]:
    """Whatever the code of a family raises, as a refusal of the base that says ``what`` was tried."""
    try:
        yield
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception as error:
        raise UserError(
            f"{config.model_type} {what} ({type(error).__name__}: {one_line(error)}); choose another base "
            "(docs/bases.md lists families)"
        ) from None


def measured_sizes(base: "BaseModel") -> dict[str, Any]:
    """Fields of the base's ``CacheShape`` by what its layers write when they read one token."""
    cache, one = DynamicCache(), torch.full((1, 1), 3, device=base.device)
    with in_one_line(base.model.config, "cannot be run over a plain key/value cache"), torch.inference_mode():
        base.model.model(input_ids=one, position_ids=one - 3, past_key_values=cache, use_cache=True)
        written = [
            (n.keys.shape[1], n.keys.shape[3], n.values.shape[1], n.values.shape[3]) if n.is_initialized else None
            for n in cache.layers
        ]
    found = written + [None] * (base.num_layers - len(written))
    if not any(found):
        raise UserError(f"{base.model.config.model_type} writes no keys and values into its cache; choose another base")
    first = found[0]
    if first is not None and first[:2] == first[2:] and set(found) == {first} and len(found) == base.num_layers:
        return {"heads": first[0], "head_dim": first[1]}
    return {"by_layer": tuple(found), "layers": len(found)}


def logit_scale(base: "BaseModel", head: LMHead, expected: Expected) -> float:
    """The factor between the product of ``head`` and the logits, of those that configs know."""
    config = base.model.config
    with torch.inference_mode():
        product = base.model.get_output_embeddings()(expected.final).float()
    scales = [1.0]
    for key in ("logits_scaling", "logit_scale", "lm_head_multiplier"):
        if isinstance(value := getattr(config, key, None), int | float) and value:
            scales += [float(value), 1.0 / value]
    if isinstance(value := getattr(config, "dim_model_base", None), int) and value:
        scales.append(value / config.hidden_size)
    found = (replace(head, scale=scale).scale_and_cap(product) for scale in scales)
    errors = [relative_error(base, logits, expected.logits[:1]) for logits in found]
    best = min(range(len(scales)), key=errors.__getitem__)
    if errors[best] > tolerance(base):
        raise UserError(
            f"{config.model_type} computes its logits in a way that is not known here (they differ by "
            f"{errors[best]:.1%} of the largest); choose another base"
        )
    return scales[best]


def check(base: "BaseModel", expected: Expected) -> None:
    """Refuse a base that computes anything else than the stock model; says what differs, and by how much."""
    if expected.known:
        return
    kind, windows = base.model.config.model_type, base.windows
    edges = shortened(base.model.config, WINDOW) if windows is not None else nullcontext()
    try:
        with in_one_line(base.model.config, "cannot be read by this code"), edges:
            base.windows = None if windows is None else windows_of(base.model.config, base.max_context)
            for what, found, wanted in _readings(base, expected):
                if (error := relative_error(base, found, wanted)) > tolerance(base):
                    raise UserError(
                        f"{kind} read {what} differs from transformers' own attention by {error:.1%} of the largest "
                        "logit: drafts would change the text; choose another base (docs/bases.md lists families)"
                    )
    finally:
        base.windows = windows
    note_passed(base, READING)


def _readings(base: "BaseModel", expected: Expected) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What was read, the logits found and those wanted."""
    tokens, wanted = expected.tokens, expected.logits
    capacity = LENGTH + len(TREE)
    shape = TREE.shape_on(base.device)

    def read(part: Tensor, cache: KVCache | RaggedCache) -> Tensor:
        return base.logits(base.forward(part, cache).final)

    def verify(nodes: Tensor, cache: KVCache | RaggedCache) -> Tensor:
        return base.verify_logits(nodes, shape, cache)[1]

    yield "whole", read(tokens[:1], KVCache(base.cache_shape, capacity)), wanted[:1]
    trimmed = base.cache_shape
    if base.windows is not None:
        trimmed = trimmed.trimmed(base.windows.by_layer, capacity, room=len(TREE), surplus=0)
    cache, edges = KVCache(trimmed, capacity), (0, 5, PREFIX - 1, PREFIX)
    parts = [read(tokens[:1, a:b], cache) for a, b in zip(edges, edges[1:], strict=False)]
    yield "in parts", torch.cat(parts, 1), wanted[:1, :PREFIX]
    nodes = _nodes(tokens[0], tokens[1], PREFIX)
    of_nodes = _nodes(wanted[0], wanted[1], PREFIX)
    yield "as a tree", verify(nodes[None], cache), of_nodes[None]
    path = torch.tensor([[0, 2, 4]], device=base.device)
    cache.commit_path(path, torch.tensor([3], device=base.device))
    yield "after a tree", read(tokens[1:2, LENGTH - 1 :], cache), wanted[1:2, LENGTH - 1 :]

    rows, short = RaggedCache(trimmed, 2, capacity), PREFIX // 2
    with torch.inference_mode():
        for row, part in enumerate((tokens[:1, :PREFIX], tokens[2:, :short])):
            slot = rows.slot(row)
            read(part, slot)
            rows.put_back(row, slot)
    both = torch.stack([nodes, _nodes(tokens[2], tokens[2], short)])
    found = verify(both, rows)
    yield "as a tree in a batch", found[:1], of_nodes[None]
    path_places = [0, 1, 3]
    yield "as a tree in a batch", found[1:, path_places], wanted[2:, short : short + 3]

    first, second = PREFIX - 3, LENGTH - 3
    yield (
        "as packed documents",
        _packed(base, tokens[0, :first], tokens[2, :second]),
        torch.cat([wanted[0, :first], wanted[2, :second]])[None],
    )


def _nodes(first: Tensor, second: Tensor, start: int) -> Tensor:
    """The five nodes of ``TREE`` whose two paths are in these rows [T, ...] from ``start`` on: [N, ...]."""
    return torch.stack([first[start], first[start + 1], second[start + 1], first[start + 2], second[start + 2]])


def _packed(base: "BaseModel", *documents: Tensor) -> Tensor:
    """Logits [1, T, V] of documents side by side in one row, which ends with padding."""
    row = TrainBatch.of([document.tolist() for document in documents], padding=1)
    hidden = base.hidden_states(row, HiddenStatesSpec()).final
    with torch.inference_mode():
        return base.logits(hidden)[:, :-1]


def relative_error(base: "BaseModel", found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest wanted value; in 16 bits the median of the tokens' largest differences.

    There rounding may send a token to another expert, which changes it by as much as a fault would change all of them.
    """
    differences = (found.float() - wanted.float()).abs().amax(-1).flatten()
    difference = differences.max() if base.rounds_to in TOLERANCE else differences.median()
    return float(difference / wanted.abs().max().clamp(min=1e-9))


def tolerance(base: "BaseModel") -> float:
    """Largest relative error that is rounding."""
    return TOLERANCE.get(base.rounds_to, HALF_TOLERANCE)


def has_passed(base: "BaseModel", what: str) -> bool:
    """Whether a base of this config has passed this check in this process: what is compared follows from the config."""
    return _key(base, what) in _passed


def note_passed(base: "BaseModel", what: str) -> None:
    """Remember it."""
    _passed.add(_key(base, what))


def _key(base: "BaseModel", what: str) -> tuple[str, ...]:
    config, settings = base.config, base.model.config
    places = str(base.dtype), base.device.type, str(config.prepack), str(base.max_context)
    return (what, type(base.model).__name__, settings.to_json_string(use_diff=False), *places)
