"""Replays sessions in lanes: each lane has one session at a time, and takes the next when that one has ended.

A session's conversations run beside each other as far as its trace has them so: a sub-agent starts after the turn that
started it, and the turn that used its result waits for it. So more requests than lanes can be under way. Promises that
whatever ends a replay (its last session, a bound, a cancellation) leaves no task behind. Knows nothing about HTTP,
text or figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.agentx.pace import Pace
from bench.agentx.session import Session, Step


@dataclass(frozen=True, slots=True)
class Sending:
    """One request that is due: which step of which replay of a session, in which lane, counted or not."""

    session: Session
    replay: int
    conversation: int
    step: int
    lane: int
    warmup: bool

    @property
    def what(self) -> Step:
        """The step itself."""
        return self.session.conversations[self.conversation].steps[self.step]


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a replay ends, whichever comes first. `passes` 0: sessions are repeated until another bound."""

    passes: int = 1
    seconds: float = float("inf")
    requests: int = 0  # sent after the warm-up; 0: no bound


# Sends one request and returns whether its conversation goes on.
Send = Callable[[Sending], Awaitable[bool]]


class Lanes:
    """One replay of `sessions` in `count` lanes, of which each first sends `warmup` requests without think times.

    Measuring begins when all lanes have done theirs.
    """

    def __init__(
        self, sessions: Sequence[Session], send: Send, *, count: int, pace: Pace, bounds: Bounds, warmup: int = 0
    ) -> None:
        self._sessions = sessions
        self._send = send
        self._pace = pace
        self._bounds = bounds
        self._taken = 0
        self._sent = 0
        self._answered = 0
        # Warm-up requests that each lane has still to send, and to get answered.
        self._to_send = [warmup] * count
        self._to_answer = [warmup] * count
        self._warm = asyncio.Event()
        self._end = asyncio.Event()
        self._look_whether_warm()

    async def run(self) -> None:
        """To the end of the replay. What is under way when a bound is reached is cancelled."""
        work = asyncio.create_task(self._work())
        ends = [asyncio.create_task(self._time_is_up()), asyncio.create_task(self._end.wait())]
        try:
            await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            for task in (work, *ends):
                task.cancel()
            await asyncio.gather(work, *ends, return_exceptions=True)

    def stop(self) -> None:
        """End as if a bound were reached."""
        self._end.set()

    async def wait(self, lane: int, recorded: float) -> None:
        """Let a recorded think time pass."""
        await self._pace.wait(0.0 if self._to_send[lane] else recorded)

    async def send(self, session: Session, replay: int, conversation: int, step: int, lane: int) -> bool:
        """Send a step when it may be sent; whether its conversation goes on."""
        warmup = self._to_send[lane] > 0
        if warmup:
            self._to_send[lane] -= 1
        else:
            await self._warm.wait()
            if self._bounds.requests and self._sent == self._bounds.requests:
                await asyncio.Event().wait()  # until the answers to the others end the replay
            self._sent += 1
        goes_on = await self._send(Sending(session, replay, conversation, step, lane, warmup))
        if warmup:
            self._to_answer[lane] -= 1
            self._look_whether_warm()
        else:
            self._answered += 1
            if self._answered == self._bounds.requests:
                self._end.set()
        return goes_on

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in range(len(self._to_send)):
                group.create_task(self._lane(lane))

    async def _lane(self, lane: int) -> None:
        while (taken := self._take()) is not None:
            await _Play(self, *taken, lane).run()
        self._to_send[lane] = self._to_answer[lane] = 0
        self._look_whether_warm()

    async def _time_is_up(self) -> None:
        await self._warm.wait()
        if self._bounds.seconds == float("inf"):
            await asyncio.Event().wait()
        await asyncio.sleep(self._bounds.seconds)

    def _take(self) -> tuple[Session, int] | None:
        """The next session and how often it was replayed before; None when all are done."""
        replay, index = divmod(self._taken, len(self._sessions))
        if self._bounds.passes and replay >= self._bounds.passes:
            return None
        self._taken += 1
        return self._sessions[index], replay

    def _look_whether_warm(self) -> None:
        if not any(self._to_answer):
            self._warm.set()


class _Play:
    """One replay of one session: which of its steps were sent, which are answered, which conversations have ended."""

    def __init__(self, lanes: Lanes, session: Session, replay: int, lane: int) -> None:
        self._lanes = lanes
        self._session = session
        self._replay = replay
        self._lane = lane
        sizes = [len(conversation.steps) for conversation in session.conversations]
        self._sent = [[asyncio.Event() for _ in range(size)] for size in sizes]
        self._answered = [[asyncio.Event() for _ in range(size)] for size in sizes]
        self._ended = [asyncio.Event() for _ in sizes]

    async def run(self) -> None:
        """Until all conversations have ended."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._ended)):
                group.create_task(self._conversation(index))

    async def _conversation(self, index: int) -> None:
        if await self._is_started(index):
            for number, step in enumerate(self._session.conversations[index].steps):
                await self._lanes.wait(self._lane, step.delay)
                for joined in step.joins:
                    await self._ended[joined].wait()
                self._sent[index][number].set()
                if not await self._lanes.send(self._session, self._replay, index, number, self._lane):
                    break
                self._answered[index][number].set()
        self._ended[index].set()

    async def _is_started(self, index: int) -> bool:
        """Wait for the start; False where the step that would have caused it never came, or ended its conversation."""
        anchor = self._session.conversations[index].anchor
        if anchor is None:
            return True
        events = self._sent if anchor.from_start else self._answered
        reached = asyncio.ensure_future(events[anchor.conversation][anchor.step].wait())
        ended = asyncio.ensure_future(self._ended[anchor.conversation].wait())
        try:
            await asyncio.wait([reached, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()
            ended.cancel()
        if not events[anchor.conversation][anchor.step].is_set():
            return False
        await self._lanes.wait(self._lane, anchor.delay)
        return True
