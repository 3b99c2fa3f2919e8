"""The walk over all stored pages in turn, to check their bytes in the background.

Keeps the page in hand from being evicted and leaves the order of use as it is. Reads no bytes itself.
"""

from __future__ import annotations

from typing import Final

from hicache.buckets import Slots
from hicache.index import PageIndex


class Scrubber:
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
