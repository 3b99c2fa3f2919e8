"""The Python twin of `hicache._copy`: rows copied, summed and prefaulted by numpy.

Promises the same results, checksums and errors as the native module; `threads` is checked and otherwise ignored.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAX_THREADS: Final = 1024
PAGE: Final = 4096  # the smallest page of memory; larger ones are only touched more often
LANES: Final = 64
STRIPE: Final = LANES * 8
MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
ROTATION: Final = 31

UInt64 = npt.NDArray[np.uint64]


def copy(dst: Any, dst_rows: Any, src: Any, src_rows: Any, threads: int) -> None:
    """dst[dst_rows[i]] = src[src_rows[i]]; nothing is written where anything does not fit (ValueError)."""
    into, out_of = _matrix(dst, "dst", writable=True), _matrix(src, "src")
    to, at = _rows(dst_rows, len(into), "dst"), _rows(src_rows, len(out_of), "src")
    _check_threads(threads)
    if into.shape[1] != out_of.shape[1]:
        raise ValueError(f"rows of {out_of.shape[1]} bytes cannot be copied to rows of {into.shape[1]} bytes")
    if len(to) != len(at):
        raise ValueError(f"{len(at)} source rows for {len(to)} destination rows")
    ordered = np.sort(to)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise ValueError(f"dst row {twice[0]} is named twice")
    if np.may_share_memory(into, out_of):
        raise ValueError("dst and src overlap")
    into[to] = out_of[at]


def sums(buffer: Any, rows: Any, out: Any, threads: int) -> None:
    """out[i] = checksum of buffer[rows[i]], as `csrc/page_sum.hpp` defines it. Raises ValueError."""
    data = _matrix(buffer, "buffer")
    at = _rows(rows, len(data), "buffer")
    results = np.asarray(out)
    if results.dtype != np.uint64 or results.ndim != 1 or not results.flags.writeable:
        raise ValueError("out must be one dimension of 8-byte integers")
    _check_threads(threads)
    if len(results) != len(at):
        raise ValueError(f"{len(at)} rows for {len(results)} sums")
    results[:] = _sums(data[at])


def prefault(buffer: Any, threads: int) -> None:
    """Have memory behind every byte. Unlike the native one it writes, so nobody else may be writing meanwhile."""
    data = _matrix(buffer, "buffer", writable=True)
    _check_threads(threads)
    data.reshape(-1)[::PAGE] |= np.uint8(0)


def _sums(data: npt.NDArray[np.uint8]) -> UInt64:
    """Checksums of all rows of `data`."""
    count, size = data.shape
    length = -(-size // STRIPE)
    words = np.zeros((count, length * STRIPE), np.uint8)
    words[:, :size] = data
    stripes = words.view("<u8").reshape(count, length, LANES)
    lanes = np.arange(1, LANES + 1, dtype=np.uint64) * MULTIPLIER + np.zeros((count, 1), np.uint64)
    for stripe in range(length):
        lanes = _step(lanes, stripes[:, stripe])
    total = np.full(count, size, np.uint64)
    for lane in range(LANES):
        total = _step(total, lanes[:, lane])
    return total ^ (total >> np.uint64(32))


def _step(state: UInt64, word: UInt64) -> UInt64:
    mixed = (state ^ word ^ (word >> np.uint64(32))) * MULTIPLIER
    return (mixed << np.uint64(ROTATION)) | (mixed >> np.uint64(64 - ROTATION))


def _matrix(given: Any, name: str, *, writable: bool = False) -> npt.NDArray[np.uint8]:
    array = np.asarray(given)
    if array.ndim != 2 or array.itemsize != 1:
        raise ValueError(f"{name} must be two dimensions of bytes")
    if not array.flags.c_contiguous or (writable and not array.flags.writeable):
        raise ValueError(f"{name} must be contiguous and, if written, writable")
    return array


def _rows(given: Any, count: int, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(given)
    if array.ndim != 1 or array.dtype not in (np.int32, np.uint32):
        raise ValueError(f"{name} rows must be one dimension of 4-byte integers")
    rows = array.astype(np.int64)
    wrong = rows[(rows < 0) | (rows >= count)]
    if len(wrong):
        raise ValueError(f"{name} row {wrong[0]} is not one of {count}")
    return rows


def _check_threads(threads: int) -> None:
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads is {threads}, must be 1 to {MAX_THREADS}")
