"""The ids of texts seen before, for texts that begin with one of them: an append-only conversation pays for its tail.

An entry ends at a border of added tokens (`AddedTokens.last_border`), where the ids of both sides simply join; so the
whole is exact if its parts are. Entries compare the text itself, never a digest. Thread-safe.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from server.tokenizer.backend import CacheCounts, Ids

# The prefixes of some hundred long conversations.
CACHE_BYTES: Final = 256 * 2**20
# Each look-up goes through the entries; at a tenth of a microsecond each, more would cost what they save.
MAX_ENTRIES: Final = 1024
# Shorter texts are encoded faster than they are looked for.
MIN_CHARACTERS: Final = 2048
# Of entries of one conversation each is so much longer than the one before it.
GROWTH: Final = 1.5
# The end of an entry is compared first: it tells apart conversations that share a long beginning.
TAIL_CHARACTERS: Final = 64

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """A text whose ids are known. `plain` are the ranges of it in which special tokens are only text."""

    text: str
    plain: Ranges
    ids: Ids
    kept: int = 0  # the size of the longest kept entry that this one goes on from
    tail: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tail", self.text[-TAIL_CHARACTERS:])

    def begins(self, text: str, plain: Ranges) -> bool:
        """Whether a text with these ranges begins with this one."""
        size = len(self.text)
        return (
            size <= len(text)
            and text.startswith(self.tail, size - len(self.tail))
            and text.startswith(self.text)
            and inside(plain, size) == self.plain
        )

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return sys.getsizeof(self.text) + self.ids.nbytes


def inside(plain: Ranges, size: int) -> Ranges:
    """The ranges that begin before a place. A border never lies within one."""
    return tuple(one for one in plain if one[0] < size)


class PrefixCache:
    """Entries, the least recently used of which go first."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._entries: OrderedDict[int, Prefix] = OrderedDict()
        self._next = 0
        self._counts = CacheCounts()
        self._lock = threading.Lock()

    def find(self, text: str, plain: Ranges) -> Prefix | None:
        """The longest entry with which the text begins."""
        if len(text) < MIN_CHARACTERS:
            return None
        with self._lock:
            number, best = -1, None
            for key, entry in reversed(self._entries.items()):
                if (best is None or len(entry.text) > len(best.text)) and entry.begins(text, plain):
                    number, best = key, entry
            if best is None:
                self._counts.misses += 1
                return None
            self._counts.hits += 1
            self._entries.move_to_end(number)
            return best

    def add(self, text: str, plain: Ranges, ids: Ids, parent: Prefix | None) -> None:
        """Keep an entry, in place of the one it goes on from unless that is a good deal shorter.

        So a conversation of many turns keeps a few entries of growing size, where others may branch off.
        """
        kept = 0 if parent is None else parent.kept
        grown = parent is not None and len(text) >= GROWTH * kept
        entry = Prefix(text, plain, ids, len(parent.text) if parent is not None and grown else kept)
        with self._lock:
            if parent is not None and not grown:
                self._drop(parent)
            self._entries[self._next] = entry
            self._next += 1
            self._counts.bytes += entry.bytes
            while self._counts.bytes > self._limit or len(self._entries) > MAX_ENTRIES:
                self._counts.bytes -= self._entries.popitem(last=False)[1].bytes

    def _drop(self, entry: Prefix) -> None:
        # The one that was found last stands last, unless another thread has moved on meanwhile; then it just ages.
        if self._entries and next(reversed(self._entries.values())) is entry:
            self._counts.bytes -= self._entries.popitem()[1].bytes

    def counts(self) -> CacheCounts:
        """Of the whole cache."""
        return self._counts
