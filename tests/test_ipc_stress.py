"""Numbered records between two processes that stall at random: all there, in order, whole, after their events."""

from __future__ import annotations

import select
import time

import numpy as np
import pytest

from ipc.link import ServerLink
from ipc.link_memory import LinkShape
from ipc.messages import Flag, Shutdown, Stats
from tests.ipc_twins import TWINS, child, link_args, link_fds

# Small enough that the engine is congested again and again.
TIGHT = LinkShape(submit_bytes=4096, event_bytes=1024, token_records=1024)


class Checker:
    """Follows the numbers in what was drained."""

    def __init__(self) -> None:
        self.records = 0
        self.marked: set[int] = set()

    def check(self, link: ServerLink, limit: int) -> int:
        drained = link.drain(limit)
        assert not drained.errors
        for event in drained.events:
            assert isinstance(event, Stats)
            assert event.steps >= self.records  # its record was not here before it
            self.marked.add(event.steps)
        records = drained.records
        number = np.arange(self.records, self.records + len(records))
        assert (records["token"] == number % 2**32).all()
        assert (records["position"] == number * 7 % 2**32).all()
        assert (records["time_ns"] == number * 2654435761).all()
        marks = number[records["flags"] == Flag.TOP].tolist()
        assert self.marked.issuperset(marks)
        self.marked.difference_update(marks)
        self.records += len(records)
        return len(records) + len(drained.events)


def run(count: int, seed: int, rings: str) -> int:
    """Returns how often the engine was congested."""
    link = ServerLink.create(TIGHT)
    rng = np.random.default_rng(seed)
    shape = (TIGHT.submit_bytes, TIGHT.event_bytes, TIGHT.token_records)
    args = ["source", *link_args(link.fds), *map(str, (*shape, count, seed))]
    checker = Checker()
    with child("ipc_engine.py", *args, fds=link_fds(link.fds), rings=rings) as engine:
        while checker.records < count:
            if not checker.check(link, int(rng.integers(1, 600))) and link.arm():
                assert select.select([link.fileno()], [], [], 60)[0], "the engine sends no more"
                link.acknowledge()
            if rng.random() < 0.02:
                time.sleep(rng.random() * 0.003)
        assert link.send(Shutdown())
        output, _ = engine.communicate()
        assert engine.returncode == 0
    assert checker.records == count
    assert not checker.marked
    link.close()
    return int(output)


@pytest.mark.parametrize("rings", TWINS)
def test_200_thousand_records(rings: str) -> None:
    assert run(200_000, 1, rings) > 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rings", TWINS)
def test_10_million_records(rings: str) -> None:
    assert run(10_000_000, 2, rings) > 0
