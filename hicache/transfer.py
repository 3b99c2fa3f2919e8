"""The way between a device's blocks and the host pool: what the engine asks for, and the way for devices that are CPUs.

Promises that every row is checked before a byte moves, and TransferError for whatever fails. Used by one thread, the
engine's. Knows nothing about keys, plans, requests or torch.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hicache import rows
from hicache.pool import HostPool

UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint32]
Blocks = npt.NDArray[np.int32]

# What a start-up probe copies: long enough to be measured, some milliseconds at most.
PROBE_BYTES: Final = 8 << 20
PROBE_ROWS: Final = 1024
PROBE_TURNS: Final = 4


class TransferError(Exception):
    """A copy or a checksum did not succeed; the rows it was to write hold anything."""


class Ticket:
    """A store under way; `Transfer.done` says when it has ended."""


class Transfer(Protocol):
    """Rows between device and host: `slots` are host rows, `blocks` (or `rows`, of states) device rows, k each.

    All methods raise TransferError: for rows that do not exist, before anything is copied; and where a copy fails on
    the way, after nothing of it is under way any more.
    """

    bytes_per_second: float
    """Of loads, measured at start."""

    def load(self, slots: Slots, blocks: Blocks) -> None:
        """Host -> device, before anything that is queued on the engine's stream later."""
        ...

    def store(self, blocks: Blocks, slots: Slots) -> Ticket:
        """Device -> host, after everything that was queued before and before everything queued later."""
        ...

    def load_states(self, slots: Slots, rows: Blocks) -> None:
        """As `load`, of states."""
        ...

    def store_states(self, rows: Blocks, slots: Slots) -> Ticket:
        """As `store`, of states."""
        ...

    def done(self, ticket: Ticket) -> bool:
        """Whether the bytes of a store are in the host pool. Never waits."""
        ...

    def page_sums(self, slots: Slots) -> UInt64:
        """Checksums [k] of host pages. Other threads run meanwhile."""
        ...

    def state_sums(self, slots: Slots) -> UInt64:
        """Checksums [k] of host states."""
        ...

    def close(self) -> None:
        """Unpin and let go of the pool and of device memory; copies under way are waited for."""
        ...


class CpuTransfer:
    """Device memory is host memory too: copies by the native module, over when a call returns."""

    def __init__(self, pages: UInt8, states: UInt8 | None, pool: HostPool, threads: int = 1) -> None:
        """`pages` [num_blocks, page_bytes] and `states` [num_states, state_bytes] are the engine's, without a copy.

        Raises TransferError where there is no memory for the pool.
        """
        try:
            # The server has put memory behind it, but this process has not met it yet: doing so page by page makes the
            # first copy to a slot three times as long, beside decodes that wait for it.
            pool.prefault(threads)
        except OSError as error:
            raise TransferError(f"cannot map the host pool: {error}") from error
        self._pages = pages
        self._states = np.empty((0, pool.shape.state_bytes), np.uint8) if states is None else states
        self._host_pages = pool.pages
        self._host_states = pool.states
        self._threads = threads
        self.bytes_per_second = measure(pool.shape.page_bytes, threads)

    def load(self, slots: Slots, blocks: Blocks) -> None:
        self._copy(self._pages, blocks, self._host_pages, slots, "load pages")

    def store(self, blocks: Blocks, slots: Slots) -> Ticket:
        self._copy(self._host_pages, slots, self._pages, blocks, "store pages")
        return Ticket()

    def load_states(self, slots: Slots, rows: Blocks) -> None:
        self._copy(self._states, rows, self._host_states, slots, "load states")

    def store_states(self, rows: Blocks, slots: Slots) -> Ticket:
        self._copy(self._host_states, slots, self._states, rows, "store states")
        return Ticket()

    def done(self, ticket: Ticket) -> bool:
        return True

    def page_sums(self, slots: Slots) -> UInt64:
        return host_sums(self._host_pages, slots, self._threads)

    def state_sums(self, slots: Slots) -> UInt64:
        return host_sums(self._host_states, slots, self._threads)

    def close(self) -> None:
        self._pages = self._states = self._host_pages = self._host_states = np.empty((0, 0), np.uint8)

    def _copy(self, dst: UInt8, to: Slots | Blocks, src: UInt8, at: Slots | Blocks, what: str) -> None:
        try:
            rows.copy(dst, to, src, at, self._threads)
        except (ValueError, MemoryError) as error:
            raise TransferError(f"cannot {what}: {error}") from error


def host_sums(memory: UInt8, slots: Slots, threads: int) -> UInt64:
    """Checksums of these rows. Raises TransferError."""
    try:
        return rows.sums(memory, slots, threads)
    except (ValueError, MemoryError) as error:
        raise TransferError(f"cannot sum host rows: {error}") from error


def measure(row_bytes: int, threads: int) -> float:
    """Bytes a second of copies between rows of that size (or parts of larger ones), on memory of its own."""
    size = min(row_bytes, PROBE_BYTES)
    count = min(PROBE_BYTES // size, PROBE_ROWS)
    src, dst = np.ones((count, size), np.uint8), np.ones((count, size), np.uint8)
    order = np.arange(count, dtype=np.uint32)
    times = []
    for _ in range(PROBE_TURNS):
        start = time.perf_counter()
        rows.copy(dst, order, src, order, threads)
        times.append(time.perf_counter() - start)
    return dst.nbytes / max(min(times), 1e-9)
