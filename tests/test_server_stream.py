"""A request's stream: pulled or diverted, ended or cancelled, it loses nothing and keeps the order."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages import Finish
from server.errors import RankLostError
from server.stream import MAX_BATCHES, Ids, Records, TokenStream
from tests.rank_pair import NO_RECORDS, tokens


def batch(*ids: int) -> tuple[Records, Ids]:
    records = tokens(0, 1, ids)
    return records, np.ascontiguousarray(records["token"])


def nothing() -> tuple[Records, Ids]:
    return NO_RECORDS, np.empty(0, np.int32)


def into(seen: list[int], *, go_on: bool) -> Callable[[Ids], bool]:
    """A sink that collects."""

    def sink(ids: Ids) -> bool:
        seen.extend(ids.tolist())
        return go_on

    return sink


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_batches_are_joined_in_order_until_they_are_pulled() -> None:
    stream = TokenStream()
    for ids in ((1, 2), (3,)):
        stream.feed(*batch(*ids))
    assert (await stream.next_batch())["token"].tolist() == [1, 2, 3]
    stream.feed(*batch(4), Finish.STOP)
    assert (await stream.next_batch())["token"].tolist() == [4]
    assert len(await stream.next_batch()) == 0
    assert stream.finish is Finish.STOP


async def test_many_small_batches_wait_as_one_array_that_holds_no_step_s_records() -> None:
    stream, wanted = TokenStream(), range(5 * MAX_BATCHES)
    steps = [tokens(0, 1, [id_, 0]) for id_ in wanted]
    held = [weakref.ref(step) for step in steps]
    while steps:
        step = steps.pop(0)
        stream.feed(step[:1], np.ascontiguousarray(step[:1]["token"]))
        del step
    assert sum(one() is not None for one in held) <= MAX_BATCHES
    assert (await stream.next_batch())["token"].tolist() == list(wanted)


async def test_a_waiting_handler_is_woken_by_tokens_and_by_the_end() -> None:
    stream = TokenStream()
    pull = asyncio.create_task(stream.next_batch())
    await settle()
    stream.feed(*batch(7))
    assert (await pull)["token"].tolist() == [7]
    pull = asyncio.create_task(stream.next_batch())
    await settle()
    stream.feed(*nothing(), Finish.CANCELLED)
    assert len(await pull) == 0


async def test_queued_tokens_are_read_before_the_error() -> None:
    stream = TokenStream()
    stream.feed(*batch(1))
    stream.fail(RankLostError("gone"))
    assert len(await stream.next_batch()) == 1
    for _ in range(2):
        with pytest.raises(RankLostError):
            await stream.next_batch()


async def test_a_sink_gets_all_but_the_last_batch() -> None:
    stream = TokenStream()
    seen: list[int] = []
    diverted = asyncio.create_task(stream.divert(into(seen, go_on=True)))
    await settle()
    stream.feed(*batch(1, 2))
    stream.feed(*batch(3))
    await settle()
    assert not diverted.done()
    stream.feed(*batch(4), Finish.LENGTH)
    await diverted
    assert seen == [1, 2, 3]
    assert (await stream.next_batch())["token"].tolist() == [4]


async def test_a_sink_that_is_full_gives_the_rest_to_the_handler() -> None:
    stream = TokenStream()
    seen: list[int] = []
    diverted = asyncio.create_task(stream.divert(into(seen, go_on=False)))
    await settle()
    stream.feed(*batch(1))
    stream.feed(*batch(2))  # before the handler ran
    await diverted
    assert seen == [1]
    assert (await stream.next_batch())["token"].tolist() == [2]


async def test_nothing_is_diverted_past_what_is_queued_or_ended() -> None:
    stream = TokenStream()
    stream.feed(*batch(1))
    await stream.divert(lambda ids: pytest.fail("out of order"))
    assert len(await stream.next_batch()) == 1
    stream.feed(*nothing(), Finish.CANCELLED)
    await stream.divert(lambda ids: pytest.fail("after the end"))


async def test_a_cancelled_handler_leaves_no_sink_behind() -> None:
    stream = TokenStream()
    diverted = asyncio.create_task(stream.divert(lambda ids: pytest.fail("nobody is there")))
    await settle()
    diverted.cancel()
    await asyncio.gather(diverted, return_exceptions=True)
    stream.feed(*batch(1))
    assert len(await stream.next_batch()) == 1


def test_a_cancel_is_told_once_and_never_after_the_end() -> None:
    told: list[int] = []
    stream = TokenStream()
    stream.on_cancel(lambda: told.append(1))
    stream.cancel()
    stream.cancel()
    assert told == [1]
    ended = TokenStream()
    ended.on_cancel(lambda: told.append(2))
    ended.feed(*nothing(), Finish.STOP)
    ended.cancel()
    assert told == [1]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from(["pull", "sink", "full"])))
)
async def test_any_mix_of_pulling_and_diverting_keeps_every_token(steps: list[tuple[list[int], str]]) -> None:
    stream = TokenStream()
    seen: list[int] = []

    async def read() -> None:
        modes = iter([mode for _, mode in steps] * 2)
        while len(got := await stream.next_batch()):
            seen.extend(got["token"].tolist())
            mode = next(modes, "pull")
            if mode != "pull":
                await stream.divert(into(seen, go_on=mode == "sink"))

    reader = asyncio.create_task(read())
    for ids, _ in steps:
        stream.feed(*batch(*ids))
        await asyncio.sleep(0)
    stream.feed(*nothing(), Finish.STOP)
    await reader
    assert seen == [token for ids, _ in steps for token in ids]
