"""Types of the native module `csrc/ring_module.cpp`; `ipc/ring_py.py` has the same names in Python.

`memory` is a writable buffer that starts at a multiple of 128 bytes. Every object keeps it exported until `close`,
must be used by one thread at a time, and raises ValueError once closed.
"""

# ruff: noqa: PYI021 - the native module carries no docstrings of its own, they are read here
from typing import Final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

LAYOUT_VERSION: Final[int]
TOKEN_BYTES: Final[int]
HEADER_BYTES: Final[int]
LINE_BYTES: Final[int]
MESSAGE_OVERHEAD: Final[int]
BELL_BYTES: Final[int]
PULSE_BYTES: Final[int]

def format_token_ring(memory: Buffer, records: int, /) -> None:
    """Make `memory` (HEADER_BYTES + 32 x records bytes) an empty ring. Raises RingFormatError."""

def format_message_ring(memory: Buffer, capacity: int, /) -> None:
    """Make `memory` (HEADER_BYTES + capacity bytes) an empty ring. Raises RingFormatError."""

class TokenWriter:
    """The writing end of a token ring."""

    def __init__(self, memory: Buffer) -> None:
        """Raises RingFormatError or RingCorruptError."""

    def push(self, records: npt.NDArray[np.void], /) -> int:
        """Publish as many of these `[n]` TOKEN_DTYPE records as fit, at once; returns how many."""

    def waiting(self) -> int:
        """Records published and not yet popped."""

    def close(self) -> None:
        """Let go of the memory."""

class TokenReader:
    """The reading end of a token ring."""

    def __init__(self, memory: Buffer) -> None:
        """Raises RingFormatError or RingCorruptError."""

    def pop(self, limit: int, /) -> npt.NDArray[np.void]:
        """A copy of the oldest records, at most `limit`, as `[n]` TOKEN_DTYPE. Raises RingCorruptError."""

    def waiting(self) -> int:
        """Records published and not yet popped."""

    def close(self) -> None:
        """Let go of the memory."""

class MessageWriter:
    """The writing end of a message ring."""

    def __init__(self, memory: Buffer) -> None:
        """Raises RingFormatError or RingCorruptError."""

    def push(self, *parts: Buffer) -> bool:
        """Publish one message of these joined parts; False: no room now. Raises MessageTooLargeError."""

    def waiting(self) -> int:
        """Bytes published and not yet popped, lengths and padding included."""

    def close(self) -> None:
        """Let go of the memory."""

class MessageReader:
    """The reading end of a message ring."""

    def __init__(self, memory: Buffer) -> None:
        """Raises RingFormatError or RingCorruptError."""

    def pop(self) -> bytes | None:
        """The oldest message; None: the ring is empty. Raises RingCorruptError."""

    def pop_all(self) -> list[bytes]:
        """All messages published before the call, oldest first. Raises RingCorruptError."""

    def waiting(self) -> int:
        """Bytes published and not yet popped, lengths and padding included."""

    def close(self) -> None:
        """Let go of the memory."""

class BellFlag:
    """The `sleeping` flag of one doorbell, over BELL_BYTES of memory."""

    def __init__(self, memory: Buffer) -> None:
        """Raises RingFormatError."""

    def prepare_sleep(self) -> None:
        """Consumer: set the flag and fence. The caller looks at its rings once more before it sleeps."""

    def cancel_sleep(self) -> None:
        """Consumer: clear the flag."""

    def should_ring(self) -> bool:
        """Producer, after publishing: fence, test and clear. True: the consumer sleeps, write its eventfd."""

    def close(self) -> None:
        """Let go of the memory."""

class PulseBlock:
    """An engine's sign of life, over PULSE_BYTES of memory."""

    def __init__(self, memory: Buffer) -> None:
        """Raises RingFormatError."""

    def write(self, time_ns: int, step: int, state: int, pid: int, /) -> None:
        """Publish all four (u64, u64, u32, u32). Raises OverflowError."""

    def read(self) -> tuple[int, int, int, int]:
        """`(time_ns, step, state, pid)`; the other three are never older than the time."""

    def close(self) -> None:
        """Let go of the memory."""
