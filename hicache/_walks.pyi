"""Types of the native module `csrc/walks_module.cpp`; `hicache/walks_py.py` has its Python twin.

Columns are contiguous. Slots come back as int32 bytes. All raise ValueError for a column of other elements and for a
number that points out of its column.
"""

# ruff: noqa: PYI021 - the native module carries no docstrings of its own, they are read here
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Slots: TypeAlias = npt.NDArray[np.int32]
Words: TypeAlias = npt.NDArray[np.uint64]
Status: TypeAlias = npt.NDArray[np.uint8]

def find(heads: Slots, after: Slots, kept: Words, keys: Words, /) -> bytes:
    """The slot of each of these `[n, 2]` keys, or -1, in a table of `heads` (a power of two) chained by `after`."""

def link(heads: Slots, after: Slots, kept: Words, slots: Slots, /) -> None:
    """Put these slots, whose keys are `kept`, into the table; of equal keys the last one is found."""

def unlink(heads: Slots, after: Slots, kept: Words, slots: Slots, /) -> None:
    """Take these slots out of the table. Raises ValueError for one that is not in it."""

def agreeing(tokens: npt.NDArray[np.int32], slots: Slots, ids: npt.NDArray[np.int32], row_bytes: int, /) -> int:
    """How many of these rows of `tokens` equal the rows of `ids` before the first that does not."""

def path(parents: Slots, slot: int, /) -> bytes:
    """`slot` (or -1: nothing) and all before it, first page first."""

def climb(columns: tuple[Slots, Slots, Slots, Status, Slots], ready: int, slot: int, most: int, /) -> bytes:
    """`slot` and the pages before it that lose their only child with it, at most so many, the last one first.

    `columns` are parents, children, pins, status and line.
    It ends before a page that has pins, another status than `ready`, or a place in `line` (not -1).
    """
