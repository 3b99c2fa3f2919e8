"""The host pool: one memory of pages and one of states, mapped by the server and by every rank.

Promises: the descriptors exist before the sizes do, so ranks inherit them at birth; the sizes are sealed when set.
Row i of `pages` is slot i. Knows nothing about who uses which slot.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache import memory, rows
from hicache.shape import PoolShape
from ipc.errors import SegmentError
from ipc.messages import PoolFds
from ipc.segment import Segment, SegmentFile

SIZE_FLAG: Final = "--hicache-size-gb"
STATES_FLAG: Final = "--hicache-state-slots"
# Of the memory that can be had, at most this share: the rest is for the server, requests and page tables.
MAX_SHARE: Final = 0.9

log = logging.getLogger(__name__)

UInt8 = npt.NDArray[np.uint8]


class PoolTooLargeError(ValueError):
    """The pool does not fit into the memory of this machine or container; the message has flag and arithmetic."""


def preflight(
    shape: PoolShape,
    ranks: int,
    *,
    promised: int = 0,
    pinned: bool = False,
    room: memory.Room | None = None,
    memlock: int | None = None,
) -> None:
    """Refuse a pool that would end in an out-of-memory kill. Raises PoolTooLargeError.

    `promised` are bytes that others were given but have not touched (the block pools of ranks on the CPU).
    `pinned` ranks lock the whole pool; a `memlock` below it is worth a warning only, because the CUDA driver does not
    count what it pins against that limit. `room` and `memlock` are this process's own by default.
    """
    room = memory.room() if room is None else room
    memlock = memory.memlock_limit() if memlock is None else memlock
    sizes = (
        f"{shape.pages:,} pages of {shape.page_bytes:,} bytes + {shape.states:,} states of {shape.state_bytes:,} bytes"
    )
    if shape.pages < ranks:
        raise PoolTooLargeError(
            f"{SIZE_FLAG}: less than one page of {shape.page_bytes:,} bytes for each of {ranks} ranks"
        )
    most = int(max(0, room.available - promised) * MAX_SHARE)
    if shape.size > most:
        raise PoolTooLargeError(
            f"{SIZE_FLAG}: {ranks} ranks need {sizes} = {shape.size:,} bytes, but there are {room.available:,} bytes "
            f"({room.source}) - {promised:,} promised to device pools, and {MAX_SHARE:.0%} of that is {most:,} bytes; "
            f"lower {SIZE_FLAG} or {STATES_FLAG}, or set {SIZE_FLAG} 0 to do without"
        )
    if pinned and shape.size > memlock:
        log.warning(
            "RLIMIT_MEMLOCK is %d bytes and each rank will pin %d bytes (%s): if pinning fails, raise it (ulimit -l)",
            memlock,
            shape.size,
            SIZE_FLAG,
        )


class HostPool:
    """The pool as this process sees it: `pages` uint8 [pages, page_bytes], `states` uint8 [states, state_bytes]."""

    def __init__(self, pages: Segment, states: Segment | None, shape: PoolShape) -> None:
        self.shape = shape
        self._segments = [segment for segment in (pages, states) if segment]
        for segment in self._segments:
            segment.prefer_huge_pages()
        self.pages = _rows_of(pages, shape.pages, shape.page_bytes)
        self.states = _rows_of(states, shape.states, shape.state_bytes)

    @classmethod
    def attach(cls, fds: PoolFds, shape: PoolShape) -> HostPool:
        """Map the pool behind inherited descriptors, which stay the caller's. Raises SegmentError."""
        pages = Segment.attach(fds.pages, shape.pages_size)
        try:
            states = Segment.attach(fds.states, shape.states_size) if shape.states_size else None
        except SegmentError:
            pages.close()
            raise
        return cls(pages, states, shape)

    def prefault(self, threads: int = 1) -> None:
        """Have memory behind every byte, contents unchanged; also while others use it. Raises OSError (no memory)."""
        for memories in (self.pages, self.states):
            rows.prefault(memories, threads)

    def close(self) -> None:
        """Unmap. Every view of `pages` and `states` must be gone before (BufferError)."""
        self.pages = self.states = np.empty((0, 0), np.uint8)
        for segment in self._segments:
            segment.close()


class PoolFiles:
    """The server's end: makes the descriptors, later gives them their sizes, and keeps them for restarted ranks."""

    def __init__(self) -> None:
        self._pages = SegmentFile("deepinfer-pages")
        try:
            self._states = SegmentFile("deepinfer-states")
        except SegmentError:
            self._pages.close()
            raise

    @classmethod
    def create(cls) -> PoolFiles:
        """Two empty files. Raises SegmentError."""
        return cls()

    @property
    def fds(self) -> PoolFds:
        """For `Launch.pool` and `pass_fds`."""
        return PoolFds(self._pages.fd, self._states.fd)

    def size(self, shape: PoolShape) -> HostPool:
        """Fix and seal the sizes, once, and map the pool. Raises SegmentError."""
        pages = self._pages.fix(shape.pages_size)
        try:
            states = self._states.fix(shape.states_size) if shape.states_size else None
        except SegmentError:
            pages.close()
            raise
        return HostPool(pages, states, shape)

    def close(self) -> None:
        """Close the descriptors; mappings stay."""
        self._pages.close()
        self._states.close()


def _rows_of(segment: Segment | None, count: int, size: int) -> UInt8:
    if segment is None:
        return np.empty((0, size), np.uint8)
    return np.frombuffer(segment.memory, np.uint8).reshape(count, size)
