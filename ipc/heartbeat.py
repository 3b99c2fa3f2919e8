"""An engine's sign of life: when it last went round its loop, at which step, doing what.

The engine writes, the server reads and judges; what counts as hung is the server's business.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ipc.errors import HeartbeatError
from ipc.ring import PulseBlock

if TYPE_CHECKING:
    from typing_extensions import Buffer


class EngineState(IntEnum):
    """What an engine was about to do when it wrote its last beat."""

    LOADING = 0  # also what untouched memory says
    IDLE = 1
    STEPPING = 2
    STOPPING = 3


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading. `time_ns` is CLOCK_MONOTONIC, 0 before the first beat; the rest is never older than it says."""

    time_ns: int
    step: int
    state: EngineState
    pid: int


class HeartbeatWriter:
    """The engine's end, over PULSE_BYTES of memory."""

    def __init__(self, memory: Buffer) -> None:
        self._block = PulseBlock(memory)
        self._pid = os.getpid()

    def beat(self, step: int, state: EngineState) -> None:
        """Say that the engine is alive now."""
        self._block.write(time.monotonic_ns(), step, state, self._pid)

    def close(self) -> None:
        """Let go of the memory."""
        self._block.close()


class HeartbeatReader:
    """The server's end, over PULSE_BYTES of memory."""

    def __init__(self, memory: Buffer) -> None:
        self._block = PulseBlock(memory)

    def beat(self) -> Beat:
        """The last beat. Raises HeartbeatError if the state is none that an engine writes."""
        time_ns, step, state, pid = self._block.read()
        try:
            return Beat(time_ns, step, EngineState(state), pid)
        except ValueError as error:
            raise HeartbeatError(f"heartbeat state {state} of pid {pid} is unknown") from error

    def close(self) -> None:
        """Let go of the memory."""
        self._block.close()
