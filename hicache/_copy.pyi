"""Types of the native module `csrc/page_copy.cpp`, which `rows.py` wraps; the twin is `copy_py.py`."""

# ruff: noqa: PYI021 - the native module carries no docstrings of its own, they are read here
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

UInt8: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.uint32] | npt.NDArray[np.int32]

MAX_THREADS: Final[int]
"""Most threads of one call."""

LEVELS: Final[tuple[str, ...]]
"""Instruction sets for checksums that this processor has, best first; the index is `level` below."""

def copy(dst: UInt8, dst_rows: Rows, src: UInt8, src_rows: Rows, threads: int, /) -> None:
    """dst[dst_rows[i]] = src[src_rows[i]]; memories are [rows, bytes], row lists int32 or uint32.

    Raises ValueError before anything is written where anything does not fit.
    """

def sums(buffer: UInt8, rows: Rows, out: npt.NDArray[np.uint64], threads: int, level: int = 0, /) -> None:
    """out[i] (uint64) = checksum of buffer[rows[i]], the same at every level. Raises ValueError."""

def prefault(buffer: UInt8, threads: int, /) -> None:
    """Have memory behind every byte, contents unchanged, also while others write. Raises OSError."""
