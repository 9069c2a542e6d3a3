"""Clusters of near-duplicate texts: Jaccard index of character shingles, joined transitively.

All pairs at or above the threshold are found, not a sample of them. If |A & B| >= t |A | B|, then |A & B| >= t |A|; so with
shingles in one order, rarest first, the first |A| - ceil(t |A|) + 1 of A and of B have one in common. Only pairs that do are
compared (prefix filter). Source: Chaudhuri, Ganti, Kaushik 2006, "A primitive operator for similarity joins".
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

SHINGLE_CHARS = 5
_SLACK = 1e-9
"""ceil must not round up what is a whole number but for the last bit."""


def normalised(text: str) -> str:
    """Lower case, letters and digits of any script, single spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def shingles(text: str) -> frozenset[str]:
    """Every run of SHINGLE_CHARS characters of the normalised text; the text itself where it is shorter."""
    plain = normalised(text)
    count = max(1, len(plain) - SHINGLE_CHARS + 1)
    return frozenset(plain[n : n + SHINGLE_CHARS] for n in range(count))


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    """|A & B| / |A | B|; both have at least one shingle."""
    common = len(first & second)
    return common / (len(first) + len(second) - common)


class UnionFind:
    """Sets of 0..n-1 that are joined."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, item: int) -> int:
        """The set's name: its least member."""
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.find(first), self.find(second)))
        self._parent[high] = low


def clusters(texts: Sequence[str], threshold: float) -> list[int]:
    """For each text the index of the first text of its cluster: texts that a chain of near-duplicates joins."""
    sets = [shingles(text) for text in texts]
    count = Counter(shingle for own in sets for shingle in own)
    joined = UnionFind(len(texts))
    with_shingle: defaultdict[str, list[int]] = defaultdict(list)
    for index, own in enumerate(sets):
        length = len(own) - math.ceil(threshold * len(own) - _SLACK) + 1
        prefix = sorted(own, key=lambda shingle: (count[shingle], shingle))[:length]
        near = {other for shingle in prefix for other in with_shingle[shingle]}
        for other in near:
            if joined.find(index) != joined.find(other) and jaccard(own, sets[other]) >= threshold:
                joined.join(index, other)
        for shingle in prefix:
            with_shingle[shingle].append(index)
    return [joined.find(index) for index in range(len(texts))]
