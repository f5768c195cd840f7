"""``certify`` for a speculative sampler that is a Python function, such as another project's. The function runs once
for every outcome of its random choices. It makes them with ``choose(probs)``, or with torch: ``torch.multinomial``
draws are choices, and so is every comparison of a ``torch.rand`` number with a probability. Therefore other projects'
code often runs unchanged."""

import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drafthead.errors import UserError, one_line
from drafthead.eval.lossless.enumerate import CommittedProbs, total_variation
from drafthead.eval.lossless.tabular_lm import TabularLM

NextToken: TypeAlias = Callable[[Sequence[int]], Tensor]  # from prefix to float64 probabilities [V] of the next token
SpeculativeSampler: TypeAlias = Callable[[NextToken, NextToken, Callable[[Any], int], int], Sequence[int]]
"""Function of (target, draft, choose, length) that returns a step's tokens: up to ``length`` accepted drafts and one
more. ``choose(probs)`` returns an index drawn from ``probs``."""
ROUNDING = 1e-6  # total variation below this is rounding: a sampler may compute in float32
PAIRS = 16  # random pairs of target and draft model, on which a sampler is checked
MOST_OUTCOMES = 200_000
RUNS = 20  # of the first outcome: if its tokens change, some random numbers are not enumerated
VIEWS = frozenset(("getitem", "view", "reshape", "squeeze", "unsqueeze", "select", "expand", "flatten", "unbind"))
DRAWS = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "uniform", "exponential", "rand_like")


