"""Rows copied and summed: the native module and its twin against plain numpy, and what both refuse."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache import _copy, copy_py, rows
from hicache.rows import CopyUnavailableError
from tests.test_ipc_build import RUNTIMES, needs_compiler, sanitized_tree

TWINS: dict[str, ModuleType] = {"native": _copy, "python": copy_py}
UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]

both = pytest.mark.parametrize("name", TWINS)


def noise(count: int, size: int, seed: int = 0) -> UInt8:
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


def sums(name: str, data: UInt8, at: list[int] | None = None, threads: int = 1) -> UInt64:
    """Checksums of these rows, or of all."""
    wanted = np.array(range(len(data)) if at is None else at, np.uint32)
    out = np.zeros(len(wanted), np.uint64)
    TWINS[name].sums(data, wanted, out, threads)
    return out


# ---- copies ----


@both
@given(data=st.data())
def test_a_copy_is_what_numpy_does(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 70))
    src, dst = noise(data.draw(st.integers(1, 9)), size, 1), noise(data.draw(st.integers(1, 9)), size, 2)
    to = data.draw(st.lists(st.integers(0, len(dst) - 1), unique=True))
    at = data.draw(st.lists(st.integers(0, len(src) - 1), min_size=len(to), max_size=len(to)))
    kinds = data.draw(st.tuples(*[st.sampled_from([np.int32, np.uint32])] * 2))
    expected = dst.copy()
    expected[to] = src[at]
    TWINS[name].copy(dst, np.array(to, kinds[0]), src, np.array(at, kinds[1]), data.draw(st.integers(1, 9)))
    assert np.array_equal(dst, expected)


@both
@pytest.mark.parametrize(("count", "size"), [(3, 5 << 20), (400, 114_048), (1, (256 << 10) + 1), (70, 256 << 10)])
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_large_rows_are_shared_by_threads(name: str, count: int, size: int, threads: int) -> None:
    src, dst = noise(count, size), np.zeros((count + 1, size), np.uint8)
    order = np.random.default_rng(3).permutation(count)
    TWINS[name].copy(dst, order.astype(np.int32), src, np.arange(count, dtype=np.uint32), threads)
    assert np.array_equal(dst[order], src)
    assert not dst[count].any()


@both
@given(at=st.lists(st.integers(0, 5), max_size=30))
def test_a_row_may_be_read_more_than_once(name: str, at: list[int]) -> None:
    src, dst = noise(6, 33), np.zeros((30, 33), np.uint8)
    TWINS[name].copy(dst, np.arange(len(at), dtype=np.int32), src, np.array(at, np.int32), 3)
    assert np.array_equal(dst[: len(at)], src[at])


@both
def test_no_rows_and_rows_without_bytes_are_nothing_to_do(name: str) -> None:
    module, none, one = TWINS[name], np.array([], np.uint32), np.array([0], np.uint32)
    dst, empty = noise(2, 8), np.zeros((2, 0), np.uint8)
    before = dst.copy()
    module.copy(dst, none, noise(2, 8, 1), none, 4)
    module.copy(dst, none, np.zeros((0, 8), np.uint8), none, 4)
    assert np.array_equal(dst, before)
    module.copy(empty, one, np.zeros((1, 0), np.uint8), one, 4)
    module.prefault(empty, 2)
    assert len(sums(name, dst, [])) == 0
    assert sums(name, empty)[0] == sums(name, empty)[1]


def ints(*values: int, kind: type[np.signedinteger[Any] | np.unsignedinteger[Any]] = np.int32) -> npt.NDArray[Any]:
    return np.array(values, kind)


BAD_COPIES: list[tuple[str, Callable[[UInt8, UInt8], tuple[Any, ...]]]] = [
    ("dst row 4 is not one of 4", lambda dst, src: (dst, ints(0, 4), src, ints(0, 1), 1)),
    ("dst row -1 is not one of 4", lambda dst, src: (dst, ints(0, -1), src, ints(0, 1), 1)),
    ("src row 3 is not one of 3", lambda dst, src: (dst, ints(0, 1), src, ints(0, 3), 1)),
    ("src row 4294967295 is not one of 3", lambda dst, src: (dst, ints(0), src, ints(2**32 - 1, kind=np.uint32), 1)),
    ("dst row 2 is named twice", lambda dst, src: (dst, ints(2, 1, 2), src, ints(0, 1, 2), 1)),
    ("1 source rows for 2 destination rows", lambda dst, src: (dst, ints(0, 1), src, ints(0), 1)),
    ("rows of 15 bytes cannot be copied", lambda dst, src: (dst, ints(0), src[:, :15].copy(), ints(0), 1)),
    ("dst and src overlap", lambda dst, src: (dst, ints(0), dst[2:], ints(1), 1)),
    ("dst rows must be one dimension of 4-byte", lambda dst, src: (dst, ints(0, kind=np.int64), src, ints(0), 1)),
    ("src rows must be one dimension of 4-byte", lambda dst, src: (dst, ints(0), src, ints(0).reshape(1, 1), 1)),
    ("dst rows must be one dimension of 4-byte", lambda dst, src: (dst, np.zeros(1, np.float32), src, ints(0), 1)),
    ("dst must be two dimensions of bytes", lambda dst, src: (dst[0], ints(0), src, ints(0), 1)),
    ("src must be two dimensions of bytes", lambda dst, src: (dst, ints(0), src.view(np.uint16), ints(0), 1)),
    ("contiguous", lambda dst, src: (dst, ints(0), noise(3, 32)[:, ::2], ints(0), 1)),
    ("threads is 0, must be 1 to 1024", lambda dst, src: (dst, ints(0), src, ints(0), 0)),
    ("threads is 1025, must be 1 to 1024", lambda dst, src: (dst, ints(0), src, ints(0), 1025)),
]


@both
@pytest.mark.parametrize(("message", "arguments"), BAD_COPIES)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    name: str, message: str, arguments: Callable[[UInt8, UInt8], tuple[Any, ...]]
) -> None:
    dst, src = noise(4, 16), noise(3, 16, 1)
    before = dst.copy()
    with pytest.raises(ValueError, match=message):
        TWINS[name].copy(*arguments(dst, src))
    assert np.array_equal(dst, before)


@both
def test_memory_that_must_not_be_written_is_refused(name: str) -> None:
    dst = noise(2, 8)
    dst.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only|writable"):
        TWINS[name].copy(dst, ints(0), noise(2, 8), ints(0), 1)
    with pytest.raises(ValueError, match=r"read-only|writable"):
        TWINS[name].prefault(dst, 1)


# ---- checksums ----


@given(size=st.integers(1, 1100), seed=st.integers(0, 99), threads=st.integers(1, 5))
def test_both_make_the_same_checksums(size: int, seed: int, threads: int) -> None:
    data = noise(4, size, seed)
    at = [3, 0, 0, 2]
    assert np.array_equal(sums("native", data, at, threads), sums("python", data, at))


@pytest.mark.parametrize("level", range(len(_copy.LEVELS)), ids=_copy.LEVELS)
@given(size=st.integers(1, 3000), seed=st.integers(0, 99))
def test_every_instruction_set_makes_the_same_checksums(level: int, size: int, seed: int) -> None:
    data, out = noise(2, size, seed), np.zeros(2, np.uint64)
    _copy.sums(data, ints(0, 1), out, 1, level)
    assert np.array_equal(out, sums("python", data))


def test_an_unknown_instruction_set_is_refused() -> None:
    for level in (-1, len(_copy.LEVELS)):
        with pytest.raises(ValueError, match=f"level {level} is not one of"):
            _copy.sums(noise(1, 8), ints(0), np.zeros(1, np.uint64), 1, level)


def test_checksums_stay_what_they_are() -> None:
    """The same on every machine and in every version, or ranks of two builds would find each other's pages bad."""
    data = (np.arange(2000, dtype=np.uint32) * 7 % 251).astype(np.uint8).reshape(1, -1)
    for name in TWINS:
        assert [hex(int(value)) for value in sums(name, data)] == ["0xde220ec23d799190"]


