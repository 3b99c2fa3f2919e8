"""Types of the native module `csrc/kernels_module.cpp`, which the files `cpu_*.py` beside it wrap."""

# ruff: noqa: PYI021 - the native module carries no docstrings of its own, they are read here
from typing import Final

import numpy as np
import numpy.typing as npt

BLOCK_SIZE: Final[int]
"""Tokens of a block that the kernels are compiled for."""

LEVELS: Final[tuple[str, ...]]
"""Instruction sets that this processor has, best first; the index is `level` below."""

def attend(
    element: str,
    q: tuple[int, int, int],
    k: tuple[int, int, int],
    v: tuple[int, int, int],
    out: int,
    k_pages: tuple[int, int],
    v_pages: tuple[int, int],
    shape: tuple[int, int, int, int, int, int],
    tables: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]],
    scaling: float,
    window: int,
    softcap: float,
    sinks: int,
    level: int,
    threads: int,
    use_openmp: bool,
    /,
) -> None:
    """Store K and V of T tokens in their blocks, then attend: out [T, heads, v_dim], dense.

    `element` is float32 or bfloat16, of all memory but the sinks. q, k, v are (address, token stride, head stride) and
    pages (address, block stride), strides in elements; `shape` is (T, heads, kv heads, k_dim, v_dim, blocks of the
    pool); `tables` are starts [S + 1], contexts [S], table_starts [S + 1] and blocks, as in `batch.Batch`. 0 stands for
    no window, no softcap and (an address of float32 [heads]) no sinks.

    Addresses are trusted. Raises ValueError for sizes and tables that do not fit each other, before any access.
    """

def linear(x: int, weight: int, bias: int, out: int, shape: tuple[int, int, int], level: int, threads: int, /) -> None:
    """out[rows, columns] = x[rows, depth] weight[columns, depth]^T + bias, all addresses of dense float32.

    `shape` is (rows, columns, depth); a bias of 0 is none. Addresses are trusted. Raises ValueError below 0.
    """

def normalize(x: int, weight: int, out: int, rows: int, size: int, epsilon: float, level: int, threads: int, /) -> None:
    """out[row] = x[row] / sqrt(mean(x[row]^2) + epsilon) * weight, all addresses of dense float32.

    x and out are [rows, size], the weight is [size]. Addresses are trusted. Raises ValueError below 0.
    """
