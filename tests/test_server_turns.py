"""Long work goes one piece a turn of the loop; short work does not wait."""

from __future__ import annotations

import asyncio

import pytest

from server.turns import LONG, Turns


async def test_the_loop_goes_round_between_long_pieces() -> None:
    turns = Turns()
    seen: list[str] = []
    ticking = True

    def tick() -> None:
        seen.append("tick")
        if ticking:
            asyncio.get_running_loop().call_soon(tick)

    async def work() -> None:
        async with turns.turn(LONG):
            seen.append("long")

    tick()
    await asyncio.gather(*(work() for _ in range(8)))
    ticking = False
    assert seen.count("long") == 8
    assert "long long" not in " ".join(seen)


async def test_between_two_steps_of_long_work_the_loop_goes_round() -> None:
    turns = Turns()
    seen: list[int] = []
    for size in (LONG - 1, LONG):
        asyncio.get_running_loop().call_soon(seen.append, size)
        await turns.breathe(size)
        seen.append(0)
    assert seen == [0, LONG - 1, LONG, 0]


async def test_short_work_does_not_wait_for_long_work() -> None:
    turns = Turns()
    async with turns.turn(LONG), asyncio.timeout(10), turns.turn(LONG - 1):
        pass


async def test_a_failure_or_a_leaving_client_gives_the_turn_back() -> None:
    turns = Turns()
    waiting = asyncio.ensure_future(_enter(turns))
    with pytest.raises(asyncio.InvalidStateError):
        await _fail(turns, waiting)
    async with asyncio.timeout(10), turns.turn(LONG):
        pass


async def _fail(turns: Turns, waiting: asyncio.Future[None]) -> None:
    async with turns.turn(LONG):
        waiting.cancel()
        waiting.result()


async def _enter(turns: Turns) -> None:
    async with turns.turn(LONG):
        pass
