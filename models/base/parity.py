"""Comparison of a base's logits with stock transformers, made once when the base is loaded.

The stock modules with the model's default attention run a few sequences, each in one pass without a cache. The base
then runs them in one pass, in chunks, as a tree, as rows of different lengths and as packed documents. All passes must
give the stock logits. During the check, sliding windows are shortened in both, so that the sequences outgrow them.

Shape legend: R rows, T tokens, N tree nodes, D width, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.errors import UserError, one_line
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.windows import recurrent_kinds, shortened, windows_of
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.cache.layers import CacheShape, shape_of
from drafthead.models.cache.recurrent import recurrent_shape_of
from drafthead.models.kernels import attention
from drafthead.models.kernels.private_apis import CACHE, other_base
from drafthead.models.token_tree import TokenTree

WINDOW = 8  # largest size of a sliding window during the check, in positions
PREFIX, LENGTH = 12, 16  # tokens before the tree, and of a whole sequence
TREE = TokenTree.from_paths([(0,), (1,), (0, 0), (1, 0)])
"""Tree of two paths with three nodes each: root 0, its children 1 and 2, their children 3 and 4."""
TOLERANCE = {torch.float32: 1e-3}  # largest accepted relative error; wrong masks give 0.1 to 1
HALF_TOLERANCE = 0.25
"""Largest accepted relative error in 16-bit dtypes. With random weights, rounding makes passes over different numbers
of tokens differ by about 0.1."""
KERNEL_PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")
"""Packages whose kernels for recurrent layers transformers uses if they are installed."""
READING, DENSE = "reading", "dense masks of packed rows"
PASSED: set[tuple[str, ...]] = set()
Base = Any  # a ``BaseModel``, whose module imports this one


@dataclass(frozen=True)
class StockResults:
    """Logits and states of the stock modules for a few sequences."""

    tokens: Tensor
    """[R, T] int64: two sequences with the same first ``PREFIX + 1`` tokens, and a different one."""
    logits: Tensor  # [R, T, V]
    final: Tensor  # [1, T, D] hidden states of the first sequence
    known: bool  # a base with this config has passed; then only the start of one sequence is computed

    @classmethod
    def of(cls, base: Base) -> "StockResults":
        """Run random sequences through a base with stock modules and transformers' attention."""
        model, config = base.model, base.model.config
        tokens = torch.randint(3, min(base.vocab_size, 300), (3, LENGTH), generator=torch.Generator().manual_seed(0))
        tokens[1, : PREFIX + 1] = tokens[0, : PREFIX + 1]
        tokens[1, PREFIX + 1 :] = tokens[0, PREFIX + 1 :].flip(0)
        known = check_key(base, READING) in PASSED
        tokens = (tokens[:1, :4] if known else tokens).to(base.device)
        with shortened(config, WINDOW) if base.windows is not None else nullcontext():
            logits, final = stock_pass(model, tokens)
        if not logits.isfinite().all():
            adapter_note = f" with the adapter {base.config.adapter}" if base.config.adapter else ""
            raise UserError(f"{base.name}{adapter_note} computes logits that are not finite; copy its weights again")
        return cls(tokens, logits, final, known)


@contextmanager
def in_one_line(config: PreTrainedConfig, what: str) -> Iterator[None]:
    """Turn errors in the block into a ``UserError`` with the model type and ``what``, except out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{config.model_type} {what} ({why}); {other_base()}") from None


def stock_pass(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``tokens`` [R, T] through a stock model with transformers' attention; return the logits [R, T, V] and the
    final hidden states [1, T, D] of the first row."""
    states: list[Tensor] = []
    hook = model.model.register_forward_hook(lambda *call: states.append(call[2].last_hidden_state[:1]))
    try:
        model.set_attn_implementation(model.get_correct_attn_implementation(None))
        with in_one_line(model.config, "cannot be run by transformers' own code"), torch.inference_mode():
            logits = model(input_ids=tokens, use_cache=False).logits.float()
    finally:
        model.set_attn_implementation(attention.register())
        hook.remove()
    return logits, states[0]


