"""Key -> slot: a hash table whose entries are the slots themselves, chained through a column.

It never grows and holds no objects: neither a rehash nor the garbage collector stops the loop at a million pages. A
prompt's keys are looked up at once. Keys are well mixed and secret, so their low bits choose the bucket.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


def key_words(keys: bytes) -> Words:
    """16-byte keys as `[n, 2]` words."""
    return np.frombuffer(keys, np.uint64).reshape(-1, 2)


class Buckets:
    """The slots that can be found, by key. Two slots may have one key: the later one is found."""

    def __init__(self, num_slots: int) -> None:
        # At least two buckets a slot: most keys are found, or known to be absent, at the first look.
        self._mask: Final = np.uint64((1 << (2 * num_slots).bit_length()) - 1)
        self._heads = np.full(int(self._mask) + 1, -1, np.int32)
        self._next = np.full(num_slots, -1, np.int32)
        self.keys: Final = np.zeros((num_slots, 2), np.uint64)

    def find(self, keys: Words) -> Slots:
        """The slot of each of these `[n, 2]` keys, or -1."""
        found = self._heads[self._bucket(keys)]
        wrong = np.flatnonzero((found >= 0) & self._differ(found, keys))
        while wrong.size:
            further = self._next[found[wrong]]
            found[wrong] = further
            wrong = wrong[(further >= 0) & self._differ(further, keys[wrong])]
        return found

    def insert(self, slots: Slots, keys: Words) -> None:
        """Let these slots be found by these keys. None of them is in the table."""
        self.keys[slots] = keys
        buckets = self._bucket(keys)
        while slots.size:
            # Of several new slots of one bucket, one goes in a round.
            chosen, first = np.unique(buckets, return_index=True)
            self._next[slots[first]] = self._heads[chosen]
            self._heads[chosen] = slots[first]
            rest = np.ones(len(slots), np.bool_)
            rest[first] = False
            slots, buckets = slots[rest], buckets[rest]

    def remove(self, slots: Slots) -> None:
        """Let these slots be found no more. All of them are in the table."""
        buckets = self._bucket(self.keys[slots])
        first = self._heads[buckets] == slots
        self._heads[buckets[first]] = self._next[slots[first]]
        # The others stand behind some slot: few, as most buckets hold one.
        heads, after = self._heads.data, self._next.data
        for slot, bucket in zip(slots[~first].tolist(), buckets[~first].tolist(), strict=True):
            at = heads[bucket]
            if at == slot:
                heads[bucket] = after[slot]
                continue
            while after[at] != slot:
                at = after[at]
            after[at] = after[slot]

    def clear(self) -> None:
        """Forget all."""
        self._heads.fill(-1)

    def _bucket(self, keys: Words) -> npt.NDArray[np.intp]:
        return (keys[:, 0] & self._mask).astype(np.intp)

    def _differ(self, slots: Slots, keys: Words) -> npt.NDArray[np.bool_]:
        kept = self.keys[slots]
        differ: npt.NDArray[np.bool_] = (kept[:, 0] != keys[:, 0]) | (kept[:, 1] != keys[:, 1])
        return differ
