"""Lanes: order, joins and bounds as the traces say, and nothing left behind however a replay ends."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from bench.agentx.lanes import Bounds, Lanes, Sending
from bench.agentx.pace import Pace
from bench.agentx.session import Session, session_of
from bench.agentx.synthetic import Options, generate
from bench.agentx.traces import Subagent, Trace, Turn

# Far above what anything here takes: a test that gets there has found a hang.
DEADLINE_S: Final = 20.0
NO_PACE: Final = Pace(ignore=True)

Name = tuple[str, str, int]


def session(name: str = "x", turns: int = 3, agents: tuple[int, ...] = ()) -> Session:
    """Turns of which each appends a block; after each of `agents` a sub-agent of two turns that the next waits for."""
    entries: list[Turn | Subagent] = []
    for number in range(turns):
        t = 10.0 * number
        entries.append(
            Turn(t=t, tokens_in=64 * (number + 1), tokens_out=1, hash_ids=list(range(number + 1)), api_time=1)
        )
        if number in agents:
            inner = [Turn(t=t + at, tokens_in=64, tokens_out=1, hash_ids=[900 + number], api_time=1) for at in (2, 5)]
            entries.append(Subagent(t=t + 2, agent_id=f"after {number}", duration_ms=4000, requests=list(inner)))
    return session_of(Trace(id=name, block_size=64, hash_id_scope="local", requests=entries))


@dataclass
class Recorder:
    """Sends nothing: notes what is due and answers when `hold` lets it."""

    hold: Callable[[Sending], Any] = lambda _: True
    log: list[tuple[str, Sending]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def __call__(self, sending: Sending) -> bool:
        self.log.append(("sent", sending))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            found = self.hold(sending)
            if asyncio.iscoroutine(found):
                found = await found
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        self.log.append(("answered", sending))
        return bool(found)

    def sent(self) -> list[Sending]:
        return [sending for what, sending in self.log if what == "sent"]

    def names(self, what: str = "sent") -> list[Name]:
        return [_name(sending) for kind, sending in self.log if kind == what]


def _name(sending: Sending) -> Name:
    return sending.session.id, sending.session.conversations[sending.conversation].name, sending.step


async def replay(
    recorder: Recorder, *sessions: Session, count: int = 1, warmup: int = 0, pace: Pace = NO_PACE, **bounds: Any
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await Lanes(
            sessions, recorder, count=count, pace=pace, bounds=Bounds(**bounds), warmup=warmup
        ).run()  # fmt: skip


async def test_a_lane_sends_one_turn_after_the_other_and_then_the_next_session() -> None:
    recorder = Recorder()
    await replay(recorder, session("one", 2), session("two", 2), passes=2)
    turns = [("one", "main", 0), ("one", "main", 1), ("two", "main", 0), ("two", "main", 1)]
    assert recorder.names() == turns * 2
    assert [sending.replay for sending in recorder.sent()] == [0] * 4 + [1] * 4
    assert recorder.most == 1


async def test_as_many_sessions_as_lanes_are_under_way() -> None:
    gate = asyncio.Barrier(3)
    recorder = Recorder(lambda _: _then_true(gate.wait()))
    await replay(recorder, *(session(str(number), 2) for number in range(6)), count=3)
    assert recorder.most == 3
    assert Counter(sending.lane for sending in recorder.sent()) == {0: 4, 1: 4, 2: 4}


async def _then_true(waiting: Any) -> bool:
    await waiting
    return True


async def test_a_turn_waits_for_its_agents_and_agents_run_beside_each_other() -> None:
    recorder = Recorder()
    await replay(recorder, session(turns=3, agents=(0, 1)))
    log = [(what, *_name(sending)[1:]) for what, sending in recorder.log]
    assert log.index(("sent", "after 0", 0)) > log.index(("answered", "main", 0))
    assert log.index(("sent", "main", 1)) > log.index(("answered", "after 0", 1))
    assert log.index(("sent", "main", 2)) > log.index(("answered", "after 1", 1))


async def test_an_agent_in_the_background_holds_nobody_up() -> None:
    """It is answered only after the session's last turn."""
    last = asyncio.Event()

    def hold(sending: Sending) -> Any:
        if _name(sending)[1:] == ("main", 2):
            last.set()
        return _then_true(last.wait()) if sending.conversation else True

    turns = [Turn(t=10.0 * at, tokens_in=64, tokens_out=1, hash_ids=[at], api_time=1) for at in range(3)]
    agent = Subagent(t=2, duration_ms=1e6, requests=[Turn(t=2, tokens_in=64, tokens_out=1, hash_ids=[9])])
    trace = Trace(id="x", block_size=64, hash_id_scope="local", requests=[turns[0], agent, *turns[1:]])
    recorder = Recorder(hold)
    await replay(recorder, session_of(trace))
    assert len(recorder.sent()) == 4


