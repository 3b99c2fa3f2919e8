"""Processes that die at the worst moment: no torn record, nothing left behind."""

from __future__ import annotations

import signal
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from ipc.ring import HEADER_BYTES, MessageReader, MessageWriter, format_message_ring
from ipc.segment import Segment
from tests.ipc_twins import TWINS, child

CAPACITY = 1 << 20


def check(message: bytes, number: int) -> None:
    found, checksum = struct.unpack_from("<II", message)
    assert found == number
    assert zlib.crc32(message[8:]) == checksum


@pytest.mark.parametrize("rings", TWINS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_writer_killed_at_any_moment_leaves_whole_messages(rings: str, seed: int) -> None:
    segment = Segment.create(HEADER_BYTES + CAPACITY)
    format_message_ring(segment.memory, CAPACITY)
    reader = MessageReader(segment.memory)
    rng = np.random.default_rng(seed)
    args = (str(segment.fd), str(CAPACITY), str(seed))
    number, last = 0, int(rng.integers(20, 60))
    with child("ipc_message_source.py", *args, fds=[segment.fd], rings=rings) as process:
        while number < last:
            if (message := reader.pop()) is not None:
                check(message, number)
                number += 1
        time.sleep(rng.random() * 0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    for message in reader.pop_all():
        check(message, number)
        number += 1
    # The ring goes on from there with another writer.
    writer = MessageWriter(segment.memory)
    assert writer.push(b"next")
    assert reader.pop() == b"next"
    writer.close()
    reader.close()
    segment.close()


@pytest.mark.parametrize("rings", TWINS)
def test_bytes_without_publication_are_nothing(rings: str) -> None:
    segment = Segment.create(HEADER_BYTES + CAPACITY)
    format_message_ring(segment.memory, CAPACITY)
    reader = MessageReader(segment.memory)
    args = (str(segment.fd), str(CAPACITY))
    with child("ipc_half_write.py", *args, fds=[segment.fd], rings=rings) as process:
        assert process.wait() == -signal.SIGKILL
    assert b"h" * 50 in bytes(segment.memory[HEADER_BYTES : HEADER_BYTES + 256])
    assert reader.pop() == b"whole"
    assert reader.pop() is None
    assert reader.waiting() == 0
    writer = MessageWriter(segment.memory)
    assert writer.push(b"next")
    assert reader.pop_all() == [b"next"]
    writer.close()
    reader.close()
    segment.close()


def maps_with(inode: str) -> list[Path]:
    """Which processes still map the file with this inode number."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it ended, or is someone else's
            continue
        found += [maps for line in lines if "/memfd:deepinfer-link" in line and line.split()[4] == inode]
    return found


def test_a_killed_owner_leaves_nothing() -> None:
    with child("ipc_engine.py", "own") as process:
        assert process.stdout is not None
        inode = process.stdout.readline().strip()
        assert len(maps_with(inode)) == 2  # both ends of its link
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert maps_with(inode) == []
