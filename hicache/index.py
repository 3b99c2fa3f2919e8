"""Which page lies in which slot of the host pool: a forest whose entries are the slots themselves.

A slot is free, reserved (an owner stores into it), ready, or doomed (never found again, not yet free). Columns hold all
of it, so that nothing grows and the garbage collector has nothing to walk. Promises:
- A page is found only where its key, its tokens, its root and all before it agree. A collision of keys is a miss.
- A parent outlives its children. A pin covers a page and all before it, so a page without pins can be evicted with all
  behind it: how much room there is, is one number and exact.
- Of ready pages without children and pins, the one used least recently goes first. When it is gone, its parent has
  inherited its place, unless it was used later itself.
One thread. Knows nothing of ranks, plans or time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.buckets import Buckets, Slots, Words
from hicache.keys import KEY_BYTES, PAGE_TOKENS
from hicache.lru import LruList
from hicache.states import NOBODY, StateSlots
from hicache.traces import EvictedKeys

FREE, RESERVED, READY, DOOMED = range(4)
NO_PARENT: Final = -1
NO_STATE: Final = -1
NO_SLOTS: Final = np.zeros(0, np.int32)

Ids = npt.NDArray[np.int32]
Sums = npt.NDArray[np.uint64]


class Match(NamedTuple):
    """The beginning of a prompt as far as it is here: ready pages, then pages that one owner is storing."""

    ready: Slots
    reserved: Slots


class PageIndex:
    """The pages and states of one pool."""

    def __init__(self, num_pages: int, num_states: int = 0) -> None:
        self.total: Final = num_pages
        self.states: Final = StateSlots(num_states)
        # Changes whenever an earlier `match` may not be true any more.
        self.version = 0
        self.evicted: Final = EvictedKeys()
        self.status: Final = np.zeros(num_pages, np.uint8)
        self.parent: Final = np.full(num_pages, NO_PARENT, np.int32)
        self.children: Final = np.zeros(num_pages, np.int32)
        self.pins: Final = np.zeros(num_pages, np.int32)
        self.state: Final = np.full(num_pages, NO_STATE, np.int32)
        self.owner: Final = np.full(num_pages, NOBODY, np.int64)
        self.sums: Final = np.zeros(num_pages, np.uint64)
        # Tokens, two to a word; like the roots of first pages they take memory only once they are written.
        self._tokens: Final = np.zeros((num_pages, PAGE_TOKENS // 2), np.int64)
        self._roots: Final = np.zeros((num_pages, KEY_BYTES), np.uint8)
        self._buckets: Final = Buckets(num_pages)
        # Ready pages without pins: all that have no children, and some that have. See `_evict`.
        self._idle: Final = LruList(num_pages)
        self._free: Final = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free_count = num_pages
        self._evictable = 0

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.total - self._free_count

    @property
    def room(self) -> int:
        """Slots that `reserve` can give now."""
        return self._free_count + self._evictable

    # ---- looking ----

    def match(self, root: bytes, keys: Words, ids: Ids, after: int = NO_PARENT) -> Match:
        """How much of these pages is here, behind the page `after` (NO_PARENT: as the first of `root`).

        `ids` are `[n, 128]`, `keys` `[n, 2]`. Changes nothing.
        """
        slots = self._buckets.find(keys)
        absent = np.flatnonzero(slots < 0)
        if absent.size:
            slots = slots[: absent[0]]
        slots = slots[: self._agreeing(slots, ids, root, after)]
        status = self.status[slots]
        pending = np.flatnonzero(status != READY)
        ready = int(pending[0]) if pending.size else len(slots)
        owners = self.owner[slots[ready:]]
        same = np.flatnonzero(owners != owners[0]) if owners.size else NO_SLOTS
        return Match(slots[:ready], slots[ready : ready + int(same[0])] if same.size else slots[ready:])

    def find(self, key: bytes) -> int:
        """The ready page of this key, or -1. Only for keys that a rank has from us: no tokens are compared."""
        slot = int(self._buckets.find(np.frombuffer(key, np.uint64).reshape(1, 2))[0])
        return slot if slot >= 0 and self.status[slot] == READY else -1

    def path(self, slot: int) -> Slots:
        """The page in `slot` and all before it, first page first."""
        parents = self.parent.data
        slots = []
        while slot != NO_PARENT:
            slots.append(slot)
            slot = parents[slot]
        return np.array(slots[::-1], np.int32)

    def begins_with(self, slot: int, page: Ids) -> bool:
        """Whether a first page with these tokens `[128]` is ready in `slot`."""
        first = self.status[slot] == READY and self.parent[slot] == NO_PARENT
        return bool(first) and bool(np.array_equal(self._tokens[slot], _pairs(page)))

    def _agreeing(self, slots: Slots, ids: Ids, root: bytes, after: int) -> int:
        """How many of these slots, found by key alone, are one path and have these tokens."""
        if not slots.size or self.parent[slots[0]] != after:
            return 0
        if after == NO_PARENT and self._roots[slots[0]].tobytes() != root:
            return 0
        torn = self.parent[slots[1:]] != slots[:-1]
        if torn.any():
            slots = slots[: int(torn.argmax()) + 1]
        differ = (self._tokens[slots] != _pairs(ids[: len(slots)])).reshape(-1)
        first = int(differ.argmax())
        return first // (PAGE_TOKENS // 2) if differ[first] else len(slots)

    # ---- pins ----

    def pin(self, path: Slots) -> None:
        """Keep these ready pages, a path from a first page on, until `unpin`."""
        pins = self.pins[path]
        self._evictable -= int(np.count_nonzero(pins == 0))
        self.pins[path] = pins + 1

    def unpin(self, path: Slots, *, used: bool = True) -> None:
        """Give back the pin of a path; the whole path counts as used just now if it was `used`."""
        if not path.size:
            return
        pins = self.pins[path] - 1
        self.pins[path] = pins
        idle = path[pins == 0]
        doomed = idle[self.status[idle] == DOOMED]
        self._evictable += len(idle) - len(doomed)
        last = int(path[-1])
        if self.pins[last] == 0 and self.status[last] == READY:
            if used:
                self._idle.touch(last)
            else:
                self._rest(last)
        for slot in doomed[::-1].tolist():
            self._rest(slot)

    # ---- storing ----

    def reserve(self, root: bytes, parent: int, keys: Words, ids: Ids, owner: int) -> Slots | None:
        """Slots for these pages behind `parent`, whose path is pinned (NO_PARENT: they are the first of `root`).

        None and nothing evicted: there is too little room.
        """
        count = len(ids)
        if count > self.room:
            return None
        self._evict(count - self._free_count)
        self._free_count -= count
        slots = self._free[self._free_count : self._free_count + count][::-1].copy()
        self.status[slots], self.owner[slots] = RESERVED, owner
        self.parent[slots[0]], self.parent[slots[1:]] = parent, slots[:-1]
        self.children[slots[:-1]], self.children[slots[-1]] = 1, 0
        if parent == NO_PARENT:
            self._roots[slots[0]] = np.frombuffer(root, np.uint8)
        else:
            self.children[parent] += 1
        self._tokens[slots] = _pairs(ids)
        self._buckets.insert(slots, keys)
        self.version += 1
        return slots

    def commit(self, slots: Slots, sums: Sums) -> int:
        """The first `len(sums)` of these reserved slots hold their pages now, the others are free.

        Returns how many are ready: none if they, or pages before them, were doomed meanwhile.
        """
        good = 0 if self._is_doomed(int(slots[0])) else len(sums)
        self._release(slots[good:])
        kept = slots[:good]
        if good:
            self.status[kept], self.owner[kept], self.sums[kept] = READY, NOBODY, sums
            self._evictable += good
            self._idle.touch(int(kept[-1]))
        self.version += 1
        return good

    def _is_doomed(self, slot: int) -> bool:
        return bool((self.status[self.path(slot)] == DOOMED).any())

    def _release(self, slots: Slots) -> None:
        """Free reserved pages, a path's end."""
        if not slots.size:
            return
        self._buckets.remove(slots[self.status[slots] == RESERVED])
        parent = int(self.parent[slots[0]])
        self._free_slots(slots)
        self._lose_child(parent)

    # ---- states ----

    def reserve_state(self, page: int, owner: int) -> int:
        """A state slot for the boundary behind `page`, which has none and is pinned or reserved by the same owner.

        -1: all are in use.
        """
        assert self.state[page] == NO_STATE
        if self.states.used == self.states.total and (oldest := self.states.oldest_idle()) >= 0:
            self.drop_state(oldest)
            self.states.evicted += 1
        slot = self.states.take(page, owner)
        if slot >= 0:
            self.state[page] = slot
            self.version += 1
        return slot

    def commit_state(self, slot: int, checksum: int) -> None:
        """A reserved state slot holds its state now."""
        self.states.commit(slot, checksum)
        self.version += 1

    def drop_state(self, slot: int) -> None:
        """Never find this state again; its slot is free once it has no pins."""
        self.state[self.states.page[slot]] = NO_STATE
        self.states.drop(slot)
        self.version += 1

    # ---- making room and forgetting ----

    def invalidate(self, slot: int) -> None:
        """Never find a ready page again, nor what hangs on it: that grows old and goes as usual."""
        if self.status[slot] != READY:
            return
        self._doom(np.array([slot], np.int32))
        self._idle.discard(slot)
        self._rest(slot)
        self.version += 1

    def reset(self) -> int:
        """Find nothing of today again. What is idle is free at once, the rest when let go. Returns pages freed."""
        idle = (self.pins == 0) & (self.owner == NOBODY) & (self.status != FREE)
        dropped = np.flatnonzero(idle).astype(np.int32)
        for state in self.state[dropped[self.state[dropped] != NO_STATE]].tolist():
            self.drop_state(state)
        busy = np.flatnonzero((self.status != FREE) & ~idle).astype(np.int32)
        self.status[dropped], self.status[busy] = FREE, DOOMED
        self.children.fill(0)
        parents = self.parent[busy]
        np.add.at(self.children, parents[parents != NO_PARENT], 1)
        self._buckets.clear()
        self._idle.clear()
        free = np.flatnonzero(self.status == FREE)[::-1]
        self._free[: len(free)], self._free_count, self._evictable = free, len(free), 0
        self.version += 1
        return len(dropped)

    def next_ready(self, start: int) -> int:
        """The first ready slot from `start` on, in a circle; -1: there is none."""
        for first, part in ((start, self.status[start:]), (0, self.status[:start])):
            ready = part == READY
            if ready.any():
                return first + int(ready.argmax())
        return -1

    def _doom(self, slots: Slots) -> None:
        self._buckets.remove(slots)
        self._evictable -= int(np.count_nonzero(self.pins[slots] == 0))
        self.status[slots] = DOOMED

    def _rest(self, slot: int) -> None:
        """This page lost a pin or a child. If none is left, it is the next to be evicted, or free at once if doomed."""
        if self.children[slot] or self.pins[slot] or self.owner[slot] != NOBODY or self.status[slot] == FREE:
            return
        if self.status[slot] == DOOMED:
            parent = int(self.parent[slot])
            self._free_slots(np.array([slot], np.int32))
            self._lose_child(parent)
        elif slot not in self._idle:
            self._idle.push_first(slot)

    def _lose_child(self, slot: int) -> None:
        if slot != NO_PARENT:
            self.children[slot] -= 1
            self._rest(slot)

    def _evict(self, count: int) -> None:
        """Free that many pages; the caller knows that there are as many to evict.

        A page with children that comes first in the list is only taken off it: what hangs on it was used later, so it
        inherits that place when its last child goes.
        """
        while count > 0:
            oldest = self._idle.first()
            assert oldest >= 0
            self._idle.discard(oldest)
            if self.pins[oldest] or self.children[oldest]:
                continue
            slots = self._climb(oldest, count)
            parent = int(self.parent[slots[-1]])
            self._buckets.remove(slots)
            self._free_slots(slots)
            self._evictable -= len(slots)
            self.evicted.add(self._buckets.keys[slots])
            self.version += 1
            count -= len(slots)
            self._lose_child(parent)

    def _climb(self, slot: int, most: int) -> Slots:
        """This page and those before it that are left without children once it is gone, the last page first."""
        idle, parents = self._idle, self.parent.data
        children, pins, status = self.children.data, self.pins.data, self.status.data
        slots = [slot]
        while len(slots) < most:
            slot = parents[slot]
            if slot == NO_PARENT or children[slot] > 1 or pins[slot] or status[slot] != READY or slot in idle:
                break
            slots.append(slot)
        return np.array(slots, np.int32)

    def _free_slots(self, slots: Slots) -> None:
        for state in self.state[slots[self.state[slots] != NO_STATE]].tolist():
            self.drop_state(state)
        self.status[slots], self.owner[slots], self.parent[slots] = FREE, NOBODY, NO_PARENT
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)


def _pairs(ids: Ids) -> npt.NDArray[np.int64]:
    return ids.view(np.int64)
