"""Host memory pinned for a card, in pieces, and unpinned again.

Promises that no row lies in two pieces, since one copy command must not span two, and that what was pinned is unpinned
when a later piece fails. Reaches the driver only through the functions it is given; knows nothing of torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache import memory

# The driver pins pages in units of this size, and refuses a page that is pinned already.
MEMORY_PAGE: Final = 4096
# The driver holds a lock while it pins, and other ranks of the machine wait: about a tenth of a second a piece.
PIECE_BYTES: Final = 1 << 30

log = logging.getLogger(__name__)

Register = Callable[[int, int], None]
Unregister = Callable[[int], None]


class PinningError(Exception):
    """The driver refused to pin; the message has sizes and the limit that may be the reason."""


class PinnedMemory:
    """Rows [count, row_bytes] at a border of a memory page, pinned until `close`."""

    def __init__(self, rows: npt.NDArray[np.uint8], register: Register, unregister: Unregister) -> None:
        """`register(address, size)` and `unregister(address)` raise RuntimeError. Raises PinningError."""
        self._unregister = unregister
        self._addresses: list[int] = []
        try:
            for address, size in pieces(rows):
                register(address, size)
                self._addresses.append(address)
        except RuntimeError as error:
            done = len(self._addresses)
            self.close()
            raise PinningError(
                f"cannot pin {rows.nbytes:,} bytes of the host pool (piece {done} failed: {error}); "
                f"RLIMIT_MEMLOCK is {memory.memlock_limit():,} bytes; lower --hicache-size-gb or set it to 0"
            ) from error

    def close(self) -> None:
        """Unpin everything; what the driver refuses is logged, the process's end unpins it too."""
        while self._addresses:
            address = self._addresses.pop()
            try:
                self._unregister(address)
            except RuntimeError:
                log.exception("cannot unpin the host pool at %#x", address)


def pieces(rows: npt.NDArray[np.uint8], piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """(address, size) of pieces that begin at borders both of rows and of memory pages, none much over `piece_bytes`
    unless the sizes have no smaller common border."""
    if rows.size == 0:
        return
    border = math.lcm(rows.shape[1], MEMORY_PAGE)
    step = max(1, piece_bytes // border) * border
    begin = rows.ctypes.data
    assert begin % MEMORY_PAGE == 0, "the pool is mapped at a border of a memory page"
    for at in range(0, rows.nbytes, step):
        yield begin + at, min(step, rows.nbytes - at)
