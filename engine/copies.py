"""What moves between the device's blocks and the host's pages: two queues, carried on page by page.

Promises that a failure costs its own job only, and that blocks of a store are held until it has ended. Knows nothing
about requests beyond their prefix, and nothing about when to copy: `engine/budget.py` does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from engine.blocks import BlockManager
from engine.prefix import Int32, Prefix, UInt32, UInt64
from hicache.transfer import Ticket, Transfer, TransferError
from ipc.messages import CacheLoaded, CacheStored

_NO_BLOCKS: Final = np.empty(0, np.int32)
_NO_SLOTS: Final = np.empty(0, np.uint32)


@dataclass(eq=False, slots=True)
class Load:
    """Pages `prefix.pages .. len(prefix.slots)` into the same places of `table`, then the state into its row."""

    prefix: Prefix
    table: Int32
    state_row: int  # -1: none


class Loads:
    """First in, first out."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._queue: deque[Load] = deque()
        self._answers: deque[tuple[Ticket | None, CacheLoaded]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def unsettled(self) -> int:
        """Answers that wait until the device has read what it was told to read."""
        return len(self._answers)

    def answer(self, event: CacheLoaded) -> None:
        """Say this once all copies begun so far are over: then its host pages may be let go."""
        try:
            # A store of nothing: done when everything queued on the device before it is.
            fence = self._transfer.store(_NO_BLOCKS, _NO_SLOTS)
        except TransferError:
            fence = None
        self._answers.append((fence, event))

    def settled(self) -> list[CacheLoaded]:
        """Answers whose time has come, each once."""
        ready = []
        while self._answers and self._reached(self._answers[0][0]):
            ready.append(self._answers.popleft()[1])
        return ready

    def _reached(self, fence: Ticket | None) -> bool:
        try:
            return fence is None or self._transfer.done(fence)
        except TransferError:  # whatever broke, nothing is read any more
            return True

    def add(self, load: Load) -> None:
        """Queue a load."""
        self._queue.append(load)

    def drop(self, prefix: Prefix) -> Load:
        """Take out the load of this prefix, however far it is."""
        load = next(load for load in self._queue if load.prefix is prefix)
        self._queue.remove(load)
        return load

    def advance(self, pages: int) -> tuple[int, list[Load]]:
        """Copy up to that many pages; returns how many were copied, and the loads that have ended."""
        left, ended = pages, []
        while self._queue:
            load = self._queue[0]
            count = min(left, len(load.prefix.slots) - load.prefix.pages)
            if not count and load.prefix.pages < len(load.prefix.slots):
                break
            left -= count
            if self._copy(load, count):
                ended.append(self._queue.popleft())
        return pages - left, ended

    def _copy(self, load: Load, count: int) -> bool:
        """Whether the load has ended, one way or the other."""
        prefix, start = load.prefix, load.prefix.pages
        slots = prefix.slots[start : start + count]
        try:
            good = self._good(prefix, slots)
            self._transfer.load(slots[:good], load.table[start : start + good])
            prefix.pages += good
            if good < count:
                prefix.bad = prefix.pages
            elif prefix.pages == len(prefix.slots) and load.state_row >= 0:
                self._copy_state(load)
        except TransferError as error:
            prefix.error = str(error)
        failed = prefix.bad >= 0 or bool(prefix.error)
        if failed and load.state_row >= 0:
            # Pages are worth nothing without the state behind the last of them.
            prefix.pages = 0
        return failed or prefix.pages == len(prefix.slots)

    def _good(self, prefix: Prefix, slots: UInt32) -> int:
        """How many of these pages may be loaded."""
        if not len(prefix.sums):
            return len(slots)
        right = self._transfer.page_sums(slots) == prefix.sums[prefix.pages : prefix.pages + len(slots)]
        return len(right) if right.all() else int(right.argmin())

    def _copy_state(self, load: Load) -> None:
        prefix = load.prefix
        slot = np.array([prefix.plan.load_state], np.uint32)
        if len(prefix.sums) and int(self._transfer.state_sums(slot)[0]) != prefix.plan.load_state_sum:
            prefix.bad = len(prefix.slots)
            return
        self._transfer.load_states(slot, np.array([load.state_row], np.int32))


@dataclass(eq=False, slots=True)
class Store:
    """Pages in `blocks` into `slots`, states into `state_slots`."""

    plan: int
    blocks: list[int]
    slots: UInt32
    state_slots: UInt32
    state_rows: Int32
    limit: int = field(init=False)  # pages that still count; those from a failure on do not
    begun: int = 0  # pages handed to the transfer
    parts: deque[tuple[Ticket, int, int]] = field(default_factory=deque)  # pages start .. end under way
    sums: list[UInt64] = field(default_factory=list)
    states: Ticket | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.limit = len(self.blocks)

    @property
    def left(self) -> int:
        """Pages that are still to be begun."""
        return max(0, self.limit - self.begun)

    def fail(self, page: int, error: TransferError) -> None:
        """Nothing from that page on is stored."""
        self.limit = min(self.limit, page)
        self.error = str(error)


class Stores:
    """First in, first out."""

    def __init__(self, transfer: Transfer, blocks: BlockManager) -> None:
        self._transfer = transfer
        self._blocks = blocks
        self._queue: deque[Store] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def next_pages(self) -> int:
        """Pages of the oldest store that were not begun."""
        return self._queue[0].left if self._queue else 0

    def add(self, store: Store) -> None:
        """Hold the blocks and queue the store. Its states go at once: the next step changes their rows."""
        self._blocks.share(store.blocks)
        if len(store.state_slots):
            try:
                store.states = self._transfer.store_states(store.state_rows, store.state_slots)
            except TransferError as error:
                store.error = str(error)
        self._queue.append(store)

    def advance(self, pages: int) -> tuple[int, list[CacheStored]]:
        """Begin copies of up to that many pages; returns how many were begun, and the answers of what has ended."""
        left = pages
        for store in self._queue:
            if not left:
                break
            if count := min(left, store.left):
                left -= count
                self._begin(store, count)
        ended = []
        while self._queue and self._over(self._queue[0]):
            ended.append(self._end(self._queue.popleft()))
        return pages - left, ended

    def _begin(self, store: Store, count: int) -> None:
        start, end = store.begun, store.begun + count
        try:
            ticket = self._transfer.store(np.array(store.blocks[start:end], np.int32), store.slots[start:end])
        except TransferError as error:
            store.fail(start, error)
        else:
            store.begun = end
            store.parts.append((ticket, start, end))

    def _over(self, store: Store) -> bool:
        """Whether all of it was begun and nothing is under way; takes in what has arrived."""
        while store.parts:
            ticket, start, end = store.parts[0]
            try:
                if not self._transfer.done(ticket):
                    return False
                if end <= store.limit:
                    store.sums.append(self._transfer.page_sums(store.slots[start:end]))
            except TransferError as error:
                store.fail(start, error)
            store.parts.popleft()
        return not store.left and self._states_over(store)

    def _states_over(self, store: Store) -> bool:
        try:
            return store.states is None or self._transfer.done(store.states)
        except TransferError as error:
            store.states, store.error = None, str(error)
            return True

    def _end(self, store: Store) -> CacheStored:
        # All at once: given back part by part, the first pages would be reused before those behind them.
        self._blocks.give_back(store.blocks)
        states: tuple[tuple[int, int], ...] = ()
        if store.states is not None:
            try:
                sums = self._transfer.state_sums(store.state_slots)
                states = tuple(zip(store.state_slots.tolist(), sums.tolist(), strict=True))
            except TransferError as error:
                store.error = str(error)
        return CacheStored(
            store.plan, store.limit, b"".join(part.tobytes() for part in store.sums), states, store.error
        )
