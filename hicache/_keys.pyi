"""Types of the native module `csrc/keys_module.cpp`; `hicache/keys_py.py` has its Python twin."""

# ruff: noqa: PYI021 - the native module carries no docstrings of its own, they are read here
import numpy as np
import numpy.typing as npt

def extend(parent: bytes, ids: npt.NDArray[np.int32], /) -> bytes:
    """Keys of the whole pages of `ids` `[n]` contiguous, 16 bytes each; tokens beyond them are not read.

    Raises ValueError for a parent of another size and ids of another shape.
    """
