"""Which blocks of the pool are in use: a free list, nothing more.

Promises O(1) allocation and release and catches a block given back twice. Knows nothing about
sequences, bytes or devices.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class BlockManager:
    """Hands out block numbers `0 .. total-1`.

    Released blocks are reused first, so that a pool far larger than the load touches little memory.
    """

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._taken = np.zeros(total, dtype=np.bool_)

    @property
    def free(self) -> int:
        """Number of blocks not in use."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self.total - len(self._free)

    def take(self) -> int:
        """One free block. The caller has checked `free`."""
        assert self._free, "no free block"
        block = self._free.pop()
        self._taken[block] = True
        return block

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks to the pool, in any order."""
        for block in blocks:
            assert self._taken[block], f"block {block} was given back twice"
            self._taken[block] = False
            self._free.append(block)
