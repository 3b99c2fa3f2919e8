"""The cache's border with the server: plans that travel, answers that come back, callers apart, faults, reset."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import server.submit
from hicache.keys import PAGE_TOKENS, extend
from ipc.messages import (
    CacheForget,
    CacheLoaded,
    CacheOffer,
    CachePlan,
    CacheStore,
    CacheStored,
    Event,
    Sampling,
    Submit,
)
from server.cache import Cache
from server.errors import OverloadedError, RankLostError
from server.rank import STEPS_AHEAD
from server.stream import TokenStream
from server.trust import MAX_FAULTS, State
from tests.cached_ranks import CachedRanks, cached_ranks, prompt, slots
from tests.rank_pair import NO_RECORDS, SHAPE, STEP_TOKENS, until


@pytest.fixture
async def ranks() -> Iterator[CachedRanks]:  # type: ignore[misc]
    with cached_ranks() as made:
        yield made


async def ask(ranks: CachedRanks, pages: float, first: int = 1) -> TokenStream:
    return await ranks.submitter.submit(prompt(pages, first))


async def serve(ranks: CachedRanks, pages: float, first: int = 1) -> TokenStream:
    """One request from its submit to its end."""
    stream = await ask(ranks, pages, first)
    ranks.finish(ranks.submitted())
    return stream


async def test_a_following_turn_loads_what_the_turn_before_stored(ranks: CachedRanks) -> None:
    first = await serve(ranks, 3.5)
    assert (first.reuse.cached_tokens, first.reuse.why) == (0, "never_stored")
    second = await ask(ranks, 5.5)
    submit = ranks.submitted()
    assert submit.cache is not None
    assert (slots(submit.cache.load), slots(submit.cache.store), submit.cache.store_from) == (3, 2, 3)
    assert ranks.pairs[0].rank.pending_tokens == int(2.5 * PAGE_TOKENS), "only what has to be computed counts"
    assert second.reuse.cached_tokens == 0, "not before the rank has told"
    ranks.finish(submit)
    assert (second.reuse.host_tokens, second.reuse.why) == (3 * PAGE_TOKENS, "never_stored")
    assert (ranks.inflight(), ranks.pairs[0].rank.pending_tokens) == (0, 0)
    assert ranks.cache.cache_counts(0) == (9 * PAGE_TOKENS, 0, 3 * PAGE_TOKENS)


async def test_who_waits_in_line_is_let_in_once_its_pages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.submit, "LOOK_INTERVAL_S", 0.0)
    with cached_ranks() as ranks:
        rank = ranks.pairs[0].rank
        rank.promise(STEP_TOKENS * STEPS_AHEAD)  # others' work: whoever comes now waits
        first, second = (asyncio.create_task(ask(ranks, 20.5)) for _ in range(2))
        await until(lambda: ranks.submitter.waiting(0)[0] == 2)
        rank.forget(STEP_TOKENS * STEPS_AHEAD)
        rank.promise(STEP_TOKENS * STEPS_AHEAD - 21 * PAGE_TOKENS)  # room for one of them, uncached
        rank.made_room()
        await first
        assert ranks.submitter.waiting(0)[0] == 1
        rank.promise(20 * PAGE_TOKENS)
        ranks.finish(ranks.submitted())
        stream = await second
        assert stream.prompt_tokens == PAGE_TOKENS // 2


async def test_all_of_a_prompt_that_can_be_reused_says_so(ranks: CachedRanks) -> None:
    await serve(ranks, 3)
    again = await serve(ranks, 3)
    assert (again.reuse.cached_tokens, again.reuse.why) == (2 * PAGE_TOKENS, "capped_by_keep_tokens")
    longer = await ask(ranks, 3.5)
    ranks.finish(ranks.submitted())
    assert (longer.reuse.cached_tokens, longer.reuse.why) == (3 * PAGE_TOKENS, "full")


async def test_what_the_device_had_beyond_the_plan_counts_by_its_tier(ranks: CachedRanks) -> None:
    stream = await ask(ranks, 2.5)
    ranks.finish(ranks.submitted(), device_tokens=2 * PAGE_TOKENS)
    assert (stream.reuse.device_tokens, stream.reuse.host_tokens) == (2 * PAGE_TOKENS, 0)
    assert stream.reuse.why == "full"
    assert ranks.cache.cache_counts(0) == (int(2.5 * PAGE_TOKENS), 2 * PAGE_TOKENS, 0)


async def test_callers_never_share_a_page(ranks: CachedRanks) -> None:
    await serve(ranks, 3.5)
    stranger = await ranks.submitter.submit(replace(prompt(3.5), caller="stranger"))
    submit = ranks.submitted()
    assert submit.cache is not None
    assert not submit.cache.load
    ranks.finish(submit)
    owner = await serve(ranks, 3.5)
    assert stranger.reuse.cached_tokens == 0
    assert owner.reuse.cached_tokens == 3 * PAGE_TOKENS, "the pair: the same prompt of the same caller hits"


async def test_a_bypassed_request_reuses_nothing_and_counts_in_full(ranks: CachedRanks) -> None:
    await serve(ranks, 3.5)
    stream = await ranks.submitter.submit(replace(prompt(3.5), reuse=False))
    submit = ranks.submitted()
    assert submit.cache is not None
    assert (submit.cache.reuse, submit.cache.load) == (False, b"")
    assert ranks.pairs[0].rank.pending_tokens == int(3.5 * PAGE_TOKENS)
    queries = ranks.cache.cache_counts(0)
    ranks.finish(submit)
    assert (stream.reuse.why, stream.reuse.cached_tokens) == ("bypassed", 0)
    assert ranks.cache.cache_counts(0) == queries


async def test_a_full_ring_leaves_no_plan_behind(ranks: CachedRanks) -> None:
    filler = Submit(0, 0, "filler", bytes(SHAPE.submit_bytes // 4), 1, Sampling(seed=1))
    while ranks.pairs[0].server.send(filler):
        pass
    with pytest.raises(OverloadedError, match="the submit ring of rank 0 is full"):
        await ask(ranks, 40)
    usage = ranks.cache.usage()
    assert usage is not None
    assert (ranks.inflight(), usage.pages_used) == (0, 0)


def offer_behind(ranks: CachedRanks, plan: CachePlan) -> CacheOffer:
    """The rank offers the second and third page of a prompt whose first it had computed."""
    whole = prompt(3)
    keys = extend(plan.root, whole.ids)
    offer = CacheOffer(keys[:16], keys[16:], whole.ids[PAGE_TOKENS:].astype("<i4").tobytes())
    ranks.pairs[0].engine.publish(NO_RECORDS, [offer])
    ranks.drain()
    return offer


async def test_the_pages_of_an_answer_are_stored_as_the_rank_offers_them(ranks: CachedRanks) -> None:
    await ask(ranks, 1.5)
    plan = ranks.finish(ranks.submitted())
    offer = offer_behind(ranks, plan)
    (command,) = ranks.pairs[0].commands()
    assert isinstance(command, CacheStore)
    assert (command.keys, slots(command.store)) == (offer.keys, 2)
    stored = CacheStored(command.plan, 2, np.zeros(2, np.uint64).tobytes())
    ranks.pairs[0].engine.publish(NO_RECORDS, [stored])
    ranks.drain()
    turn = await serve(ranks, 3.5)
    assert turn.reuse.host_tokens == 3 * PAGE_TOKENS
    assert ranks.inflight() == 0


async def test_an_offer_waits_for_the_pages_before_it(ranks: CachedRanks) -> None:
    await ask(ranks, 1.5)
    plan = ranks.submitted().cache
    assert plan is not None
    offer_behind(ranks, plan)
    assert ranks.pairs[0].commands() == []
    ranks.store(plan)
    (command,) = ranks.pairs[0].commands()
    assert isinstance(command, CacheStore)


async def test_an_offer_of_a_rank_that_is_gone_holds_nothing(ranks: CachedRanks) -> None:
    await ask(ranks, 1.5)
    plan = ranks.submitted().cache
    assert plan is not None
    ranks.collectors[0].start()
    offer_behind(ranks, plan)
    ranks.collectors[0].stop()
    ranks.cache.drop_rank(0)
    usage = ranks.cache.usage()
    assert usage is not None
    assert (ranks.inflight(), usage.pages_used, ranks.pairs[0].commands()) == (0, 0, [])


async def test_a_lost_rank_holds_its_pages_until_it_is_gone(ranks: CachedRanks) -> None:
    await serve(ranks, 3.5)
    await ask(ranks, 5.5)
    ranks.pairs[0].rank.lose("it died", RankLostError("gone"))
    usage = ranks.cache.usage()
    assert usage is not None
    assert (ranks.inflight(), usage.pages_used) == (1, 5)
    ranks.cache.drop_rank(0)
    usage = ranks.cache.usage()
    assert usage is not None
    assert (ranks.inflight(), usage.pages_used) == (0, 3)


async def test_after_a_reset_nothing_is_found_and_ranks_forget(ranks: CachedRanks) -> None:
    await serve(ranks, 3.5)
    assert ranks.cache.reset() == 3
    assert ranks.pairs[0].commands() == [CacheForget()]
    turn = await serve(ranks, 3.5)
    assert turn.reuse.cached_tokens == 0
    again = await serve(ranks, 3.5)
    assert again.reuse.cached_tokens == 3 * PAGE_TOKENS


async def test_what_is_stored_across_a_reset_is_not_found(ranks: CachedRanks) -> None:
    await ask(ranks, 3.5)
    submit = ranks.submitted()
    ranks.cache.reset()
    ranks.finish(submit)
    turn = await serve(ranks, 3.5)
    assert turn.reuse.cached_tokens == 0


# ---- faults ----


def fail_load(ranks: CachedRanks, *, bad: int = -1) -> None:
    """The newest request could not load what it should."""
    submit = ranks.submitted()
    assert submit.cache is not None
    error = "" if bad >= 0 else "no such luck"
    ranks.pairs[0].engine.publish(NO_RECORDS, [CacheLoaded(submit.cache.plan, bad=bad, error=error)])
    ranks.drain()


async def test_three_faults_disable_the_cache_loudly_and_for_good(
    ranks: CachedRanks, caplog: pytest.LogCaptureFixture
) -> None:
    await serve(ranks, 3.5)
    for number in range(MAX_FAULTS):
        assert ranks.cache.trust.as_json() == {"state": "on", "reason": None}, number
        stream = await ask(ranks, 3.5)
        fail_load(ranks)
        assert (stream.reuse.why, stream.reuse.error) == ("failed", "no such luck")
    assert ranks.cache.trust.state is State.DISABLED
    assert "no such luck" in (ranks.cache.trust.as_json()["reason"] or "")
    assert [record.levelno for record in caplog.records].count(logging.CRITICAL) == 1
    stream = await ask(ranks, 3.5)
    assert ranks.submitted().cache is None
    assert (stream.reuse.why, stream.prompt_tokens) == ("disabled", int(3.5 * PAGE_TOKENS))
    ranks.cache.reset()
    assert ranks.cache.trust.state is State.DISABLED
    assert ranks.cache.next_to_scrub() is None


async def test_plans_that_were_out_when_it_was_disabled_are_closed(ranks: CachedRanks) -> None:
    await ask(ranks, 3.5)
    submit = ranks.submitted()
    for _ in range(MAX_FAULTS):
        ranks.cache.trust.fault("bad memory")
    ranks.finish(submit)
    assert ranks.inflight() == 0


async def test_a_page_with_a_wrong_checksum_is_not_found_again(ranks: CachedRanks) -> None:
    await serve(ranks, 3.5)
    await ask(ranks, 3.5)
    fail_load(ranks, bad=1)
    turn = await ask(ranks, 3.5)
    submit = ranks.submitted()
    assert submit.cache is not None
    assert slots(submit.cache.load) == 1
    ranks.finish(submit)
    assert turn.reuse.cached_tokens == PAGE_TOKENS
    assert ranks.cache.trust.state is State.ON


async def test_a_failed_store_and_an_impossible_count_are_faults(ranks: CachedRanks) -> None:
    stream = await ask(ranks, 3.5)
    submit = ranks.submitted()
    assert submit.cache is not None
    events: list[Event] = [
        CacheLoaded(submit.cache.plan, host_tokens=10**6),
        CacheStored(submit.cache.plan, error="disk full"),
    ]
    ranks.pairs[0].engine.publish(NO_RECORDS, events)
    ranks.drain()
    assert (ranks.cache.trust.faults, stream.reuse.cached_tokens, ranks.inflight()) == (2, 0, 0)


async def test_an_exception_within_costs_cached_tokens_and_nothing_else(
    ranks: CachedRanks, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable = replace(prompt(3.5), ids=prompt(3.5).ids.reshape(-1, 2))  # no prompt has that shape
    prospect = ranks.cache.look(unreadable)
    assert (prospect.look, prospect.reuse.why) == (None, "failed")
    assert caplog.text.count("Traceback") == 1
    assert ranks.cache.trust.faults == 1
    ranks.cache.withdraw(CacheStore(99, b"", b""))  # a plan that nobody has
    assert ranks.cache.trust.faults == 1


async def test_without_a_pool_all_of_it_is_nothing() -> None:
    cache = Cache([])
    prospect = cache.look(prompt(3.5))
    assert (prospect.tokens, prospect.reuse.why) == (int(3.5 * PAGE_TOKENS), "off")
    assert cache.plan(0, prospect, prompt(3.5)) is None
    assert (cache.reset(), cache.counts(0), cache.usage(), cache.fds) == (0, None, None, None)
    assert cache.trust.as_json() == {"state": "off", "reason": None}
    cache.loaded(0, CacheLoaded(1))
    cache.stored(0, CacheStored(1))
    cache.offered(0, CacheOffer(b"", b"", b""), lambda command: pytest.fail("there is nothing to store into"))
    cache.drop_rank(0)
    settled = asyncio.Event()
    cache.settled(1, settled.set)
    assert settled.is_set()