async def test_made_sessions_are_replayed_whole() -> None:
    sessions = [session_of(trace) for trace in generate(Options(conversations=6, turns=10))]
    recorder = Recorder()
    await replay(recorder, *sessions, count=4)
    expected = [
        (one.id, conversation.name, step)
        for one in sessions
        for conversation in one.conversations
        for step in range(len(conversation.steps))
    ]
    assert sorted(recorder.names()) == sorted(expected)


async def test_warm_up_is_sent_by_every_lane_before_anything_counts() -> None:
    recorder = Recorder()
    await replay(recorder, *(session(str(number), 5) for number in range(3)), count=3, warmup=2)
    first_counted = next(at for at, (_, sending) in enumerate(recorder.log) if not sending.warmup)
    before = recorder.log[:first_counted]
    assert Counter(sending.lane for what, sending in before if what == "answered") == {0: 2, 1: 2, 2: 2}
    assert sum(sending.warmup for sending in recorder.sent()) == 6
    assert len(recorder.sent()) == 15


async def test_a_lane_without_work_does_not_hold_the_warm_up() -> None:
    recorder = Recorder()
    await replay(recorder, session("short", 1), session("long", 5), count=3, warmup=3)
    assert len(recorder.sent()) == 6


async def test_a_bound_of_requests_counts_those_after_the_warm_up_and_waits_for_their_answers() -> None:
    recorder = Recorder()
    await replay(recorder, session(turns=9), session("y", 9), count=2, warmup=1, passes=0, requests=7)
    counted = [sending for sending in recorder.sent() if not sending.warmup]
    assert len(counted) == 7
    assert recorder.names("answered") != []
    assert len(recorder.names("answered")) == len(recorder.sent())


async def test_a_bound_of_time_cuts_off_what_is_under_way() -> None:
    forever = asyncio.Event()
    recorder = Recorder(lambda sending: _then_true(forever.wait()) if sending.step == 2 else True)
    await replay(recorder, session(turns=4), count=1, passes=0, seconds=0.05)
    # On a busy machine the time may be up before the turn that is never answered.
    assert recorder.names() in [[("x", "main", step) for step in range(count)] for count in range(4)]
    assert recorder.running == 0


async def test_a_conversation_that_cannot_go_on_starts_nothing_more_and_holds_nobody_up() -> None:
    """The agent after turn 1 is never started; the one after turn 0 fails, and its turn goes on."""
    recorder = Recorder(lambda sending: _name(sending)[1:] not in {("after 0", 0), ("main", 1)})
    await replay(recorder, session(turns=3, agents=(0, 1)))
    assert recorder.names() == [("x", "main", 0), ("x", "after 0", 0), ("x", "main", 1)]


@pytest.mark.parametrize("sends", [1, 3, 8, 20])
async def test_a_replay_that_is_cancelled_leaves_no_task(sends: int) -> None:
    before = asyncio.all_tasks()
    reached = asyncio.Event()
    recorder = Recorder()

    def hold(_: Sending) -> Any:
        if len(recorder.sent()) >= sends:
            reached.set()
            return _then_true(asyncio.Event().wait())
        return True

    recorder.hold = hold
    sessions = [session(str(number), 6, agents=(0, 2)) for number in range(3)]
    task = asyncio.create_task(replay(recorder, *sessions, count=2, passes=0))
    await asyncio.wait_for(reached.wait(), DEADLINE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert recorder.running == 0


async def test_an_interrupt_ends_a_replay_as_a_bound_does() -> None:
    recorder = Recorder(lambda _: True)
    lanes = Lanes([session()], recorder, count=1, pace=NO_PACE, bounds=Bounds(passes=0))
    recorder.hold = lambda _: lanes.stop() if len(recorder.log) > 10 else True
    before = asyncio.all_tasks()
    await asyncio.wait_for(lanes.run(), DEADLINE_S)
    assert asyncio.all_tasks() == before


async def test_a_failure_of_our_own_ends_the_replay_and_is_seen() -> None:
    def hold(_: Sending) -> bool:
        raise ZeroDivisionError

    before = asyncio.all_tasks()
    with pytest.raises(ExceptionGroup):
        await replay(Recorder(hold), session(), count=2)
    assert asyncio.all_tasks() == before


def test_think_times_are_cut_then_divided_or_ignored() -> None:
    assert Pace().seconds(7.0) == 7.0
    assert Pace(speedup=2, cap=5).seconds(7.0) == 2.5
    assert Pace(cap=5).seconds(math.inf) == 5
    assert Pace(ignore=True, cap=5).seconds(7.0) == 0
