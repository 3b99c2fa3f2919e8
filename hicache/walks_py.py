"""The twin of `csrc/page_walks.hpp` in Python and numpy, for tests and machines without a compiler.

The C++ checks every number that it follows; here numpy does, but for negative ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Status = npt.NDArray[np.uint8]


def find(heads: Slots, after: Slots, kept: Words, keys: Words, /) -> bytes:
    """See `hicache/_walks.pyi`."""
    found = heads[_buckets(heads, keys)]
    wrong = np.flatnonzero((found >= 0) & (kept[found] != keys).any(axis=1))
    while wrong.size:
        further = after[found[wrong]]
        found[wrong] = further
        wrong = wrong[(further >= 0) & (kept[further] != keys[wrong]).any(axis=1)]
    return found.tobytes()


def link(heads: Slots, after: Slots, kept: Words, slots: Slots, /) -> None:
    """See `hicache/_walks.pyi`."""
    for slot, bucket in zip(slots.tolist(), _buckets(heads, kept[slots]).tolist(), strict=True):
        after[slot] = heads[bucket]
        heads[bucket] = slot


def unlink(heads: Slots, after: Slots, kept: Words, slots: Slots, /) -> None:
    """See `hicache/_walks.pyi`."""
    for slot, bucket in zip(slots.tolist(), _buckets(heads, kept[slots]).tolist(), strict=True):
        at = int(heads[bucket])
        if at == slot:
            heads[bucket] = after[slot]
            continue
        while at >= 0 and after[at] != slot:
            at = int(after[at])
        if at < 0:
            raise ValueError(f"slot {slot} is not in its bucket")
        after[at] = after[slot]


def agreeing(tokens: npt.NDArray[np.int32], slots: Slots, ids: npt.NDArray[np.int32], row_bytes: int, /) -> int:
    """See `hicache/_walks.pyi`."""
    width = row_bytes // tokens.itemsize
    rows = min(len(slots), ids.size // width)
    same = (tokens.reshape(-1, width)[slots[:rows]] == ids.reshape(-1)[: rows * width].reshape(rows, width)).all(axis=1)
    return rows if same.all() else int(same.argmin())


def path(parents: Slots, slot: int, /) -> bytes:
    """See `hicache/_walks.pyi`."""
    slots = []
    while slot >= 0:
        slots.append(slot)
        slot = int(parents[slot])
    return np.array(slots[::-1], np.int32).tobytes()


def climb(columns: tuple[Slots, Slots, Slots, Status, Slots], ready: int, slot: int, most: int, /) -> bytes:
    """See `hicache/_walks.pyi`."""
    parents, children, pins, status, line = columns
    slots = [slot]
    while len(slots) < most:
        slot = int(parents[slot])
        if slot < 0 or children[slot] != 1 or pins[slot] or status[slot] != ready or line[slot] >= 0:
            break
        slots.append(slot)
    return np.array(slots, np.int32).tobytes()


def _buckets(heads: Slots, keys: Words) -> npt.NDArray[np.intp]:
    return (keys[:, 0] & np.uint64(len(heads) - 1)).astype(np.intp)
