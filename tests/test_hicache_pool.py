"""The host pool: its sizes, what refuses them, and its memory in several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.memory import Room
from hicache.pool import MAX_SHARE, HostPool, PoolFiles, PoolTooLargeError, preflight
from hicache.shape import AUTO_SHARE, MAX_AUTO_BYTES, MAX_PAGES_PER_RANK, PoolShape, auto_bytes, shape_for
from ipc.errors import SegmentError
from ipc.messages import CacheAttach, PoolFds
from tests.ipc_twins import ROOT

GIB = 1 << 30
SHAPE = PoolShape(pages=5, page_bytes=4096 + 16, states=3, state_bytes=1000)

# Maps the pool, adds one to every byte of slot 1 and of state 2, and says what it found there.
CHILD = """
import sys
from hicache.pool import HostPool
from hicache.shape import PoolShape
from ipc.messages import PoolFds
numbers = [int(argument) for argument in sys.argv[1:]]
pool = HostPool.attach(PoolFds(*numbers[:2]), PoolShape(*numbers[2:]))
print(pool.pages[1].min(), pool.pages[1].max(), pool.states[2].max())
pool.pages[1] += 1
pool.states[2] += 1
pool.close()
"""


def held() -> tuple[int, int, int]:
    """Descriptors, threads and mapped pools of this process."""
    maps = Path("/proc/self/maps").read_text()
    fds, tasks = list(Path("/proc/self/fd").iterdir()), list(Path("/proc/self/task").iterdir())
    return len(fds), len(tasks), len(re.findall("memfd:deepinfer-(?:pages|states)", maps))


# ---- sizes ----


@given(st.integers(1, 1 << 40), st.integers(1, 8), st.integers(1, 10**8), st.integers(0, 5000), st.integers(0, 10**7))
def test_a_shape_is_whole_pages_within_what_each_rank_was_given(
    size: int, ranks: int, page: int, states: int, state: int
) -> None:
    shape = shape_for(size, ranks, page, states, state)
    assert shape.pages % ranks == 0
    assert shape.pages_size <= size * ranks
    assert shape.pages // ranks == MAX_PAGES_PER_RANK or shape.pages_size + ranks * page > size * ranks
    assert shape.states == (states * ranks if state else 0)
    assert shape.size == shape.pages * page + shape.states * state
    assert PoolShape.of(shape.message()) == shape


def test_a_shape_travels_as_a_message() -> None:
    assert SHAPE.message() == CacheAttach(pages=5, page_bytes=4112, states=3, state_bytes=1000)


@given(st.integers(0, 1 << 44), st.integers(1, 8), st.integers(1, 10**8))
def test_a_chosen_size_is_modest(available: int, ranks: int, page: int) -> None:
    size = auto_bytes(available, ranks, page)
    assert size % page == 0
    assert size // page <= MAX_PAGES_PER_RANK
    assert size <= MAX_AUTO_BYTES
    assert size * ranks <= available * AUTO_SHARE + 1


def test_sizes_that_are_chosen() -> None:
    assert auto_bytes(4096 * GIB, 4, GIB) == 32 * GIB
    assert auto_bytes(40 * GIB, 2, GIB) == 2 * GIB
    assert auto_bytes(4096 * GIB, 1, 512) == MAX_PAGES_PER_RANK * 512
    assert auto_bytes(GIB, 1, GIB) == 0


# ---- preflight ----


def test_what_fits_passes() -> None:
    shape = shape_for(4 * GIB, 2, 1 << 20, 0, 0)
    preflight(shape, 2, room=Room(9 * GIB, "MemAvailable"))
    preflight(shape, 2, room=Room(12 * GIB, "MemAvailable"), promised=3 * GIB)


@pytest.mark.parametrize("promised", [0, 5 * GIB])
def test_what_does_not_fit_is_refused_with_the_arithmetic(promised: int) -> None:
    shape = shape_for(4 * GIB, 2, 1 << 20, 10, 1000)
    room = Room(8 * GIB + promised, "/sys/fs/cgroup/memory.max")
    with pytest.raises(PoolTooLargeError) as caught:
        preflight(shape, 2, room=room, promised=promised)
    text = str(caught.value)
    assert text.startswith("--hicache-size-gb: ")
    parts = ("8,192 pages of 1,048,576 bytes", "20 states of 1,000 bytes", f"{shape.size:,} bytes")
    limits = (f"{room.available:,} bytes (/sys/fs/cgroup/memory.max)", f"{promised:,} promised")
    for part in (*parts, *limits, f"{int(8 * GIB * MAX_SHARE):,}", "--hicache-state-slots"):
        assert part in text


def test_more_promised_than_there_is() -> None:
    with pytest.raises(PoolTooLargeError, match="of that is 0 bytes"):
        preflight(SHAPE, 1, room=Room(GIB, "MemAvailable"), promised=2 * GIB)


def test_a_rank_without_a_page_is_refused() -> None:
    with pytest.raises(
        PoolTooLargeError, match="--hicache-size-gb: less than one page of 4,194,304 bytes for each of 2"
    ):
        preflight(shape_for(1 << 20, 2, 4 << 20, 0, 0), 2, room=Room(GIB, "MemAvailable"))


def test_a_low_limit_of_locked_memory_is_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plenty = Room(GIB, "MemAvailable")
    preflight(SHAPE, 1, room=plenty, pinned=False, memlock=8192)
    preflight(SHAPE, 1, room=plenty, pinned=True, memlock=SHAPE.size)
    assert not caplog.text
    preflight(SHAPE, 1, room=plenty, pinned=True, memlock=8192)
    assert "RLIMIT_MEMLOCK is 8192 bytes" in caplog.text
    assert "--hicache-size-gb" in caplog.text


def test_by_default_this_machine_is_asked() -> None:
    preflight(SHAPE, 1)
    with pytest.raises(PoolTooLargeError):
        preflight(shape_for(1 << 50, 1, GIB, 0, 0), 1)


# ---- memory ----


def test_a_pool_is_zeros_in_rows() -> None:
    files = PoolFiles.create()
    pool = files.size(SHAPE)
    assert (pool.pages.shape, pool.states.shape) == ((5, 4112), (3, 1000))
    assert not pool.pages.any()
    assert not pool.states.any()
    assert pool.shape == SHAPE
    pool.close()
    files.close()


def test_a_child_that_was_there_before_the_size_sees_the_same_bytes() -> None:
    files = PoolFiles.create()
    fds = files.fds
    pool = files.size(SHAPE)
    pool.pages[1], pool.states[2] = 41, 6
    numbers = [str(number) for number in (fds.pages, fds.states, *SHAPE)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *numbers],
        pass_fds=(fds.pages, fds.states), cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["41", "41", "6"]
    assert (pool.pages[1] == 42).all()
    assert (pool.states[2] == 7).all()
    assert not pool.pages[[0, 2, 3, 4]].any()
    pool.close()
    files.close()


def test_the_pool_outlives_the_descriptors() -> None:
    files = PoolFiles.create()
    pool = files.size(SHAPE)
    files.close()
    pool.pages[4, -1] = 9
    assert pool.pages[4, -1] == 9
    pool.close()


def test_without_states_their_file_stays_empty() -> None:
    files = PoolFiles.create()
    shape = PoolShape(2, 512, 0, 0)
    pool, other = files.size(shape), HostPool.attach(files.fds, shape)
    assert pool.states.shape == other.states.shape == (0, 0)
    assert os.fstat(files.fds.states).st_size == 0
    other.close()
    pool.close()
    files.close()


def test_sizes_are_sealed_and_must_agree() -> None:
    files = PoolFiles.create()
    with pytest.raises(SegmentError, match="has 0 bytes"):
        HostPool.attach(files.fds, SHAPE)
    pool = files.size(SHAPE)
    for fd in (files.fds.pages, files.fds.states):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    with pytest.raises(SegmentError, match="instead of"):
        HostPool.attach(files.fds, SHAPE._replace(pages=6))
    with pytest.raises(SegmentError, match="instead of"):
        HostPool.attach(files.fds, SHAPE._replace(states=2))
    with pytest.raises(SegmentError, match=f"fd {files.fds.pages}"):
        files.size(SHAPE._replace(pages=6))
    with pytest.raises(SegmentError):
        HostPool.attach(PoolFds(pages=-1, states=-1), SHAPE)
    pool.close()
    files.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_prefaulting_takes_all_memory_and_changes_nothing(threads: int) -> None:
    files = PoolFiles.create()
    shape = PoolShape(1000, 4096 * 5, 7, 100)
    pool = files.size(shape)
    pool.pages[3, 5:9] = 200
    before = pool.pages.copy()
    pool.prefault(threads)
    assert os.fstat(files.fds.pages).st_blocks * 512 >= shape.pages_size
    assert np.array_equal(pool.pages, before)
    pool.close()
    files.close()


def test_nothing_is_left_behind() -> None:
    PoolFiles.create().close()
    before = held()
    for _ in range(20):
        files = PoolFiles.create()
        pool = files.size(SHAPE)
        other = HostPool.attach(files.fds, SHAPE)
        pool.prefault(4)
        with pytest.raises(SegmentError):
            HostPool.attach(files.fds, SHAPE._replace(states=2))
        for mine in (other, pool):
            mine.close()
        files.close()
    assert held() == before


def test_closing_waits_for_views() -> None:
    files = PoolFiles.create()
    pool = files.size(SHAPE)
    view = pool.pages[2]
    with pytest.raises(BufferError):
        pool.close()
    del view
    pool.close()
    pool.close()
    files.close()
