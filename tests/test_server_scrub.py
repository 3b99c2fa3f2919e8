"""Checksums of cached pages, compared in the background: what is right stays, what is wrong is never found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

import server.scrub
from hicache.keys import PAGE_TOKENS
from hicache.rows import sums
from ipc.messages import CacheStored
from server.config import Config
from server.pool import SharedPool
from server.scrub import Scrubber
from server.trust import MAX_FAULTS, State
from tests.cached_ranks import CachedRanks, cached_ranks, prompt
from tests.rank_pair import FACTS, NO_RECORDS, until


@dataclass
class Stored:
    """A cache with three real pages in a real pool."""

    ranks: CachedRanks
    pool: SharedPool
    slots: list[int]
    scrubber: Scrubber

    def flip(self, page: int) -> None:
        assert self.pool.host is not None
        self.pool.host.pages[self.slots[page], 3] ^= 1

    def loadable(self) -> int:
        """Pages that a following turn would load."""
        look = self.ranks.cache.look(prompt(3.5)).look
        assert look is not None
        return look.cached_tokens // PAGE_TOKENS


@pytest.fixture
async def stored() -> AsyncIterator[Stored]:
    pool = await asyncio.to_thread(SharedPool, Config(hicache_size_gb=0.001))
    with cached_ranks() as ranks:
        pool.rank_loaded(ranks.pairs[0].rank, FACTS)
        await until(lambda: pool.host is not None)
        await ranks.submitter.submit(prompt(3.5))
        plan = ranks.submitted().cache
        assert plan is not None
        assert pool.host is not None
        slots = np.frombuffer(plan.store, np.uint32)
        pool.host.pages[slots] = np.arange(3, dtype=np.uint8)[:, None] + 1
        event = CacheStored(plan.plan, 3, sums(pool.host.pages, slots).tobytes())
        ranks.pairs[0].engine.publish(NO_RECORDS, [event])
        ranks.drain()
        yield Stored(ranks, pool, slots.tolist(), Scrubber(ranks.cache, pool))
    pool.close()


async def test_right_pages_are_checked_round_after_round_and_stay(stored: Stored) -> None:
    for _ in range(7):
        assert await stored.scrubber.check_one() == FACTS.page_bytes
    assert (stored.ranks.cache.scrubbed_pages, stored.ranks.cache.trust.faults, stored.loadable()) == (7, 0, 3)


async def test_a_flipped_byte_is_found_within_a_round_and_costs_what_hangs_on_it(stored: Stored) -> None:
    stored.flip(1)
    for _ in range(3):
        await stored.scrubber.check_one()
    assert (stored.ranks.cache.trust.faults, stored.loadable()) == (1, 1)
    assert stored.ranks.cache.trust.state is State.ON


async def test_without_pages_there_is_nothing_to_do(stored: Stored) -> None:
    stored.ranks.cache.reset()
    assert await stored.scrubber.check_one() == 0


async def test_it_goes_on_until_the_cache_is_disabled(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.scrub, "MIN_PAUSE_S", 0.0)
    task = asyncio.create_task(stored.scrubber.run())
    await until(lambda: stored.ranks.cache.scrubbed_pages > 3)
    for _ in range(MAX_FAULTS):
        stored.ranks.cache.trust.fault("bad memory")
    await task


async def test_a_check_that_is_cancelled_lets_its_page_go(stored: Stored) -> None:
    task = asyncio.create_task(stored.scrubber.check_one())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(3):
        assert await stored.scrubber.check_one() == FACTS.page_bytes
    assert stored.ranks.cache.trust.faults == 0
