"""Waking the other process without polling: a shared `sleeping` flag and an eventfd, one pair a direction.

The consumer calls `prepare_sleep`, looks at its rings once more and sleeps on `fileno`; a producer calls `ring` after
it published, which costs a system call only if the consumer sleeps. `csrc/ring.hpp` says why no wake-up is lost.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ipc.errors import SegmentError
from ipc.ring import BellFlag

if TYPE_CHECKING:
    from typing_extensions import Buffer


def create_eventfd() -> int:
    """A new eventfd, close-on-exec and non-blocking. Raises SegmentError."""
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise SegmentError(f"cannot make an eventfd: {error}") from error


class Doorbell:
    """One direction's bell. Owns `fd`."""

    def __init__(self, flag_memory: Buffer, fd: int) -> None:
        self._flag = BellFlag(flag_memory)
        self._fd = fd

    def fileno(self) -> int:
        """Readable while a ring has not been acknowledged."""
        return self._fd

    def ring(self) -> None:
        """Producer, after publishing: wake the consumer if it sleeps."""
        if self._flag.should_ring():
            os.eventfd_write(self._fd, 1)

    def prepare_sleep(self) -> None:
        """Consumer: from now on a producer rings. Look at the rings once more before sleeping."""
        self._flag.prepare_sleep()

    def cancel_sleep(self) -> None:
        """Consumer: awake again. A ring that was already on its way stays readable until `acknowledge`."""
        self._flag.cancel_sleep()

    def acknowledge(self) -> None:
        """Consumer: forget all rings so far. Never blocks."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Let go of the memory and close the eventfd. A second call does nothing."""
        if self._fd < 0:
            return
        self._flag.close()
        os.close(self._fd)
        self._fd = -1
