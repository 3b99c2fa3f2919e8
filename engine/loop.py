"""The loop of one rank: drain the inbox, run a step, publish what it gave; asleep when there is nothing to do.

Promises a heartbeat on every pass, statistics when the rank falls idle, and that a request the engine refuses
costs no other request anything. An exception out of a step is not handled here: the rank's state is then
unknown, and the process border ends it.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec
import numpy as np

from engine.prefix import unused
from engine.protocol import Engine, RequestRefusedError
from ipc.errors import CodecError
from ipc.heartbeat import EngineState
from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink
from ipc.messages import (
    CacheAttach,
    CacheForget,
    CacheStore,
    Cancel,
    Command,
    Event,
    Finish,
    RequestError,
    Shutdown,
    Stats,
    Submit,
)

log = logging.getLogger(__name__)

# An idle rank still shows a heartbeat this often, so that a stopped process is told from a resting one.
IDLE_BEAT_S: Final = 1.0
# Statistics of a busy rank: often enough for a dashboard, rare enough to cost nothing.
STATS_INTERVAL_S: Final = 0.5
# Commands taken per pass: a flood of submissions must not keep running requests from their next token.
COMMANDS_PER_PASS: Final = 256
# Wait while the server does not drain: nothing wakes us when room appears, and steps take longer than this.
STALL_PAUSE_S: Final = 0.001

_NO_RECORDS: Final = np.empty(0, TOKEN_DTYPE)


class RankLoop:
    """Drives one engine from one link until it is told to stop."""

    def __init__(self, engine: Engine, link: EngineLink, log_interval_steps: int) -> None:
        self._engine = engine
        self._link = link
        self._log_interval_steps = log_interval_steps
        self._steps = 0
        self._stalls = 0
        self._running = True
        self._idle = False
        self._stats_due = 0.0

    def run(self) -> None:
        """Loop until a Shutdown message arrives or `stop` is called."""
        while self._running:
            self._pass()
        self._link.beat(self._steps, EngineState.STOPPING)

    @property
    def stopped(self) -> bool:
        """Whether it was told to leave, maybe before it ran."""
        return not self._running

    def stop(self) -> None:
        """Leave the loop after the current pass (called from a signal handler)."""
        self._running = False

    def _pass(self) -> None:
        self._link.beat(self._steps, EngineState.IDLE if self._idle else EngineState.STEPPING)
        if not self._link.flush():
            # Taking commands now could only add answers to what already waits.
            self._stalls += 1
            time.sleep(STALL_PAUSE_S)
            return
        for command in self._commands():
            self._obey(command)
        if self._engine.has_work():
            self._step()
        elif self._running:
            self._rest()

    def _commands(self) -> list[Command]:
        try:
            return self._link.receive(COMMANDS_PER_PASS)
        except CodecError:  # one bad record; those behind it come with the next pass
            log.exception("a command could not be read")
            return []

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                if self._engine.cancel(command.slot, command.generation):
                    self._end(command.slot, command.generation, Finish.CANCELLED)
            case CacheStore():
                self._engine.store(command)
            case CacheForget():
                self._engine.forget()
            case CacheAttach():
                log.error("a host pool came to a rank that has none to wait for")
            case Shutdown():
                self._running = False

    def _submit(self, request: Submit) -> None:
        try:
            self._engine.add(request)
        except RequestRefusedError as refusal:
            self._refuse(request, str(refusal), client_fault=True)
        except Exception:  # the request's border: whatever it broke, the others go on
            log.exception("request %s failed to start", request.request_id)
            self._refuse(request, "the engine failed to start this request", client_fault=False)

    def _refuse(self, request: Submit, message: str, *, client_fault: bool) -> None:
        events: list[Event] = unused(request.cache) if request.cache is not None else []
        events.append(RequestError(request.slot, request.generation, message, client_fault))
        self._link.publish(_NO_RECORDS, events)
        self._end(request.slot, request.generation, Finish.ERROR)

    def _end(self, slot: int, generation: int, finish: Finish) -> None:
        record = np.zeros(1, TOKEN_DTYPE)
        record["slot"], record["generation"], record["finish"] = slot, generation, finish
        record["time_ns"] = time.monotonic_ns()
        self._link.publish(record, ())

    def _step(self) -> None:
        if self._idle:
            # A long first step must not look like an idle rank that went silent.
            self._idle = False
            self._link.beat(self._steps, EngineState.STEPPING)
        output = self._engine.step()
        self._steps += 1
        self._link.publish(output.records, output.events)
        now = time.monotonic()
        if now >= self._stats_due:
            self._stats_due = now + STATS_INTERVAL_S
            self._publish_stats()
        if self._log_interval_steps and self._steps % self._log_interval_steps == 0:
            self._log_step()

    def _rest(self) -> None:
        if not self._idle:
            self._idle = True
            self._publish_stats()
            self._link.beat(self._steps, EngineState.IDLE)
        self._link.wait(IDLE_BEAT_S)

    def _publish_stats(self) -> None:
        self._link.publish(_NO_RECORDS, [self.stats()])

    def stats(self) -> Stats:
        """The engine's statistics with the loop's own counters filled in."""
        return msgspec.structs.replace(self._engine.stats(), steps=self._steps, stalls=self._stalls)

    def _log_step(self) -> None:
        stats = self.stats()
        log.info(
            "step %d: running %d, waiting %d, blocks %d/%d, preemptions %d, stalls %d",
            stats.steps, stats.running, stats.waiting, stats.blocks_used, stats.blocks_total,
            stats.preemptions, stats.stalls,
        )  # fmt: skip
