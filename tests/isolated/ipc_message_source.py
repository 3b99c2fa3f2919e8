"""Pushes large checksummed messages into a ring without end, to be killed at any moment: argv is fd, bytes, seed."""

from __future__ import annotations

import struct
import sys
import time
import zlib

import numpy as np

from ipc.ring import HEADER_BYTES, MessageWriter
from ipc.segment import Segment


def main(fd: int, capacity: int, seed: int) -> None:
    segment = Segment.attach(fd, HEADER_BYTES + capacity)
    writer = MessageWriter(segment.memory)
    rng = np.random.default_rng(seed)
    number = 0
    while True:
        body = rng.bytes(int(rng.integers(1, capacity // 3)))
        while not writer.push(struct.pack("<II", number, zlib.crc32(body)), body):
            time.sleep(0.0002)
        number += 1


main(*map(int, sys.argv[1:]))
