"""State slots: which are free, which hold a state, which go first.

For models that keep more than pages. A state hangs on the page that ends at its boundary and never outlives it;
`hicache/index.py` links the two. There are a few thousand, a request touches a handful: plain columns, no vectors.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from hicache.lru import LruList

NO_PAGE: Final = -1
# In place of a page: dropped while it was pinned.
DROPPED: Final = -2
NOBODY: Final = -1


class StateSlots:
    """Free, reserved (an owner), or ready: then it may have pins, and goes to make room if it has none."""

    def __init__(self, num_slots: int) -> None:
        self.total: Final = num_slots
        self.page = array("i", [NO_PAGE]) * num_slots
        self.owner = array("q", [NOBODY]) * num_slots
        self.pins = array("i", [0]) * num_slots
        self.sums = array("Q", [0]) * num_slots
        self.taken = array("Q", [0]) * num_slots  # how often: whoever read a slot can tell that it has changed hands
        self.evicted = 0
        self._free = array("i", range(num_slots - 1, -1, -1))
        self._idle = LruList(num_slots)

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.total - len(self._free)

    def oldest_idle(self) -> int:
        """The ready slot without pins that was used least recently, or -1."""
        return self._idle.first()

    def is_free(self, slot: int) -> bool:
        """Whether nothing hangs here."""
        return self.page[slot] == NO_PAGE

    def is_ready(self, slot: int) -> bool:
        """Whether it holds a state."""
        return self.page[slot] >= 0 and self.owner[slot] == NOBODY

    def next_ready(self, start: int) -> int:
        """The first slot from `start` on that holds a state, in a circle; -1: there is none."""
        ready = np.flatnonzero((np.frombuffer(self.page, "i4") >= 0) & (np.frombuffer(self.owner, "i8") == NOBODY))
        if not ready.size:
            return -1
        return int(ready[np.searchsorted(ready, start) % ready.size])

    def take(self, page: int, owner: int) -> int:
        """A free slot, now reserved for the state behind `page`; -1: there is none."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self.page[slot], self.owner[slot] = page, owner
        self.taken[slot] += 1
        return slot

    def commit(self, slot: int, checksum: int) -> None:
        """A reserved slot holds its state now."""
        assert self.owner[slot] != NOBODY
        self.owner[slot], self.sums[slot] = NOBODY, checksum
        self._idle.touch(slot)

    def pin(self, slot: int) -> None:
        """Keep a ready slot until `unpin`."""
        assert self.is_ready(slot)
        self.pins[slot] += 1
        self._idle.discard(slot)

    def unpin(self, slot: int) -> None:
        """Give back one pin; the slot counts as used just now."""
        assert self.pins[slot] > 0
        self.pins[slot] -= 1
        if not self.pins[slot]:
            if self.page[slot] == DROPPED:
                self._free_slot(slot)
            else:
                self._idle.touch(slot)

    def drop(self, slot: int) -> None:
        """Nothing hangs here any more; the slot is free once it has no pins."""
        assert self.page[slot] >= 0
        self.page[slot] = DROPPED
        if not self.pins[slot]:
            self._idle.discard(slot)
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        self.page[slot], self.owner[slot] = NO_PAGE, NOBODY
        self._free.append(slot)
