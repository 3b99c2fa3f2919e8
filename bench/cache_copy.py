"""How fast pages go between a device's blocks in host memory and the host pool, and how fast a pool is ready.

Copies: all pages of a pool in random order, by `hicache.transfer`, with and without their checksums. The ceiling is one
`memmove` of as many bytes between the same two memories, in one piece, which neither looks for rows nor checks any;
`np.copyto` of the same stands beside it. Both use one thread, so the ratio is taken from the row with one thread.
Prefault: fresh pools filled with memory by the kernel, which clears every byte of it.

All ways take turns in one run. Fixed seed. `python -m bench.cache_copy [--megabytes N] [--turns N] [--threads N]`
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.report import Row, report
from hicache.pool import HostPool, PoolFiles
from hicache.shape import PoolShape
from hicache.transfer import CpuTransfer

# The smallest page of a model we serve, a round size, and the demo model's in float32.
PAGE_BYTES: Final = (114_048, 1 << 20, 5_898_240)
MIB: Final = 1 << 20

Way = Callable[[], object]


@contextmanager
def fresh_pool(shape: PoolShape) -> Iterator[HostPool]:
    files = PoolFiles.create()
    pool = files.size(shape)
    try:
        yield pool
    finally:
        pool.close()
        files.close()


def copy_ways(pool: HostPool, device: npt.NDArray[np.uint8], threads: int) -> dict[str, Way]:
    """The ways of the project, on so many threads; close over memories that the caller owns."""
    count = len(device)
    order = np.random.default_rng(0)
    blocks, slots = order.permutation(count).astype(np.int32), order.permutation(count).astype(np.uint32)
    transfer = CpuTransfer(device, None, pool, threads)

    def load_checked() -> None:
        transfer.page_sums(slots)
        transfer.load(slots, blocks)

    return {
        "store": lambda: transfer.store(blocks, slots),
        "load": lambda: transfer.load(slots, blocks),
        "store, then checksums": lambda: (transfer.store(blocks, slots), transfer.page_sums(slots)),
        "checksums, then load": load_checked,
        "checksums": lambda: transfer.page_sums(slots),
    }


def plain_ways(pool: HostPool, device: npt.NDArray[np.uint8]) -> dict[str, Way]:
    """The ceilings."""
    to, at, size = pool.pages.ctypes.data, device.ctypes.data, device.nbytes
    pages = pool.pages
    return {
        "memmove": lambda: ctypes.memmove(to, at, size),
        "np.copyto": lambda: np.copyto(pages, device),
    }


def measure(page_bytes: int, total: int, turns: int, threads: int) -> list[Row]:
    """One row a way; speeds in bytes a second over all pages."""
    shape = PoolShape(max(1, total // page_bytes), page_bytes, 0, 0)
    with fresh_pool(shape) as pool:
        device = np.ones(pool.pages.shape, np.uint8)
        pool.prefault(threads)
        ways = {(name, 1): way for name, way in plain_ways(pool, device).items()}
        for number in sorted({1, threads}):
            ways |= {(name, number): way for name, way in copy_ways(pool, device, number).items()}
        times: dict[tuple[str, int], list[float]] = {key: [] for key in ways}
        for _ in range(turns):
            for key, way in ways.items():
                begin = time.perf_counter()
                way()
                times[key].append(time.perf_counter() - begin)
        del way
        ways.clear()
    return [row(key, times[key], times["memmove", 1], shape) for key in times]


def row(key: tuple[str, int], times: list[float], plain: list[float], shape: PoolShape) -> Row:
    """Figures of one way; the ratio is the median over turns, so that a slow moment slows both of its sides."""
    ratios = [ours / theirs for ours, theirs in zip(plain, times, strict=True)]
    return {
        "way": key[0],
        "page": shape.page_bytes,
        "threads": key[1],
        "GB/s": shape.size / statistics.median(times) / 1e9,
        "best GB/s": shape.size / min(times) / 1e9,
        "x memmove": statistics.median(ratios),
    }


def prefault(total: int, turns: int, threads: int) -> Row:
    """A row for pools that come to be."""
    shape = PoolShape(total // MIB, MIB, 0, 0)
    times = []
    for _ in range(turns):
        with fresh_pool(shape) as pool:
            begin = time.perf_counter()
            pool.prefault(threads)
            times.append(time.perf_counter() - begin)
    speed, best = shape.size / statistics.median(times) / 1e9, shape.size / min(times) / 1e9
    return {"way": "prefault", "page": MIB, "threads": threads, "GB/s": speed, "best GB/s": best}


def main() -> None:
    parser = argparse.ArgumentParser(description="Pages between a device in host memory and the host pool.")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the pool (%(default)s)")
    parser.add_argument("--turns", type=int, default=9, help="turns of each way (%(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="most threads (%(default)s)")
    args = parser.parse_args()
    total = args.megabytes * MIB
    rows = [row for size in PAGE_BYTES for row in measure(size, total, args.turns, args.threads)]
    rows += [prefault(total, args.turns, threads) for threads in sorted({1, args.threads})]
    print(f"pages of a pool of {args.megabytes} MiB in random order, median of {args.turns} turns")
    report("cache_copy", rows)


if __name__ == "__main__":
    main()
