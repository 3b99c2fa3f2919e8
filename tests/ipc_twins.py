"""What the ring tests share: both implementations, and memory and child processes for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from ipc import _ring as ring_native
from ipc import ring_py
from ipc.messages import LinkFds
from ipc.segment import Segment

ROOT = Path(__file__).parent.parent
TWINS: dict[str, ModuleType] = {"native": ring_native, "python": ring_py}
# (writer, reader): the bytes are the same, so any pair must work.
PAIRS = [(writer, reader) for writer in TWINS for reader in TWINS]
twins = pytest.mark.parametrize("rings", TWINS.values(), ids=TWINS.keys())
HEADER = 384
TAIL, HEAD = 16, 32  # cursors as indices of u64


@contextmanager
def shared_memory(size: int) -> Iterator[memoryview]:
    """`size` bytes at a page border. Everything on them must be closed at the end."""
    segment = Segment.create(size)
    try:
        yield segment.memory
    finally:
        segment.close()


def set_cursors(memory: memoryview, value: int) -> None:
    """As if so many bytes had gone through the ring."""
    words = memory[:HEADER].cast("Q")
    words[TAIL] = words[HEAD] = value
    words.release()


@contextmanager
def child(program: str, *args: str, fds: Sequence[int] = (), rings: str = "native") -> Iterator[subprocess.Popen[str]]:
    """tests/isolated/PROGRAM with these arguments, killed at the end if it still runs."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DEEPINFER_RING": rings}
    command = [sys.executable, str(ROOT / "tests" / "isolated" / program), *args]
    with subprocess.Popen(
        command, env=environ, pass_fds=tuple(fds), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def link_args(fds: LinkFds) -> list[str]:
    """The descriptors as arguments of a child program."""
    return [str(fds.segment), str(fds.to_engine), str(fds.to_server)]


def link_fds(fds: LinkFds) -> tuple[int, int, int]:
    """The descriptors for `pass_fds`."""
    return fds.segment, fds.to_engine, fds.to_server
