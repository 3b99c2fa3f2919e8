"""Copies that fail, pages and states with wrong bytes, and states that go with their pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hicache.faults import Faults
from hicache.transfer import CpuTransfer, Ticket, TransferError
from ipc.messages import CacheLoaded
from tests.offload_device import PAGE_BYTES, Device, answers_to_the_end, device_of, keys_of, plan_of, prompt


def sums_of(device: Device, slots: list[int]) -> Any:
    return device.transfer.page_sums(np.array(slots, np.uint32))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_page_with_a_wrong_checksum_is_not_used_nor_what_follows(bad: int) -> None:
    tokens = prompt(3)
    with device_of() as device:
        plan = plan_of(tokens, load=[7, 8, 9], sums=sums_of(device, [7, 8, 9]))
        device.pool.pages[7 + bad, 5] ^= 1
        one = device.admit(tokens, plan)
        one.load_to_the_end()
        assert one.prefix.pages == bad
        assert device.answers() == [CacheLoaded(1, host_tokens=128 * bad, bad=bad)]
        assert device.blocks.find(plan.root, keys_of(tokens), tokens) == one.held[:bad]
        one.leave()


@pytest.mark.parametrize("fault", ["load_error_every", "short_copy_every"])
def test_a_load_that_fails_leaves_the_pages_before_it(fault: str) -> None:
    tokens = prompt(3)
    with device_of(faults=Faults(**{fault: 2})) as device:
        one = device.admit(tokens, plan_of(tokens, load=[7, 8, 9]))
        one.load_to_the_end()
        assert one.prefix.pages == 1
        (event,) = device.answers()
        assert (event.host_tokens, event.bad) == (128, -1)
        assert "DEEPINFER_CACHE_FAULTS" in event.error
        one.leave()


def test_a_store_that_fails_tells_how_far_it_came() -> None:
    tokens = prompt(4)
    with device_of(faults=Faults(store_error_every=3)) as device:
        one = device.admit(tokens, plan_of(tokens, store=[1, 2, 3, 4]))
        one.compute()
        one.leave()
        events = answers_to_the_end(device)
        assert (events[1].pages, len(events[1].sums)) == (2, 16)
        assert "failed store" in events[1].error


def test_states_come_with_their_pages_and_go_at_once() -> None:
    tokens = prompt(4)
    with device_of(states=True) as device:
        plan = plan_of(tokens, load=[7, 8], load_state=3, store=[9, 10], store_from=2, store_states=((3, 0), (4, 1)))
        one = device.admit(tokens, plan)
        one.load_to_the_end()
        assert (device.states[2] == 203).all()
        device.states[3:5] = [[33], [44]]
        one.compute()
        device.states[:] = 0
        one.leave()
        events = answers_to_the_end(device)
        assert device.pool.states[:2, 0].tolist() == [33, 44]
        sums = device.transfer.state_sums(np.array([0, 1], np.uint32)).tolist()
        assert events[1].states == ((0, sums[0]), (1, sums[1]))


def test_a_state_is_loaded_also_where_all_pages_are_shared_but_only_once() -> None:
    tokens = prompt(3)
    with device_of(states=True) as device:
        first = device.admit(tokens, plan_of(tokens))
        first.compute()
        second = device.admit(tokens, plan_of(tokens, 2, load=[7, 8], load_state=1))
        second.load_to_the_end()
        assert (second.shared, second.prefix.pages) == (first.held[:2], 2)
        assert (device.states[2] == 201).all()
        assert device.offload.find(second.prefix, tokens) == []
        plain = device.admit(tokens, plan_of(tokens, 3))
        assert plain.shared == []
        for one in (first, second, plain):
            one.leave()
        device.answers()


@pytest.mark.parametrize("harm", ["page", "state"])
def test_a_bad_state_or_page_behind_shared_ones_undoes_the_whole_hit(harm: str) -> None:
    tokens = prompt(3)
    with device_of(states=True) as device:
        sums = sums_of(device, [7, 8])
        state = int(device.transfer.state_sums(np.array([1], np.uint32))[0])
        first = device.admit(tokens[:130], plan_of(tokens[:130]))
        first.compute()
        (device.pool.pages[8] if harm == "page" else device.pool.states[1])[3] ^= 4
        second = device.admit(tokens, plan_of(tokens, 2, load=[7, 8], load_state=1, sums=sums, load_state_sum=state))
        second.load_to_the_end()
        assert (second.prefix.shared, second.prefix.pages) == (1, 0)
        assert device.answers()[-1] == CacheLoaded(2, bad=1 if harm == "page" else 2)
        first.leave()
        second.leave()


class LateTransfer(CpuTransfer):
    """Copies are over when the test says so, as on a card; the next `broken` ones fail."""

    over = False
    broken = 0

    def done(self, ticket: Ticket) -> bool:
        if self.broken:
            self.broken -= 1
            raise TransferError("the card fell off the bus")
        return self.over


@contextmanager
def late_device() -> Iterator[tuple[Device, LateTransfer]]:
    with device_of() as device:
        late = LateTransfer(device.pages, None, device.pool)
        late.bytes_per_second = 1.0
        device.transfer.close()
        device.transfer = late
        device.offload.attach(late, PAGE_BYTES)
        yield device, late


def test_host_pages_are_let_go_only_when_the_device_has_read_them() -> None:
    tokens = prompt(2)
    with late_device() as (device, late):
        one = device.admit(tokens, plan_of(tokens, load=[7, 8]))
        assert one.load_to_the_end() == 1  # what is queued behind the loads on the device may go on
        gone = device.admit(tokens, plan_of(tokens, 2, load=[7]))
        one.leave()
        gone.leave()
        assert device.answers() == [CacheLoaded(2, device_tokens=256)]
        for _ in range(3):
            device.offload.pump(decoding=False)
            device.offload.rest()
            assert device.answers() == []
            assert device.offload.busy
        late.over = True
        assert device.answers() == [CacheLoaded(1, host_tokens=256)]


def test_blocks_are_held_until_their_copies_are_over() -> None:
    tokens = prompt(4)
    with late_device() as (device, late):
        one = device.admit(tokens, plan_of(tokens, store=[1, 2, 3]))
        one.compute()
        one.leave()
        for _ in range(6):
            device.offload.pump(decoding=True)
            device.offload.rest()
        assert device.answers() == [CacheLoaded(1)]
        assert device.blocks.used == 3
        late.over = True
        (stored,) = answers_to_the_end(device)
        assert stored.pages == 3


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_copy_that_fails_late_ends_its_store_and_no_other(steps: int) -> None:
    tokens = prompt(4)
    with late_device() as (device, late):
        one = device.admit(tokens, plan_of(tokens, store=[1, 2, 3]))
        one.compute()
        one.leave()
        for _ in range(steps):
            device.offload.pump(decoding=True)
        late.broken = 1
        device.offload.pump(decoding=True)
        device.offload.pump(decoding=True)
        late.over = True
        events = answers_to_the_end(device)
        assert [event.plan for event in events] == [1, 1]
        assert (events[1].pages, events[1].error) == (0, "the card fell off the bus")


def test_a_fence_that_fails_holds_nothing_up() -> None:
    tokens = prompt(2)
    with late_device() as (device, late):
        one = device.admit(tokens, plan_of(tokens, load=[7]))
        late.broken = 1
        one.load_to_the_end()
        assert device.answers() == [CacheLoaded(1, host_tokens=128)]
        one.leave()
