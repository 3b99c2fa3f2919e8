"""Reads cached pages and states over and over and compares their checksums: memory that went bad is found before a
prompt is.

One page or state at a time, in turns, off the loop, at a bounded rate. A wrong one is never found again, counts as a
fault of the cache, and costs the prompts that would have used it their cached tokens only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

import numpy as np

from hicache.pool import UInt8
from hicache.rows import sums
from server.cache import Cache
from server.pool import SharedPool
from server.trust import State

# Bytes read a second: of a memory that gives tens of GB, nobody notices these; a pool of 32 GiB takes a quarter hour.
BYTES_PER_S: Final = 32 * 2**20
# Between two of them, however small: each costs the loop two turns.
MIN_PAUSE_S: Final = 0.05
# While there is nothing to read.
IDLE_PAUSE_S: Final = 1.0


class Scrubber:
    """Checks one pool until it is cancelled."""

    def __init__(self, cache: Cache, pool: SharedPool) -> None:
        self._cache = cache
        self._pool = pool
        self._checks = deque([self._check_page, self._check_state])

    async def run(self) -> None:
        """One after the other, as the cache gives them, until it is disabled."""
        while self._cache.trust.state is not State.DISABLED:
            size = await self.check_one()
            await asyncio.sleep(max(MIN_PAUSE_S, size / BYTES_PER_S) if size else IDLE_PAUSE_S)

    async def check_one(self) -> int:
        """Check a page or a state; returns its bytes, 0 where there is none."""
        for _ in range(len(self._checks)):
            self._checks.rotate()
            if size := await self._checks[0]():
                return size
        return 0

    async def _check_page(self) -> int:
        page, host = self._cache.next_to_scrub(), self._pool.host
        if page is None or host is None:
            return 0
        await _compare(host.pages, *page, self._cache.scrubbed)
        return host.shape.page_bytes

    async def _check_state(self) -> int:
        state, host = self._cache.next_state_to_scrub(), self._pool.host
        if state is None or host is None:
            return 0
        await _compare(host.states, *state, self._cache.scrubbed_state)
        return host.shape.state_bytes


class _Tell(Protocol):
    def __call__(self, slot: int, *, right: bool) -> None: ...


async def _compare(memory: UInt8, slot: int, expected: int, tell: _Tell) -> None:
    """Read a row and tell whether it has this checksum."""
    right = True  # what was not read says nothing
    try:
        found = await asyncio.to_thread(sums, memory, np.array([slot], np.uint32), 1)
        right = int(found[0]) == expected
    finally:
        tell(slot, right=right)
