"""Which rank takes a request: the ready one that holds the fewest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import NotReadyError
from server.rank import Rank, RankState
from server.route import pick
from server.stream import TokenStream


def rank_with(index: int, taken: int, state: RankState = RankState.READY) -> Rank:
    rank = Rank(index, 8)
    rank.state = state
    for _ in range(taken):
        rank.slots.take(TokenStream())
    return rank


@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from(RankState)), min_size=1, max_size=8))
def test_the_first_of_the_least_loaded_ready_ranks_is_picked(held: list[tuple[int, RankState]]) -> None:
    ranks = [rank_with(index, taken, state) for index, (taken, state) in enumerate(held)]
    ready = [(taken, index) for index, (taken, state) in enumerate(held) if state is RankState.READY]
    if ready:
        assert pick(ranks).index == min(ready)[1]
    else:
        with pytest.raises(NotReadyError):
            pick(ranks)


def test_a_refusal_says_what_every_rank_does() -> None:
    ranks = [rank_with(0, 0, RankState.LOADING), rank_with(1, 0, RankState.LOST)]
    with pytest.raises(NotReadyError, match=r"no engine rank is ready \(rank 0 loading, rank 1 lost\)"):
        pick(ranks)
