"""Reads the cached pages over and over and compares their checksums: memory that went bad is found before a prompt is.

One page at a time, off the loop, at a bounded rate; a page is pinned while it is read. A wrong page is never found
again, counts as a fault of the cache, and costs the prompts that would have used it their cached tokens only.
"""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np

from hicache.rows import sums
from server.cache import Cache
from server.pool import SharedPool
from server.trust import State

# Bytes read a second: of a memory that gives tens of GB, nobody notices these; a pool of 32 GiB takes a quarter hour.
BYTES_PER_S: Final = 32 * 2**20
# Between two pages, however small: each costs the loop two turns.
MIN_PAUSE_S: Final = 0.05
# While there is nothing to read.
IDLE_PAUSE_S: Final = 1.0


class Scrubber:
    """Checks one pool until it is cancelled."""

    def __init__(self, cache: Cache, pool: SharedPool) -> None:
        self._cache = cache
        self._pool = pool

    async def run(self) -> None:
        """One page after the other, as the cache gives them, until it is disabled."""
        while self._cache.trust.state is not State.DISABLED:
            size = await self.check_one()
            await asyncio.sleep(max(MIN_PAUSE_S, size / BYTES_PER_S) if size else IDLE_PAUSE_S)

    async def check_one(self) -> int:
        """Check a page; returns its bytes, 0 where there is none."""
        page, host = self._cache.next_to_scrub(), self._pool.host
        if page is None or host is None:
            return 0
        slot, expected = page
        right = True  # what was not read says nothing
        try:
            found = await asyncio.to_thread(sums, host.pages, np.array([slot], np.uint32), 1)
            right = int(found[0]) == expected
        finally:
            self._cache.scrubbed(slot, right=right)
        return host.shape.page_bytes
