"""Which engine a session goes to, and which engines to leave alone for a while."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence


def rendezvous_order(session: str, urls: Sequence[str]) -> list[str]:
    """`urls` in this session's order of preference. Losing one engine moves only that engine's sessions.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """

    def weight(url: str) -> bytes:
        return hashlib.blake2b(f"{session}\n{url}".encode(), digest_size=8).digest()

    return sorted(urls, key=weight, reverse=True)


class Breakers:
    """Engines that failed several times in a row are left alone for `rest_s`; then one request tries again.

    When all rest, the one that rested longest is tried: the breakers cannot close the whole fleet.
    """

    def __init__(self, max_failures: int = 3, rest_s: float = 5.0) -> None:
        self._max_failures = max_failures
        self._rest_s = rest_s
        self._failures: dict[str, int] = {}
        self._opened_s: dict[str, float] = {}

    def choose(self, preferred: Sequence[str]) -> str:
        """The first of `preferred` that may be tried; `preferred` must not be empty."""
        now_s = time.monotonic()
        for url in preferred:
            if url not in self._opened_s:
                return url
            if now_s - self._opened_s[url] >= self._rest_s:
                self._opened_s[url] = now_s
                return url
        longest = min(preferred, key=lambda url: self._opened_s[url])
        self._opened_s[longest] = now_s
        return longest

    def succeeded(self, url: str) -> None:
        self._failures.pop(url, None)
        self._opened_s.pop(url, None)

    def failed(self, url: str) -> None:
        self._failures[url] = self._failures.get(url, 0) + 1
        if self._failures[url] >= self._max_failures:
            self._opened_s[url] = time.monotonic()

    def is_resting(self, url: str) -> bool:
        return url in self._opened_s
