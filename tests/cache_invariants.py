"""What must hold of a planner and its index after every operation, whatever happened before."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hicache.hold import Hold
from hicache.index import PageIndex
from hicache.lru import LruList
from hicache.pages import DOOMED, FREE, NO_PARENT, NO_STATE, READY, RESERVED
from hicache.plan import Planner
from hicache.states import NOBODY


def check_planner(planner: Planner) -> None:
    """Every pin and every reservation has one owner, and the index is whole."""
    holds = list(planner._holds.values())
    _check_pins(planner, holds)
    _check_reservations(planner.index, holds)
    for rank, counts in planner.counts.items():
        assert counts.inflight == sum(hold.rank == rank for hold in holds)
    check_index(planner.index)


def check_index(index: PageIndex) -> None:
    """No slot twice, parents outlive children, what can be evicted is counted and in line, what is live is found."""
    pages = index.pages
    status, parent = pages.status.tolist(), pages.parent.tolist()
    live = [slot for slot in range(pages.total) if status[slot] != FREE]
    assert sorted([*pages._free[: pages.free_count].tolist(), *live]) == list(range(pages.total))
    assert all(parent[slot] == NO_PARENT or status[parent[slot]] != FREE for slot in live)
    children = Counter(parent[slot] for slot in live)
    assert all(pages.children[slot] == children[slot] for slot in live)
    idle = [slot for slot in live if status[slot] == READY and pages.pins[slot] == 0]
    assert index._evictable == len(idle)
    line = members(index._idle)
    assert {slot for slot in idle if not children[slot]} <= set(line)
    assert all(status[slot] == READY for slot in line)
    for slot in live:
        if status[slot] == DOOMED:
            assert pages.pins[slot] or pages.owner[slot] != NOBODY or children[slot]
        else:
            assert (pages.owner[slot] != NOBODY) == (status[slot] == RESERVED)
    assert found_slots(index) == {slot for slot in live if status[slot] != DOOMED}
    _check_states(index, live)


def members(line: LruList) -> list[int]:
    """The list from its first to its last, read both ways."""
    forward, at = [], line.first()
    while at not in (-1, line._edge):
        forward.append(at)
        at = line._after[at]
    backward, at = [], line._before[line._edge]
    while at != line._edge:
        backward.append(at)
        at = line._before[at]
    assert forward == backward[::-1]
    assert len(set(forward)) == len(forward) == sum(number in line for number in range(line._edge))
    return forward


def found_slots(index: PageIndex) -> set[int]:
    """All slots in the table, each in the bucket of its key and once."""
    buckets, found = index._buckets, []
    for bucket, first in enumerate(buckets._heads.tolist()):
        at = first
        while at >= 0:
            found.append(at)
            assert int(buckets.keys[at, 0]) % len(buckets._heads) == bucket
            at = int(buckets._next[at])
    assert len(set(found)) == len(found)
    return set(found)


def _check_pins(planner: Planner, holds: list[Hold]) -> None:
    pages = planner.index.pages
    paths = [hold.path for hold in holds] + list(planner.scrub._held.values())
    pins = np.zeros(pages.total, np.int32)
    for path in paths:
        assert path.tolist() == pages.path(int(path[-1]) if path.size else NO_PARENT).tolist()
        pins[path] += 1
    assert pins.tolist() == pages.pins.tolist()
    assert not (pages.pins[pages.status == FREE]).any()
    state_pins = Counter(hold.load_state for hold in holds if hold.loading and hold.load_state != NO_STATE)
    assert all(planner.index.states.pins[slot] == state_pins[slot] for slot in range(planner.index.states.total))


def _check_reservations(index: PageIndex, holds: list[Hold]) -> None:
    owned = {slot: hold.name for hold in holds if hold.storing for slot in hold.slots.tolist()}
    assert len(owned) == sum(len(hold.slots) for hold in holds if hold.storing)
    assert owned == {slot: owner for slot, owner in enumerate(index.pages.owner.tolist()) if owner != NOBODY}
    states = {slot: hold.name for hold in holds if hold.storing for slot in hold.states}
    assert states == {slot: owner for slot, owner in enumerate(index.states.owner) if owner != NOBODY}


def _check_states(index: PageIndex, live: list[int]) -> None:
    states = index.states
    linked = {slot: int(index.pages.state[slot]) for slot in live if index.pages.state[slot] != NO_STATE}
    assert all(states.page[state] == slot for slot, state in linked.items())
    assert sorted(linked.values()) == [slot for slot in range(states.total) if states.page[slot] >= 0]
    assert (index.pages.state[index.pages.status == FREE] == NO_STATE).all()
    free = states._free.tolist()
    assert sorted(free) == [slot for slot in range(states.total) if states.is_free(slot)]
    ready = {slot for slot in range(states.total) if states.is_ready(slot) and not states.pins[slot]}
    assert set(members(states._idle)) == ready
