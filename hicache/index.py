"""Which page lies in which slot of the host pool: a forest whose entries are the slots themselves.

Promises:
- A page is found only where its key, its tokens, its root and all before it agree. A collision of keys is a miss.
- A parent outlives its children. A pin covers a page and all before it, so a page without pins can be evicted with all
  behind it: how much room there is is one number, and exact.
- Of ready pages without children and pins, the one used least recently goes first. When it is gone, its parent has
  inherited its place, unless it was used later itself.
One thread. Knows nothing of ranks, plans or time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.buckets import Buckets, Slots, Words, key_words
from hicache.lru import LruList
from hicache.pages import DOOMED, FREE, NO_PARENT, NO_SLOTS, NO_STATE, READY, RESERVED, Ids, Pages
from hicache.states import NOBODY, StateSlots
from hicache.traces import EvictedKeys

Sums = npt.NDArray[np.uint64]


class Match(NamedTuple):
    """The beginning of a prompt as far as it is here: ready pages, then pages that one owner is storing."""

    ready: Slots
    reserved: Slots


class PageIndex:
    """The pages and states of one pool."""

    def __init__(self, num_pages: int, num_states: int = 0) -> None:
        self.pages: Final = Pages(num_pages)
        self.states: Final = StateSlots(num_states)
        self.evicted: Final = EvictedKeys()
        # Changes whenever an earlier `match` may not be true any more.
        self.version = 0
        self._buckets: Final = Buckets(num_pages)
        # Ready pages without pins: all that have no children, and some that have. See `_evict`.
        self._idle: Final = LruList(num_pages)
        self._evictable = 0

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.pages.total - self.pages.free_count

    @property
    def room(self) -> int:
        """Slots that `reserve` can give now."""
        return self.pages.free_count + self._evictable

    # ---- looking ----

    def match(self, root: bytes, keys: Words, ids: Ids, after: int = NO_PARENT) -> Match:
        """How much of these pages is here, behind the page `after` (NO_PARENT: as the first of `root`).

        `ids` are `[n, 128]`, `keys` `[n, 2]`. Changes nothing.
        """
        slots = self._buckets.find(keys)
        absent = np.flatnonzero(slots < 0)
        if absent.size:
            slots = slots[: absent[0]]
        if not slots.size:
            return Match(slots, slots)
        slots = slots[: self.pages.agreeing(slots, ids, root, after)]
        ready = self.pages.leading(slots, READY)
        behind = slots[ready:]
        # Nobody stores behind a page that another one is storing, so all these have the first one's owner.
        return Match(slots[:ready], behind)

    def proven(self, root: bytes, slots: Slots, ids: Ids) -> int:
        """How many of these remembered slots hold just these first pages `[n, 128]` of `root` now."""
        slots = slots[: self.pages.leading(slots, READY)]
        return self.pages.agreeing(slots, ids, root, NO_PARENT)

    def locate(self, key: bytes) -> int:
        """The slot of this key, ready or reserved; -1: there is none. See `find`."""
        return int(self._buckets.find(key_words(key))[0])

    def find(self, key: bytes) -> Slots:
        """The path that ends with the page of this key; empty if there is none that is ready.

        Only for keys that a rank has from us: no tokens are compared.
        """
        path = self.pages.path(self.locate(key))
        return path if self.pages.leading(path, READY) == len(path) else NO_SLOTS

    def keys(self, slots: Slots) -> bytes:
        """Their keys, 16 bytes each."""
        return self._buckets.keys[slots].tobytes()

    # ---- pins ----

    def pin(self, path: Slots) -> None:
        """Keep these pages, a path from a first page on, until `unpin`."""
        if not path.size:
            return
        pins = self.pages.pins[path]
        self._evictable -= int(np.count_nonzero((pins == 0) & (self.pages.status[path] == READY)))
        self.pages.pins[path] = pins + 1

    def unpin(self, path: Slots, *, used: bool = True) -> None:
        """Give back the pin of a path; if it was `used`, it counts as used just now."""
        if not path.size:
            return
        pages = self.pages
        pins = pages.pins[path] - 1
        pages.pins[path] = pins
        self._evictable += int(np.count_nonzero((pins == 0) & (pages.status[path] == READY)))
        last = int(path[-1])
        if used and pins[-1] == 0 and pages.status[last] == READY:
            self._idle.touch(last)
        # If it is free now, this goes on with the page before it.
        self._rest(last)

    # ---- storing ----

    def reserve(self, root: bytes, parent: int, keys: Words, ids: Ids, owner: int) -> Slots | None:
        """Slots for these pages behind `parent`, whose path is pinned (NO_PARENT: they are the first of `root`).

        None, and nothing evicted: there is too little room.
        """
        if len(ids) > self.room:
            return None
        self._evict(len(ids))
        slots = self.pages.take(len(ids))
        self.pages.write(slots, ids, root, parent, owner)
        self._buckets.insert(slots, keys)
        self.version += 1
        return slots

    def commit(self, slots: Slots, sums: Sums) -> int:
        """The first `len(sums)` of these reserved slots hold their pages now, the others are free.

        Returns how many are ready: none if they, or pages before them, were doomed meanwhile.
        """
        pages = self.pages
        doomed = (pages.status[pages.path(int(slots[0]))] == DOOMED).any()
        good = 0 if doomed else len(sums)
        self._release(slots[good:])
        kept = slots[:good]
        if good:
            pages.status[kept], pages.owner[kept], pages.sums[kept] = READY, NOBODY, sums
            self._evictable += good
            self._idle.touch(int(kept[-1]))
        self.version += 1
        return good

    def _release(self, slots: Slots) -> None:
        """Free reserved pages, a path's end."""
        if slots.size:
            self._buckets.remove(slots[self.pages.status[slots] == RESERVED])
            self._give(slots[::-1])

    # ---- states ----

    def reserve_state(self, page: int, owner: int) -> int:
        """A state slot for the boundary behind `page`, which has none and is pinned or reserved by the same owner.

        -1: all are in use.
        """
        assert self.pages.state[page] == NO_STATE
        if self.states.used == self.states.total and (oldest := self.states.oldest_idle()) >= 0:
            self.drop_state(oldest)
            self.states.evicted += 1
        slot = self.states.take(page, owner)
        if slot >= 0:
            self.pages.state[page] = slot
            self.version += 1
        return slot

    def commit_state(self, slot: int, checksum: int) -> None:
        """A reserved state slot holds its state now."""
        self.states.commit(slot, checksum)
        self.version += 1

    def drop_state(self, slot: int) -> None:
        """Never find this state again; its slot is free once it has no pins."""
        self.pages.state[self.states.page[slot]] = NO_STATE
        self.states.drop(slot)
        self.version += 1

    # ---- making room and forgetting ----

    def invalidate(self, slot: int) -> None:
        """Never find a ready page again, nor what hangs on it: that grows old and goes as usual."""
        pages = self.pages
        if pages.status[slot] != READY:
            return
        self._buckets.remove(np.array([slot], np.int32))
        self._evictable -= int(pages.pins[slot] == 0)
        pages.status[slot] = DOOMED
        self._idle.discard(slot)
        self._rest(slot)
        self.version += 1

    def reset(self) -> int:
        """Find nothing of today again. What is idle is free at once, the rest when let go. Returns pages freed."""
        pages = self.pages
        idle = (pages.pins == 0) & (pages.owner == NOBODY) & (pages.status != FREE)
        dropped = np.flatnonzero(idle).astype(np.int32)
        busy = np.flatnonzero((pages.status != FREE) & ~idle).astype(np.int32)
        self._drop_states(dropped)
        pages.give_all(dropped)
        pages.status[busy] = DOOMED
        pages.children.fill(0)
        parents = pages.parent[busy]
        np.add.at(pages.children, parents[parents != NO_PARENT], 1)
        self._buckets.clear()
        self._idle.clear()
        self._evictable = 0
        self.version += 1
        return len(dropped)

    def _rest(self, slot: int) -> None:
        """This page lost a pin or a child. If none is left, it is the next to be evicted, or free at once if doomed."""
        pages = self.pages
        if pages.children[slot] or pages.pins[slot]:
            return
        if pages.status[slot] == READY and slot not in self._idle:
            self._idle.push_first(slot)
        elif pages.status[slot] == DOOMED and pages.owner[slot] == NOBODY:
            self._give(np.array([slot], np.int32))

    def _evict(self, wanted: int) -> None:
        """Make that many slots free; the caller knows that there is room.

        A page with children that comes first in the list is only taken off it: what hangs on it was used later, so it
        inherits that place when its last child goes.
        """
        pages = self.pages
        while (lacking := wanted - pages.free_count) > 0:
            oldest = self._idle.first()
            assert oldest >= 0
            self._idle.discard(oldest)
            if pages.pins[oldest] or pages.children[oldest]:
                continue
            slots = pages.climb(oldest, lacking, self._idle)
            self._evictable -= len(slots)
            self._buckets.remove(slots)
            self.evicted.add(self._buckets.keys[slots])
            self._give(slots)
            self.version += 1

    def _give(self, slots: Slots) -> None:
        """Free a path's end that nothing hangs on, given from its last page on."""
        parent = int(self.pages.parent[slots[-1]])
        self._drop_states(slots)
        self.pages.give(slots)
        if parent != NO_PARENT:
            self.pages.children[parent] -= 1
            self._rest(parent)

    def _drop_states(self, slots: Slots) -> None:
        states = self.pages.state[slots]
        for state in states[states != NO_STATE].tolist():
            self.drop_state(state)
