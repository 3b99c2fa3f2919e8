"""What of the way to a card can be checked without one: pinning, the copy engine's loop, which ways there are."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache import kernel, ways
from hicache.kernel import KernelUnavailableError
from hicache.pinning import MEMORY_PAGE, PIECE_BYTES, PinnedMemory, PinningError, pieces
from hicache.pool import PoolFiles
from hicache.shape import PoolShape
from tests.fake_driver import FakeDriver

CPU = torch.device("cpu")
UInt8 = npt.NDArray[np.uint8]


@contextmanager
def rows(count: int, size: int) -> Iterator[UInt8]:
    """Pages of a pool; untouched, they cost no memory."""
    files = PoolFiles.create()
    pool = files.size(PoolShape(count, size, 0, 0))
    try:
        yield pool.pages
    finally:
        files.close()


# ---- pinning ----


@given(st.integers(1, 40), st.integers(1, 50_000), st.integers(1, 1 << 20))
def test_pieces_cover_all_rows_and_cut_none(count: int, size: int, piece: int) -> None:
    with rows(count, size) as memory:
        found, begin = list(pieces(memory, piece)), memory.ctypes.data
    assert found[0][0] == begin
    assert sum(length for _, length in found) == count * size
    for (address, length), (following, _) in itertools.pairwise(found):
        assert following == address + length
        assert (following - begin) % size == 0
        assert following % MEMORY_PAGE == 0


def test_pieces_stay_small_where_sizes_allow() -> None:
    with rows(40_000, 114_048) as memory:
        lengths = [length for _, length in pieces(memory)]
    assert len(lengths) == 5
    assert max(lengths) <= PIECE_BYTES


def test_memory_is_pinned_once_and_unpinned() -> None:
    driver = FakeDriver()
    with rows(40_000, 114_048) as memory:
        pinned = PinnedMemory(memory, driver.register, driver.unregister)
        assert sum(driver.pinned.values()) == memory.nbytes
        pinned.close()
        pinned.close()
    assert driver.calls == 5
    assert not driver.pinned


def test_no_rows_need_no_pinning() -> None:
    driver = FakeDriver()
    PinnedMemory(np.empty((0, 100), np.uint8), driver.register, driver.unregister).close()
    assert driver.calls == 0


@pytest.mark.parametrize("piece", [0, 3])
def test_what_is_pinned_is_unpinned_when_a_later_piece_fails(piece: int) -> None:
    driver = FakeDriver(refuse_piece=piece)
    with rows(40_000, 114_048) as memory, pytest.raises(PinningError) as caught:
        PinnedMemory(memory, driver.register, driver.unregister)
    assert not driver.pinned
    for part in ("4,561,920,000 bytes", f"piece {piece}", "out of memory", "RLIMIT_MEMLOCK", "--hicache-size-gb"):
        assert part in str(caught.value)


def test_a_refusal_to_unpin_is_logged_and_the_rest_is_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    with rows(40_000, 114_048) as memory:
        pinned = PinnedMemory(memory, driver.register, driver.unregister)
        driver.unregister(memory.ctypes.data)
        pinned.close()
    assert not driver.pinned
    assert "cannot unpin" in caplog.text


# ---- ways ----


@given(st.permutations(range(7)), st.permutations(range(5)), st.integers(0, 5))
def test_the_copy_engine_copies_row_by_row(to: list[int], at: list[int], count: int) -> None:
    dst, src = torch.zeros((7, 33), dtype=torch.uint8), torch.arange(165, dtype=torch.uint8).view(5, 33)
    expected = dst.clone()
    expected[to[:count]] = src[at[:count]]
    ways.CopyEngine().copy(dst, np.array(to[:count], np.int64), src, np.array(at[:count], np.int64))
    assert torch.equal(dst, expected)


def test_the_kernel_is_left_out_where_it_cannot_serve(caplog: pytest.LogCaptureFixture) -> None:
    assert [way.name for way in ways.ways_for(1001, CPU)] == ["copy engine"]
    assert not caplog.text
    if torch.version.cuda is None:
        with caplog.at_level(logging.WARNING):
            assert [way.name for way in ways.ways_for(4096, CPU)] == ["copy engine"]
        assert "built without CUDA" in caplog.text
        with pytest.raises(KernelUnavailableError, match="built without CUDA"):
            kernel.load()


def test_the_kernel_is_built_from_files_that_exist() -> None:
    for name in kernel.FILES:
        assert (kernel.SOURCES / name).is_file()
