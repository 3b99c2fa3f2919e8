"""Which slots a conversation's last prompt used: where the next one most likely finds its beginning.

A guess that costs nothing when it is wrong: the index proves it by tokens. It saves hashing and looking up what was
hashed and looked up a turn ago. Bounded in bytes; the conversation used least recently is forgotten first.
"""

from __future__ import annotations

from typing import Final

from hicache.buckets import Slots
from hicache.pages import NO_SLOTS

# 4 bytes a page: three thousand conversations of 150,000 tokens.
MEMO_BYTES: Final = 16 << 20
# What a short entry costs beside its slots: the name, the array's head, the place in the table.
ENTRY_BYTES: Final = 256


class Memo:
    """Conversation -> slots, by whatever name it has."""

    def __init__(self, limit: int = MEMO_BYTES) -> None:
        self._limit: Final = limit
        self._slots: Final[dict[bytes, Slots]] = {}
        self._bytes = 0

    def get(self, name: bytes) -> Slots:
        """The slots it used last; empty if it is unknown."""
        return self._slots.get(name, NO_SLOTS)

    def put(self, name: bytes, slots: Slots) -> None:
        """It uses these slots now."""
        self._forget(name)
        self._slots[name] = slots
        self._bytes += slots.nbytes + ENTRY_BYTES
        while self._bytes > self._limit:
            self._forget(next(iter(self._slots)))

    def clear(self) -> None:
        """Forget all."""
        self._slots.clear()
        self._bytes = 0

    def _forget(self, name: bytes) -> None:
        old = self._slots.pop(name, None)
        if old is not None:
            self._bytes -= old.nbytes + ENTRY_BYTES
