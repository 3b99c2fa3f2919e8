"""The contract of a transfer, for blocks in host memory and, where there is one, on a card."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache import rows
from hicache.opening import open_transfer
from hicache.pool import HostPool, PoolFiles
from hicache.shape import PoolShape
from hicache.transfer import CpuTransfer, TransferError, measure
from tests.cache_rigs import BLOCKS, DEVICES, SHAPES, STATE_ROWS, Rig, blocks, rig, slots
from tests.ipc_twins import ROOT

on_all = pytest.mark.parametrize("device", DEVICES)
of_all_sizes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.page_bytes))

Lists = tuple[list[int], list[int]]


def pairs(first: int, second: int) -> st.SearchStrategy[Lists]:
    """Distinct rows of two memories, as many of each."""
    return st.integers(0, min(first, second)).flatmap(
        lambda k: st.tuples(st.permutations(range(first)), st.permutations(range(second))).map(
            lambda both: (both[0][:k], both[1][:k])
        )
    )


# ---- bytes ----


@on_all
@of_all_sizes
@settings(max_examples=30)
@given(st.data())
def test_any_row_of_copies_is_what_numpy_does(device: str, shape: PoolShape, data: st.DataObject) -> None:
    with rig(device, shape) as made:
        device_rows, host_rows = made.pages.copy(), made.pool.pages.copy()
        for _ in range(data.draw(st.integers(1, 6))):
            at_blocks, at_slots = data.draw(pairs(BLOCKS, shape.pages))
            if data.draw(st.booleans()):
                made.transfer.load(slots(*at_slots), blocks(*at_blocks))
                device_rows[at_blocks] = host_rows[at_slots]
            else:
                made.wait(made.transfer.store(blocks(*at_blocks), slots(*at_slots)))
                host_rows[at_slots] = device_rows[at_blocks]
        assert np.array_equal(made.pages, device_rows)
        assert np.array_equal(made.pool.pages, host_rows)


@on_all
@of_all_sizes
def test_states_go_their_own_way(device: str, shape: PoolShape) -> None:
    with rig(device, shape) as made:
        pages, host_pages = made.pages.copy(), made.pool.pages.copy()
        expected = made.states.copy()
        made.wait(made.transfer.store_states(blocks(2, 0), slots(1, 3)))
        assert np.array_equal(made.pool.states[[1, 3]], expected[[2, 0]])
        made.transfer.load_states(slots(0), blocks(1))
        expected[1] = made.pool.states[0]
        assert np.array_equal(made.states, expected)
        assert np.array_equal(made.pages, pages)
        assert np.array_equal(made.pool.pages, host_pages)


@on_all
def test_a_page_comes_back_as_it_went(device: str) -> None:
    """Stored, its block overwritten, loaded elsewhere: all queued in that order, nothing waited for."""
    with rig(device) as made:
        first = made.pages[1].copy()
        made.transfer.store(blocks(1), slots(5))
        made.transfer.load(slots(0), blocks(1))
        made.transfer.load(slots(5), blocks(4))
        assert np.array_equal(made.pages[4], first)
        assert np.array_equal(made.pages[1], made.pool.pages[0])


@on_all
def test_no_rows_are_nothing_to_do_and_in_order_all_the_same(device: str) -> None:
    with rig(device) as made:
        before = made.pages.copy()
        made.transfer.load(slots(), blocks())
        made.transfer.load_states(slots(), blocks())
        made.wait(made.transfer.store(blocks(), slots()))
        made.wait(made.transfer.store_states(blocks(), slots()))
        assert np.array_equal(made.pages, before)
        assert len(made.transfer.page_sums(slots())) == 0


@on_all
@of_all_sizes
def test_checksums_are_those_of_the_host_rows(device: str, shape: PoolShape) -> None:
    with rig(device, shape) as made:
        made.wait(made.transfer.store(blocks(3), slots(2)))
        expected = rows.sums(made.pages, np.array([3], np.uint32))
        assert np.array_equal(made.transfer.page_sums(slots(2)), expected)
        assert np.array_equal(made.transfer.page_sums(slots(4, 0)), rows.sums(made.pool.pages, slots(4, 0)))
        assert np.array_equal(made.transfer.state_sums(slots(3, 1)), rows.sums(made.pool.states, slots(3, 1)))


def test_no_copy_is_the_first_to_touch_a_slot() -> None:
    """Each page of memory that a copy meets anew costs a fault, and decodes wait for it."""
    shape = PoolShape(64, 256 << 10, 0, 0)
    files = PoolFiles.create()
    try:
        files.size(shape).prefault()
        pool = HostPool.attach(files.fds, shape)
        device = np.ones((1, shape.page_bytes), np.uint8)
        transfer = CpuTransfer(device, None, pool)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for slot in range(shape.pages):
            transfer.store(blocks(0), slots(slot))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < shape.size // resource.getpagesize() // 10
    finally:
        files.close()


# ---- what is refused ----


@on_all
@of_all_sizes
@pytest.mark.parametrize(
    ("to_blocks", "at_slots"),
    [([0, BLOCKS], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 100]), ([0, 1], [0]), ([], [3])],
)
def test_rows_that_do_not_exist_stop_the_whole_copy(
    device: str, shape: PoolShape, to_blocks: list[int], at_slots: list[int]
) -> None:
    with rig(device, shape) as made:
        before, host = made.pages.copy(), made.pool.pages.copy()
        with pytest.raises(TransferError):
            made.transfer.load(slots(*at_slots), blocks(*to_blocks))
        with pytest.raises(TransferError):
            made.transfer.store(blocks(*to_blocks), slots(*at_slots))
        assert np.array_equal(made.pages, before)
        assert np.array_equal(made.pool.pages, host)


@on_all
def test_a_destination_is_named_once(device: str) -> None:
    with rig(device) as made:
        with pytest.raises(TransferError, match="twice"):
            made.transfer.load(slots(0, 1), blocks(2, 2))
        with pytest.raises(TransferError, match="twice"):
            made.transfer.store(blocks(0, 1), slots(2, 2))


@on_all
def test_states_and_sums_of_rows_that_do_not_exist(device: str) -> None:
    with rig(device) as made:
        with pytest.raises(TransferError, match=str(STATE_ROWS)):
            made.transfer.load_states(slots(0), blocks(STATE_ROWS))
        for sums in (made.transfer.page_sums, made.transfer.state_sums):
            with pytest.raises(TransferError, match="row 100 is not one of"):
                sums(slots(100))


@on_all
def test_a_model_without_states_has_no_state_rows(device: str) -> None:
    with rig(device, with_states=False) as made:
        with pytest.raises(TransferError):
            made.transfer.load_states(slots(0), blocks(0))
        with pytest.raises(TransferError):
            made.transfer.store_states(blocks(0), slots(0))


# ---- start and end ----


@on_all
def test_speed_is_measured(device: str) -> None:
    with rig(device) as made:
        assert 1e6 < made.transfer.bytes_per_second < 1e14


@pytest.mark.parametrize("size", [1, 4096, 100 << 20])
def test_speed_is_measured_for_any_size_of_row(size: int) -> None:
    assert 0 < measure(size, 2) < 1e14


def test_what_is_opened_depends_on_where_the_rows_are() -> None:
    with rig() as made:
        transfer = open_transfer(np.zeros((2, SHAPES[0].page_bytes), np.uint8), None, made.pool, 1, {})
        assert isinstance(transfer, CpuTransfer)
        transfer.close()


def test_only_the_way_to_a_card_loads_torch() -> None:
    cards = ("transfer_cuda", "ways", "kernel")
    modules = [path.stem for path in (ROOT / "hicache").glob("*.py") if path.stem not in cards]
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module('hicache.' + name)\n"
    command = [sys.executable, "-c", program + "print('torch' in sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


@on_all
def test_nothing_is_left_behind(device: str) -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with rig(device):
        pass
    before = held()
    for _ in range(5):
        with rig(device) as made:
            copy_everything(made)
    assert held() == before


def copy_everything(made: Rig) -> None:
    """Every block out and back in."""
    every = list(range(BLOCKS))
    made.wait(made.transfer.store(blocks(*every), slots(*every)))
    made.transfer.load(slots(*every), blocks(*every))