def measured_shape(base: Base) -> CacheShape:
    """Return the shape of the base's cache, by running one token."""
    config, one = base.model.config, torch.full((1, 1), 3, device=base.device)
    recurrent = bool(recurrent_kinds(config))
    cache = DynamicCache(config=config) if recurrent else DynamicCache()
    with in_one_line(config, "cannot be run over a plain key/value cache"), torch.inference_mode():
        base.model.model(input_ids=one, position_ids=one * 0, use_cache=True, **{CACHE: cache})
        written = [shape_of(layer) for layer in cache.layers]
        states = [recurrent_shape_of(*pair) for pair in zip(cache.layers, base.model.model.layers, strict=False)]
    if not any(written) and not any(states):
        raise UserError(f"{config.model_type} writes nothing into its cache; {other_base()}")
    missing = [None] * (base.num_layers - len(written))
    shape: CacheShape = replace(base.cache_shape, layers=(*written, *missing))
    return replace(shape, states=(*states, *missing)) if any(states) else shape


def logit_scale(config: PreTrainedConfig, head: LMHead, product: Tensor, logits: Tensor, dtype: torch.dtype) -> float:
    """Return the factor, 1 or from ``config``, by which ``head`` gives the stock ``logits`` of the layer's ``product``;
    refuse a base without such a factor."""
    scales = [1.0]
    for key in ("logits_scaling", "logit_scale", "lm_head_multiplier"):
        if isinstance(value := getattr(config, key, None), int | float) and value:
            scales += [float(value), 1.0 / value]
    if isinstance(value := getattr(config, "dim_model_base", None), int) and value:
        scales.append(value / config.hidden_size)
    candidates = (replace(head, scale=scale).scale_and_cap(product.float()) for scale in scales)
    errors = [relative_error(dtype, candidate, logits) for candidate in candidates]
    best = min(range(len(scales)), key=errors.__getitem__)
    if errors[best] > tolerance(dtype):
        what = f"{config.model_type} computes its logits in an unknown way"
        raise UserError(f"{what} (recomputed ones differ by {errors[best]:.1%} of the largest); {other_base()}")
    return scales[best]


def check_against_stock(base: Base) -> None:
    """Reject a base whose logits differ from the stock model's, unless its config has passed before; free the stock
    results."""
    results, base.stock_results = base.stock_results, None
    if results is None or results.known:
        return
    kind, windows, dtype = base.model.config.model_type, base.windows, base.rounding_dtype
    edges = shortened(base.model.config, WINDOW) if windows is not None else nullcontext()
    try:
        with in_one_line(base.model.config, "cannot be run by drafthead"), edges:
            base.windows = None if windows is None else windows_of(base.model.config, base.max_context)
            for what, logits, stock in _readings(base, results):
                if (error := relative_error(dtype, logits, stock)) > tolerance(dtype):
                    given = f"the logits of {kind} run {what} differ from stock transformers by {error:.1%}"
                    given = f"{given} of the largest one, so drafts would change the output"
                    packages = [name for name in KERNEL_PACKAGES if find_spec(name)] if base.recurrent else []
                    if packages:
                        given = f"{given} (transformers reads prompts with the kernels of {', '.join(packages)})"
                    raise UserError(f"{given}; {other_base()}")
    finally:
        base.windows = windows
    PASSED.add(check_key(base, READING))


def _readings(base: Base, results: StockResults) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Run the base's passes; yield the name of each, its logits and the stock logits of its tokens."""
    tokens, stock = results.tokens, results.logits
    capacity = LENGTH + len(TREE)
    shape = TREE.shape_on(base.device)

    def read(chunk: Tensor, cache: TreeCache) -> Any:
        return base.logits(base.forward(chunk, cache).final)

    def verify(nodes: Tensor, cache: TreeCache) -> Any:
        return base.verify_logits(nodes, shape, cache)[1]

    yield "in one pass", read(tokens[:1], TreeCache.empty(base.cache_shape, capacity)), stock[:1]
    trimmed = base.cache_shape
    if base.windows is not None:
        # No surplus: the cache drops positions as early as possible, so that the check covers it.
        trimmed = trimmed.trimmed(base.windows.by_layer, capacity, room=len(TREE), surplus=0)
    cache, edges = TreeCache.empty(trimmed, capacity), (0, 5, PREFIX - 1, PREFIX)
    chunks = [read(tokens[:1, a:b], cache) for a, b in zip(edges, edges[1:], strict=False)]
    yield "in chunks", torch.cat(chunks, 1), stock[:1, :PREFIX]
    # The tree's two paths are the continuations of the first two sequences after their common prefix, so a node's
    # logits must be the stock logits of its token in its sequence.
    nodes = _nodes(tokens[0], tokens[1], PREFIX)
    of_nodes = _nodes(stock[0], stock[1], PREFIX)
    yield "as a tree", verify(nodes[None], cache), of_nodes[None]
    # Accept the second path, and read on: the cache must now hold the second sequence.
    path = torch.tensor([[0, 2, 4]], device=base.device)
    cache.commit_path(path, [3])
    yield "after a tree", read(tokens[1:2, LENGTH - 1 :], cache), stock[1:2, LENGTH - 1 :]

    # Two rows with prefixes of different lengths. Both paths of the second row's tree are the third sequence.
    rows, short = TreeCache.empty(trimmed, capacity, 2), PREFIX // 2
    with torch.inference_mode():
        for row, prompt in enumerate((tokens[:1, :PREFIX], tokens[2:, :short])):
            read(prompt, rows.row(row))
    both = torch.stack([nodes, _nodes(tokens[2], tokens[2], short)])
    logits = verify(both, rows)
    yield "as a tree in a batch", logits[:1], of_nodes[None]
    first_path = [0, 1, 3]
    yield "as a tree in a batch", logits[1:, first_path], stock[2:, short : short + 3]

    if base.recurrent:
        yield from _recurrent_readings(base, results, nodes, of_nodes, rows)
    first, second = PREFIX - 3, LENGTH - 3
    expected = torch.cat([stock[0, :first], stock[2, :second]])[None]
    documents, dtype = (tokens[0, :first], tokens[2, :second]), base.rounding_dtype
    try:
        logits = _packed(base, *documents)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # its layers compute with the mask
        logits = None
    if logits is None or relative_error(dtype, logits, expected) > tolerance(dtype):
        base.dense_masks = True
        PASSED.add(check_key(base, DENSE))
        logits = _packed(base, *documents)
    yield "as packed documents", logits, expected


