"""Dies between writing a message's bytes and publishing them: argv is fd, bytes."""

from __future__ import annotations

import os
import signal
import sys

from ipc.ring import HEADER_BYTES, MessageWriter
from ipc.segment import Segment


def main(fd: int, capacity: int) -> None:
    segment = Segment.attach(fd, HEADER_BYTES + capacity)
    assert MessageWriter(segment.memory).push(b"whole")
    # What `push` does before its release store: length, guard and half of the bytes, behind the first message.
    at = HEADER_BYTES + 16
    segment.memory[at : at + 4] = (100).to_bytes(4, "little")
    segment.memory[at + 4 : at + 8] = (100 ^ 0x5AFE1E57).to_bytes(4, "little")
    segment.memory[at + 8 : at + 58] = b"h" * 50
    os.kill(os.getpid(), signal.SIGKILL)


main(*map(int, sys.argv[1:]))
