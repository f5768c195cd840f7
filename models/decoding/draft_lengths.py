"""Draft lengths that pay: how far each request of a batch drafts, by expected gain and measured cost.

A step of R requests with m drafts in all commits R tokens and the accepted drafts. It costs the time of a pass over
R + m tokens, which the engine's own steps show: that of a step of R requests without drafts, and on a line for each
draft, corrected where steps of so many tokens were timed often. Single times are noisy, and the speed of a machine
changes. A draft is accepted if all drafts before it are, so the next best draft
of a batch is the one with the largest product of rates along its chain. Drafts are added in this order, by the rule of
trees by cost (``cost_tree.py``). For the rates 0.9, 0.8 and 0.3 of two requests::

    m                  0     1 (a: 0.9)   2 (a: 0.9, 0.8)   3 (b: 0.3)
    expected tokens    2     2.9          2.9 + 0.72        3.62 + 0.3
"""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from drafthead.models.decoding.cost_tree import Pace, best_count

KEPT = 8  # latest times of steps with one number of tokens, so that they follow the machine
SLOPES = 32  # latest steps with drafts, from which the time of a draft is estimated
TRUST = 3.0  # this many times of steps with one number of tokens count as much as the line
PROBES = (0.0, 1.0, 0.5)
"""Shares of the drafts with which the first steps are tried in turn, until there are times of ``PROBED`` steps."""
PROBED = 9
PLAIN = 3  # steps without drafts that are timed for about as many requests, so that their time is not a guess
PLAIN_EVERY = 64  # steps with drafts, after which one without is timed again
MOST_SAVED, MOST_LOST = 0.5, 0.5
"""Drafting pauses when it has lost the time of this many steps without drafts, after what it saved, which counts up to
``MOST_SAVED``."""
PAUSE, LONGEST_PAUSE = 32, 256  # steps without drafts before drafting is tried again, twice as many each time
PROBE = 0.25  # share of the drafts with which it is tried again, so that old times do not prevent drafting for good
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

    def known(self) -> list[tuple[int, float, int]]:
        """Return the numbers of tokens, ascending, the median time of each, and how many times it is of."""
        return [(tokens, median(latest), len(latest)) for tokens, latest in sorted(self._latest.items())]


class DraftLengths:
    """The choice of draft lengths, learnt from the engine's steps."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Times(), _Times()  # of steps without and with drafts
        self._slopes: deque[tuple[float, int]] = deque(maxlen=SLOPES)  # (seconds of each draft, drafts) of a step
        self._recorded = 0
        self._tried = Counter[int]()  # steps without drafts to learn their time, by requests
        self._since_plain = 0  # steps with drafts since the last one without
        self._drafting: deque[float] = deque(maxlen=SLOPES)
        self._pace = Pace(1.0, MEMORY)
        self._saved = 0.0  # time that drafting saved since the last pause, in steps without drafts
        self._paused, self._pause = 0, PAUSE
        self._probes = False  # drafting is tried again after a pause

    def record(self, requests: int, tokens: int, seconds: float) -> None:
        """Count a step that read ``tokens`` tokens of ``requests`` requests; no prompts among them."""
        if drafts := tokens - requests:
            self._drafted.add(tokens, seconds)
            self._slopes.append(((seconds - self._plain_seconds(requests)) / drafts, drafts))
            self._since_plain += 1
        else:
            self._plain.add(tokens, seconds)
            self._since_plain = 0
        self._recorded += 1

    def record_drafting(self, seconds: float) -> None:
        """Count the time in which the drafters read a step's tokens and drafted."""
        self._drafting.append(seconds)

    def seconds(self, requests: int, drafts: int) -> list[float]:
        """Return the expected times of steps with 0 to ``drafts`` drafts in all; more tokens never take less time."""
        plain, slope = self._plain_seconds(requests), self._slope()
        knots, corrections = [requests], [0.0]
        for tokens, time, count in self._drafted.known():
            if tokens > requests:
                knots.append(tokens)
                corrections.append((time - plain - slope * (tokens - requests)) * count / (count + TRUST))
        numbers = np.arange(drafts + 1)
        times = plain + slope * numbers + np.interp(requests + numbers, knots, corrections)
        rising: list[float] = np.maximum.accumulate(np.maximum(times, plain)).tolist()
        return rising

    def _plain_seconds(self, requests: int) -> float:
        """Return the time of a step of ``requests`` requests without drafts, on lines between known ones."""
        if not (known := self._plain.known()):
            return 0.0
        tokens, times, _ = zip(*known, strict=True)
        rising = np.maximum.accumulate(times)
        beyond = max(0, requests - tokens[-1]) * (rising[-1] - rising[0]) / max(1, tokens[-1] - tokens[0])
        return float(np.interp(requests, tokens, rising) + beyond)

    def _slope(self) -> float:
        """Return the median time of a draft in steps with drafts; steps with more drafts weigh more."""
        total = sum(drafts for _, drafts in self._slopes)
        weight = 0
        for slope, drafts in sorted(self._slopes):
            weight += drafts
            if 2 * weight >= total:
                return max(0.0, slope)
        return 0.0

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
        share: float | None = None
        if self._recorded < PROBED:
            share = PROBES[self._recorded % len(PROBES)]
        elif self._plain.near(len(rates)) < PLAIN and self._tried[len(rates)] < 2 * PLAIN:
            self._tried[len(rates)] += 1  # limited, because a step between which requests came or went is not timed
            share = 0.0
        elif self._since_plain >= PLAIN_EVERY:
            share, self._since_plain = 0.0, 0
        elif self._probes:
            share, self._probes = PROBE, False
        count = self._best(len(rates), [chance for chance, _ in steps]) if share is None else round(share * len(steps))
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
        self._saved = min(MOST_SAVED, self._saved + (expected - cost) / requests)
        if self._saved < -MOST_LOST:
            self._paused, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._saved, self._probes = 0.0, True
        elif self._saved == MOST_SAVED:
            self._pause = PAUSE
        return best