def _recurrent_readings(
    base: Base, results: StockResults, nodes: Tensor, of_nodes: Tensor, rows: TreeCache
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Run passes in which only recurrent layers can differ: after commits of paths of unequal lengths, of which
    ``rows`` has the trees, and over a tree that is read in two passes."""
    tokens, stock, short = results.tokens, results.logits, PREFIX // 2
    rows.commit_path(torch.tensor([[0, 2, 4], [0, 0, 0]], device=base.device), [3, 1])
    following = torch.stack([tokens[1, LENGTH - 1 :], tokens[2, short + 1 : short + 2]])
    expected = torch.stack([stock[1, LENGTH - 1 :], stock[2, short + 1 : short + 2]])
    yield "after trees in a batch", base.logits(base.forward(following, rows).final), expected
    cache, shape = TreeCache.empty(base.cache_shape, LENGTH + len(TREE)), TREE.shape_on(base.device)
    base.forward(tokens[:1, :PREFIX], cache)
    parts = [(nodes[None, :1], TokenTree.chain(0).shape_on(base.device)), (nodes[None, 1:], shape)]
    logits = [base.verify_logits(*part, cache)[1] for part in parts]
    yield "as a tree in two passes", torch.cat(logits, 1), of_nodes[None]


def _nodes(first: Tensor, second: Tensor, start: int) -> Tensor:
    """Return the values of ``TREE``'s nodes from those of its two paths, ``first[start:]`` and ``second[start:]``."""
    return torch.stack([first[start], first[start + 1], second[start + 1], first[start + 2], second[start + 2]])


def _packed(base: Base, *documents: Tensor) -> Any:
    """Pack ``documents`` into one row, and return its logits [1, T, V]."""
    row = TrainBatch.of([document.tolist() for document in documents], padding=1)
    hidden = base.hidden_states(row, HiddenStatesSpec()).final
    with torch.inference_mode():
        return base.logits(hidden)[:, :-1]


def relative_error(dtype: torch.dtype, logits: Tensor, expected: Tensor) -> float:
    """Return max |logits - expected| / max |expected|; ``dtype`` is that of the rounding errors.

    In 16 bits, the median over tokens of each token's largest difference replaces the maximum over all tokens:
    rounding may send single tokens to another expert, whereas a fault changes most tokens.
    """
    differences = (logits.float() - expected.float()).abs().amax(-1).flatten()
    difference = differences.max() if dtype in TOLERANCE else differences.median()
    return float(difference / expected.abs().max().clamp(min=1e-9))


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, HALF_TOLERANCE)


def check_key(base: Base, what: str) -> tuple[str, ...]:
    """Return a key for the check ``what``, equal for all bases with the same result."""
    config, settings = base.config, base.model.config
    build = str(base.dtype), base.device.type, str(config.prepack), str(base.max_context)
    return (what, type(base.model).__name__, settings.to_json_string(use_diff=False), *build)
