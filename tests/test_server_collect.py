"""A rank's rings, read by a real collector, written by the engine's end of the same link."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from ipc.messages import Cancel, Failed, Finish, Flag, Ready, RequestError, Sampling, Stats, Submit, TopLogprobs
from server.collect import RECORDS_PER_PASS, STREAMS_PER_PASS
from server.errors import ApiError, EngineRequestError, InvalidRequestError
from server.rank import RankState
from server.stream import TokenStream
from tests.rank_pair import FACTS, NO_RECORDS, SHAPE, RankPair, rank_pair, record, tokens

TOKEN_TAIL = 128  # byte of a ring's published cursor


@pytest.fixture
def pair() -> Iterator[RankPair]:
    with rank_pair() as made:
        yield made


def place_of(pair: RankPair) -> tuple[int, int]:
    """The slot and generation of the newest request."""
    submit = pair.commands()[-1]
    assert isinstance(submit, Submit)
    return submit.slot, submit.generation


async def read_all(stream: TokenStream) -> list[int]:
    found: list[int] = []
    while len(batch := await stream.next_batch()):
        found += batch["token"].tolist()
    return found


async def test_tokens_reach_their_streams_and_ends_free_the_slots(pair: RankPair) -> None:
    first = await pair.submit()
    place = place_of(pair)
    second = await pair.submit()
    other = place_of(pair)
    collector = pair.collector()
    collector.start()
    pair.answer(record(*place, 5), record(*other, 50), record(*place, 6, finish=Finish.STOP), record(*other, 51))
    assert await read_all(first) == [5, 6]
    assert (first.finish, pair.rank.slots.taken) == (Finish.STOP, 1)
    pair.answer(record(*other, 52, finish=Finish.LENGTH))
    assert await read_all(second) == [50, 51, 52]
    assert pair.rank.slots.taken == 0
    collector.stop()


async def test_an_event_is_seen_before_the_record_it_precedes(pair: RankPair) -> None:
    stream = await pair.submit()
    slot, generation = place_of(pair)
    collector = pair.collector()
    collector.start()
    top = TopLogprobs(slot, generation, 3, (7, 8), (-0.1, -2.0))
    pair.engine.publish(record(slot, generation, 7, position=3, flags=Flag.TOP, finish=Finish.LENGTH), [top])
    assert len(await stream.next_batch()) == 1
    assert stream.top == {3: top}
    collector.stop()


@pytest.mark.parametrize(("client_fault", "kind"), [(True, InvalidRequestError), (False, EngineRequestError)])
async def test_an_engine_s_refusal_is_raised_with_its_words(
    pair: RankPair, client_fault: bool, kind: type[ApiError]
) -> None:
    stream = await pair.submit()
    slot, generation = place_of(pair)
    collector = pair.collector()
    collector.start()
    error = RequestError(slot, generation, "not like this", client_fault)
    pair.engine.publish(record(slot, generation, finish=Finish.ERROR), [error])
    with pytest.raises(ApiError, match="not like this") as caught:
        await stream.next_batch()
    assert type(caught.value) is kind
    assert pair.rank.slots.taken == 0
    collector.stop()


async def test_an_error_whose_reason_was_lost_is_still_an_error(pair: RankPair) -> None:
    stream = await pair.submit()
    slot, generation = place_of(pair)
    collector = pair.collector()
    pair.engine._event.push(b"\xc1 no event")
    pair.answer(record(slot, generation, 5), record(slot, generation, finish=Finish.ERROR))
    collector.start()
    assert (await stream.next_batch())["token"].tolist() == [5]
    with pytest.raises(EngineRequestError, match="gave no reason"):
        await stream.next_batch()
    collector.stop()


async def test_the_first_token_or_the_end_frees_what_the_prompt_held(pair: RankPair) -> None:
    room: list[int] = []
    for _ in range(2):
        await pair.submit(1, 2, 3)
    pair.rank.on_room = room.append
    submits = [command for command in pair.commands() if isinstance(command, Submit)]
    first, second = ((one.slot, one.generation) for one in submits)
    collector = pair.collector()
    assert pair.rank.pending_tokens == 6
    for answer, left in ((record(*first, 7), 3), (record(*first, 8), 3), (record(*second, finish=Finish.CANCELLED), 0)):
        pair.answer(answer)
        collector.drain_rest()
        assert pair.rank.pending_tokens == left
    assert room == [0, 0]


async def test_time_between_tokens_is_the_engine_s_and_of_one_request(pair: RankPair) -> None:
    await pair.submit()
    first = place_of(pair)
    await pair.submit()
    second = place_of(pair)
    collector = pair.collector()
    for places, seconds in (((first, second), 1.0), ((first,), 3.0), ((second, first), 4.5)):
        records = [record(*place, 1) for place in places]
        for one in records:
            one["time_ns"] = int(seconds * 1e9)
        pair.answer(*records)
        collector.drain_rest()
    name = "deepinfer:inter_token_latency_seconds"
    assert pair.metrics.registry.get_sample_value(f"{name}_count") == 3
    assert pair.metrics.registry.get_sample_value(f"{name}_sum") == pytest.approx(2.0 + 1.5 + 3.5)


async def test_late_records_and_events_are_counted_and_reach_nobody(pair: RankPair) -> None:
    await pair.submit()
    old = place_of(pair)
    collector = pair.collector()
    pair.answer(record(*old, finish=Finish.CANCELLED))
    collector.start()
    newer = await pair.submit()
    new = place_of(pair)
    assert new[0] == old[0]
    late = TopLogprobs(*old, 0, (1,), (0.0,))
    pair.engine.publish(tokens(*old, [1, 2], Finish.STOP), [late, RequestError(*old, "late", client_fault=True)])
    pair.answer(record(99, 1, 3), record(*new, 4, finish=Finish.LENGTH))
    assert await read_all(newer) == [4]
    assert newer.finish is Finish.LENGTH
    assert newer.top == {}
    assert pair.metrics.registry.get_sample_value("deepinfer:late_records_total") == 3
    collector.stop()


async def test_an_unreadable_event_costs_nothing_else(pair: RankPair, caplog: pytest.LogCaptureFixture) -> None:
    stream = await pair.submit()
    slot, generation = place_of(pair)
    collector = pair.collector()
    pair.engine._event.push(b"\xc1 no event")
    stats = Stats(1, 2, 3, 4, 5, 6, 7, 8)
    pair.engine.publish(record(slot, generation, 9, finish=Finish.STOP), [stats])
    collector.start()
    assert await read_all(stream) == [9]
    assert pair.rank.stats == stats
    assert pair.failures == []
    assert "rank 0 sent an event that cannot be read" in caplog.text
    collector.stop()


async def test_ready_and_failed_change_the_rank(pair: RankPair) -> None:
    pair.rank.state, pair.rank.facts, pair.rank.reason = RankState.LOADING, None, "before"
    collector = pair.collector()
    pair.engine.publish(NO_RECORDS, [Ready(FACTS)])
    collector.start()
    await pair.rank.became_ready.wait()
    assert vars(pair.rank) | {"state": RankState.READY, "facts": FACTS, "reason": ""} == vars(pair.rank)
    pair.engine.publish(NO_RECORDS, [Failed("out of memory")])
    collector.drain_rest()
    assert pair.failures == ["out of memory"]
    collector.stop()


async def test_many_records_come_in_passes_with_the_loop_free_between(pair: RankPair) -> None:
    count = 3 * RECORDS_PER_PASS
    stream = await pair.submit(max_tokens=count)
    collector = pair.collector()
    pair.answer(tokens(*place_of(pair), range(count), Finish.LENGTH))
    collector.start()
    assert len(await stream.next_batch()) == RECORDS_PER_PASS
    assert await read_all(stream) == list(range(RECORDS_PER_PASS, count))
    collector.stop()


@pytest.mark.parametrize("dead", [False, True])
async def test_a_step_of_many_streams_is_handed_out_with_the_loop_free_between(dead: bool) -> None:
    count = STREAMS_PER_PASS + 3
    with rank_pair(seqs=count) as pair:
        streams = [await pair.submit(max_tokens=9) for _ in range(count)]
        places = [(one.slot, one.generation) for one in pair.commands() if isinstance(one, Submit)]
        collector = pair.collector()
        pair.answer(*(record(*place, 5) for place in places))
        collector.start()
        assert sum(stream.last_ns > 0 for stream in streams) == STREAMS_PER_PASS
        # What comes meanwhile waits for the rest, also of a rank whose last words it is.
        pair.answer(*(record(*place, 6, finish=Finish.LENGTH) for place in places))
        if dead:
            collector.drain_rest()
            collector.stop()
        assert [await read_all(stream) for stream in streams] == [[5, 6]] * count
        collector.stop()


async def test_a_corrupt_ring_or_record_is_a_failure_of_the_rank(pair: RankPair) -> None:
    await pair.submit()
    pair.answer(record(*place_of(pair), 1, finish=999))
    collector = pair.collector()
    collector.start()
    assert pair.failures == ["its link is broken: a token record ends its request with 999, which is no reason"]
    collector.drain_rest()
    tail = pair.server._memory.token[TOKEN_TAIL : TOKEN_TAIL + 8]
    tail[:] = np.uint64(2**63).tobytes()
    tail.release()
    collector._drain()
    assert len(pair.failures) == 2
    assert pair.failures[1].startswith("its link is broken: ")
    collector.drain_rest()
    collector.stop()


async def test_a_cancel_that_finds_the_ring_full_is_sent_when_there_is_room(pair: RankPair) -> None:
    stream = await pair.submit()
    slot, generation = place_of(pair)
    filler = Submit(3, 1, "filler", bytes(SHAPE.submit_bytes // 4), 1, Sampling(seed=0))
    while pair.server.send(filler):
        pass
    while pair.server.send(Cancel(3, 1)):
        pass
    collector = pair.collector()
    collector.start()
    stream.cancel()
    assert Cancel(slot, generation) not in pair.commands()
    pair.engine.publish(NO_RECORDS, [Stats(0, 0, 0, 0, 0, 0, 0, 0)])
    collector._drain()
    assert pair.commands() == [Cancel(slot, generation)]
    collector.stop()


async def test_after_stop_nothing_is_delivered(pair: RankPair) -> None:
    stream = await pair.submit()
    collector = pair.collector()
    collector.start()
    collector.stop()
    pair.answer(record(*place_of(pair), 1, finish=Finish.STOP))
    collector.drain_rest()
    await asyncio.sleep(0)
    assert not stream.ended
