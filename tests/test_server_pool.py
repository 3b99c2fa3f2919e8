"""The host pool's start: its size, who is told of it and when, and what makes it impossible."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hicache.shape import PoolShape
from ipc.errors import SegmentError
from ipc.messages import CacheAttach, Facts
from server.config import Config, ConfigError
from server.pool import GIB, SharedPool
from tests.rank_pair import FACTS, RankPair, rank_pair, until

SIZE_GB = 0.001
PAGES = int(SIZE_GB * GIB) // FACTS.page_bytes


@pytest.fixture
def pairs() -> Iterator[list[RankPair]]:
    with rank_pair(index=0) as one, rank_pair(index=1) as two:
        yield [one, two]


@pytest.fixture
def shared() -> Iterator[SharedPool]:
    pool = SharedPool(Config(hicache_size_gb=SIZE_GB, dp=2))
    yield pool
    pool.close()


def facts_of(**fields: Any) -> Facts:
    return msgspec.structs.replace(FACTS, **fields)


async def test_the_first_rank_s_facts_size_it_and_every_rank_is_told(pairs: list[RankPair], shared: SharedPool) -> None:
    opened: list[tuple[PoolShape, Facts]] = []
    shared.on_open = lambda shape, facts: opened.append((shape, facts))
    shared.rank_loaded(pairs[0].rank, FACTS)
    assert pairs[0].commands() == [], "not before the memory is there"
    await until(lambda: bool(opened))
    shape = PoolShape(2 * PAGES, FACTS.page_bytes, 0, 0)
    assert opened == [(shape, FACTS)]
    assert pairs[0].commands() == [CacheAttach(*shape)]
    shared.rank_loaded(pairs[1].rank, facts_of(num_blocks=3))
    assert pairs[1].commands() == [CacheAttach(*shape)], "the second one at once"
    assert shared.host is not None
    assert shared.host.pages.shape == (2 * PAGES, FACTS.page_bytes)


async def test_states_have_slots_of_their_own(pairs: list[RankPair]) -> None:
    with_states = facts_of(state_bytes=512)
    shared = await until_open(Config(hicache_size_gb=SIZE_GB, dp=2, hicache_state_slots=8), pairs[0], with_states)
    assert shared.host is not None
    assert shared.host.states.shape == (16, 512)
    shared.close()


async def until_open(config: Config, pair: RankPair, facts: Facts) -> SharedPool:
    """A pool of that configuration, once a rank with these facts has it."""
    shared = await make(config)
    shared.rank_loaded(pair.rank, facts)
    await until(lambda: shared.host is not None)
    return shared


async def make(config: Config) -> SharedPool:
    return await asyncio.to_thread(SharedPool, config)  # it reads files


async def test_without_a_size_it_takes_what_memory_allows(
    pairs: list[RankPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.pool.auto_bytes", lambda available, ranks, page_bytes: 5 * page_bytes)
    shared = await until_open(Config(dp=2), pairs[0], FACTS)
    assert shared.host is not None
    assert len(shared.host.pages) == 10
    shared.close()


async def test_a_rank_lost_meanwhile_is_not_told_and_its_successor_is(
    pairs: list[RankPair], shared: SharedPool
) -> None:
    opened: list[PoolShape] = []
    shared.on_open = lambda shape, facts: opened.append(shape)
    rank = pairs[0].rank
    shared.rank_loaded(rank, FACTS)
    rank.link = pairs[1].server  # a new process came up behind a new link before the pool was there
    shared.rank_loaded(rank, FACTS)
    await until(lambda: bool(opened))
    assert (len(pairs[0].commands()), len(pairs[1].commands())) == (0, 1)


@pytest.mark.parametrize("field", ["page_bytes", "state_bytes", "layout_digest", "keep_tokens", "block_size"])
async def test_ranks_whose_pages_differ_are_fatal(pairs: list[RankPair], shared: SharedPool, field: str) -> None:
    fatal: list[str] = []
    shared.on_fatal = fatal.append
    shared.rank_loaded(pairs[0].rank, FACTS)
    other = "x" if field == "layout_digest" else 7
    shared.rank_loaded(pairs[1].rank, facts_of(**{field: other}))
    assert re.fullmatch(f"engine rank 1 cannot share the prefix cache with the others: {field} is .*7?.*", fatal[0])
    await until(lambda: shared.host is not None)
    assert pairs[1].commands() == []


def test_more_than_the_machine_has_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"--hicache-size-gb 60000: 2 rank\(s\) x 60000 GiB = .* bytes, but 90%"):
        SharedPool(Config(hicache_size_gb=60000, dp=2))


async def test_what_only_the_facts_show_to_be_too_large_is_fatal(pairs: list[RankPair], shared: SharedPool) -> None:
    fatal: list[str] = []
    shared.on_fatal = fatal.append
    shared.rank_loaded(pairs[0].rank, facts_of(num_blocks=2**40))
    await until(lambda: bool(fatal))
    assert "--hicache-size-gb: 2 ranks need" in fatal[0]
    assert shared.host is None


async def test_a_page_larger_than_the_pool_is_fatal(pairs: list[RankPair], shared: SharedPool) -> None:
    fatal: list[str] = []
    shared.on_fatal = fatal.append
    shared.rank_loaded(pairs[0].rank, facts_of(page_bytes=2**30))
    await until(lambda: bool(fatal))
    assert "--hicache-size-gb: less than one page" in fatal[0]


def test_descriptors_are_closed_with_it() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    shared = SharedPool(Config(hicache_size_gb=SIZE_GB))
    assert count() == before + 2
    shared.close()
    assert count() == before
    with pytest.raises((SegmentError, ValueError, OSError)):
        shared._files.size(PoolShape(1, 1024, 0, 0))
