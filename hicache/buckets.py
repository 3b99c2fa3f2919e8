"""Key -> slot: a hash table whose entries are the slots themselves, chained through a column.

It never grows and holds no objects: neither a rehash nor the garbage collector stops the loop at a million pages. A
prompt's keys are looked up at once. Keys are well mixed and secret, so their low bits choose the bucket.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hicache import walks

Slots = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


def key_words(keys: bytes) -> Words:
    """16-byte keys as `[n, 2]` words."""
    return np.frombuffer(keys, np.uint64).reshape(-1, 2)


class Buckets:
    """The slots that can be found, by key. Two slots may have one key: the later one is found."""

    def __init__(self, num_slots: int) -> None:
        # At least two buckets a slot: most keys are found, or known to be absent, at the first look.
        self._heads: Final = np.full(1 << (2 * num_slots).bit_length(), -1, np.int32)
        self._next: Final = np.full(num_slots, -1, np.int32)
        self.keys: Final = np.full((num_slots, 2), 0, np.uint64)

    def find(self, keys: Words) -> Slots:
        """The slot of each of these `[n, 2]` keys, or -1."""
        return np.frombuffer(walks.find(self._heads, self._next, self.keys, keys), np.int32)

    def insert(self, slots: Slots, keys: Words) -> None:
        """Let these slots be found by these keys. None of them is in the table."""
        self.keys[slots] = keys
        walks.link(self._heads, self._next, self.keys, slots)

    def remove(self, slots: Slots) -> None:
        """Let these slots be found no more. All of them are in the table."""
        walks.unlink(self._heads, self._next, self.keys, slots)

    def clear(self) -> None:
        """Forget all."""
        self._heads.fill(-1)
