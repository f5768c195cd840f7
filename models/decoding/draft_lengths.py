"""Draft lengths that pay: how far each request of a batch drafts, by expected gain and measured cost.

A step of R requests with m drafts in all commits R tokens and the accepted drafts. It costs the time of a pass over
R + m tokens, which the engine's own steps show. Steps without drafts are timed apart, because an engine checks sampled
drafts by slower code. A draft is accepted if all drafts before it are, so the next best draft
of a batch is the one with the largest product of rates along its chain. Drafts are added in this order, by the rule of
trees by cost (``cost_tree.py``). For the rates 0.9, 0.8 and 0.3 of two requests::

    m                  0     1 (a: 0.9)   2 (a: 0.9, 0.8)   3 (b: 0.3)
    expected tokens    2     2.9          2.9 + 0.72        3.62 + 0.3
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from drafthead.models.decoding.cost_tree import Pace, best_count

KEPT = 32  # latest times of steps with one number of tokens
PROBES = (1.0, 0.0, 0.5)
"""Shares of the drafts with which the first steps are tried in turn, until there are times of ``PROBED`` steps."""
PROBED = 9
PLAIN = 3  # steps without drafts that are timed for about as many requests, so that their time is not a guess
PAUSE = 32  # steps without drafts after drafting did not pay, before it is tried again
SMOOTHING = 0.1  # weight of the latest step in the mean gain
MEMORY = 4096.0  # latest tokens of plain decoding whose speedup decides the price of time


class _Times:
    """The times of steps by their number of tokens."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}

    def add(self, tokens: int, seconds: float) -> None:
        self._latest.setdefault(tokens, deque(maxlen=KEPT)).append(seconds)

    def near(self, tokens: int) -> int:
        """Return how many times are known of steps with about as many tokens: within a quarter."""
        return sum(len(latest) for n, latest in self._latest.items() if 4 * abs(n - tokens) <= tokens)

    def medians(self) -> dict[int, float]:
        return {tokens: median(latest) for tokens, latest in self._latest.items()}


def _joined(times: Mapping[int, float], tokens: Sequence[int]) -> list[float]:
    """Return the expected times of steps with these numbers of ``tokens``: the known ``times``, joined by lines. More
    tokens never take less time."""
    known = sorted(times)
    rising = np.maximum.accumulate([times[n] for n in known])
    slope = (rising[-1] - rising[0]) / max(1, known[-1] - known[0])
    beyond = [max(0, n - known[-1]) * slope for n in tokens]
    return [float(time) for time in np.interp(tokens, known, rising) + np.array(beyond)]


class DraftLengths:
    """The choice of draft lengths, learnt from the engine's steps."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Times(), _Times()  # of steps without and with drafts
        self._recorded = 0
        self._tried = Counter[int]()  # steps without drafts to learn their time, by requests
        self._drafting: deque[float] = deque(maxlen=KEPT)
        self._pace = Pace(1.0, MEMORY)
        self._advantage = 0.0  # mean relative gain in tokens per second over steps without drafts
        self._paused = 0

    def record(self, requests: int, tokens: int, seconds: float) -> None:
        """Count a step that read ``tokens`` tokens of ``requests`` requests; no prompts among them."""
        (self._plain if tokens == requests else self._drafted).add(tokens, seconds)
        self._recorded += 1

    def record_drafting(self, seconds: float) -> None:
        """Count the time in which the drafters read a step's tokens and drafted."""
        self._drafting.append(seconds)

    def seconds(self, requests: int, drafts: int) -> list[float]:
        """Return the expected times of steps with 0 to ``drafts`` drafts in all."""
        drafted = self._drafted.medians()
        plain = _joined(self._plain.medians() or drafted, [requests])[0]
        above = {tokens: time for tokens, time in drafted.items() if tokens > requests}
        return _joined({requests: plain} | above, [requests + n for n in range(drafts + 1)])

    @property
    def is_paused(self) -> bool:
        """True if the next ``drafts_now`` will be False."""
        return self._paused > 1

    def drafts_now(self) -> bool:
        """Return False while drafting is paused because it did not pay."""
        self._paused = max(0, self._paused - 1)
        return self._paused == 0

    def choose(self, rates: Sequence[Sequence[float]]) -> list[int]:
        """Return the number of drafts of each request. ``rates`` are the probabilities of acceptance along its chain,
        each given that the drafts before it are accepted."""
        steps = sorted(
            ((float(chance), row) for row, chain in enumerate(rates) for chance in np.cumprod(chain)), reverse=True
        )
        if self._recorded < PROBED:
            count = round(PROBES[self._recorded % len(PROBES)] * len(steps))
        elif self._plain.near(len(rates)) < PLAIN and self._tried[len(rates)] < 2 * PLAIN:
            self._tried[len(rates)] += 1  # limited, because a step between which requests came or went is not timed
            count = 0
        else:
            count = self._best(len(rates), [chance for chance, _ in steps])
        rows = [row for _, row in steps[:count]]
        return [rows.count(row) for row in range(len(rates))]

    def _best(self, requests: int, chances: list[float]) -> int:
        """Return the number of drafts that pays; pause if drafting does not pay."""
        times = self.seconds(requests, len(chances))
        plain = requests / times[0]  # tokens per second
        best, _ = best_count(chances, times, plain * self._pace.speedup)
        drafting = median(self._drafting) if self._drafting else 0.0
        expected, cost = requests + sum(chances[:best]), (times[best] + drafting) * plain
        self._pace.count(expected, cost)
        self._advantage += SMOOTHING * (expected / cost - 1 - self._advantage)
        if self._advantage < 0:
            self._paused, self._advantage = PAUSE, 0.0
        return best
