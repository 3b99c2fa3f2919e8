"""A link's two ends: order, wholeness, sleeping and waking, congestion, and errors that cost nobody else."""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ipc.errors import CodecError, MessageTooLargeError, RingCorruptError, RingFormatError, SegmentError
from ipc.heartbeat import EngineState
from ipc.layout import TOKEN_DTYPE
from ipc.link import Drained, EngineLink, RingDepth, ServerLink
from ipc.link_memory import LinkMemory, LinkShape
from ipc.messages import Cancel, Command, Failed, LinkFds, Sampling, Shutdown, Stats, Submit
from ipc.ring import MessageWriter
from ipc.segment import Segment
from tests.ipc_twins import child, link_args, link_fds

SMALL = LinkShape(submit_bytes=4096, event_bytes=4096, token_records=64)

Ends = tuple[ServerLink, EngineLink]


@pytest.fixture
def ends() -> Iterator[Ends]:
    server = ServerLink.create(SMALL)
    engine = EngineLink.attach(server.fds, SMALL)
    yield server, engine
    engine.close()
    server.close()


def tokens(first: int, count: int) -> npt.NDArray[np.void]:
    records = np.zeros(count, TOKEN_DTYPE)
    records["token"] = np.arange(first, first + count)
    return records


def rung(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def stats(steps: int) -> Stats:
    return Stats(0, 0, 0, 0, steps, 0, 0, 0)


def test_commands_arrive_in_order_and_in_bites(ends: Ends) -> None:
    server, engine = ends
    sent: list[Command] = [Submit(1, 1, "r", b"\1\0\0\0", 5, Sampling(seed=2**64 - 1)), Cancel(1, 1), Shutdown()]
    assert all(server.send(command) for command in sent)
    assert engine.receive(2) == sent[:2]
    assert engine.receive(2) == sent[2:]
    assert engine.receive(2) == []


def test_a_million_ids_pass_the_default_link() -> None:
    server = ServerLink.create()
    engine = EngineLink.attach(server.fds)
    ids = np.arange(1_000_000, dtype="<i4").tobytes()
    for slot in range(20):  # 80 MB: through the end of the ring
        assert server.send(Submit(slot, 1, "r", ids, 5, Sampling(seed=1)))
        (command,) = engine.receive(8)
        assert isinstance(command, Submit)
        assert command.slot == slot
        assert command.ids == ids
    engine.close()
    server.close()


def test_a_full_submit_ring_takes_nothing(ends: Ends) -> None:
    server, engine = ends
    large = Submit(1, 1, "r", bytes(1500), 5, Sampling(seed=1))
    assert server.send(large)
    assert server.send(large)
    depth = server.depth()
    assert not server.send(large)
    assert server.depth() == depth
    assert engine.receive(1) == [large]
    assert server.send(large)
    with pytest.raises(MessageTooLargeError):
        server.send(Submit(1, 1, "r", bytes(5000), 5, Sampling(seed=1)))
    assert engine.receive(8) == [large, large]


def test_drain_brings_events_with_records(ends: Ends) -> None:
    server, engine = ends
    assert not server.drain(10)
    engine.publish(tokens(0, 5), [stats(1)])
    engine.publish(tokens(5, 5), [stats(2), Failed("x")])
    assert server.depth().records == 10
    drained = server.drain(7)
    assert drained.events == [stats(1), stats(2), Failed("x")]
    assert drained.records["token"].tolist() == list(range(7))
    assert server.drain(7).records["token"].tolist() == [7, 8, 9]
    assert server.depth() == RingDepth(0, 0, 0)


def test_no_record_overtakes_its_event_at_any_moment(ends: Ends) -> None:
    """The engine publishes between any two calls that a drain makes."""
    server, engine = ends
    seen: set[int] = set()
    for number in range(40):
        left = number

        def interrupt(*_: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                sys.setprofile(None)
                engine.publish(tokens(number, 1), [stats(number)])  # noqa: B023 - runs in this round only

        sys.setprofile(interrupt)
        drained = server.drain(10)
        sys.setprofile(None)
        for some in (drained, server.drain(10)):
            seen.update(event.steps for event in some.events if isinstance(event, Stats))
            assert seen.issuperset(some.records["token"].tolist()), f"published at call {number}"
    assert len(seen) > 5  # late moments lie behind the end of the drain


def test_truth_of_a_drain() -> None:
    assert not Drained(tokens(0, 0), [])
    assert Drained(tokens(0, 1), [])
    assert Drained(tokens(0, 0), [stats(1)])
    assert Drained(tokens(0, 0), [], [CodecError("x")])


# ---- records that are no messages ----


def test_a_malformed_event_costs_no_other(ends: Ends) -> None:
    server, engine = ends
    engine.publish(tokens(0, 3), [stats(1)])
    memory = LinkMemory.attach(server.fds.segment, SMALL)
    writer = MessageWriter(memory.event)
    for record in (b"\xc1", b"\x82\xa4type\x14\xa7message\xa1x", b""):
        writer.push(record)
    writer.close()
    memory.close()
    drained = server.drain(10)
    assert drained.events == [stats(1), Failed("x")]
    assert len(drained.records) == 3
    assert [str(error)[:20] for error in drained.errors] == ["1 bytes are no event", "0 bytes are no event"]


def test_a_malformed_command_costs_no_other(ends: Ends) -> None:
    server, engine = ends
    memory = LinkMemory.attach(server.fds.segment, SMALL)
    server.send(Cancel(1, 1))
    writer = MessageWriter(memory.submit)
    writer.push(b"\xc1")
    writer.push(b"\x81\xa4type\x03")
    writer.close()
    memory.close()
    assert engine.receive(8) == [Cancel(1, 1)]
    engine.wait(30.0)  # the error is still to come, so nobody sleeps
    with pytest.raises(CodecError, match="1 bytes are no command"):
        engine.receive(8)
    assert engine.receive(8) == [Shutdown()]


def test_a_corrupt_cursor_is_named(ends: Ends) -> None:
    server, engine = ends
    engine.publish(tokens(0, 3), [])
    memory = LinkMemory.attach(server.fds.segment, SMALL)
    words = memory.token[:384].cast("Q")
    words[16] = 2**63
    for call in (lambda: server.drain(4), server.arm, server.depth):
        with pytest.raises(RingCorruptError, match=f"tail cursor is {2**63}"):
            call()
    words.release()
    memory.close()


# ---- sleeping and waking ----


def test_arm_sees_what_came_before_and_rings_for_what_comes_after(ends: Ends) -> None:
    server, engine = ends
    for records, events in ((tokens(0, 1), []), (tokens(0, 0), [stats(1)])):
        engine.publish(records, events)
        assert not server.arm()
        engine.publish(records, events)
        assert not rung(server.fileno())  # awake: no bell
        assert server.drain(10)
        assert server.arm()
        engine.publish(records, events)
        assert rung(server.fileno())
        server.acknowledge()
        assert not rung(server.fileno())
        assert server.drain(10)


def test_wait_returns_for_what_is_there_and_for_what_comes(ends: Ends) -> None:
    server, engine = ends
    server.send(Cancel(1, 1))
    engine.wait(60.0)
    assert engine.receive(8) == [Cancel(1, 1)]
    sender = threading.Timer(0.05, server.send, [Cancel(2, 1)])
    sender.start()
    engine.wait(60.0)
    assert engine.receive(8) == [Cancel(2, 1)]
    sender.join()


def test_wait_ends_with_its_time(ends: Ends) -> None:
    _, engine = ends
    engine.wait(0.0)
    engine.wait(0.01)
    assert engine.receive(8) == []


async def test_an_event_loop_is_woken() -> None:
    """The server's turn as the module describes it, against another process."""
    link = ServerLink.create()
    seen: asyncio.Queue[int] = asyncio.Queue()

    def turn() -> None:
        link.acknowledge()
        while True:
            drained = link.drain(4096)
            for generation in drained.records["generation"].tolist():
                seen.put_nowait(generation)
            if link.arm():
                break

    with child("ipc_engine.py", "echo", *link_args(link.fds), fds=link_fds(link.fds)) as engine:
        asyncio.get_running_loop().add_reader(link.fileno(), turn)
        turn()
        for number in range(300):
            assert link.send(Cancel(1, number))
            if number % 3 == 0:
                assert await asyncio.wait_for(seen.get(), 30) == number // 3
        for number in range(100, 300):
            assert await asyncio.wait_for(seen.get(), 30) == number
        link.send(Shutdown())
        assert await asyncio.to_thread(engine.wait) == 0
        asyncio.get_running_loop().remove_reader(link.fileno())
    link.close()


# ---- congestion ----


def test_a_congested_engine_is_told_and_loses_nothing(ends: Ends) -> None:
    server, engine = ends
    published = 0
    while engine.flush():
        engine.publish(tokens(published, 50), [stats(published)])
        published += 50
    assert published == 100  # 64 fit
    engine.publish(tokens(published, 1), [Failed("late")])
    assert not engine.flush()
    first = server.drain(1000)
    assert (len(first.records), first.events) == (64, [stats(0), stats(50)])
    assert server.arm()
    assert engine.flush()
    assert rung(server.fileno())
    rest = server.drain(1000)
    assert rest.records["token"].tolist() == list(range(64, 101))
    assert rest.events == [Failed("late")]


def test_a_congested_engine_does_not_oversleep(ends: Ends) -> None:
    server, engine = ends
    engine.publish(tokens(0, 100), [])
    engine.wait(3600.0)
    server.drain(100)
    assert engine.flush()


# ---- life ----


def test_beats_cross(ends: Ends) -> None:
    server, engine = ends
    assert server.beat().state is EngineState.LOADING
    engine.beat(7, EngineState.STEPPING)
    beat = server.beat()
    assert (beat.step, beat.state, beat.pid) == (7, EngineState.STEPPING, os.getpid())


def test_ends_close_apart_and_twice(ends: Ends) -> None:
    server, engine = ends
    server.send(Cancel(1, 1))
    server.close()
    server.close()
    assert engine.receive(8) == [Cancel(1, 1)]  # the engine's mapping outlives the server's
    engine.publish(tokens(0, 1), [])
    engine.close()
    engine.close()
    for fd in (server.fds.segment, server.fds.to_engine, server.fds.to_server):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_no_descriptor_stays_open() -> None:
    before = open_descriptors()
    for _ in range(3):
        server = ServerLink.create(SMALL)
        engine = EngineLink.attach(server.fds, SMALL)
        assert not any(os.get_inheritable(fd) for fd in link_fds(server.fds))
        engine.close()
        server.close()
    assert open_descriptors() == before


def test_attaching_names_what_is_wrong() -> None:
    server = ServerLink.create(SMALL)
    fds = server.fds
    with pytest.raises(SegmentError, match=f"fd {fds.segment} has {SMALL.size} bytes instead of"):
        EngineLink.attach(fds)
    with pytest.raises(SegmentError, match="fd 9999"):
        EngineLink.attach(LinkFds(9999, fds.to_engine, fds.to_server), SMALL)
    with pytest.raises(SegmentError, match="cannot use the inherited fd 9999"):
        EngineLink.attach(LinkFds(fds.segment, fds.to_engine, 9999), SMALL)
    empty = Segment.create(SMALL.size)
    with pytest.raises(RingFormatError, match=r"starts with \(magic, version, size\) \(0, 0, 0\)"):
        EngineLink.attach(LinkFds(empty.fd, fds.to_engine, fds.to_server), SMALL)
    empty.close()
    server.close()
    with pytest.raises(RingFormatError, match="capacity 100 "):
        ServerLink.create(LinkShape(submit_bytes=100))
