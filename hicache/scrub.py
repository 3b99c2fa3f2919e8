"""The walks over all stored pages, and over all stored states, to check their bytes in the background.

Both leave the order of use as it is. A page in hand is kept from being evicted; a state, on which nothing hangs, is
not: what was read of a slot that has changed hands meanwhile counts for nothing. They read no bytes themselves.
"""

from __future__ import annotations

from typing import Final

from hicache.buckets import Slots
from hicache.index import PageIndex
from hicache.states import StateSlots


class PageWalk:
    """Hands out ready pages one after the other, in a circle."""

    def __init__(self, index: PageIndex) -> None:
        self.checked = 0
        self.bad = 0
        self._index: Final = index
        self._at = 0
        self._held: Final[dict[int, Slots]] = {}

    def next_to_scrub(self) -> tuple[int, int] | None:
        """The next page's slot, pinned until `done`, and the checksum its bytes must have; None: there is none."""
        slot = self._index.pages.next_ready(self._at)
        if slot < 0 or slot in self._held:
            return None
        self._at = (slot + 1) % self._index.pages.total
        self._held[slot] = self._index.pages.path(slot)
        self._index.pin(self._held[slot])
        return slot, int(self._index.pages.sums[slot])

    def done(self, slot: int, ok: bool) -> None:
        """Its bytes were right, or not: then neither it nor what hangs on it is found again."""
        path = self._held.pop(slot)
        self.checked += 1
        if not ok:
            self.bad += 1
            self._index.invalidate(slot)
        self._index.unpin(path, used=False)


class StateWalk:
    """Hands out ready states one after the other, in a circle, one at a time."""

    def __init__(self, index: PageIndex) -> None:
        self._index: Final = index
        self._states: Final[StateSlots] = index.states
        self._at = 0
        self._taken = 0

    def next_to_scrub(self) -> tuple[int, int] | None:
        """The next state's slot and the checksum its bytes must have; None: there is none. Answer with `done`."""
        slot = self._states.next_ready(self._at)
        if slot < 0:
            return None
        self._at = (slot + 1) % self._states.total
        self._taken = self._states.taken[slot]
        return slot, self._states.sums[slot]

    def done(self, slot: int, ok: bool) -> bool:
        """Its bytes were right, or not: then it is not found again. Returns whether they were still those."""
        same = self._states.is_ready(slot) and self._states.taken[slot] == self._taken
        if same and not ok:
            self._index.drop_state(slot)
        return same
