"""Rows of bytes copied, summed and prefaulted: by the native module, or by its Python twin.

DEEPINFER_COPY=native or python forces one; without it a missing native module is worth a warning. Promises that
nothing is written unless every row fits. Knows nothing about pages, pools or devices.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt

VARIABLE: Final = "DEEPINFER_COPY"
BUILD_HINT: Final = "build it with `python setup.py build_ext --inplace`"

log = logging.getLogger(__name__)

UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint32] | npt.NDArray[np.int32]


class CopyUnavailableError(RuntimeError):
    """The implementation that was asked for cannot be loaded."""


def load(wanted: str) -> ModuleType:
    """The module to use: `wanted` is `native`, `python` or empty for a choice. Raises CopyUnavailableError."""
    if wanted not in ("", "native", "python"):
        raise CopyUnavailableError(f"{VARIABLE}={wanted} is neither native nor python")
    if wanted == "python":
        return importlib.import_module("hicache.copy_py")
    try:
        return importlib.import_module("hicache._copy")
    except ImportError as error:
        if wanted:
            raise CopyUnavailableError(f"{VARIABLE}=native: cannot be loaded ({error}); {BUILD_HINT}") from error
        log.warning("the native page copy cannot be loaded (%s), using the slower Python one: %s", error, BUILD_HINT)
        return importlib.import_module("hicache.copy_py")


_copy: Final = load(os.environ.get(VARIABLE, ""))


def copy(dst: UInt8, dst_rows: Rows, src: UInt8, src_rows: Rows, threads: int = 1) -> None:
    """dst[dst_rows[i]] = src[src_rows[i]] for rows of equal size, on up to `threads` threads, without the GIL.

    Raises ValueError, before anything is written, for a row out of range, a destination named twice, sizes that differ
    or memories that overlap.
    """
    _copy.copy(dst, dst_rows, src, src_rows, threads)


def sums(buffer: UInt8, rows: Rows, threads: int = 1) -> UInt64:
    """Checksums of these rows, as `csrc/page_sum.hpp` defines them, without the GIL.

    Raises ValueError for a row out of range.
    """
    out = np.empty(len(rows), np.uint64)
    _copy.sums(buffer, rows, out, threads)
    return out


def prefault(buffer: UInt8, threads: int = 1) -> None:
    """Have memory behind every byte, contents unchanged. Raises OSError where there is none."""
    _copy.prefault(buffer, threads)
