"""Detection of training prompts that resemble evaluation prompts."""

import re
from collections import Counter
from collections.abc import Iterable

SHARED = 0.5  # share of the shorter text's three-word sequences that makes two texts near-duplicates


class NearDuplicates:
    """Set of texts; ``text in set`` is true if one of them and ``text`` are near-duplicates (see ``SHARED``)."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._texts_with: dict[tuple[str, ...], list[int]] = {}
        for number, sequences in enumerate(map(_sequences, texts)):
            self._sizes.append(len(sequences))
            for sequence in sequences:
                self._texts_with.setdefault(sequence, []).append(number)

    def __contains__(self, text: str) -> bool:
        sequences = _sequences(text)
        shared = Counter(number for sequence in sequences for number in self._texts_with.get(sequence, ()))
        return any(count >= SHARED * min(self._sizes[number], len(sequences)) for number, count in shared.items())


def _sequences(text: str) -> set[tuple[str, ...]]:
    """Return all sequences of three words, without case and punctuation; a shorter text is one sequence."""
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[n : n + 3]) for n in range(max(1, len(words) - 2))}
