"""Memory that both processes see, and its two smallest uses: the bell flag and the pulse block, in pure Python.

Part of the twin `ipc/ring_py.py`, with the same promises and limits; `csrc/ring.hpp` says which byte is whose.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from ipc.errors import RingFormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

LINE_BYTES: Final = 128
BELL_BYTES: Final = LINE_BYTES
PULSE_BYTES: Final = LINE_BYTES

_fence_lock = threading.Lock()


def _fence() -> None:
    """A full barrier: taking a lock executes a `lock`-prefixed instruction on x86."""
    with _fence_lock:
        pass


def open_memory(memory: Buffer) -> memoryview:
    """`memory` as bytes. Raises RingFormatError unless it starts at a multiple of LINE_BYTES."""
    view = memoryview(memory).cast("B")
    if view.readonly:
        raise TypeError("the memory is read-only")
    if view.nbytes and np.frombuffer(view, np.uint8).ctypes.data % LINE_BYTES:
        raise RingFormatError(f"the memory does not start at a multiple of {LINE_BYTES} bytes")
    return view


class SharedBlock:
    """A piece of shared memory that is let go once."""

    def __init__(self, memory: Buffer, size: int | None = None) -> None:
        self._memory = open_memory(memory)
        if size is not None and self._memory.nbytes != size:
            raise RingFormatError(f"the {type(self).__name__}'s size is {self._memory.nbytes} instead of {size}")
        self._open = True

    def check_open(self) -> None:
        """Raises ValueError once closed."""
        if not self._open:
            raise ValueError(f"this {type(self).__name__} is closed")

    def close(self) -> None:
        """Let go of the memory."""
        self._open = False
        self._memory.release()


class BellFlag(SharedBlock):
    """The `sleeping` flag of one doorbell, over BELL_BYTES of memory."""

    def __init__(self, memory: Buffer) -> None:
        super().__init__(memory, BELL_BYTES)
        self._sleeping = self._memory.cast("I")

    def prepare_sleep(self) -> None:
        """Consumer: set the flag and fence. The caller looks at its rings once more before it sleeps."""
        self.check_open()
        self._sleeping[0] = 1
        _fence()

    def cancel_sleep(self) -> None:
        """Consumer: clear the flag."""
        self.check_open()
        self._sleeping[0] = 0

    def should_ring(self) -> bool:
        """Producer, after publishing: fence, test and clear. True: the consumer sleeps, write its eventfd."""
        self.check_open()
        _fence()
        if not self._sleeping[0]:
            return False
        # Not atomic with the test, which costs at most one bell too many: the eventfd is written in any case.
        self._sleeping[0] = 0
        return True

    def close(self) -> None:
        """Let go of the memory."""
        self._sleeping.release()
        super().close()


class PulseBlock(SharedBlock):
    """An engine's sign of life, over PULSE_BYTES of memory."""

    def __init__(self, memory: Buffer) -> None:
        super().__init__(memory, PULSE_BYTES)
        self._words = self._memory.cast("Q")
        self._small = self._memory.cast("I")

    def write(self, time_ns: int, step: int, state: int, pid: int, /) -> None:
        """Publish all four (u64, u64, u32, u32). Raises OverflowError."""
        self.check_open()
        limits = (("time_ns", time_ns, 64), ("step", step, 64), ("state", state, 32), ("pid", pid, 32))
        for name, value, bits in limits:
            if not 0 <= value < 1 << bits:
                raise OverflowError(f"{name} {value} does not fit {bits} bits")
        self._words[1], self._small[4], self._small[5] = step, state, pid
        self._words[0] = time_ns  # last, so that the others are never older than it says

    def read(self) -> tuple[int, int, int, int]:
        """`(time_ns, step, state, pid)`; the other three are never older than the time."""
        self.check_open()
        time_ns = self._words[0]
        return time_ns, self._words[1], self._small[4], self._small[5]

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._small.release()
        super().close()