@both
@pytest.mark.parametrize("size", [1, 7, 8, 511, 512, 513, 1600])
def test_every_flipped_bit_changes_the_checksum(name: str, size: int) -> None:
    data = noise(1, size)
    flipped = np.repeat(data, size * 8, axis=0)
    for bit in range(size * 8):
        flipped[bit, bit // 8] ^= np.uint8(1 << bit % 8)
    found = np.append(sums(name, flipped), sums(name, data))
    assert len(np.unique(found)) == size * 8 + 1


@both
def test_words_that_change_places_change_the_checksum(name: str) -> None:
    data = noise(1, 1536)
    words = data.view(np.uint64)[0]
    swapped = np.repeat(data, len(words) ** 2 // 2, axis=0)
    pairs = [(a, b) for a in range(len(words)) for b in range(a)]
    for row, (a, b) in zip(swapped.view(np.uint64), pairs, strict=False):
        row[a], row[b] = words[b], words[a]
    found = sums(name, swapped[: len(pairs)])
    assert len(np.unique(np.append(found, sums(name, data)))) == len(pairs) + 1


@both
def test_zeros_and_lengths_are_told_apart(name: str) -> None:
    found = [int(sums(name, np.zeros((1, size), np.uint8))[0]) for size in range(1, 1300)]
    assert len(set(found)) == len(found)


@both
def test_sums_are_refused_where_they_do_not_fit(name: str) -> None:
    module, data, out = TWINS[name], noise(3, 8), np.zeros(1, np.uint64)
    with pytest.raises(ValueError, match="buffer row 3 is not one of 3"):
        module.sums(data, ints(3), out, 1)
    with pytest.raises(ValueError, match="2 rows for 1 sums"):
        module.sums(data, ints(0, 1), out, 1)
    with pytest.raises(ValueError, match="out must be one dimension of 8-byte"):
        module.sums(data, ints(0), np.zeros(1, np.uint32), 1)
    with pytest.raises(ValueError, match="threads is -1"):
        module.sums(data, ints(0), out, -1)
    with pytest.raises(ValueError, match="threads is 5000"):
        module.prefault(data, 5000)
    assert not out.any()


# ---- beside other threads ----


@both
def test_prefaulting_loses_no_byte_and_no_thread_stays(name: str) -> None:
    data = noise(64, 8192)
    before = data.copy()
    TWINS[name].prefault(data, 7)
    assert np.array_equal(data, before)
    assert len(list(Path("/proc/self/task").iterdir())) >= threading.active_count()


def test_several_threads_may_copy_at_once() -> None:
    src, dst = noise(32, 300_000), np.zeros((32, 300_000), np.uint8)

    def copy(part: int) -> None:
        mine = np.arange(part, 32, 4, dtype=np.uint32)
        for _ in range(3):
            rows.copy(dst, mine, src, mine, 3)
            assert np.array_equal(rows.sums(dst, mine, 2), rows.sums(src, mine, 2))

    threads = [threading.Thread(target=copy, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(dst, src)


# ---- the choice ----


def test_the_native_module_is_chosen_and_either_can_be_forced() -> None:
    assert rows.load("").__name__ == rows.load("native").__name__ == "hicache._copy"
    assert rows.load("python").__name__ == "hicache.copy_py"
    with pytest.raises(CopyUnavailableError, match="DEEPINFER_COPY=rust is neither"):
        rows.load("rust")


def test_without_the_native_module(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "hicache._copy", None)  # what an import finds if it is not built
    assert rows.load("").__name__ == "hicache.copy_py"
    assert rows.BUILD_HINT in caplog.text
    with pytest.raises(CopyUnavailableError, match="DEEPINFER_COPY=native"):
        rows.load("native")


@needs_compiler
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", RUNTIMES)
def test_copies_stay_within_their_memory_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    environ = sanitized_tree(sanitizer, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "tests/test_hicache_copy.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout
