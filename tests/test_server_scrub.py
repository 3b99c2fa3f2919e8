"""Checksums of cached pages and states, compared in the background: what is wrong is never found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import pytest

import server.scrub
from hicache.keys import PAGE_TOKENS
from hicache.pool import HostPool
from hicache.rows import sums
from ipc.messages import CacheStored, Facts
from server.config import Config
from server.pool import SharedPool
from server.scrub import Scrubber
from server.trust import MAX_FAULTS, State
from tests.cached_ranks import CachedRanks, cached_ranks, prompt
from tests.rank_pair import FACTS, NO_RECORDS, until

STATE_FACTS: Final = ("state_bytes", "num_states", "state_window", "first_state")
PAGES_ONLY: Final = msgspec.structs.replace(FACTS, max_model_len=2**16)
WITH_STATES: Final = msgspec.structs.replace(
    PAGES_ONLY, state_bytes=512, num_states=8, state_window=652, first_state=128, keep_tokens=1
)


@dataclass
class Stored:
    """A cache with three real pages in a real pool, and their states where there are any."""

    ranks: CachedRanks
    pool: SharedPool
    slots: list[int]
    state_slots: dict[int, int]  # by the pages before
    scrubber: Scrubber

    @property
    def host(self) -> HostPool:
        assert self.pool.host is not None
        return self.pool.host

    def flip(self, page: int) -> None:
        self.host.pages[self.slots[page], 3] ^= 1

    def loadable(self) -> int:
        """Pages that a following turn would load."""
        look = self.ranks.cache.look(prompt(3.5)).look
        assert look is not None
        return look.cached_tokens // PAGE_TOKENS


@asynccontextmanager
async def stored_with(facts: Facts) -> AsyncIterator[Stored]:
    pool = await asyncio.to_thread(SharedPool, Config(hicache_size_gb=0.001, hicache_state_slots=8))
    states = {"states": 8} if facts.state_bytes else {}
    with cached_ranks(**states, **{name: getattr(facts, name) for name in STATE_FACTS}) as ranks:
        pool.rank_loaded(ranks.pairs[0].rank, facts)
        await until(lambda: pool.host is not None)
        await ranks.submitter.submit(prompt(3.5))
        plan = ranks.submitted().cache
        assert plan is not None
        assert pool.host is not None
        slots, state_slots = np.frombuffer(plan.store, np.uint32), dict(plan.store_states)
        pool.host.pages[slots] = np.arange(3, dtype=np.uint8)[:, None] + 1
        rows = np.array(list(state_slots.values()), np.uint32)
        pool.host.states[rows] = 7
        state_sums = tuple(zip(rows.tolist(), sums(pool.host.states, rows).tolist(), strict=True))
        event = CacheStored(plan.plan, 3, sums(pool.host.pages, slots).tobytes(), state_sums)
        ranks.pairs[0].engine.publish(NO_RECORDS, [event])
        ranks.drain()
        yield Stored(ranks, pool, slots.tolist(), state_slots, Scrubber(ranks.cache, pool))
    pool.close()


@pytest.fixture
async def stored() -> AsyncIterator[Stored]:
    async with stored_with(PAGES_ONLY) as found:
        yield found


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


async def test_states_are_checked_in_turns_with_pages() -> None:
    async with stored_with(WITH_STATES) as stored:
        cache = stored.ranks.cache
        sizes = [await stored.scrubber.check_one() for _ in range(6)]
        assert sorted(sizes) == [WITH_STATES.state_bytes] * 3 + [FACTS.page_bytes] * 3
        assert (cache.scrubbed_pages, cache.scrubbed_states, cache.trust.faults, stored.loadable()) == (3, 3, 0, 3)


async def test_a_flipped_byte_of_a_state_costs_its_boundary_only() -> None:
    async with stored_with(WITH_STATES) as stored:
        stored.host.states[stored.state_slots[3], 3] ^= 1
        for _ in range(6):
            await stored.scrubber.check_one()
        assert (stored.ranks.cache.trust.faults, stored.loadable()) == (1, 2)
        for _ in range(6):
            await stored.scrubber.check_one()
        assert stored.ranks.cache.trust.faults == 1
