"""Admission: bounded, fair, nothing lost when clients leave or ranks die; a promise is always kept or forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from server.admission import MAX_RETRY_S, MIN_RETRY_S, Admission, Limits
from server.errors import ApiError, NotReadyError, OverloadedError, RateLimitedError


class Desk:
    """A place with room for so many prompts at once."""

    def __init__(self, room: int, rate: float = 0.0) -> None:
        self.room = room
        self.ready = True
        self.prefill_rate = rate
        self.promised: list[int] = []

    @property
    def pending_tokens(self) -> int:
        return sum(self.promised)

    def has_room(self, tokens: int) -> bool:
        return len(self.promised) < self.room

    def promise(self, tokens: int) -> None:
        assert self.has_room(tokens)
        self.promised.append(tokens)

    def forget(self, tokens: int) -> None:
        self.promised.remove(tokens)


def wide(requests: int = 100, tokens: int = 10**9, *, shared: bool = False) -> Limits:
    return Limits(requests, tokens, shared)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_room_is_given_at_once_and_then_in_turn() -> None:
    desk = Desk(1)
    admission = Admission([desk], wide())
    assert await admission.enter(0, "a", 10) == 0
    waiting = [asyncio.create_task(admission.enter(0, "a", tokens)) for tokens in (20, 30)]
    await settle()
    assert admission.waiting(0) == (2, 50)
    desk.forget(10)
    admission.advance(0)
    await settle()
    assert waiting[0].done()
    assert not waiting[1].done()
    assert desk.promised == [20]
    desk.forget(20)
    admission.advance(0)
    assert await waiting[1] == 0
    assert admission.waiting(0) == (0, 0)


async def test_who_has_less_to_compute_by_now_is_let_in_for_that() -> None:
    class Scale(Desk):
        """Room for so many tokens."""

        def has_room(self, tokens: int) -> bool:
            return self.pending_tokens + tokens <= self.room

    desk = Scale(100)
    admission = Admission([desk], wide())
    await admission.enter(0, "a", 60)
    left = 80
    waiter = asyncio.create_task(admission.enter(0, "a", 80, lambda: left))
    await settle()
    admission.advance(0)
    assert desk.promised == [60]
    left = 40
    admission.advance(0)
    assert await waiter == 0
    assert desk.promised == [60, 40]
    assert admission.waiting(0) == (0, 0)


async def test_a_full_line_turns_away_with_the_time_it_needs() -> None:
    desk = Desk(1, rate=100.0)
    admission = Admission([desk], wide(requests=1))
    await admission.enter(0, "a", 1000)
    waiter = asyncio.create_task(admission.enter(0, "a", 500))
    await settle()
    with pytest.raises(OverloadedError) as refused:
        await admission.enter(0, "a", 1)
    assert refused.value.retry_after_s == 15
    desk.prefill_rate = 0.0
    with pytest.raises(OverloadedError) as refused:
        await admission.enter(0, "a", 1)
    assert refused.value.retry_after_s == MIN_RETRY_S
    desk.prefill_rate = 0.001
    with pytest.raises(OverloadedError) as refused:
        await admission.enter(0, "a", 1)
    assert refused.value.retry_after_s == MAX_RETRY_S
    waiter.cancel()


async def test_waiting_tokens_are_bounded_but_one_long_prompt_may_always_wait() -> None:
    admission = Admission([Desk(0)], wide(tokens=100))
    long = asyncio.create_task(admission.enter(0, "a", 1000))
    await settle()
    assert admission.waiting(0) == (1, 1000)
    with pytest.raises(OverloadedError, match="1000 prompt tokens"):
        await admission.enter(0, "b", 1)
    long.cancel()


async def test_one_key_cannot_fill_a_shared_line() -> None:
    admission = Admission([Desk(0)], wide(tokens=100, shared=True))
    tasks = [asyncio.create_task(admission.enter(0, "flood", 25)) for _ in range(2)]
    await settle()
    with pytest.raises(RateLimitedError):
        await admission.enter(0, "flood", 25)
    tasks.append(asyncio.create_task(admission.enter(0, "other", 25)))
    await settle()
    assert admission.waiting(0) == (3, 75)
    for task in tasks:
        task.cancel()


async def test_a_lost_place_hands_its_line_over() -> None:
    lost, other = Desk(0), Desk(1)
    admission = Admission([lost, other], wide())
    waiters = [asyncio.create_task(admission.enter(0, "a", 5)) for _ in range(2)]
    await settle()
    lost.ready = False
    admission.abandon(0, lambda tokens: 1)
    assert await waiters[0] == 1
    other.forget(5)
    admission.advance(1)
    assert await waiters[1] == 1


async def test_with_no_place_left_everybody_is_told() -> None:
    def nowhere(tokens: int) -> int:
        raise NotReadyError("no rank")

    admission = Admission([Desk(0)], wide())
    waiter = asyncio.create_task(admission.enter(0, "a", 5))
    await settle()
    admission.abandon(0, nowhere)
    with pytest.raises(NotReadyError):
        await waiter


async def test_a_turn_that_meets_a_cancel_is_passed_on() -> None:
    desk = Desk(1)
    admission = Admission([desk], wide())
    await admission.enter(0, "a", 1)
    leaver, follower = (asyncio.create_task(admission.enter(0, "a", tokens)) for tokens in (2, 3))
    await settle()
    desk.forget(1)
    admission.advance(0)  # the turn is given ...
    leaver.cancel()  # ... and its owner leaves before it runs
    assert await follower == 0
    assert desk.promised == [3]


@pytest.mark.parametrize("seed", range(20))
async def test_no_promise_is_lost_under_random_traffic(seed: int) -> None:
    chance = random.Random(seed)
    desks = [Desk(2), Desk(3)]
    admission = Admission(desks, wide(requests=8, tokens=400, shared=True))

    async def client(number: int) -> None:
        tokens = chance.randint(1, 50)
        with contextlib.suppress(ApiError):
            index = await admission.enter(number % 2, chance.choice("abc"), tokens)
            try:
                for _ in range(chance.randint(0, 4)):
                    await asyncio.sleep(0)
            finally:
                desks[index].forget(tokens)
                admission.advance(index)

    clients = [asyncio.create_task(client(number)) for number in range(60)]
    for _ in range(200):
        await asyncio.sleep(0)
        if chance.random() < 0.2:
            chance.choice(clients).cancel()
    await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 10)
    assert [desk.promised for desk in desks] == [[], []]
    assert [admission.waiting(index) for index in (0, 1)] == [(0, 0), (0, 0)]
