"""Signs of life: what was written is read, and nonsense is named."""

from __future__ import annotations

import os
import time
from types import ModuleType

import pytest

from ipc.errors import HeartbeatError, RingFormatError
from ipc.heartbeat import Beat, EngineState, HeartbeatReader, HeartbeatWriter
from ipc.ring import PULSE_BYTES
from tests.ipc_twins import PAIRS, TWINS, shared_memory

twins = pytest.mark.parametrize("rings", TWINS.values(), ids=TWINS.keys())


def test_untouched_memory_says_loading() -> None:
    with shared_memory(PULSE_BYTES) as memory:
        reader = HeartbeatReader(memory)
        assert reader.beat() == Beat(0, 0, EngineState.LOADING, 0)
        reader.close()


def test_the_last_beat_is_read() -> None:
    with shared_memory(PULSE_BYTES) as memory:
        writer, reader = HeartbeatWriter(memory), HeartbeatReader(memory)
        before = time.monotonic_ns()
        for step, state in enumerate(EngineState):
            writer.beat(step, state)
            beat = reader.beat()
            assert (beat.step, beat.state, beat.pid) == (step, state, os.getpid())
            assert before <= beat.time_ns <= time.monotonic_ns()
            before = beat.time_ns
        writer.close()
        reader.close()


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_every_bit_crosses(writer: str, reader: str) -> None:
    with shared_memory(PULSE_BYTES) as memory:
        pulse, other = TWINS[writer].PulseBlock(memory), TWINS[reader].PulseBlock(memory)
        for values in ((1, 2, 3, 4), (2**64 - 1, 2**64 - 2, 2**32 - 1, 2**32 - 2)):
            pulse.write(*values)
            assert other.read() == values
        pulse.close()
        other.close()


@twins
def test_numbers_that_do_not_fit_change_nothing(rings: ModuleType) -> None:
    with shared_memory(PULSE_BYTES) as memory:
        pulse = rings.PulseBlock(memory)
        pulse.write(1, 2, 3, 4)
        for values in ((2**64, 0, 0, 0), (0, -1, 0, 0), (0, 0, 2**32, 0), (0, 0, 0, 2**32)):
            with pytest.raises(OverflowError):
                pulse.write(*values)
        assert pulse.read() == (1, 2, 3, 4)
        pulse.close()
        with pytest.raises(ValueError, match="PulseBlock is closed"):
            pulse.read()
        with pytest.raises(RingFormatError, match="64"):
            rings.PulseBlock(memory[:64])


def test_an_unknown_state_is_named() -> None:
    with shared_memory(PULSE_BYTES) as memory:
        pulse, reader = TWINS["python"].PulseBlock(memory), HeartbeatReader(memory)
        pulse.write(1, 1, 77, 4242)
        with pytest.raises(HeartbeatError, match="state 77 of pid 4242"):
            reader.beat()
        pulse.close()
        reader.close()
