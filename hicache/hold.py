"""What one plan holds of the index: a pinned path, a pinned state, slots reserved for pages and states.

Promises: all of it is given back by `end_load`, `end_store` and `close`, whatever came of the plan; nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache.buckets import Slots, Words
from hicache.index import PageIndex, Sums
from hicache.pages import NO_PARENT, NO_SLOTS, NO_STATE, READY, Ids

NO_SUMS: Final[Sums] = np.zeros(0, np.uint64)


@dataclass(slots=True, eq=False)
class Hold:
    """From a plan's birth until its rank has answered all that is due."""

    index: PageIndex = field(repr=False)
    name: int  # the plan
    rank: int
    path: Slots  # the ready pages it begins with, pinned to the end
    load: int = 0  # pages of it that are loaded
    load_state: int = NO_STATE  # pinned while `loading`
    slots: Slots = field(default_factory=lambda: NO_SLOTS)  # reserved for the pages behind the path
    states: dict[int, int] = field(default_factory=dict)  # reserved state slot -> the page it hangs on
    prompt_tokens: int = 0  # of a request that looked up; else 0
    loading: bool = False  # its CacheLoaded is due
    storing: bool = False  # its CacheStored is due
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index.pin(self.path)

    @property
    def parent(self) -> int:
        """The page behind which it stores, or NO_PARENT."""
        return int(self.path[-1]) if self.path.size else NO_PARENT

    def begin_load(self, pages: int, state: int) -> None:
        """These first pages of the path are loaded, and this state (NO_STATE: none)."""
        self.load, self.load_state, self.loading = pages, state, True
        if state != NO_STATE:
            self.index.states.pin(state)

    def reserve_pages(self, root: bytes, keys: Words, ids: Ids) -> bool:
        """Slots for these pages, all or none. False: too little room."""
        slots = self.index.reserve(root, self.parent, keys, ids, self.name)
        if slots is None:
            return False
        self.slots, self.storing = slots, True
        return True

    def reserve_states(self, boundaries: Sequence[int]) -> list[tuple[int, int]]:
        """`(pages, state slot)` for those boundaries, in pages, that have none and whose pages are held."""
        if not boundaries:
            return []
        held, have = np.concatenate([self.path, self.slots]).tolist(), self.index.pages.state
        # Chosen before the first is reserved: that may evict the state of another one of them.
        lacking = [pages for pages in boundaries if pages <= len(held) and have[held[pages - 1]] == NO_STATE]
        reserved = []
        for pages in lacking:
            page = held[pages - 1]
            slot = self.index.reserve_state(page, self.name)
            if slot == NO_STATE:
                break
            self.states[slot] = page
            reserved.append((pages, slot))
        self.storing = self.storing or bool(reserved)
        return reserved

    def end_load(self, bad: int = -1) -> None:
        """Nothing is read any more. The loaded page at index `bad` was wrong; the state, where that is past them."""
        self.loading = False
        if 0 <= bad < self.load:
            self.index.invalidate(int(self.path[bad]))
        if self.load_state == NO_STATE:
            return
        if bad == self.load and self.index.states.is_ready(self.load_state):
            self.index.drop_state(self.load_state)
        self.index.states.unpin(self.load_state)

    def end_store(self, sums: Sums, states: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Nothing is written any more: the first `len(sums)` pages hold theirs, and these states (slot, checksum).

        Returns how many pages and states can be found now.
        """
        self.storing = False
        pages = self.index.commit(self.slots, sums) if self.slots.size else 0
        done = 0
        # The last boundary comes last: it is the one most likely to be hit, and the last to be evicted.
        for slot, page in reversed(self.states.items()):
            if self.index.pages.state[page] != slot:  # it went with its page
                continue
            checksum = next((checksum for stored, checksum in states if stored == slot), None)
            if checksum is None or self.index.pages.status[page] != READY:
                self.index.drop_state(slot)
            else:
                self.index.commit_state(slot, checksum)
                done += 1
        return pages, done

    def close(self) -> None:
        """Both answers are there, or none will come: what is still held is given back."""
        if self.loading:
            self.end_load()
        if self.storing:
            self.end_store(NO_SUMS, ())
        self.index.unpin(self.path)
