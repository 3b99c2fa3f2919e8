"""Types of the native module `csrc/page_copy.cpp`, which `rows.py` wraps; the twin is `copy_py.py`."""

# ruff: noqa: PYI021 - the native module carries no docstrings of its own, they are read here
from typing import Final

from typing_extensions import Buffer

MAX_THREADS: Final[int]
"""Most threads of one call."""

def copy(dst: Buffer, dst_rows: Buffer, src: Buffer, src_rows: Buffer, threads: int, /) -> None:
    """dst[dst_rows[i]] = src[src_rows[i]]; memories are [rows, bytes], row lists int32 or uint32.

    Raises ValueError before anything is written where anything does not fit.
    """

def sums(buffer: Buffer, rows: Buffer, out: Buffer, threads: int, /) -> None:
    """out[i] (uint64) = checksum of buffer[rows[i]]. Raises ValueError."""

def prefault(buffer: Buffer, threads: int, /) -> None:
    """Have memory behind every byte, contents unchanged, also while others write. Raises OSError."""
