"""A rank's loop in a thread, over a real link whose server's end is the test."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.fake import FakeEngine
from engine.loop import RankLoop
from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink, ServerLink
from ipc.link_memory import LinkShape
from ipc.messages import CacheForget, CacheStore, Cancel, Event, Finish, Flag, Shutdown, Stats, Submit
from tests.serving import DEADLINE_S

SHAPE: Final = LinkShape(submit_bytes=1 << 20, event_bytes=1 << 16, token_records=64)


class LoopUnderTest:
    """A running loop, the server's end of its link, and all that came over it so far."""

    def __init__(self, engine: FakeEngine) -> None:
        self.server = ServerLink.create(SHAPE)
        self._engine_end = EngineLink.attach(self.server.fds, SHAPE)
        self.loop = RankLoop(engine, self._engine_end, log_interval_steps=1)
        self.thread = threading.Thread(target=self.loop.run)
        self.events: list[Event] = []
        self.records: npt.NDArray[np.void] = np.empty(0, TOKEN_DTYPE)

    def send(self, *commands: Submit | Cancel | Shutdown | CacheStore | CacheForget) -> None:
        for command in commands:
            assert self.server.send(command)

    def read_until(self, condition: Callable[[], bool]) -> None:
        """Drain as the server does until the condition holds."""
        bell = select.poll()
        bell.register(self.server.fileno(), select.POLLIN)
        while True:
            drained = self.server.drain(16)
            self.events += drained.events
            self.records = np.concatenate([self.records, drained.records])
            if condition():
                return
            if not drained and self.server.arm():
                assert bell.poll(DEADLINE_S * 1000), "the loop went silent"
                self.server.acknowledge()

    def ends(self) -> dict[int, Finish]:
        """Slot -> how it ended."""
        ended = self.records[self.records["finish"] != Finish.NONE]
        return {int(record["slot"]): Finish(int(record["finish"])) for record in ended}

    def tokens(self, slot: int) -> list[int]:
        mine = self.records[(self.records["slot"] == slot) & (self.records["flags"] & Flag.TOKEN != 0)]
        return [int(token) for token in mine["token"]]

    def last_stats(self) -> Stats | None:
        return next((event for event in reversed(self.events) if isinstance(event, Stats)), None)

    def idle_with_nothing_held(self) -> bool:
        stats = self.last_stats()
        return stats is not None and (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)

    def close(self) -> None:
        self.server.send(Shutdown())
        while self.thread.is_alive():
            self.server.drain(1000)  # a stalled loop goes on only once it is read
            self.thread.join(0.01)
        self._engine_end.close()
        self.server.close()


@contextmanager
def running_loop(engine: FakeEngine) -> Iterator[LoopUnderTest]:
    under_test = LoopUnderTest(engine)
    under_test.thread.start()
    try:
        yield under_test
    finally:
        under_test.close()