class _Choices(TorchFunctionMode):
    """Random choices of one run: first the options (indices) that ``script`` lists, then the likeliest options."""

    def __init__(self, script: tuple[int, ...]) -> None:
        super().__init__()
        self._script = script
        self._made: tuple[int, ...] = ()
        self.weight = 1.0
        self.others: list[tuple[int, ...]] = []  # scripts that lead to the options not taken in this run

    def choose(self, probs: Any) -> int:
        values = [float(value) for value in probs]
        if not values or min(values) < -ROUNDING or abs(sum(values) - 1) > ROUNDING:
            raise UserError(f"choose(probs) needs probabilities that add up to 1, got {values}")
        choice = max(range(len(values)), key=values.__getitem__)
        if len(self._made) < len(self._script):
            choice = min(self._script[len(self._made)], len(values) - 1)
        else:
            self.others += [(*self._made, n) for n, value in enumerate(values) if value > 0 and n != choice]
        self._made += (choice,)
        self.weight *= values[choice]
        return choice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Turn ``multinomial``, and comparisons of numbers from ``rand``, into choices; run all other functions."""
        name, kwargs = getattr(func, "__name__", "").strip("_"), kwargs or {}
        if name == "multinomial":
            probs, samples = args[0], kwargs.get("num_samples", args[1] if len(args) > 1 else 1)
            if samples != 1:
                raise UserError("torch.multinomial is enumerated for num_samples=1 only; draw one token at a time")
            drawn = [self.choose(row / row.sum()) for row in probs.reshape(-1, probs.shape[-1])]
            return torch.tensor(drawn).view(*probs.shape[:-1], 1)
        if name in ("rand", "rand_like"):
            numbers = func(*args, **kwargs)
            numbers.low, numbers.high = torch.zeros(2, *numbers.shape, dtype=torch.float64)
            numbers.high += 1  # the bounds that comparisons have set so far
            return numbers
        if name in DRAWS:
            raise UserError(f"torch.{name} cannot be enumerated; draw with choose(probs), multinomial or rand")
        is_uniform = [hasattr(argument, "low") for argument in args]
        if not any(is_uniform):
            return func(*args, **kwargs)
        if name in VIEWS and is_uniform[0]:
            numbers, low, high = (func(tensor, *args[1:], **kwargs) for tensor in (args[0], args[0].low, args[0].high))
            numbers.low, numbers.high = low, high
            return numbers
        if name not in ("lt", "le", "gt", "ge"):
            raise UserError(f"torch.{name} of a random number cannot be enumerated; compare it with a probability")
        numbers, limits = args if is_uniform[0] else args[::-1]
        asks_above = (name in ("gt", "ge")) == is_uniform[0]
        return self._below(numbers, limits) ^ asks_above

    def _below(self, numbers: Any, limits: Any) -> Tensor:
        """Choose for each number whether it is below its limit. A number is uniform in [``numbers.low``,
        ``numbers.high``); a choice narrows this interval."""
        limits = torch.as_tensor(limits, dtype=torch.float64)
        shape = (numbers.low + limits).shape
        low, high, limits = (tensor.expand(shape) for tensor in (numbers.low, numbers.high, limits))
        below = torch.zeros(limits.shape, dtype=torch.bool)
        for at in torch.cartesian_prod(*map(torch.arange, limits.shape)).view(below.numel(), -1).tolist():
            index = tuple(at) if below.dim() else ()
            bottom, top = float(low[index]), float(high[index])
            limit = min(max(float(limits[index]), bottom), top)
            share = (limit - bottom) / max(top - bottom, 1e-300)
            below[index] = self.choose([1 - share, share]) == 1
            (high if below[index] else low)[index].fill_(limit)
        return below


def sampler_distribution(
    sampler: SpeculativeSampler, target: TabularLM, draft: TabularLM, length: int
) -> CommittedProbs:
    """Return the exact distribution of the tokens that a step of ``sampler`` with up to ``length`` drafts commits."""

    def run(script: tuple[int, ...]) -> tuple[list[int], _Choices]:
        choices = _Choices(script)
        try:
            with torch.inference_mode(), choices:
                drawn = sampler(_next_token(target), _next_token(draft), choices.choose, length)
                tokens = [int(token) for token in drawn]
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the sampler failed: {type(error).__name__}: {one_line(error)}") from error
        if not 1 <= len(tokens) <= length + 1 or not all(0 <= token < target.vocabulary for token in tokens):
            expected = f"1 to {length + 1} tokens below {target.vocabulary}"
            raise UserError(f"a step commits {expected}, but the sampler returned {tokens}")
        return tokens, choices

    result = CommittedProbs(target.vocabulary, length)
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        script = waiting.pop()
        tokens, choices = run(script)
        if any(run(script)[0] != tokens for _ in range(1 if script else RUNS)):
            raise UserError("the sampler draws random numbers outside torch; draw with choose(probs)")
        number = sum(token * target.vocabulary**n for n, token in enumerate(reversed(tokens)))
        result.by_length[len(tokens) - 1][number] += choices.weight
        result.outcomes += 1
        waiting += choices.others
        if result.outcomes + len(waiting) > MOST_OUTCOMES:
            raise UserError(f"the sampler has more than {MOST_OUTCOMES} outcomes; lower length or vocabulary")
    return result


def distances(
    sampler: SpeculativeSampler,
    length: int,
    vocabulary: int = 3,
    probs: tuple[Sequence[float], Sequence[float]] | None = None,
) -> tuple[list[float], int]:
    """Return the total variation between ``sampler``'s output and each target, and the total number of outcomes.
    ``probs`` are the next-token probabilities of one target and its draft model; None: ``PAIRS`` random pairs over
    ``vocabulary`` tokens."""
    targets = [TabularLM.random(vocabulary, length, seed) for seed in range(PAIRS)]
    pairs = [(target, target.near(PAIRS + seed, 1.0)) for seed, target in enumerate(targets)]
    if probs:
        pairs = [(constant(probs[0], length), constant(probs[1], length))]
    total, outcomes = [], 0
    for target, draft in pairs:
        committed = sampler_distribution(sampler, target, draft, length)
        total.append(total_variation(committed, target.logits.softmax(-1)))
        outcomes += committed.outcomes
    return total, outcomes


def constant(probs: Sequence[float], length: int) -> TabularLM:
    """Return a model with the same next-token probabilities after every prefix of up to ``length`` tokens."""
    prefixes = sum(len(probs) ** level for level in range(length + 1))
    return TabularLM(torch.tensor(probs, dtype=torch.float64).log().expand(prefixes, -1))


def load_sampler(name: str) -> SpeculativeSampler:
    """Import the function ``module:function``; the module may lie in the current folder."""
    sys.path.insert(0, "")
    try:
        sampler: SpeculativeSampler = resolve_name(name)
    except Exception as error:
        raise UserError(f"callable={name} cannot be loaded ({one_line(error)}); give module:function") from None
    finally:
        sys.path.remove("")
    return sampler


def _next_token(table: TabularLM) -> NextToken:
    def probs(prefix: Sequence[int]) -> Tensor:
        number = 0
        for token in prefix:
            number = number * table.vocabulary + 1 + int(token)
        if number >= len(table.logits):
            raise UserError(f"the sampler reads a prefix of {len(prefix)} tokens; it may have at most `length` tokens")
        return table.logits[number].softmax(-1)

    return probs
