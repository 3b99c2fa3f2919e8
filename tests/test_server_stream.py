"""One request's queue: batches are taken whole, ends and errors come after the tokens, a cancel is told once."""

from __future__ import annotations

import asyncio

import pytest

from ipc.messages import Finish
from server.errors import EngineRequestError, InvalidRequestError, RankLostError
from server.stream import Token, TokenStream


def token(id_: int) -> Token:
    return Token(id_, 0.0, False, 0, None)


def ids(batch: list[Token]) -> list[int]:
    return [one.id for one in batch]


async def test_what_was_queued_comes_whole_and_in_order() -> None:
    stream = TokenStream()
    for id_ in (3, 1, 2):
        stream.feed(token(id_))
    assert ids(await stream.next_batch()) == [3, 1, 2]
    stream.feed(token(4))
    stream.end(Finish.LENGTH)
    assert ids(await stream.next_batch()) == [4]
    assert await stream.next_batch() == []
    assert await stream.next_batch() == []


async def test_a_waiting_reader_is_woken_by_tokens_and_by_the_end() -> None:
    stream = TokenStream()
    for feed in ([token(1)], [token(2), token(3)]):
        reader = asyncio.create_task(stream.next_batch())
        await asyncio.sleep(0)
        for one in feed:
            stream.feed(one)
        assert not reader.done()
        stream.wake()
        assert await reader == feed
    reader = asyncio.create_task(stream.next_batch())
    await asyncio.sleep(0)
    stream.end(Finish.STOP)
    stream.wake()
    stream.wake()
    assert await reader == []


async def test_an_error_is_raised_after_the_tokens_before_it() -> None:
    stream = TokenStream()
    stream.feed(token(1))
    stream.fail(RankLostError("gone"))
    assert ids(await stream.next_batch()) == [1]
    for _ in range(2):
        with pytest.raises(RankLostError, match="gone"):
            await stream.next_batch()


async def test_a_waiting_reader_gets_the_error() -> None:
    stream = TokenStream()
    reader = asyncio.create_task(stream.next_batch())
    await asyncio.sleep(0)
    stream.fail(RankLostError("gone"))
    with pytest.raises(RankLostError, match="gone"):
        await reader


async def test_an_expected_error_waits_for_its_record() -> None:
    stream = TokenStream()
    stream.expect_error(InvalidRequestError("too long"))
    assert not stream.ended
    stream.end(Finish.ERROR)
    with pytest.raises(InvalidRequestError, match="too long"):
        await stream.next_batch()


async def test_an_error_whose_reason_was_lost_is_still_an_error() -> None:
    stream = TokenStream()
    stream.end(Finish.ERROR)
    with pytest.raises(EngineRequestError, match="reason was lost"):
        await stream.next_batch()


async def test_a_cancelled_record_after_a_failure_keeps_the_failure() -> None:
    stream = TokenStream()
    stream.fail(RankLostError("gone"))
    stream.end(Finish.CANCELLED)
    with pytest.raises(RankLostError):
        await stream.next_batch()


def test_a_cancel_is_told_once_and_never_after_the_end() -> None:
    told: list[str] = []
    stream = TokenStream()
    stream.cancel()
    stream.on_cancel(lambda: told.append("cancel"))
    stream.cancel()
    stream.cancel()
    assert told == ["cancel"]
    ended = TokenStream()
    ended.on_cancel(lambda: told.append("late"))
    ended.end(Finish.STOP)
    ended.cancel()
    assert told == ["cancel"]


async def test_a_reader_that_was_cancelled_does_not_hurt_the_collector() -> None:
    stream = TokenStream()
    reader = asyncio.create_task(stream.next_batch())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    stream.feed(token(1))
    stream.wake()
    assert ids(await stream.next_batch()) == [1]
