"""Where requests go: to the least loaded rank, or home as long as home is not far behind."""

from __future__ import annotations

import pytest

from server.errors import NotReadyError
from server.rank import Rank, RankState
from server.route import MAX_EXTRA_REQUESTS, MAX_EXTRA_TOKENS, Router

IDLE = (0, 0)


def ranks_of(count: int) -> list[Rank]:
    ranks = [Rank(index, 64, 32768) for index in range(count)]
    for rank in ranks:
        rank.state = RankState.READY
    return ranks


def router_of(ranks: list[Rank], waiting: dict[int, tuple[int, int]] | None = None, *, affinity: bool = True) -> Router:
    lines = waiting or {}
    return Router(ranks, lambda index: lines.get(index, IDLE), affinity=affinity)


def test_least_loaded_counts_prompt_tokens_first_then_requests() -> None:
    ranks = ranks_of(3)
    ranks[0].promise(100)
    ranks[1].promise(50)
    ranks[2].promise(50)
    ranks[2].promise(0)
    assert router_of(ranks).least_loaded() == 1
    assert router_of(ranks, {1: (1, 60)}).least_loaded() == 2
    ranks[1].state = ranks[2].state = RankState.LOST
    assert router_of(ranks).least_loaded() == 0


def test_no_ready_rank_is_named() -> None:
    ranks = ranks_of(2)
    ranks[0].state, ranks[1].state = RankState.LOST, RankState.LOADING
    with pytest.raises(NotReadyError, match="rank 0 lost, rank 1 loading"):
        router_of(ranks).choose(b"s")


def test_a_conversation_stays_home_until_home_is_far_behind() -> None:
    ranks = ranks_of(2)
    router = router_of(ranks)
    assert router.choose(b"s") == 0
    ranks[0].promise(MAX_EXTRA_TOKENS)
    assert router.choose(b"s") == 0
    ranks[0].promise(1)
    assert router.choose(b"s") == 1
    ranks[0].forget(1)
    ranks[0].forget(MAX_EXTRA_TOKENS)
    assert router.choose(b"s") == 1  # it has moved


def test_a_lost_home_is_left() -> None:
    ranks = ranks_of(2)
    router = router_of(ranks)
    assert router.choose(b"s") == 0
    ranks[0].state = RankState.LOST
    assert router.choose(b"s") == 1


def test_without_affinity_every_turn_goes_to_the_least_loaded() -> None:
    ranks = ranks_of(2)
    router = router_of(ranks, affinity=False)
    assert router.choose(b"s") == 0
    ranks[0].promise(1)
    assert router.choose(b"s") == 1


def test_sessions_that_open_alike_spread_out() -> None:
    ranks = ranks_of(4)
    router = router_of(ranks)
    for _ in range(64):
        ranks[router.choose(b"the same first message")].promise(200)
    loads = [rank.load for rank in ranks]
    assert sum(loads) == 64
    assert max(loads) - min(loads) <= MAX_EXTRA_REQUESTS + 1
