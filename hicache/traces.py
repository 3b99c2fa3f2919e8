"""What is remembered of pages that a look-up did not find, to say why: they were here once, or they are another's.

Bounded tables that forget by being written over. They explain; nothing is served because of them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.buckets import Words
from hicache.keys import KEY_BYTES, extend

# Evicted keys that are remembered: four pools' worth of a long conversation each costs 8 bytes a page, 4 MiB in all.
EVICTED_KEYS: Final = 1 << 19
# First pages, by their tokens alone: conversations that can be told apart by their first 128 tokens.
FIRST_PAGES: Final = 1 << 16
# Tokens get a name without a root here.
_NO_ROOT: Final = bytes(KEY_BYTES)


class EvictedKeys:
    """Keys of pages that were evicted, most of the recent ones."""

    def __init__(self) -> None:
        self._seen: Final = np.full(EVICTED_KEYS, 0, np.uint64)
        self.total = 0

    def add(self, keys: Words) -> None:
        """Remember these `[n, 2]` keys."""
        self.total += len(keys)
        self._seen[keys[:, 0] % np.uint64(EVICTED_KEYS)] = keys[:, 1]

    def __contains__(self, key: Words) -> bool:
        """Whether this `[2]` key was evicted; a rare wrong answer is no harm."""
        return bool(self._seen[int(key[0]) % EVICTED_KEYS] == key[1])


class FirstPages:
    """Where a first page with some tokens was stored last, whatever its root."""

    def __init__(self) -> None:
        self._slots: Final = np.full(FIRST_PAGES, -1, np.int32)

    def add(self, page: npt.NDArray[np.int32], slot: int) -> None:
        """The page with these `[128]` tokens goes to `slot`."""
        self._slots[self._place(page)] = slot

    def find(self, page: npt.NDArray[np.int32]) -> int:
        """A slot that held such a page, or -1. It may hold anything by now: see `PageIndex.begins_with`."""
        return int(self._slots[self._place(page)])

    def _place(self, page: npt.NDArray[np.int32]) -> int:
        return int.from_bytes(extend(_NO_ROOT, page)[:8], "little") % FIRST_PAGES
