"""The bell: it wakes a sleeper, costs an awake consumer nothing, and loses no wake-up between two processes."""

from __future__ import annotations

import random
import select
from types import ModuleType

import pytest

from ipc.doorbell import Doorbell, create_eventfd
from ipc.errors import RingFormatError
from ipc.link import ServerLink
from ipc.messages import Cancel, Shutdown
from ipc.ring import BELL_BYTES
from tests.ipc_twins import TWINS, child, link_args, link_fds, shared_memory

ROUNDS = 2_000
twins = pytest.mark.parametrize("rings", TWINS.values(), ids=TWINS.keys())


def readable(fd: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


@twins
def test_only_a_sleeper_is_rung_and_only_once(rings: ModuleType) -> None:
    with shared_memory(BELL_BYTES) as memory:
        consumer, producer = rings.BellFlag(memory), rings.BellFlag(memory)
        assert not producer.should_ring()
        consumer.prepare_sleep()
        assert producer.should_ring()
        assert not producer.should_ring()
        consumer.prepare_sleep()
        consumer.cancel_sleep()
        assert not producer.should_ring()
        consumer.close()
        producer.close()
        with pytest.raises(ValueError, match="BellFlag is closed"):
            producer.should_ring()


@twins
def test_a_bell_needs_its_own_line(rings: ModuleType) -> None:
    with shared_memory(2 * BELL_BYTES) as memory:
        for part in (memory[:4], memory[4 : 4 + BELL_BYTES]):
            with pytest.raises(RingFormatError):
                rings.BellFlag(part)
            part.release()


def test_the_eventfd_is_written_for_a_sleeper_only() -> None:
    with shared_memory(BELL_BYTES) as memory:
        bell = Doorbell(memory, create_eventfd())
        bell.ring()
        assert not readable(bell.fileno())
        bell.prepare_sleep()
        bell.ring()
        bell.ring()
        assert readable(bell.fileno())
        bell.acknowledge()
        bell.acknowledge()
        assert not readable(bell.fileno())
        bell.close()
        bell.close()


@pytest.mark.parametrize("rings", TWINS)
def test_no_wake_up_is_lost_between_two_processes(rings: str) -> None:
    """Both sides sleep without a way out but the bell, so one lost wake-up ends the game."""
    link = ServerLink.create()
    pauses = random.Random(5)
    with child("ipc_engine.py", "echo", *link_args(link.fds), fds=link_fds(link.fds), rings=rings) as engine:
        for number in range(ROUNDS):
            assert link.send(Cancel(number % 7, number))
            for _ in range(pauses.randrange(200)):  # shifts the moment of going to sleep against the answer
                pass
            answers: list[tuple[int, int]] = []
            while not answers:
                if link.arm():
                    assert readable(link.fileno(), 30.0), f"no bell in round {number}"
                    link.acknowledge()
                records = link.drain(64).records
                answers += zip(records["slot"].tolist(), records["generation"].tolist(), strict=True)
            assert answers == [(number % 7, number)]
        assert link.send(Shutdown())
        assert engine.wait() == 0
    assert link.beat().pid == engine.pid
    assert link.beat().step >= 1
    link.close()
