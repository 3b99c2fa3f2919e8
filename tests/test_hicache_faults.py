"""Copies that fail on purpose: how often, how much of them is done, and that they say so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache.faults import VARIABLE, Faults, FaultyTransfer
from hicache.transfer import TransferError
from tests.cache_rigs import DEVICES, blocks, rig, slots

on_all = pytest.mark.parametrize("device", DEVICES)


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except TransferError as error:
        return VARIABLE in str(error)  # and not some other failure
    return False


# ---- the variable ----


def test_the_variable_is_read() -> None:
    assert Faults.of({}) is None
    assert Faults.of({VARIABLE: ""}) is None
    text = "load_error_every=3, flip_byte_every=5,short_copy_every=7"
    assert Faults.of({VARIABLE: text}) == Faults(load_error_every=3, flip_byte_every=5, short_copy_every=7)


@pytest.mark.parametrize("text", ["load_error_every", "load_error_every=x", "load_error_every=-1", "rust_every=1", ","])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(TransferError, match=f"{VARIABLE}=.*flip_byte_every, load_error_every"):
        Faults.of({VARIABLE: text})


def test_it_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    with rig(faults="flip_byte_every=2") as made:
        assert isinstance(made.transfer, FaultyTransfer)
    assert "FAIL ON PURPOSE" in caplog.text
    assert "flip_byte_every=2" in caplog.text


# ---- what goes wrong ----


@on_all
def test_every_third_load_fails_before_a_byte_is_copied(device: str) -> None:
    with rig(device, faults="load_error_every=3") as made:
        before = made.pages.copy()
        load = [fails(lambda slot=slot: made.transfer.load(slots(slot), blocks(slot))) for slot in range(6)]  # type: ignore[misc]
        assert load == [False, False, True, False, False, True]
        assert np.array_equal(made.pages[[2, 5]], before[[2, 5]])
        assert np.array_equal(made.pages[[0, 1, 3, 4]], made.pool.pages[[0, 1, 3, 4]])
        assert not fails(lambda: made.transfer.store(blocks(0), slots(0)))


@on_all
def test_stores_fail_alike_and_states_count(device: str) -> None:
    with rig(device, faults="store_error_every=2") as made:
        host = made.pool.pages.copy()
        assert not fails(lambda: made.transfer.store_states(blocks(0), slots(0)))
        assert fails(lambda: made.transfer.store(blocks(0), slots(0)))
        assert np.array_equal(made.pool.pages, host)
        assert not fails(lambda: made.transfer.store(blocks(0), slots(0)))
        assert fails(lambda: made.transfer.store_states(blocks(0), slots(0)))


@on_all
def test_a_short_copy_does_half_its_rows(device: str) -> None:
    with rig(device, faults="short_copy_every=2") as made:
        before, host = made.pages.copy(), made.pool.pages.copy()
        made.transfer.load_states(slots(0), blocks(0))
        assert fails(lambda: made.transfer.load(slots(5, 6, 7, 8), blocks(0, 1, 2, 3)))
        before[:2] = host[5:7]
        assert np.array_equal(made.pages, before)
        made.transfer.load_states(slots(0), blocks(0))
        assert fails(lambda: made.transfer.store(blocks(2, 3), slots(0, 1)))
        host[0] = before[2]
        assert np.array_equal(made.pool.pages, host)


@on_all
def test_nothing_to_copy_never_fails(device: str) -> None:
    with rig(device, faults="load_error_every=1,store_error_every=1,short_copy_every=1") as made:
        made.transfer.load(slots(), blocks())
        made.wait(made.transfer.store(blocks(), slots()))


@on_all
def test_a_byte_flips_once_the_checksum_has_been_taken(device: str) -> None:
    with rig(device, faults="flip_byte_every=2") as made:
        every = slots(0, 1, 2, 3)
        made.wait(made.transfer.store(blocks(0, 1, 2, 3), every))
        assert np.array_equal(made.pool.pages[:4], made.pages[:4])
        taken = made.transfer.page_sums(every)
        found = made.transfer.page_sums(every)
        assert (taken == found).tolist() == [True, False, True, False]
        different = made.pool.pages[:4] != made.pages[:4]
        assert different.sum(axis=1).tolist() == [0, 1, 0, 1]
        # A page that is only looked at stays as it is.
        assert np.array_equal(made.transfer.page_sums(every), found)
        made.wait(made.transfer.store(blocks(1), slots(1)))
        assert made.transfer.page_sums(slots(1))[0] == taken[1]
