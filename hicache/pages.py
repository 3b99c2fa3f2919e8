"""The columns that describe the slots of a pool, and what can be read from them.

A slot is free, reserved (an owner stores into it), ready, or doomed (never found again, not yet free). Nothing here is
an object per page: columns do not grow, and the garbage collector has nothing to walk. `hicache/index.py` keeps them
true.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache import walks
from hicache.buckets import Slots
from hicache.keys import KEY_BYTES, PAGE_TOKENS
from hicache.lru import LruList
from hicache.states import NOBODY

FREE, RESERVED, READY, DOOMED = range(4)
NO_PARENT: Final = -1
NO_STATE: Final = -1
NO_SLOTS: Final = np.zeros(0, np.int32)
# Slots that are looked through at once for the next ready page, which is mostly the next slot.
STRIDE: Final = 4096
_ROW_BYTES: Final = 4 * PAGE_TOKENS

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


class Pages:
    """Columns over the slots, and the stack of free ones."""

    def __init__(self, total: int) -> None:
        # Large columns are written here: memory that is touched for the first time by a prompt costs it milliseconds.
        self.total: Final = total
        self.status: Final = np.zeros(total, np.uint8)
        self.parent: Final = np.full(total, NO_PARENT, np.int32)
        self.children: Final = np.zeros(total, np.int32)
        self.pins: Final = np.zeros(total, np.int32)
        self.state: Final = np.full(total, NO_STATE, np.int32)
        self.owner: Final = np.full(total, NOBODY, np.int64)
        self.sums: Final = np.full(total, 0, np.uint64)
        self._tokens: Final = np.full((total, PAGE_TOKENS), 0, np.int32)
        self._roots: Final = np.full((total, KEY_BYTES), 0, np.uint8)
        self._free: Final = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free_count = total

    def take(self, count: int) -> Slots:
        """That many free slots, in rising order where they were freed together: copies are faster on neighbours."""
        assert count <= self.free_count
        self.free_count -= count
        return self._free[self.free_count : self.free_count + count][::-1].copy()

    def give(self, slots: Slots) -> None:
        """These slots, a path from its end on, are free."""
        self.status[slots], self.owner[slots], self.parent[slots] = FREE, NOBODY, NO_PARENT
        self._free[self.free_count : self.free_count + len(slots)] = slots
        self.free_count += len(slots)

    def give_all(self, slots: Slots) -> None:
        """These slots, in no order, are free; the stack is sorted anew."""
        self.give(slots)
        free = np.flatnonzero(self.status == FREE)[::-1]
        self._free[: self.free_count] = free

    def write(self, slots: Slots, ids: Ids, root: bytes, parent: int, owner: int) -> None:
        """Reserve these slots for a path of pages with these `[n, 128]` tokens behind `parent`."""
        self.status[slots], self.owner[slots] = RESERVED, owner
        self.parent[slots[0]], self.parent[slots[1:]] = parent, slots[:-1]
        self.children[slots[:-1]], self.children[slots[-1]] = 1, 0
        if parent == NO_PARENT:
            self._roots[slots[0]] = np.frombuffer(root, np.uint8)
        else:
            self.children[parent] += 1
        self._tokens[slots] = ids

    def agreeing(self, slots: Slots, ids: Ids, root: bytes, after: int) -> int:
        """How many of these slots are one path behind `after` (or at `root`) with just these `[n, 128]` tokens.

        Whether they can be found is not asked here.
        """
        slots = slots[: len(ids)]
        if not slots.size or self.parent[slots[0]] != after:
            return 0
        if after == NO_PARENT and self._roots[slots[0]].tobytes() != root:
            return 0
        slots = slots[: 1 + _leading(self.parent[slots[1:]] == slots[:-1])]
        return walks.agreeing(self._tokens, slots, ids, _ROW_BYTES)

    def leading(self, slots: Slots, status: int) -> int:
        """How many of these slots have that status before the first that has not."""
        return _leading(self.status[slots] == status)

    def path(self, slot: int) -> Slots:
        """The page in `slot` (or NO_PARENT: nothing) and all before it, first page first."""
        return np.frombuffer(walks.path(self.parent, slot), np.int32)

    def climb(self, slot: int, most: int, stays: LruList) -> Slots:
        """This page and the ones before it that lose their only child with it, at most so many, the last one first.

        It ends before a page that `stays`, is pinned or not ready.
        """
        columns = self.parent, self.children, self.pins, self.status, stays.after
        return np.frombuffer(walks.climb(columns, READY, slot, most), np.int32)

    def begins_with(self, slot: int, page: Ids) -> bool:
        """Whether a first page with these tokens `[128]` is ready in `slot`."""
        first = self.status[slot] == READY and self.parent[slot] == NO_PARENT
        return bool(first) and bool(np.array_equal(self._tokens[slot], page))

    def next_ready(self, start: int) -> int:
        """The first ready slot from `start` on, in a circle; -1: there is none."""
        for first in chain(range(start, self.total, STRIDE), range(0, start, STRIDE)):
            ready: Flags = self.status[first : first + STRIDE] == READY
            if ready.any():
                return first + int(ready.argmax())
        return -1


def _leading(flags: Flags) -> int:
    """How many are true before the first that is not."""
    first = int(flags.argmin()) if flags.size else 0
    return len(flags) if not flags.size or flags[first] else first
