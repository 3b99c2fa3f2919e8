"""Requests whose next pages another one is storing: who waits, for how long, and that every wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

import server.twins
from hicache.keys import PAGE_TOKENS
from ipc.messages import Submit
from server.errors import RankLostError, ShuttingDownError
from server.route import MAX_EXTRA_TOKENS
from server.stream import TokenStream
from server.trust import MAX_FAULTS
from tests.cached_ranks import CachedRanks, cached_ranks, prompt
from tests.rank_pair import until

LONG = server.twins.MIN_TOKENS / PAGE_TOKENS + 0.5  # pages that are just worth waiting for

FAR = MAX_EXTRA_TOKENS * 2  # prompt tokens before a rank that send its conversations to another one


@pytest.fixture
async def ranks() -> Iterator[CachedRanks]:  # type: ignore[misc]
    with cached_ranks(2) as made:
        yield made


def ask(ranks: CachedRanks, pages: float = LONG, first: int = 1) -> asyncio.Task[TokenStream]:
    return asyncio.create_task(ranks.submitter.submit(prompt(pages, first)))


async def waits(ranks: CachedRanks, count: int = 1) -> None:
    await until(lambda: ranks.submitter.twins.waiting == count)


async def owner_of(ranks: CachedRanks, pages: float = LONG) -> Submit:
    """A request that a rank has and whose pages are not there yet."""
    await ask(ranks, pages)
    return ranks.submitted()


async def test_a_twin_waits_for_the_other_s_pages_and_loads_them(ranks: CachedRanks) -> None:
    owner = await owner_of(ranks)
    twin = ask(ranks, LONG + 2)
    await waits(ranks)
    assert ranks.pairs[0].rank.slots.taken == 1
    ranks.finish(owner)
    stream = await twin
    assert stream.prompt_tokens == 2.5 * PAGE_TOKENS
    ranks.finish(ranks.submitted())
    assert (stream.reuse.host_tokens, ranks.inflight()) == (4 * PAGE_TOKENS, 0)
    assert stream.reuse.waited_s > 0
    assert ranks.submitter.twins.waited == 1


async def test_what_is_short_or_bypassed_or_another_caller_s_waits_for_nobody(ranks: CachedRanks) -> None:
    await owner_of(ranks, LONG - 1)
    await ask(ranks, LONG - 1)
    ranks.cache.reset()
    await owner_of(ranks, LONG)
    await ranks.submitter.submit(replace(prompt(LONG), reuse=False))
    await ranks.submitter.submit(replace(prompt(LONG), caller="stranger"))
    assert ranks.submitter.twins.waited == 0


async def test_nobody_waits_for_a_rank_that_is_further_behind_than_computing_takes(ranks: CachedRanks) -> None:
    await owner_of(ranks)
    ranks.pairs[0].rank.promise(FAR)
    await ask(ranks)
    assert ranks.submitter.twins.waited == 0
    assert ranks.pairs[1].rank.slots.taken == 1
    ranks.pairs[0].rank.forget(FAR)


async def test_the_next_one_takes_over_when_the_first_stores_nothing(ranks: CachedRanks) -> None:
    owner = await owner_of(ranks)
    twins = [ask(ranks) for _ in range(3)]
    await waits(ranks, 3)
    assert owner.cache is not None
    ranks.store(owner.cache, pages=0)
    await until(lambda: sum(twin.done() for twin in twins) == 1)
    await waits(ranks, 2)
    ranks.finish(ranks.submitted())
    await asyncio.gather(*twins)
    assert ranks.submitter.twins.waiting == 0


async def test_a_wait_has_an_end(ranks: CachedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.twins, "UNMEASURED_WAIT_S", 0.0)
    monkeypatch.setattr(server.twins, "MIN_WAIT_S", 0.01)
    await owner_of(ranks)
    stream = await ask(ranks)
    assert (ranks.submitter.twins.waited, ranks.submitter.twins.gave_up) == (1, 1)
    assert stream.reuse.waited_s > 0


async def test_a_client_that_leaves_while_it_waits_holds_nothing(ranks: CachedRanks) -> None:
    owner = await owner_of(ranks)
    twin = ask(ranks)
    await waits(ranks)
    twin.cancel()
    await asyncio.gather(twin, return_exceptions=True)
    assert ranks.submitter.twins.waiting == 0
    ranks.finish(owner)  # calls back somebody who is gone
    assert ranks.inflight() == 0
    assert sum(pair.rank.load for pair in ranks.pairs) == 0


async def test_the_loss_of_the_owner_s_rank_ends_the_wait(ranks: CachedRanks) -> None:
    await owner_of(ranks)
    twin = ask(ranks)
    await waits(ranks)
    ranks.pairs[0].rank.lose("it died", RankLostError("gone"))
    ranks.cache.drop_rank(0)
    stream = await twin
    assert (ranks.pairs[1].rank.slots.taken, stream.reuse.cached_tokens) == (1, 0)


async def test_the_end_of_the_server_or_of_the_cache_ends_every_wait(ranks: CachedRanks) -> None:
    await owner_of(ranks)
    twin = ask(ranks)
    await waits(ranks)
    for _ in range(MAX_FAULTS):
        ranks.cache.trust.fault("bad memory")
    assert (await twin).reuse.why == "disabled"


async def test_who_waits_when_the_server_closes_is_told(ranks: CachedRanks) -> None:
    await owner_of(ranks)
    twin = ask(ranks)
    await waits(ranks)
    ranks.submitter.close()
    with pytest.raises(ShuttingDownError):
        await twin
    assert ranks.submitter.twins.waiting == 0


async def test_so_many_wait_and_no_more(ranks: CachedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.twins, "MAX_WAITING", 1)
    owner = await owner_of(ranks)
    twin = ask(ranks)
    await waits(ranks)
    await ask(ranks)
    assert ranks.submitter.twins.waited == 1
    ranks.finish(owner)
    await twin
