"""Bytes shared by both sides: the token record. Ring headers are described in `csrc/ring.hpp`."""

from __future__ import annotations

from typing import Final

import numpy as np

# 32 bytes, little-endian, no padding; `tests/test_ipc_layout.py` checks it against the native module.
TOKEN_DTYPE: Final = np.dtype(
    [
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("token", "<i4"),
        ("flags", "<u2"),  # ipc.messages.Flag
        ("finish", "<u2"),  # ipc.messages.Finish
        ("logprob", "<f4"),  # natural logarithm; 0 when not asked for
        ("position", "<u4"),  # index of the token in prompt + output
        ("time_ns", "<u8"),  # CLOCK_MONOTONIC of the engine when the step's results were known
    ]
)
TOKEN_BYTES: Final = 32
assert TOKEN_DTYPE.itemsize == TOKEN_BYTES
