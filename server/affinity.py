"""Which conversation a request belongs to, and the rank that conversation lives on.

A rank that served a conversation has its prefix at hand, so its next turn goes there unless that rank is behind
the others by more than a bound. Knows nothing about requests beyond headers and their first words.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

# Sessions named by their client, most specific first: benchmark harnesses, gateways, coding agents.
SESSION_HEADERS: Final = ("X-Correlation-ID", "X-Session-Id", "x-claude-code-session-id")
# Of the first user message: agents tell themselves apart within it, and a long paste costs no more than this.
PREFIX_CHARS: Final = 4096
# Agents pause for up to an hour between turns; later the prefix is gone from every cache anyway.
HOME_TTL_S: Final = 3600.0
# Conversations remembered; the longest unused goes first.
MAX_HOMES: Final = 65536


def session_key(headers: Mapping[str, str], first_words: str) -> bytes:
    """A digest of what names the conversation: a session header, else the beginning of its first user message."""
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            return hashlib.sha1(f"{name}:{value}".encode("utf-8", "replace"), usedforsecurity=False).digest()
    return hashlib.sha1(first_words[:PREFIX_CHARS].encode("utf-8", "replace"), usedforsecurity=False).digest()


class Homes:
    """Conversation -> rank index, least recently used first, each for HOME_TTL_S after its last turn."""

    def __init__(self, limit: int = MAX_HOMES, ttl_s: float = HOME_TTL_S) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._homes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, key: bytes) -> int | None:
        """The conversation's rank, if it is remembered."""
        home = self._homes.get(key)
        if home is None or time.monotonic() - home[1] > self._ttl_s:
            return None
        return home[0]

    def settle(self, key: bytes, index: int) -> None:
        """Remember where a turn went."""
        self._homes[key] = index, time.monotonic()
        self._homes.move_to_end(key)
        if len(self._homes) > self._limit:
            self._homes.popitem(last=False)
